"""KV of a context that the gateway cannot read, although engines can: to Python, a number may be too large."""

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.faults.raw_engine import raw_engine, whole, writes
from tests.kv.kv_fleet import Fleet
from tests.support.gateway import ADMIN, eventually, running_gateway

ANSWER = {"role": "assistant", "content": "x"}
REPLY = {
    "choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3_000, "completion_tokens": 1, "total_tokens": 3_001},
}
TASK = {"role": "user", "content": "Weave the warp through the heddle. " * 300}
TOOL = {"role": "user", "content": "the tool says: go on", "score": "1e999"}


@pytest.mark.parametrize("has_left", [False, True], ids=["in a tool call", "before a turn"])
async def test_a_move_whose_context_cannot_be_read_is_counted_and_fails_no_turn(has_left: bool) -> None:
    """The next turn goes to the new home as it is. In a tool call nothing was counted; before a turn, it got a 400."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(raw_engine(writes(whole(json.dumps(REPLY).encode())))) for _ in "ab"]
        gateway = await stack.enter_async_context(running_gateway())
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=60))
        for engine in engines:
            table = {"url": engine.url, "kv_transfer": "nixl"}
            (await client.post("/v1/engines", json=table, headers=ADMIN)).raise_for_status()

        async def are_ready() -> bool:
            return all(one["state"] == "ready" for one in (await client.get("/v1/engines")).json()["data"])

        await eventually(are_ready)
        fleet = Fleet(client)
        messages = [TASK]
        for _ in range(2):
            await turn(client, messages)
            messages += [ANSWER, TOOL]
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "cordon" if has_left else "evacuate")
        if not has_left:
            assert await fleet.moves() == {"failed": 1}
        await turn(client, messages)
        last = await fleet.last("t")
        assert last["engine"] != home and last["kv_by"] is None
        assert set(await fleet.moves()) == {"failed"}


async def turn(client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> None:
    """A turn that must finish."""
    body = json.dumps({"model": "simulated", "messages": messages}).replace('"1e999"', "1e999")
    answer = await client.post("/t/t/v1/chat/completions", content=body)
    assert answer.status_code == 200, answer.text
