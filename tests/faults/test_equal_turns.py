"""The same request again, after its client left or by a sibling: a new turn, which contains nothing of the first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from store import StoreSettings, open_store
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
        await read(answer.aiter_lines(), text)
        yield


async def read(lines: AsyncIterator[str], text: str) -> None:
    """Read on until this text has come."""
    received = ""
    async for line in lines:
        received += line.partition('"content":"')[2].partition('"')[0]
        if received == text:
            break


@pytest.mark.parametrize("store", ["sqlite", "redis"])
async def test_a_killed_gateway_resumes_the_last_of_two_equal_turns(
    client: httpx.AsyncClient, tmp_path: Path, store: str, request: pytest.FixtureRequest
) -> None:
    """The earlier turn was abandoned by its client. Its stored tokens were once put before those of the later turn. The
    end of the one that goes on drops the tokens of both from the store."""
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
            assert text_of(answer) == "bbc"
    record = open_store(url, StoreSettings())
    await record.open()
    assert await record.get_pieces("mine", "partial/") == {}
    await record.close()


def text_of(answer: httpx.Response) -> str:
    return "".join(part.partition('"')[0] for part in answer.text.split('"content":"')[1:])


async def test_a_killed_gateway_does_not_mix_the_tokens_of_siblings(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """They share only a `user`, and ask the same at the same time. The first one's later tokens were put behind those
    of the second: what was continued, and exported, was never sampled."""
    wire, texts_of_turns = Wire("auto"), iter(("aaaa", "bb", "c"))
    second_is_read, body = asyncio.Event(), BODY | {"user": "agent-7"}

    async def play(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        texts = next(texts_of_turns) if asked.headers["x-session-id"] == "agent-7" else "c"
        for number, text in enumerate(texts):
            if number == 1 and text == "a":
                await second_is_read.wait()
            await write(wire.chunk(text, "stop" if text == "c" else None))
        if texts != "c":
            await asyncio.Event().wait()

    settings = {"HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_SAVE_TOKENS_S": "0.000001", "HEDDLE_SETTLE_TIMEOUT_S": "60"}
    async with recorded_engine(toy()) as engine:
        engine.scripts[GENERATE] = Script(play)
        store = f"sqlite:{tmp_path / 's.sqlite3'}"
        async with gateway_process("--engine", engine.url, "--store", store, **settings) as gateway:
            url = gateway.url + "/v1/chat/completions"
            async with client.stream("POST", url, json=body) as one:
                lines = one.aiter_lines()
                await read(lines, "a")
                async with client.stream("POST", url, json=body) as two:
                    await read(two.aiter_lines(), "bb")
                    second_is_read.set()
                    await read(lines, "aaa")
                    # A turn ends only when the store has all earlier writes.
                    await client.post(url, json=BODY, headers={"x-trajectory-id": "other"})
                    await gateway.kill()
            await gateway.start()
            answer = await client.post(url, json=body, headers={"x-stainless-retry-count": "1"})
            assert text_of(answer) == "bbc"
