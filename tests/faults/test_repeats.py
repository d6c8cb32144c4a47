"""A request that is repeated after its turn has ended: a retry gets the same answer, a new question a new one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from redis import Redis

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.turns import repeats
from tests.faults.asking import APIS, PATHS, ask, body_of, client_connection, nothing_is_pending
from tests.faults.gateway_process import gateway_process
from tests.faults.raw_engine import CHAT_EVENT, STREAM_HEAD, chunk, hangs, raw_engine, resets, whole, writes
from tests.support.gateway import eventually, running_gateway
from tests.support.redis_server import RedisServer

MINE = {"x-trajectory-id": "mine"}
ANSWER = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}'
OTHER = {"x-trajectory-id": "other"}
RETRY = MINE | {"x-stainless-retry-count": "1"}


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


async def num_turns(client: httpx.AsyncClient, url: str, trajectory_id: str = "mine") -> int:
    record = (await client.get(f"{url}/v1/trajectories/{trajectory_id}")).json()
    return len(record["turns"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
async def test_a_retry_of_a_finished_turn_gets_the_same_answer(
    client: httpx.AsyncClient, api: str, stream: bool
) -> None:
    """To the byte, with its request id; the engine generates it once."""
    async with serve_engine(SimulatedEngineSettings(speed_up=50)) as engine, running_gateway(engine) as gateway:
        body = body_of(api, stream)
        first = await ask(client, gateway.url, api, body, MINE)
        again = await ask(client, gateway.url, api, body, RETRY)
        assert first.is_finished(api)
        assert again.text == first.text
        for name in ("x-request-id", "x-trajectory-id", "x-heddle-engine", "x-heddle-queued-ms", "content-type"):
            assert again.headers[name] == first.headers[name]
        assert await num_turns(client, gateway.url) == 1


async def test_a_repeat_that_is_not_marked_as_a_retry_is_a_new_turn(client: httpx.AsyncClient) -> None:
    """An agent that samples again needs another answer; so does a retry with another body."""
    async with serve_engine(SimulatedEngineSettings(speed_up=50)) as engine, running_gateway(engine) as gateway:
        first = await ask(client, gateway.url, "chat", body_of("chat"), MINE)
        second = await ask(client, gateway.url, "chat", body_of("chat"), MINE)
        third = await ask(client, gateway.url, "chat", body_of("chat", text="other"), RETRY)
        assert len({one.headers["x-request-id"] for one in (first, second, third)}) == 3
        assert await num_turns(client, gateway.url) == 3


async def test_only_the_same_key_gets_the_same_answer(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """Also after a restart. Another key, or one after a request without any, is a new turn."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50)) as engine,
        gateway_process("--store", f"sqlite:{tmp_path}/s.sqlite3", "--engine", engine) as gateway,
    ):

        async def request_id(key: str) -> str:
            headers = MINE | ({"idempotency-key": key} if key else {})
            return (await ask(client, gateway.url, "chat", body_of("chat"), headers)).headers["x-request-id"]

        first = await request_id("one")
        assert await request_id("one") == first
        await gateway.kill()
        await gateway.start()
        assert await request_id("one") == first
        second = await request_id("two")
        without = await request_id("")
        third = await request_id("two")
        assert len({first, second, without, third}) == 4
        assert await request_id("two") == third


async def test_a_retry_with_another_key_is_a_new_turn(client: httpx.AsyncClient) -> None:
    """Its first attempt never arrived. The count of retries decides only if one of the two has no key."""
    async with serve_engine(SimulatedEngineSettings(speed_up=50)) as engine, running_gateway(engine) as gateway:
        first = await request_id(client, gateway.url, MINE | {"idempotency-key": "one"})
        assert await request_id(client, gateway.url, RETRY) == first
        second = await request_id(client, gateway.url, RETRY | {"idempotency-key": "two"})
        assert second != first
        assert await request_id(client, gateway.url, RETRY | {"idempotency-key": "two"}) == second


