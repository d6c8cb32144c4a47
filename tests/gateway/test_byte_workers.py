"""A stream that a byte worker passes on reaches its client, and the history, as if the gateway had passed it on."""

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
ENDED = b"\r\n"  # what `masked` leaves of LAST
TWO = chunk(CHAT_EVENT) * 2
# What an engine sends after the first event, once the stream is lent: its pieces, and whether it then closes.
REST: dict[str, tuple[tuple[bytes, ...], bool]] = {
    "complete": ((TWO, chunk(END), chunk(USAGE), chunk(DONE) + LAST), False),
    "at once": ((TWO + chunk(END) + chunk(USAGE) + chunk(DONE) + LAST,), False),
    "byte by byte": (tuple(bytes([byte]) for byte in TWO + chunk(END + USAGE + DONE) + LAST), False),
    "an unknown finish reason": ((TWO, chunk(ODD_END), chunk(DONE) + LAST), False),
    "comments": ((TWO, chunk(b": ping\n\n"), TWO, chunk(b": ping\n\n") + TWO, chunk(END + DONE) + LAST), False),
    "usage now and then": (
        (TWO, chunk(CHAT_EVENT.replace(b"}\n", b',"usage":null}\n')), TWO + chunk(END + DONE) + LAST),
        False,
    ),
    "a long event": ((chunk(CHAT_EVENT.replace(b"x", b"x" * 400_000)), TWO, chunk(END + DONE) + LAST), False),
    "events across chunks": ((chunk(CHAT_EVENT[:30]), chunk(CHAT_EVENT[30:]), chunk(END + DONE) + LAST), False),
    "an error": ((TWO, chunk(ERROR)), False),
    "cut": ((TWO, chunk(CHAT_EVENT)[:40]), True),
    "closed": ((TWO,), True),
    "without an end": ((TWO + LAST,), False),
    "not HTTP": ((TWO, b"SSH-2.0\r\n"), True),
    "not JSON": ((TWO, chunk(b"data: nonsense\n\n")), False),
    "data after the end": ((TWO, chunk(END + DONE) + LAST + b"HTTP/1.1 200 OK\r\n\r\n"), False),
}


