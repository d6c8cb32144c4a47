"""Agents with one system prompt share an engine's KV, whatever their tasks: the gateway admits them all."""

import asyncio

import httpx
import orjson
import pytest

from tests.faults.asking import body_of
from tests.faults.raw_engine import raw_engine, whole
from tests.support.gateway import PATIENT, eventually, running_gateway

NUM_AGENTS = 6
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 30_000, "completion_tokens": 2, "total_tokens": 30_002}
CHAT = orjson.dumps({"id": "c", "object": "chat.completion", "choices": [CHOICE], "usage": USAGE})


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "one each"])
async def test_a_shared_system_prompt_is_counted_once(is_shared: bool) -> None:
    """Six contexts of some 30,000 tokens, on an engine that holds 160,000, of which nine tenths may be claimed. With a
    system prompt each, only four enter."""
    may_answer = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        writer.write(whole(CHAT))

    async with (
        raw_engine(answer) as engine,
        running_gateway(engine.url, **PATIENT) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
    ):

        async def ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        async def all_are_there() -> bool:
            page = (await client.get("/metrics")).text.splitlines()
            counts = [line.split()[1] for line in page if line.startswith(("heddle_waiting_", "heddle_running_"))]
            return sum(map(float, counts)) == NUM_AGENTS

        def body(number: int) -> dict[str, object]:
            system = f"You are an agent{'' if is_shared else number}. " + "Rules. " * 17_000
            messages = [{"role": "system", "content": system}, {"role": "user", "content": f"task {number}"}]
            return body_of("chat") | {"messages": messages}

        await eventually(ready)
        turns = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body(n), headers={"x-trajectory-id": f"t{n}"}))
            for n in range(NUM_AGENTS)
        ]
        await eventually(all_are_there)
        num_entered = NUM_AGENTS if is_shared else 4
        await eventually(lambda: len(engine.posts) >= num_entered)
        assert len(engine.posts) == num_entered
        may_answer.set()
        assert [answer.status_code for answer in await asyncio.gather(*turns)] == [200] * NUM_AGENTS