@pytest.mark.parametrize("fault", ["the engine fails", "too many turns"])
async def test_a_retry_of_a_question_asked_again_gets_another_answer(client: httpx.AsyncClient, fault: str) -> None:
    """The agent wants a second sample, and the turn for it ends without one. The first sample is no answer to that."""
    async with (
        raw_engine(writes(whole(ANSWER))) as engine,
        running_gateway(engine.url, max_attempts=1, max_turns_per_key=1, retry_pause_s=0.01) as gateway,
    ):
        first = await request_id(client, gateway.url, MINE)
        if fault == "the engine fails":
            engine.answer = writes(whole(b'{"error":{"message":"no"}}', status=b"500 Internal Server Error"))
            assert (await ask(client, gateway.url, "chat", body_of("chat"), MINE)).status == 502
        else:
            engine.answer = hangs
            async with client_connection(gateway.url, "chat", body_of("chat"), OTHER):
                await eventually(lambda: len(engine.posts) == 2)
                assert (await ask(client, gateway.url, "chat", body_of("chat"), MINE)).status == 429
            await eventually(lambda: num_turns(client, gateway.url, "other"))
        engine.answer = writes(whole(ANSWER))
        second = await request_id(client, gateway.url, RETRY)
        assert second != first
        assert await request_id(client, gateway.url, RETRY) == second


async def test_a_retry_of_a_question_asked_again_gets_another_answer_after_a_restart(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """The gateway is killed while the turn for the second sample runs; the store still had the first one."""
    options = ("--store", f"sqlite:{tmp_path}/s.sqlite3")
    async with (
        raw_engine(writes(whole(ANSWER))) as engine,
        gateway_process(*options, "--engine", engine.url) as gateway,
    ):
        first = await request_id(client, gateway.url, MINE)
        engine.answer = hangs
        async with client_connection(gateway.url, "chat", body_of("chat"), MINE):
            await eventually(lambda: len(engine.posts) == 2)
            engine.answer = writes(whole(ANSWER))
            # A turn ends only when the store has all earlier writes.
            await request_id(client, gateway.url, OTHER)
            await gateway.kill()
        await gateway.start()
        assert await request_id(client, gateway.url, RETRY) != first


async def test_a_conversation_continues_after_a_retry(client: httpx.AsyncClient) -> None:
    """The client sends no id. The retry starts no turn, so the trajectory has none running."""
    async with serve_engine(SimulatedEngineSettings(speed_up=50)) as engine, running_gateway(engine) as gateway:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        replies = []
        for _ in range(3):
            body = body_of("chat", messages=messages)
            replies.append(await ask(client, gateway.url, "chat", body))
            messages = [*messages, replies[-1].json["choices"][0]["message"], {"role": "user", "content": "and then?"}]
            if len(replies) == 2:
                again = await ask(client, gateway.url, "chat", body, {"x-stainless-retry-count": "1"})
                assert again.text == replies[-1].text
        assert len({one.headers["x-trajectory-id"] for one in replies}) == 1


async def test_a_failed_turn_is_not_repeated_to_a_retry(client: httpx.AsyncClient) -> None:
    """After an error the retry is a turn of its own."""
    async with serve_engine(SimulatedEngineSettings(speed_up=50)) as engine, running_gateway(engine) as gateway:
        refused = await ask(client, gateway.url, "chat", body_of("chat", tokens=10**6), MINE)
        again = await ask(client, gateway.url, "chat", body_of("chat", tokens=10**6), RETRY)
        assert refused.status == again.status == 400
        assert refused.headers["x-request-id"] != again.headers["x-request-id"]


async def test_answers_beyond_the_byte_limit_are_not_kept(client: httpx.AsyncClient) -> None:
    """With no room for answers, none is kept and everything else works."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50)) as engine,
        running_gateway(engine, max_kept_answer_bytes=10) as gateway,
    ):
        first = await ask(client, gateway.url, "chat", body_of("chat"), MINE)
        again = await ask(client, gateway.url, "chat", body_of("chat"), RETRY)
        assert first.is_finished("chat") and again.is_finished("chat")
        assert first.headers["x-request-id"] != again.headers["x-request-id"]


async def test_the_longest_running_streams_are_not_kept_beyond_their_bound(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise memory grows with all that is under way. A repeat of the long one is a new turn; the short one can
    still be joined."""
    monkeypatch.setattr(repeats, "_LOOK_S", 0.001)
    looked, bound = asyncio.Event(), repeats.Repeats.bound

    def looks(self: repeats.Repeats) -> None:
        bound(self)
        looked.set()

    monkeypatch.setattr(repeats.Repeats, "bound", looks)
    num_events = {"short": 1, "long": 100}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(CHAT_EVENT) * num_events["long" if b"long" in engine.posts[-1] else "short"])
        await reader.read()

    async with (
        raw_engine(answer) as engine,
        running_gateway(engine.url, max_running_answer_bytes=30 * len(CHAT_EVENT)) as gateway,
        AsyncExitStack() as streams,
    ):

        async def asked_for(text: str) -> httpx.Response:
            body, headers = body_of("chat", True, text=text), {"x-trajectory-id": text}
            url = gateway.url + PATHS["chat"]
            return await streams.enter_async_context(client.stream("POST", url, json=body, headers=headers))

        replies = {text: await asked_for(text) for text in ("short", "long")}
        request_ids = {text: reply.headers["x-request-id"] for text, reply in replies.items()}
        pieces, received = replies["long"].aiter_raw(), b""
        while received.count(b"data:") < num_events["long"]:
            received += await anext(pieces)
        looked.clear()
        await looked.wait()
        # In this order: a stream that is joined is never freed, so its length would come on the other one.
        assert (await asked_for("short")).headers["x-request-id"] == request_ids["short"]
        assert (await asked_for("long")).headers["x-request-id"] != request_ids["long"]


