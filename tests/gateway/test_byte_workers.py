"""A stream that a byte worker passes on is the same to its client, and in the history, as one that none does."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.server import Listening
from tests.faults.asking import body_of
from tests.faults.raw_engine import CHAT_EVENT, STREAM_HEAD, RawEngine, chunk, raw_engine
from tests.support.gateway import PATIENT, eventually, running_gateway

PATH = "/v1/chat/completions"
END = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
ODD_END = END.replace(b'"stop"', b'"repetition"')
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,"total_tokens":14}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"no","type":"InternalServerError","code":500}}\n\n'
LAST = b"0\r\n\r\n"
ENDED = b"\r\n"  # what `masked` leaves of it
TWO = chunk(CHAT_EVENT) * 2
# What an engine says of a stream that is lent behind its first event, in these pieces, and whether it then closes.
REST: dict[str, tuple[tuple[bytes, ...], bool]] = {
    "to its end": ((TWO, chunk(END), chunk(USAGE), chunk(DONE) + LAST), False),
    "at once": ((TWO + chunk(END) + chunk(USAGE) + chunk(DONE) + LAST,), False),
    "byte by byte": (tuple(bytes([byte]) for byte in TWO + chunk(END + USAGE + DONE) + LAST), False),
    "an odd reason": ((TWO, chunk(ODD_END), chunk(DONE) + LAST), False),
    "comments": ((TWO, chunk(b": ping\n\n"), TWO, chunk(b": ping\n\n") + TWO, chunk(END + DONE) + LAST), False),
    "usage now and then": (
        (TWO, chunk(CHAT_EVENT.replace(b"}\n", b',"usage":null}\n')), TWO + chunk(END + DONE) + LAST),
        False,
    ),
    "a long event": ((chunk(CHAT_EVENT.replace(b"x", b"x" * 400_000)), TWO, chunk(END + DONE) + LAST), False),
    "events over chunks": ((chunk(CHAT_EVENT[:30]), chunk(CHAT_EVENT[30:]), chunk(END + DONE) + LAST), False),
    "an error": ((TWO, chunk(ERROR)), False),
    "cut": ((TWO, chunk(CHAT_EVENT)[:40]), True),
    "closed": ((TWO,), True),
    "without its end": ((TWO + LAST,), False),
    "not HTTP": ((TWO, b"SSH-2.0\r\n"), True),
    "not JSON": ((TWO, chunk(b"data: nonsense\n\n")), False),
    "after it": ((TWO, chunk(END + DONE) + LAST + b"HTTP/1.1 200 OK\r\n\r\n"), False),
}


@dataclass
class Stage:
    """An engine that begins a stream at once, and goes on when it is told to."""

    rest: tuple[bytes, ...] = ()
    closes: bool = False
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(CHAT_EVENT))
        await writer.drain()
        waits = asyncio.create_task(self.may_go_on.wait())
        left = asyncio.create_task(reader.read(1))
        await asyncio.wait((waits, left), return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()
        if left.done():
            writer.close()
            return
        left.cancel()
        await asyncio.gather(waits, left, return_exceptions=True)
        for piece in self.rest:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if self.closes:
            writer.close()


@dataclass
class Site:
    """A gateway with one byte worker that is ready, or none; and whoever asks what it does."""

    stage: Stage
    engine: RawEngine
    gateway: Listening
    watch: httpx.AsyncClient

    async def metrics(self, name: str) -> dict[str, float]:
        """The values of a metric, by labels."""
        page = (await self.watch.get("/metrics")).text
        return {labels: float(value) for labels, value in re.findall(rf"^{name}(\S*) (\S+)$", page, re.M)}

    async def num_lent(self) -> float:
        return sum((await self.metrics("heddle_byte_worker_streams")).values())

    async def until_lent(self, number: int = 1) -> None:
        async def is_lent() -> bool:
            return await self.num_lent() == number

        await eventually(is_lent, 60)

    async def open(self, name: str = "t-1", **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which a stream was asked for."""
        host, _, port = self.gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps(body_of("chat", True, **more))
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nx-trajectory-id: {name}\r\n".encode()
        writer.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        return reader, writer

    async def outcomes(self, name: str = "t-1") -> list[str]:
        shown = (await self.watch.get(f"/v1/trajectories/{name}")).json()
        return [turn["outcome"] for turn in shown["turns"]]


