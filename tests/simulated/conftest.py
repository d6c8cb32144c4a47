"""Simulated engines on real sockets."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest

from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings

Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts an engine with the given settings and returns a client for it; the default is a fast toy engine."""
    async with AsyncExitStack() as stack:

        async def started(**settings: Any) -> httpx2.AsyncClient:
            given = {"profile": load_profile("toy-cpu-tp1"), "speed_up": 100.0, "max_model_len": 4096, **settings}
            url = await stack.enter_async_context(serve_engine(SimulatedEngineSettings(**given)))
            return await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=20))

        yield started
