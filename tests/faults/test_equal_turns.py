"""The same request again after its client left: a new turn, which contains nothing of the first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import GENERATE, HELLO, MODEL, Wire, toy
from tests.faults.gateway_process import gateway_process
from tests.support.engine import Asked, Script, recorded_engine
from tests.support.gateway import eventually

BODY = {"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 99}
MINE = {"x-trajectory-id": "mine"}


@asynccontextmanager
async def client_that_reads(client: httpx.AsyncClient, url: str, text: str) -> AsyncIterator[None]:
    """The client reads until it has this text, then leaves."""
    async with client.stream("POST", url + "/v1/chat/completions", json=BODY, headers=MINE) as answer:
        received = ""
        async for line in answer.aiter_lines():
            received += line.partition('"content":"')[2].partition('"')[0]
            if received == text:
                break
        yield


@pytest.mark.parametrize("store", ["sqlite", "redis"])
async def test_a_killed_gateway_resumes_the_last_of_two_equal_turns(
    client: httpx.AsyncClient, tmp_path: Path, store: str, request: pytest.FixtureRequest
) -> None:
    """The earlier turn was abandoned by its client. Its stored tokens were once put before those of the later turn."""
    wire, texts_of_turns = Wire("auto"), iter((("a", "a", "a", "a"), ("b", "b"), ("c",)))

    async def play(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        texts = next(texts_of_turns) if asked.headers["x-session-id"] == "mine" else ("c",)
        for text in texts:
            await write(wire.chunk(text, "stop" if text == "c" else None))
        if texts != ("c",):
            await asyncio.Event().wait()

    url = f"sqlite:{tmp_path / 's.sqlite3'}" if store == "sqlite" else request.getfixturevalue("redis_server").url(15)
    settings = {"HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_SAVE_TOKENS_S": "0.000001", "HEDDLE_SETTLE_TIMEOUT_S": "60"}
    async with recorded_engine(toy()) as engine:
        engine.scripts[GENERATE] = Script(play)
        async with gateway_process("--engine", engine.url, "--store", url, **settings) as gateway:

            async def is_abandoned() -> bool:
                shown = (await client.get(gateway.url + "/v1/trajectories/mine")).json()
                return [turn["outcome"] for turn in shown["turns"]] == ["left"]

            async with client_that_reads(client, gateway.url, "aaaa"):
                pass
            await eventually(is_abandoned)
            async with client_that_reads(client, gateway.url, "bb"):
                # A turn ends only when the store has all earlier writes.
                other = {"x-trajectory-id": "other"}
                await client.post(gateway.url + "/v1/chat/completions", json=BODY, headers=other)
                await gateway.kill()
            await gateway.start()
            answer = await client.post(gateway.url + "/v1/chat/completions", json=BODY, headers=MINE)
            text = "".join(part.partition('"')[0] for part in answer.text.split('"content":"')[1:])
            assert text == "bbc"