@dataclass
class ScriptedEngine:
    """An engine that starts a stream at once and continues when it is allowed to."""

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
    """A gateway whose byte workers, if it has any, are ready, and a client that watches it."""

    script: ScriptedEngine
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
        """A connection on which a stream was requested."""
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
    script = ScriptedEngine()
    async with (
        raw_engine(script.answer, keeps_open=True) as engine,
        running_gateway(
            engine.url,
            **{"byte_workers": num_workers, "byte_worker_turns": 0, "max_attempts": 1, **PATIENT, **settings},
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as watch,
    ):

        async def is_ready() -> bool:
            return (await watch.get("/readyz")).status_code == 200

        await eventually(is_ready, 60)
        here = Site(script, engine, gateway, watch)
        if num_workers:  # the first stream starts them, and does not wait for them
            script.rest = (chunk(END + DONE) + LAST,)
            script.may_go_on.set()
            while len(await here.metrics("heddle_byte_worker_streams")) < num_workers:
                reader, writer = await here.open("first")
                await reader.read()
                writer.close()
            script.may_go_on.clear()
        yield here


def masked(answer: bytes) -> bytes:
    """The answer without ids and times, and without chunk boundaries, which follow the engine's segments."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    body = re.sub(rb"(?:^|\r\n)[0-9a-f]+\r\n", b"", body)
    answer = re.sub(rb"[0-9a-f]{32}", b"ID", head + blank + body)
    return re.sub(rb"(date|x-heddle-queued-ms|x-heddle-engine): [^\r]*", rb"\1: X", answer)


@dataclass
class Trace:
    """What a stream leaves behind: the bytes that its client got, and the turn in the history without times."""

    answer: bytes
    turn: dict[str, Any]


async def trace_of(name: str, num_workers: int, home: Path) -> Trace:
    async with site(num_workers, store=f"sqlite:{home / str(num_workers)}") as here:
        here.script.rest, here.script.closes = REST[name]
        reader, writer = await here.open()
        if num_workers:
            await here.until_lent()
        here.script.may_go_on.set()
        answer = await reader.read()
        writer.close()
        assert await here.num_lent() == 0
        (turn,) = (await here.watch.get("/v1/trajectories/t-1")).json()["turns"]
        lent = await here.metrics("heddle_lent_streams_total")
        assert bool(lent) == bool(num_workers)
        assert "lost" not in str(lent)
    timed = ("_at", "turn_id", "engine", "queued_s", "priority", "predicted_tokens")
    return Trace(masked(answer), {name: value for name, value in turn.items() if not name.endswith(timed)})


@pytest.mark.parametrize("name", REST)
async def test_a_lent_stream_equals_one_that_is_not_lent(name: str, tmp_path: Path) -> None:
    """Byte for byte, and in the history, whatever the engine does while a worker passes it on."""
    async with asyncio.timeout(110):
        assert await trace_of(name, 1, tmp_path) == await trace_of(name, 0, tmp_path)


async def test_a_client_that_leaves_a_lent_stream_frees_the_engine() -> None:
    """Even though a worker has both connections."""
    async with asyncio.timeout(110), site() as here:
        _, writer = await here.open()
        await here.until_lent()
        writer.transport.abort()
        await eventually(lambda: here.engine.num_open == 0, 60)

        async def is_left() -> bool:
            return await here.outcomes() == ["left"]

        await eventually(is_left, 60)


async def test_deleting_a_trajectory_ends_its_lent_stream() -> None:
    """The client is told within the stream, and the engine is freed."""
    async with asyncio.timeout(110), site() as here:
        reader, writer = await here.open()
        await here.until_lent()
        await here.watch.delete("/v1/trajectories/t-1")
        answer = await reader.read()
        writer.close()
        assert b"trajectory_aborted" in answer
        assert answer.endswith(LAST)
        await eventually(lambda: here.engine.num_open == 0, 60)


async def test_a_repeated_request_joins_a_lent_stream() -> None:
    """The stream is recalled for that. Both clients get the same answer, and the engine gets one request."""
    async with asyncio.timeout(110), site() as here:
        num_before = len(here.engine.posts)
        first, writer = await here.open()
        await here.until_lent()
        second, other = await here.open()
        await here.until_lent(0)
        here.script.rest = (TWO, chunk(END + DONE) + LAST)
        here.script.may_go_on.set()
        answers = [masked(await reader.read()) for reader in (first, second)]
        writer.close()
        other.close()
        assert answers[0] == answers[1]
        assert answers[0].endswith(DONE + ENDED)
        assert len(here.engine.posts) == num_before + 1


async def test_a_retry_of_a_lent_stream_gets_the_same_answer() -> None:
    """Also the part that a worker passed on."""
    async with asyncio.timeout(110), site() as here:
        here.script.rest = (TWO, chunk(END + DONE) + LAST)
        reader, writer = await here.open()
        await here.until_lent()
        here.script.may_go_on.set()
        answer = masked(await reader.read())
        writer.close()
        num_asked = len(here.engine.posts)
        retry = {"x-trajectory-id": "t-1", "x-stainless-retry-count": "1"}
        again = await here.watch.post(PATH, content=orjson.dumps(body_of("chat", True)), headers=retry)
        assert answer.endswith(b"\r\n\r\n" + again.content + ENDED)
        assert again.content == CHAT_EVENT * 3 + END + DONE
        assert len(here.engine.posts) == num_asked


async def test_a_slow_client_of_a_lent_stream_loses_nothing() -> None:
    """The worker gives the stream back; the gateway waits for the client, which then gets all of it."""
    async with asyncio.timeout(110), site(byte_worker_loan_bytes=1 << 40) as here:
        events = [CHAT_EVENT.replace(b'"x"', b'"%06d%b"' % (number, b"y" * 2_000)) for number in range(6_000)]
        here.script.rest = (*map(chunk, events), chunk(END + DONE) + LAST)
        reader, writer = await here.open()
        await here.until_lent()
        here.script.may_go_on.set()

        async def is_slow() -> bool:
            return (await here.metrics("heddle_lent_streams_total")).get('{until="client"}', 0) > 0

        await eventually(is_slow, 60)
        answer = await reader.read()
        writer.close()
        assert masked(answer).endswith(b"".join(events) + END + DONE + ENDED)
        assert await here.outcomes() == ["finished"]


async def test_a_lent_stream_that_falls_silent_is_broken_off() -> None:
    """After the same time as a stream that is not lent."""
    async with asyncio.timeout(110), site(silence_timeout_s=1) as here:
        reader, writer = await here.open()
        answer = await reader.read()
        writer.close()
        assert b"no byte for 1 s" in answer
        await eventually(lambda: here.engine.num_open == 0, 60)
        assert (await here.metrics("heddle_lent_streams_total"))['{until="recalled"}'] == 1, "it was lent"


async def test_a_long_stream_is_lent_repeatedly() -> None:
    """A worker returns a stream when it has kept a certain part of it. If the client stalls, the stream comes back for
    that reason instead, so the test tries again."""
    async with asyncio.timeout(110), site() as here:
        events = [CHAT_EVENT.replace(b'"x"', b'"%06d%b"' % (number, b"y" * 2_000)) for number in range(600)]
        here.script.rest = (*map(chunk, events), chunk(END + DONE) + LAST)
        num_full, num_before = 0.0, 0.0
        while num_full - num_before <= 1:
            num_before = num_full
            here.script.may_go_on.clear()
            reader, writer = await here.open()
            await here.until_lent()
            here.script.may_go_on.set()
            assert masked(await reader.read()).endswith(b"".join(events) + END + DONE + ENDED)
            writer.close()
            num_full = (await here.metrics("heddle_lent_streams_total")).get('{until="full"}', 0.0)


async def test_a_dead_worker_cuts_its_streams_and_is_replaced() -> None:
    """Nobody knows what their clients have received, so their connections end without a last chunk. The history says
    that the stream broke, not that its client left."""
    async with asyncio.timeout(110), site() as here:
        reader, writer = await here.open()
        await here.until_lent()
        os.kill(the_worker(), signal.SIGKILL)
        assert not (await reader.read()).endswith(LAST)
        writer.close()
        await eventually(lambda: here.engine.num_open == 0, 60)
        (turn,) = (await here.watch.get("/v1/trajectories/t-1")).json()["turns"]
        assert (turn["outcome"], turn["error"]["code"]) == ("failed", "stream_broken")
        assert list((await here.metrics("heddle_engine_up")).values()) == [1], "the engine is not at fault"
        here.script.rest = (TWO, chunk(END + DONE) + LAST)
        here.script.may_go_on.set()
        while not await here.metrics("heddle_byte_worker_streams"):
            reader, writer = await here.open("t-2")
            assert (await reader.read()).endswith(LAST)
            writer.close()


@pytest.mark.parametrize("first_leaves", [False, True])
async def test_a_client_that_joined_a_dead_workers_stream_is_told(first_leaves: bool) -> None:
    """Nobody has the rest of the stream, so it ends with an error event, whether the first client is still there or
    not."""
    async with asyncio.timeout(60), site() as here:
        _, writer = await here.open()
        await here.until_lent()
        os.kill(pid := the_worker(), signal.SIGSTOP)  # it does not give the stream back when the second client joins
        second, other = await here.open()

        async def has_joined() -> bool:
            return await here.metrics("heddle_joined_turns_total") == {"": 1}

        await eventually(has_joined, 60)
        if first_leaves:
            writer.transport.abort()
        os.kill(pid, signal.SIGKILL)
        answer = await second.read()
        writer.close()
        other.close()
        assert b'"code":"stream_broken"' in answer and answer.endswith(LAST)
        await eventually(lambda: here.engine.num_open == 0, 60)
        assert await here.outcomes() == ["failed"]
        assert list((await here.metrics("heddle_engine_up")).values()) == [1], "the engine is not at fault"


async def test_a_worker_that_hangs_is_killed() -> None:
    """Even if no stream is recalled from it: its clients would otherwise wait as long as for a silent engine."""
    async with asyncio.timeout(110), site(byte_worker_timeout_s=2) as here:
        reader, writer = await here.open()
        await here.until_lent()
        os.kill(pid := the_worker(), signal.SIGSTOP)
        here.script.rest = (TWO, chunk(END + DONE) + LAST)
        here.script.may_go_on.set()
        await eventually(lambda: not is_alive(pid), 60)
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).endswith(LAST)
        writer.close()
        await eventually(lambda: here.engine.num_open == 0, 60)
        reader, writer = await here.open("t-2")
        assert (await reader.read()).endswith(LAST), "another worker, or none, passes it on"
        writer.close()


async def test_a_worker_that_hangs_while_it_starts_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It counts as one that did not start, and does not stand in the way of another one."""
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nkill -STOP $$\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hangs))
    async with asyncio.timeout(110), site(num_workers=None, byte_workers=1, byte_worker_timeout_s=2) as here:
        here.script.rest = (TWO, chunk(END + DONE) + LAST)
        here.script.may_go_on.set()

        async def stream() -> None:
            reader, writer = await here.open()
            assert (await reader.read()).endswith(LAST)
            writer.close()

        while not workers():
            await stream()
        pid = the_worker()
        monkeypatch.undo()
        await eventually(lambda: not is_alive(pid), 60)
        while not await here.metrics("heddle_byte_worker_streams"):
            await stream()


