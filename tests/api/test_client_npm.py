"""The OpenAI SDK for Node.js against the gateway."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.api.conftest import MODEL, Site

pytestmark = [pytest.mark.npm, pytest.mark.usefixtures("token_legs")]


async def test_the_node_sdk_works(site: Site, node_clients: Path) -> None:
    """Chat, streams, tools, responses, embeddings, models and errors, in the trajectory that the base_url names."""
    script = Path(__file__).with_name("openai_client.mjs")
    command = ("node", str(script), str(node_clients), f"{site.url}/t/run-7/v1", MODEL)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    seen = json.loads(out)
    assert seen["whole"] == seen["streamed"] != ""
    assert seen["usages"] == [8, 8]
    assert (seen["trajectory"], len(seen["requestID"])) == ("run-7", 32)
    assert (seen["finishReason"], seen["call"]["name"]) == ("tool_calls", "get_weather")
    assert json.loads(seen["call"]["arguments"]) == {"city": "Oslo"}
    assert seen["responseText"]
    assert seen["responseKinds"][0] == "response.created"
    assert seen["responseKinds"][1] in ("response.completed", "response.incomplete")
    assert seen["embedding"] > 0
    assert seen["models"] == [MODEL]
    unknown, bad = seen["unknownModel"], seen["badRequest"]
    assert (unknown["name"], unknown["status"], unknown["code"]) == ("NotFoundError", 404, "model_not_found")
    assert (bad["name"], bad["status"], len(bad["requestID"])) == ("BadRequestError", 400, 32)
    assert (await site.trajectory("run-7"))["num_turns"] >= 5
