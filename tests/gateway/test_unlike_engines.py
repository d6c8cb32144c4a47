"""Engines that serve the same model and differ otherwise: a request reaches one that can serve it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import permutations
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.support.gateway import REUSED_FOR, running_gateway

CONTEXTS = {"large": 32_768, "middle": 8_192, "small": 4_096}


@asynccontextmanager
async def unlike_engines(*engines: dict[str, Any]) -> AsyncIterator[tuple[httpx.AsyncClient, list[str]]]:
    """A client of a gateway with one engine for each of these settings, in their order, and the engines' ids."""
    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(serve_engine(SimulatedEngineSettings(speed_up=200, **engine)))
            for engine in engines
        ]
        gateway = await stack.enter_async_context(running_gateway(*urls))
        client = httpx.AsyncClient(base_url=gateway.url, timeout=60, limits=REUSED_FOR)
        yield await stack.enter_async_context(client), [url.removeprefix("http://") for url in urls]


@pytest.mark.parametrize("order", [*permutations(CONTEXTS)], ids="-".join)
async def test_a_long_prompt_goes_to_an_engine_that_takes_it(order: tuple[str, ...]) -> None:
    """Whichever engine was added last: of long prompts that come at once, none is sent where it is refused."""
    async with unlike_engines(*({"max_model_len": CONTEXTS[name]} for name in order)) as (client, ids):

        async def ask(number: int) -> tuple[int, str]:
            messages = [{"role": "user", "content": f"{number} " + "word " * 12_000}]
            body = {"model": "simulated", "messages": messages, "max_tokens": 100, "ignore_eos": True}
            answer = await client.post("/v1/chat/completions", json=body)
            return answer.status_code, answer.headers["x-heddle-engine"]

        assert set(await asyncio.gather(*map(ask, range(8)))) == {(200, ids[order.index("large")])}
        assert (await client.get("/v1/models/simulated")).json()["max_model_len"] == CONTEXTS["large"]