async def test_a_shutdown_waits_for_lent_streams() -> None:
    """They may end, as other streams may."""
    async with asyncio.timeout(110):
        async with site(shutdown_timeout_s=60) as here:
            reader, writer = await here.open()
            await here.until_lent()
            pid = the_worker()
            asyncio.get_running_loop().call_later(0.3, here.script.may_go_on.set)
            here.script.rest = (TWO, chunk(END + DONE) + LAST)
        assert masked(await reader.read()).endswith(DONE + ENDED)
        writer.close()
        assert not is_alive(pid)


async def test_a_worker_that_fails_to_start_is_not_retried_for_each_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams continue without it, and the log reports it once."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with asyncio.timeout(110), site(num_workers=None, byte_workers=1) as here:
        here.script.rest = (TWO, chunk(END + DONE) + LAST)
        here.script.may_go_on.set()
        for number in range(5):
            reader, writer = await here.open(f"t-{number}")
            assert masked(await reader.read()).endswith(CHAT_EVENT * 3 + END + DONE + ENDED)
            writer.close()
            if number == 0:
                await eventually(lambda: "byte worker did not start" in caplog.text, 60)
        assert caplog.text.count("byte worker did not start") == 1


async def test_few_turns_start_no_worker() -> None:
    """Below the limit, no stream is lent."""
    async with asyncio.timeout(110), site(num_workers=None, byte_worker_turns=2) as here:
        here.script.rest = (TWO, chunk(END + DONE) + LAST)
        here.script.may_go_on.set()
        reader, writer = await here.open()
        assert (await reader.read()).endswith(LAST)
        writer.close()
        assert not await here.metrics("heddle_lent_streams_total")


async def test_two_workers_share_the_streams() -> None:
    """Each stream goes to the worker that has fewer."""
    async with asyncio.timeout(110), site(num_workers=2) as here:
        opened = [await here.open(f"t-{number}") for number in range(6)]
        await here.until_lent(6)
        assert sorted((await here.metrics("heddle_byte_worker_streams")).values()) == [3, 3]
        here.script.rest = (TWO, chunk(END + DONE) + LAST)
        here.script.may_go_on.set()
        for reader, writer in opened:
            assert masked(await reader.read()).endswith(CHAT_EVENT * 3 + END + DONE + ENDED)
            writer.close()


def the_worker() -> int:
    """The process id of this process's byte worker."""
    (pid,) = workers()
    return pid


def workers() -> set[int]:
    """The process ids of this process's byte workers."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(child) for child in children if b"gateway.workers" in Path(f"/proc/{child}/cmdline").read_bytes()}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
