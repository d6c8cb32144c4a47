"""What the scheduler is told of an arriving turn: how long its prompt is, before any engine has counted it."""

import asyncio
from pathlib import Path

import httpx
import orjson

from tests.faults.asking import ask, body_of
from tests.faults.raw_engine import raw_engine, whole
from tests.support.gateway import running_gateway

USAGE = {"input_tokens": 20_000, "output_tokens": 2, "total_tokens": 20_002}
RESPONSE = orjson.dumps({"id": "r", "object": "response", "status": "completed", "output": [], "usage": USAGE})


async def test_a_prompt_that_is_mostly_at_the_engine_makes_no_other_seem_long(tmp_path: Path) -> None:
    """Requests that name an earlier response send only what is new. First prompts of others then counted as twenty
    times as long as they are, and few fitted into an engine."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(RESPONSE))

    async with (
        raw_engine(answer, keeps_open=True) as engine,
        running_gateway(engine.url, event_log=str(tmp_path / "events")) as gateway,
        httpx.AsyncClient(timeout=60) as client,
    ):
        going_on = body_of("responses", previous_response_id="r")
        for _ in range(60):
            assert (await ask(client, gateway.url, "responses", going_on, {"x-trajectory-id": "a"})).status == 200
        first = body_of("responses", text="looms " * 1_000)
        assert (await ask(client, gateway.url, "responses", first, {"x-trajectory-id": "b"})).status == 200
    events = map(orjson.loads, (tmp_path / "events").read_bytes().splitlines())
    arrived = [event for event in events if event.get("type") == "TurnArrived"]
    assert arrived[-1]["trajectory_id"] == "b" and 1_000 < arrived[-1]["prompt_tokens"] < 2_000