@asynccontextmanager
async def site(num_workers: int | None = 1, **settings: Any) -> AsyncIterator[Site]:
    stage = Stage()
    async with (
        raw_engine(stage.answer, keeps_open=True) as engine,
        running_gateway(
            engine.url,
            **{"byte_workers": num_workers, "byte_worker_turns": 0, "max_attempts": 1, **PATIENT, **settings},
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as watch,
    ):

        async def is_ready() -> bool:
            return (await watch.get("/readyz")).status_code == 200

        await eventually(is_ready, 60)
        here = Site(stage, engine, gateway, watch)
        if num_workers:  # the first stream has them started, and does not wait for them
            stage.rest = (chunk(END + DONE) + LAST,)
            stage.may_go_on.set()
            while len(await here.metrics("heddle_byte_worker_streams")) < num_workers:
                reader, writer = await here.open("first")
                await reader.read()
                writer.close()
            stage.may_go_on.clear()
        yield here


def masked(answer: bytes) -> bytes:
    """Without ids and times, and without the bounds of chunks, which are those of the engine's segments."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    body = re.sub(rb"(?:^|\r\n)[0-9a-f]+\r\n", b"", body)
    answer = re.sub(rb"[0-9a-f]{32}", b"ID", head + blank + body)
    return re.sub(rb"(date|x-heddle-queued-ms|x-heddle-engine): [^\r]*", rb"\1: X", answer)


@dataclass
class Seen:
    """What a stream leaves behind: the bytes that its client got, and the turn in the history, without times."""

    answer: bytes
    turn: dict[str, Any]


async def seen(name: str, num_workers: int, home: Path) -> Seen:
    async with site(num_workers, store=f"sqlite:{home / str(num_workers)}") as here:
        here.stage.rest, here.stage.closes = REST[name]
        reader, writer = await here.open()
        if num_workers:
            await here.until_lent()
        here.stage.may_go_on.set()
        answer = await reader.read()
        writer.close()
        assert await here.num_lent() == 0
        (turn,) = (await here.watch.get("/v1/trajectories/t-1")).json()["turns"]
        lent = await here.metrics("heddle_lent_streams_total")
        assert bool(lent) == bool(num_workers)
        assert "lost" not in str(lent)
    timed = ("_at", "turn_id", "engine", "queued_s", "priority", "predicted_tokens")
    return Seen(masked(answer), {name: value for name, value in turn.items() if not name.endswith(timed)})


@pytest.mark.parametrize("name", REST)
async def test_a_stream_that_is_lent_is_the_same(name: str, tmp_path: Path) -> None:
    """Byte for byte, and in the history: whatever the engine does once a worker passes it on."""
    async with asyncio.timeout(110):
        assert await seen(name, 1, tmp_path) == await seen(name, 0, tmp_path)


async def test_a_client_that_leaves_frees_the_engine() -> None:
    """Although a worker has both connections."""
    async with asyncio.timeout(110), site() as here:
        _, writer = await here.open()
        await here.until_lent()
        writer.transport.abort()
        await eventually(lambda: here.engine.num_open == 0, 60)

        async def is_left() -> bool:
            return await here.outcomes() == ["left"]

        await eventually(is_left, 60)


async def test_a_trajectory_that_is_deleted_stops_its_stream() -> None:
    """Its client is told within the stream, and the engine is freed."""
    async with asyncio.timeout(110), site() as here:
        reader, writer = await here.open()
        await here.until_lent()
        await here.watch.delete("/v1/trajectories/t-1")
        answer = await reader.read()
        writer.close()
        assert b"trajectory_aborted" in answer
        assert answer.endswith(LAST)
        await eventually(lambda: here.engine.num_open == 0, 60)


async def test_the_same_request_joins_a_stream_that_is_lent() -> None:
    """It comes back for that; both clients get the same answer, and the engine one request."""
    async with asyncio.timeout(110), site() as here:
        num_before = len(here.engine.posts)
        first, writer = await here.open()
        await here.until_lent()
        second, other = await here.open()
        await here.until_lent(0)
        here.stage.rest = (TWO, chunk(END + DONE) + LAST)
        here.stage.may_go_on.set()
        answers = [masked(await reader.read()) for reader in (first, second)]
        writer.close()
        other.close()
        assert answers[0] == answers[1]
        assert answers[0].endswith(DONE + ENDED)
        assert len(here.engine.posts) == num_before + 1


async def test_a_client_that_does_not_read_loses_nothing() -> None:
    """The worker gives the stream back; the gateway waits for the client, which then gets all of it."""
    async with asyncio.timeout(110), site(byte_worker_loan_bytes=1 << 40) as here:
        events = [CHAT_EVENT.replace(b'"x"', b'"%06d%b"' % (number, b"y" * 2_000)) for number in range(6_000)]
        here.stage.rest = (*map(chunk, events), chunk(END + DONE) + LAST)
        reader, writer = await here.open()
        await here.until_lent()
        here.stage.may_go_on.set()

        async def is_slow() -> bool:
            return (await here.metrics("heddle_lent_streams_total")).get('{until="client"}', 0) > 0

        await eventually(is_slow, 60)
        answer = await reader.read()
        writer.close()
        assert masked(answer).endswith(b"".join(events) + END + DONE + ENDED)
        assert await here.outcomes() == ["finished"]


async def test_a_stream_that_falls_silent_is_broken() -> None:
    """After the same time as one that nobody has lent."""
    async with asyncio.timeout(110), site(silence_timeout_s=1) as here:
        reader, writer = await here.open()
        answer = await reader.read()
        writer.close()
        assert b"no byte for 1 s" in answer
        await eventually(lambda: here.engine.num_open == 0, 60)


async def test_a_long_stream_is_lent_again_and_again() -> None:
    """A worker keeps so much of a stream and no more. What a stalled client does not take comes back for that alone."""
    async with asyncio.timeout(110), site() as here:
        events = [CHAT_EVENT.replace(b'"x"', b'"%06d%b"' % (number, b"y" * 2_000)) for number in range(600)]
        here.stage.rest = (*map(chunk, events), chunk(END + DONE) + LAST)
        num_full, num_before = 0.0, 0.0
        while num_full - num_before <= 1:
            num_before = num_full
            here.stage.may_go_on.clear()
            reader, writer = await here.open()
            await here.until_lent()
            here.stage.may_go_on.set()
            assert masked(await reader.read()).endswith(b"".join(events) + END + DONE + ENDED)
            writer.close()
            num_full = (await here.metrics("heddle_lent_streams_total")).get('{until="full"}', 0.0)


async def test_a_worker_that_dies_cuts_its_streams_and_is_replaced() -> None:
    """Nobody knows what their clients have: their connections end without an end. Others are not touched."""
    async with asyncio.timeout(110), site() as here:
        reader, writer = await here.open()
        await here.until_lent()
        os.kill(the_worker(), signal.SIGKILL)
        assert not (await reader.read()).endswith(LAST)
        writer.close()
        await eventually(lambda: here.engine.num_open == 0, 60)
        assert await here.outcomes() == ["left"]
        assert list((await here.metrics("heddle_engine_up")).values()) == [1], "it is no fault of the engine's"
        here.stage.rest = (TWO, chunk(END + DONE) + LAST)
        here.stage.may_go_on.set()
        while not await here.metrics("heddle_byte_worker_streams"):
            reader, writer = await here.open("t-2")
            assert (await reader.read()).endswith(LAST)
            writer.close()


async def test_a_worker_that_hangs_is_killed() -> None:
    """Also where nobody asks it for a stream back: their clients would wait as long as for a silent engine."""
    async with asyncio.timeout(110), site(byte_worker_timeout_s=2) as here:
        reader, writer = await here.open()
        await here.until_lent()
        os.kill(pid := the_worker(), signal.SIGSTOP)
        here.stage.rest = (TWO, chunk(END + DONE) + LAST)
        here.stage.may_go_on.set()
        await eventually(lambda: not is_alive(pid), 60)
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).endswith(LAST)
        writer.close()
        await eventually(lambda: here.engine.num_open == 0, 60)
        reader, writer = await here.open("t-2")
        assert (await reader.read()).endswith(LAST), "another worker, or none, passes it on"
        writer.close()


async def test_a_shutdown_waits_for_streams_that_are_lent() -> None:
    """As for all others: they may end."""
    async with asyncio.timeout(110):
        async with site(shutdown_timeout_s=60) as here:
            reader, writer = await here.open()
            await here.until_lent()
            pid = the_worker()
            asyncio.get_running_loop().call_later(0.3, here.stage.may_go_on.set)
            here.stage.rest = (TWO, chunk(END + DONE) + LAST)
        assert masked(await reader.read()).endswith(DONE + ENDED)
        writer.close()
        assert not is_alive(pid)


async def test_a_worker_that_does_not_start_is_not_tried_at_each_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams go on without it, and the log says so once."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with asyncio.timeout(110), site(num_workers=None, byte_workers=1) as here:
        here.stage.rest = (TWO, chunk(END + DONE) + LAST)
        here.stage.may_go_on.set()
        for number in range(5):
            reader, writer = await here.open(f"t-{number}")
            assert masked(await reader.read()).endswith(CHAT_EVENT * 3 + END + DONE + ENDED)
            writer.close()
            if number == 0:
                await eventually(lambda: "byte worker did not start" in caplog.text, 60)
        assert caplog.text.count("byte worker did not start") == 1


async def test_few_turns_need_no_worker() -> None:
    """Below the limit none is started."""
    async with asyncio.timeout(110), site(num_workers=None, byte_worker_turns=2) as here:
        here.stage.rest = (TWO, chunk(END + DONE) + LAST)
        here.stage.may_go_on.set()
        reader, writer = await here.open()
        assert (await reader.read()).endswith(LAST)
        writer.close()
        assert not await here.metrics("heddle_lent_streams_total")


async def test_two_workers_share_the_streams() -> None:
    """Each stream goes to the one that has fewer."""
    async with asyncio.timeout(110), site(num_workers=2) as here:
        opened = [await here.open(f"t-{number}") for number in range(6)]
        await here.until_lent(6)
        assert sorted((await here.metrics("heddle_byte_worker_streams")).values()) == [3, 3]
        here.stage.rest = (TWO, chunk(END + DONE) + LAST)
        here.stage.may_go_on.set()
        for reader, writer in opened:
            assert masked(await reader.read()).endswith(CHAT_EVENT * 3 + END + DONE + ENDED)
            writer.close()


def the_worker() -> int:
    """The byte worker of this process."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    (pid,) = (int(child) for child in children if b"gateway.workers" in Path(f"/proc/{child}/cmdline").read_bytes())
    return pid


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
