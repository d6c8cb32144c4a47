"""A server with data-parallel ranks dies while turns run and wait at all of them: other servers serve these turns."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from tests.api.conftest import HELLO, MODEL, toy
from tests.support.gateway import eventually, running_gateway

LONG: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 900, "ignore_eos": True}


@asynccontextmanager
async def site(stack: AsyncExitStack, kind: str, token_legs: str) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway before a server of four ranks, which `stack` ends, and one without ranks. Two turns run on each."""
    doomed = await stack.enter_async_context(serve_engine(toy(kind, slots=2, data_parallel_size=4)))
    async with (
        serve_engine(toy(kind, slots=2)) as healthy,
        running_gateway(doomed, healthy, token_legs=token_legs, sends_ahead=False) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=120) as client,
    ):
        yield client


@pytest.mark.parametrize("token_legs", ["off", "auto"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_no_turn_is_lost_with_a_server_of_several_ranks(kind: str, token_legs: str) -> None:
    """It costs a turn one attempt, however many ranks are lost; some trajectories have their home there and wait."""
    async with AsyncExitStack() as stack, site(stack, kind, token_legs) as client:
        names = [f"t{number % 16}" for number in range(32)]  # the second turns of each wait for their home, or for room
        turns = [asyncio.create_task(client.post(f"/t/{name}/v1/chat/completions", json=LONG)) for name in names]

        async def all_run() -> bool:
            engines = (await client.get("/v1/engines")).json()["data"]
            return [engine["num_legs"] for engine in engines] == [2] * 5

        await eventually(all_run)
        await stack.aclose()
        answers = await asyncio.gather(*turns)
        assert [answer.status_code for answer in answers] == [200] * 32, {answer.text for answer in answers}
        states = {engine["id"]: engine["state"] for engine in (await client.get("/v1/engines")).json()["data"]}
        assert list(states.values()) == ["lost"] * 4 + ["ready"]
