"""What the API tests share: a fast simulated engine and a gateway in front of it."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from engines.profiles import load_profile
from engines.simulated.settings import SimulatedEngineSettings
from engines.simulated.text import Tokenizer
from tests.support.engine import RecordedEngine, recorded_engine
from tests.support.gateway import REUSED_FOR, running_gateway

_CHECKOUT = Path(__file__).parents[2]
MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
DONE = b"data: [DONE]\n\n"


@pytest.fixture(params=["off", "auto"], ids=["passed through", "token level"])
def token_legs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test twice: with turns that are passed through, and at token level. The client must see no difference."""
    monkeypatch.setenv("HEDDLE_TOKEN_LEGS", request.param)
    return str(request.param)


class Wire:
    """How a scripted engine is asked for a chat stream, and what it answers.

    Attributes:
        path: where the request arrives.
    """

    def __init__(self, token_legs: str) -> None:
        self.path = GENERATE if token_legs == "auto" else CHAT

    def chunk(self, text: str, reason: str | None = None) -> bytes:
        """An event with this text."""
        if self.path == CHAT:
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
            return event(
                {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
            )
        ids = Tokenizer().encode(text)
        logprobs = [{"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * len(ids)
        choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": {"content": logprobs}}
        return event({"request_id": "g", "choices": [choice | {"finish_reason": reason, "stop_reason": None}]})


@pytest.fixture
def wire(token_legs: str) -> Wire:
    return Wire(token_legs)


def event(data: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def toy(dialect: Any = "vllm", slots: int = 8, **settings: Any) -> SimulatedEngineSettings:
    """A simulated engine that makes a token in a millisecond."""
    profile = replace(load_profile("toy-cpu-tp1"), slots=slots)
    return SimulatedEngineSettings(
        **{"dialect": dialect, "profile": profile, "model": MODEL, "max_model_len": 8192, "mean_output_tokens": 24}
        | settings
    )


class Site:
    """An engine that records its requests, a gateway in front of it, and a client of the gateway."""

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
        httpx.AsyncClient(base_url=listening.url, timeout=30, limits=REUSED_FOR) as client,
    ):
        yield Site(recorded, listening.url, client)


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as opened:
        yield opened


@pytest.fixture
def node_clients() -> Path:
    """Where the clients are installed; fails the test with the command to run if they are not."""
    home = Path(os.environ.get("HEDDLE_WORK", _CHECKOUT / ".work")) / "npm"
    if shutil.which("node") is None or not (home / "node_modules" / "jsdom").is_dir():
        pytest.fail("no clients for Node.js; get them with: deploy/get-node-clients.sh", pytrace=False)
    return home