async def test_a_retry_gets_the_same_answer_after_the_gateway_was_killed(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """The turns had ended, but nobody knows whether their clients got the answers."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50)) as engine,
        gateway_process("--store", f"sqlite:{tmp_path}/s.sqlite3", "--engine", engine) as gateway,
    ):
        jobs = [(f"{api}-{stream}", api, body_of(api, stream)) for api in APIS for stream in (False, True)]
        firsts = [await ask(client, gateway.url, api, body, {"x-trajectory-id": name}) for name, api, body in jobs]
        await gateway.kill()
        await gateway.start()
        for (name, api, body), first in zip(jobs, firsts, strict=True):
            again = await ask(client, gateway.url, api, body, RETRY | {"x-trajectory-id": name})
            assert first.is_finished(api) and again.is_finished(api)
            for header in ("x-request-id", "x-trajectory-id", "content-type"):
                assert again.headers[header] == first.headers[header]
            assert again.text == first.text
            assert await num_turns(client, gateway.url, name) == 1


async def test_answers_are_stored_again_after_the_store_lost_them(
    client: httpx.AsyncClient, redis_server: RedisServer
) -> None:
    """Also one that is being stored when the loss is noticed, and none that is too long."""
    settings = {"store": redis_server.url(11), "max_stored_answer_bytes": 2_000}

    async def answer_after_the_loss(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await eventually(lambda: nothing_is_pending(client, gateway.url))
        with Redis.from_url(redis_server.url(11)) as redis:
            redis.flushdb()
        await writes(whole(ANSWER))(reader, writer)

    answers = {
        "early": writes(whole(ANSWER)),
        "long": writes(whole(ANSWER.replace(b'"x"', b'"%b"' % (b"x" * 3_000)))),
        "last": answer_after_the_loss,
    }
    ids = {}
    async with raw_engine(resets) as engine:
        async with running_gateway(engine.url, **settings) as gateway:
            for name, engine.answer in answers.items():
                ids[name] = await request_id(client, gateway.url, {"x-trajectory-id": name})
        engine.answer = answers["early"]
        async with running_gateway(engine.url, **settings) as gateway:
            again = {name: await request_id(client, gateway.url, RETRY | {"x-trajectory-id": name}) for name in ids}
            assert {name for name in ids if again[name] == ids[name]} == {"early", "last"}
            assert [await num_turns(client, gateway.url, name) for name in ids] == [1, 2, 1]


async def request_id(client: httpx.AsyncClient, url: str, headers: dict[str, str]) -> str:
    reply = await ask(client, url, "chat", body_of("chat"), headers)
    assert reply.is_finished("chat")
    return str(reply.headers["x-request-id"])


async def test_a_long_answer_is_not_stored(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """Above the limit, the retry after a restart is a turn of its own, and nothing else differs."""
    async with serve_engine(SimulatedEngineSettings(speed_up=50)) as engine:
        options = ("--store", f"sqlite:{tmp_path}/s.sqlite3", "--engine", engine)
        async with gateway_process(*options, HEDDLE_MAX_STORED_ANSWER_BYTES="100") as gateway:
            first = await ask(client, gateway.url, "chat", body_of("chat"), MINE)
            await gateway.kill()
            await gateway.start()
            again = await ask(client, gateway.url, "chat", body_of("chat"), RETRY)
            assert again.is_finished("chat")
            assert again.headers["x-request-id"] != first.headers["x-request-id"]
            assert await num_turns(client, gateway.url) == 2
