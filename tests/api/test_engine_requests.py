"""What an engine is sent for a request: its body, the scheduler's priority, and nothing of the client's headers."""

import asyncio
from typing import Any

import httpx
import pytest

from gateway.config import EngineSettings
from tests.api.conftest import HELLO, MODEL, running_site, toy
from tests.support.engine import recorded_engine
from tests.support.gateway import eventually, running_gateway

CHAT = "/v1/chat/completions"
APIS = ("chat/completions", "completions", "responses", "messages")

SECRETS = {
    "authorization": "Bearer secret",
    "x-api-key": "secret",
    "cookie": "secret=1",
    "proxy-authorization": "Basic secret",
    "openai-organization": "secret",
    "x-forwarded-for": "10.0.0.1",
    "x-vllm-priority": "-999",
    "x-data-parallel-rank": "3",
    "connection": "x-custom",
    "x-custom": "secret",
}


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("path", [*(f"/v1/{api}" for api in APIS), "/tokenize", "/v1/embeddings"])
async def test_no_header_of_the_client_reaches_the_engine(dialect: Any, path: str) -> None:
    """Above all not its key, nor what would steer the engine past the scheduler."""
    async with running_site(toy(dialect)) as site:
        body = {"model": MODEL, "messages": HELLO, "prompt": "a", "input": "a", "max_tokens": 4}
        answer = await site.client.post(path, json=body, headers=SECRETS)
        assert answer.status_code == 200
        (asked,) = site.engine.turns
        ours = {"x-request-id", "x-vllm-priority", "x-session-id", "x-smg-routing-key"}
        assert set(asked.headers) - ours == {"host", "content-type", "content-length"}
        assert "secret" not in str(asked)
        assert asked.headers.get("x-vllm-priority") != "-999"


async def test_an_engine_is_sent_its_own_key() -> None:
    """The key that the settings have for it, whatever the client sent; one that it refuses is no client's fault."""
    async with recorded_engine(toy(api_key="engine-key")) as engine:
        settings = EngineSettings(url=engine.url, kind="vllm", api_key="engine-key")
        async with running_gateway(settings) as listening, httpx.AsyncClient(base_url=listening.url) as client:
            headers = {"authorization": "Bearer client-key"}
            answer = await client.post(CHAT, json={"model": MODEL, "messages": HELLO, "max_tokens": 4}, headers=headers)
            assert answer.status_code == 200
            assert engine.turns[-1].headers["authorization"] == "Bearer engine-key"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_lower_priority_is_earlier_at_both_engines(dialect: Any) -> None:
    """The longer a trajectory is expected to be, the lower the number that its engine is told."""
    async with running_site(toy(dialect)) as site:
        for name, tokens in (("short", 100), ("long", 9000)):
            await site.client.post("/v1/trajectories", json={"id": name, "expected_output_tokens": tokens})
            assert (await site.chat(f"/t/{name}{CHAT}", priority=5)).status_code == 200
        told = [asked.headers.get("x-vllm-priority") or asked.json["priority"] for asked in site.engine.turns]
        assert int(told[1]) < int(told[0])


async def test_sglangs_generate_is_not_told_the_model() -> None:
    """The gateway needs the name where a fleet serves several; the engine refuses fields that it does not know."""
    async with running_site(toy("sglang")) as site:
        body = {"model": MODEL, "input_ids": [300, 301], "sampling_params": {"max_new_tokens": 3}}
        answer = await site.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        (asked,) = site.engine.turns
        assert "model" not in asked.json and asked.json["input_ids"] == [300, 301] and asked.json["rid"]


async def test_sglang_is_told_ids_that_are_no_prefix_of_another() -> None:
    """SGLang aborts by prefix, so ids have one length, whatever id the client sent, and are never the same."""
    async with running_site(toy("sglang")) as sglang:
        for number in range(3):
            await sglang.chat(rid=f"mine-{number}")
        ids = [asked.json["rid"] for asked in sglang.engine.turns]
    assert len(set(ids)) == 3
    assert len({len(one) for one in ids}) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_sglang_is_asked_to_abort_what_its_client_left(stream: bool) -> None:
    """A closed connection alone would let it run on for seconds (SGLang 0.5.23, managers/tokenizer_manager.py)."""
    async with running_site(toy("sglang")) as site:
        turn = asyncio.create_task(site.chat(stream=stream, max_tokens=8000, ignore_eos=True))
        await eventually(lambda: site.engine.turns)
        turn.cancel()
        await eventually(lambda: len(site.engine.turns) == 2, 1.0)
        asked, aborted = site.engine.turns
        assert (aborted.path, aborted.json["rid"]) == ("/abort_request", asked.json["rid"])
