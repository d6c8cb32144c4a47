"""What the API's tests share: a fast simulated engine, and a gateway before it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest_asyncio

from engines.profiles import load_profile
from engines.simulated.settings import SimulatedEngineSettings
from tests.support.engine import RecordedEngine, recorded_engine
from tests.support.gateway import running_gateway

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hello"}]


def toy(dialect: Any = "vllm", slots: int = 8, **settings: Any) -> SimulatedEngineSettings:
    """A simulated engine of a token a millisecond."""
    profile = replace(load_profile("toy-cpu-tp1"), slots=slots)
    return SimulatedEngineSettings(
        **{"dialect": dialect, "profile": profile, "model": MODEL, "max_model_len": 8192, "mean_output_tokens": 24}
        | settings
    )


class Site:
    """An engine that records what it is asked, a gateway before it, and a client of the gateway."""

    def __init__(self, engine: RecordedEngine, url: str, client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.url = url
        self.client = client

    async def chat(self, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        """One chat turn of a few tokens."""
        headers = fields.pop("headers", {})
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, **fields}
        return await self.client.post(path, json=body, headers=headers)

    async def trajectory(self, trajectory_id: str) -> dict[str, Any]:
        """A trajectory as the gateway shows it."""
        answer = await self.client.get(f"/v1/trajectories/{trajectory_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()


@asynccontextmanager
async def running_site(engine: SimulatedEngineSettings | None = None, **settings: Any) -> AsyncIterator[Site]:
    """A site; `settings` are the gateway's."""
    async with (
        recorded_engine(engine or toy()) as recorded,
        running_gateway(recorded.url, **settings) as listening,
        httpx.AsyncClient(base_url=listening.url, timeout=30) as client,
    ):
        yield Site(recorded, listening.url, client)


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as opened:
        yield opened
