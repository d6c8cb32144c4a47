"""Agents whose prompts begin alike share an engine's KV, whatever comes then: the gateway admits them all."""

import asyncio
from collections.abc import Callable

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


RULES = "Rules. " * 17_000


def one_system_prompt(number: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": RULES}, {"role": "user", "content": f"task {number}"}]


def one_each(number: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": f"Agent {number}. {RULES}"}, {"role": "user", "content": "task"}]


def one_conversation(number: int) -> list[dict[str, str]]:
    """The same one, each time 3,000 tokens longer."""
    answers = [{"role": role, "content": "Yes. " * 1_200} for _ in range(number) for role in ("assistant", "user")]
    return [{"role": "user", "content": RULES}, *answers]


@pytest.mark.parametrize(
    ("messages_of", "num_entered"), [(one_system_prompt, NUM_AGENTS), (one_each, 4), (one_conversation, NUM_AGENTS)]
)
async def test_what_prompts_have_in_common_is_counted_once(
    messages_of: Callable[[int], list[dict[str, str]]], num_entered: int
) -> None:
    """Six contexts of 30,000 tokens and more, on an engine that holds 160,000, of which nine tenths may be claimed. If
    they have nothing in common, only four enter."""
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
            return body_of("chat") | {"messages": messages_of(number)}

        await eventually(ready)
        turns = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body(n), headers={"x-trajectory-id": f"t{n}"}))
            for n in range(NUM_AGENTS)
        ]
        await eventually(all_are_there)
        await eventually(lambda: len(engine.posts) >= num_entered)
        assert len(engine.posts) == num_entered
        may_answer.set()
        assert [answer.status_code for answer in await asyncio.gather(*turns)] == [200] * NUM_AGENTS
