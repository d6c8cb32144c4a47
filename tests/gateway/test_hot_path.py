"""A turn served by callbacks is answered like one served by coroutines, and leaves the same behind.

A request whose body arrives with its head may be served by callbacks; one whose body arrives later never is.
"""

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.http.exchange import Exchange
from gateway.server import Listening
from gateway.turns.turn import Turn
from tests.faults.asking import body_of
from tests.faults.raw_engine import CHAT_EVENT, STREAM_HEAD, Answer, chunk, raw_engine, whole
from tests.support.gateway import PATIENT, eventually, running_gateway

PATH = "/v1/chat/completions"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4}}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
CHAT = orjson.dumps({"id": "c", "object": "chat.completion", "choices": [CHOICE], "usage": USAGE})
# An unknown finish reason makes the gateway write the body again, and not all JSON that can be read can be written.
DEEP = CHAT.replace(b'"stop"', b'"repetition"').replace(b'"hi"', b"[" * 400 + b"]" * 400)
END = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE_EVENT = b'data: {"id":"c","choices":[],"usage":%s}\n\n' % orjson.dumps(USAGE)
LAST = chunk(END) + chunk(USAGE_EVENT) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
STREAM = chunk(CHAT_EVENT) * 3 + LAST
ERROR = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'
ERROR_EVENT = b'data: {"error":{"message":"no","type":"InternalServerError","code":500}}\n\n'
ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Case:
    """The pieces that an engine sends, whether it then closes the connection, and whether callbacks serve the turn to
    its end.

    `is_hot` is None if that depends on how long the pieces take.
    """

    name: str
    pieces: tuple[bytes, ...]
    closes: bool = False
    is_stream: bool = False
    is_hot: bool | None = True


def reporting_tokens(number: bytes) -> bytes:
    """An answer that reports this number of output tokens."""
    return CHAT.replace(b'"completion_tokens":2', b'"completion_tokens":' + number)


CASES = (
    Case("whole", (whole(CHAT),)),
    Case("whole in two pieces", (whole(CHAT)[:150], whole(CHAT)[150:]), is_hot=None),
    Case("whole in chunks", (CHUNKED_HEAD + chunk(CHAT[:20]) + chunk(CHAT[20:]), b"0\r\n\r\n")),
    Case("until the connection closes", (b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n", CHAT), True),
    Case("a client's error", (whole(ERROR, b"400 Bad Request"),), is_hot=False),
    Case("an engine's error", (whole(ERROR, b"500 Oh"),), is_hot=False),
    Case("not JSON", (whole(b"<html>"),), is_hot=False),
    Case("an unknown finish reason", (whole(CHAT.replace(b'"stop"', b'"repetition"')),)),
    Case("cut", (whole(CHAT)[:150],), True, is_hot=False),
    Case("not HTTP", (b"SSH-2.0\r\n",), True, is_hot=False),
    Case("a count of 5,000 digits", (whole(reporting_tokens(b"2" * 5_000)),)),
    Case("a count of 64 bits", (whole(reporting_tokens(b"%d" % (2**64 - 1))),)),
    Case("a prompt of no tokens", (whole(CHAT.replace(b'"prompt_tokens":9', b'"prompt_tokens":0')),)),
    Case("a negative count", (whole(reporting_tokens(b"-5")),)),
    Case("too deep to be written as JSON", (whole(DEEP),), is_hot=False),
    Case("above the high-water mark", (whole(CHAT.replace(b"hi", b"h" * 400_000)),), is_hot=False),
    Case("stream", (STREAM_HEAD + STREAM,), is_stream=True),
    Case("stream, byte by byte", (STREAM_HEAD, *(STREAM[n : n + 1] for n in range(len(STREAM)))), is_stream=True),
    Case("stream without usage", (STREAM_HEAD, STREAM.replace(chunk(USAGE_EVENT), b"")), is_stream=True),
    Case("stream that begins with an end", (STREAM_HEAD, chunk(END), STREAM), is_stream=True),
    Case("stream that opens with its role", (STREAM_HEAD, chunk(ROLE), STREAM), is_stream=True),
    Case("stream of its role and an end", (STREAM_HEAD, chunk(ROLE), LAST), is_stream=True),
    Case("stream cut after its role", (STREAM_HEAD, chunk(ROLE)), True, is_stream=True, is_hot=False),
    Case("stream with an error after its role", (STREAM_HEAD, chunk(ROLE + ERROR_EVENT)), is_stream=True, is_hot=False),
    Case("stream answered without one", (whole(CHAT),), is_stream=True, is_hot=False),
    Case("stream refused", (whole(ERROR, b"400 Bad Request"),), is_stream=True, is_hot=False),
    Case("stream without its end", (STREAM_HEAD, chunk(CHAT_EVENT) + b"0\r\n\r\n"), is_stream=True, is_hot=False),
    Case("stream cut", (STREAM_HEAD, chunk(CHAT_EVENT)), True, is_stream=True, is_hot=False),
    Case("stream cut at once", (STREAM_HEAD,), True, is_stream=True, is_hot=False),
    Case("stream with an error", (STREAM_HEAD, chunk(CHAT_EVENT + ERROR_EVENT)), is_stream=True, is_hot=False),
    Case("stream that is an error", (STREAM_HEAD, chunk(ERROR_EVENT)), is_stream=True, is_hot=False),
    Case("stream not JSON", (STREAM_HEAD, chunk(b"data: nonsense\n\n")), is_stream=True, is_hot=False),
)


def sends(case: Case) -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in case.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if case.closes:
            writer.close()

    return answer


@dataclass
class Trace:
    """All that a turn leaves behind: the bytes that its client got, history, metrics and events without times."""

    answer: bytes
    turns: list[dict[str, Any]]
    num_running: float
    counts: dict[str, float]
    events: list[dict[str, Any]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_both_paths_answer_alike(case: Case, tmp_path: Path) -> None:
    """Status, headers, body, history, metrics and events are equal, and the turn took the expected path."""
    for name in ("hot", "cold"):
        (tmp_path / name).mkdir()
    async with asyncio.timeout(110):
        hot = await trace_of(case, tmp_path / "hot", is_together=True)
        cold = await trace_of(case, tmp_path / "cold", is_together=False)
    num_hot = {name: hot.counts.pop(name) for name in list(hot.counts) if name.startswith("heddle_hot_turns_total")}
    if case.is_hot is not None:
        assert num_hot == {f'heddle_hot_turns_total{{until="{"answer" if case.is_hot else "handed_over"}"}}': 1}
    assert not any(name.startswith("heddle_hot_turns_total") for name in cold.counts)
    assert hot == cold
    assert not case.is_hot or hot.answer.startswith(b"HTTP/1.1 200")


async def trace_of(case: Case, home: Path, is_together: bool) -> Trace:
    settings = {"event_log": str(home / "events"), "store": f"sqlite:{home / 'store'}", "max_attempts": 1}
    async with (
        raw_engine(sends(case), keeps_open=True) as engine,
        running_gateway(engine.url, **settings, **PATIENT) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as watch,
    ):
        await eventually(lambda: knows_the_engine(watch), 60)
        body = orjson.dumps(body_of("chat", case.is_stream))
        answer = await answer_to(gateway, watch, body, is_together)
        assert len(engine.posts) == 1
        shown = (await watch.get("/v1/trajectories/t-1")).json()
        page = (await watch.get("/metrics")).text
    name = engine.url.removeprefix("http://").encode()
    lines = (home / "events").read_bytes().replace(name, b"ENGINE").splitlines()
    return Trace(
        answer=masked(answer.replace(name, b"ENGINE")),
        turns=[timeless(turn) for turn in shown["turns"]],
        num_running=float(re.findall(r"^heddle_running_turns (\S+)$", page, re.M)[0]),
        counts={name: float(count) for name, count in re.findall(COUNT, page, re.M)},
        events=[timeless(event) for line in lines if (event := orjson.loads(line)).get("type") in OF_TURNS],
    )


async def test_without_usage_the_tokens_of_a_stream_are_its_events(tmp_path: Path) -> None:
    """The scheduler and the predictor would otherwise take the turn for one that made nothing."""
    (case,) = (case for case in CASES if case.name == "stream without usage")
    trace = await trace_of(case, tmp_path, is_together=True)
    (finished,) = (event for event in trace.events if event["type"] == "TurnFinished")
    assert finished["output_tokens"] == trace.turns[0]["output_tokens"] == 4


@pytest.mark.parametrize("is_together", [True, False], ids=["hot", "cold"])
async def test_a_turn_ended_by_a_defect_frees_its_slot(tmp_path: Path, is_together: bool) -> None:
    """A few leaked slots would have stopped the engine. The history and the counts show the failure."""
    (case,) = (case for case in CASES if case.name == "too deep to be written as JSON")
    trace = await trace_of(case, tmp_path, is_together)
    assert trace.answer.startswith(b"HTTP/1.1 500") and trace.num_running == 0
    assert [(turn["outcome"], turn["error"]["code"]) for turn in trace.turns] == [("failed", "internal_error")]
    assert trace.counts['heddle_turns_total{api="chat",outcome="failed"}'] == 1
    assert trace.counts['heddle_refused_requests_total{status="500"}'] == 1


async def test_a_turn_is_sent_at_most_once_more_if_all_idle_connections_are_closed() -> None:
    """A dying engine got a turn on each of its idle connections in turn, all in one leg."""
    both_are_there, is_dying = asyncio.Barrier(2), asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_dying.is_set():
            writer.close()
        else:
            await both_are_there.wait()
            writer.write(whole(CHAT))

    async with (
        raw_engine(answer, keeps_open=True) as engine,
        running_gateway(engine.url, max_attempts=1, **PATIENT) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as watch,
    ):
        await eventually(lambda: knows_the_engine(watch), 60)
        await asyncio.gather(*(watch.post(PATH, json=body_of("chat", text=text)) for text in ("one", "two")))
        is_dying.set()
        answer = await answer_to(gateway, watch, orjson.dumps(body_of("chat")), is_together=True)
        assert answer.startswith(b"HTTP/1.1 502")
        assert len(engine.posts) - 2 <= 2


OF_TURNS = {"TurnArrived", "TurnFinished", "TurnFailed", "TurnProgressed", "Dispatch", "Save", "Reject", "Abort"}
COUNT = r"^(heddle_\S+_(?:total|count)\S*) (\S+)$"
OF_TIME = ("at", "turn_id", "queued_s", "engine", "priority", "last_", "created_")


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """The row without what differs from one turn to the next on either path."""
    kept = {name: timeless(value) if isinstance(value, dict) else value for name, value in row.items()}
    return {name: value for name, value in kept.items() if not name.startswith(OF_TIME) and not name.endswith("_at")}


def masked(answer: bytes) -> bytes:
    """The answer without ids and times, and without the chunk boundaries of streams, which follow the engine's
    segments."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    if b"\r\ntransfer-encoding: chunked" in head:
        assert body.endswith(b"0\r\n\r\n")
        body = re.sub(rb"(?:^|\r\n)[0-9a-f]+\r\n", b"", body)
    answer = head + blank + body
    answer = re.sub(rb"[0-9a-f]{32}", b"ID", answer)
    return re.sub(rb"(date|x-heddle-queued-ms): [^\r]*", rb"\1: X", answer)


async def knows_the_engine(watch: httpx.AsyncClient) -> bool:
    return (await watch.get("/readyz")).status_code == 200


async def answer_to(gateway: Listening, watch: httpx.AsyncClient, body: bytes, is_together: bool) -> bytes:
    """The answer to a request that is sent in one piece, or as a head and, once that was read, the body."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nx-trajectory-id: t-1\r\nconnection: close\r\n".encode()
    head += b"content-length: %d\r\n\r\n" % len(body)
    try:
        if is_together:
            writer.write(head + body)
        else:
            writer.write(head)
            await writer.drain()
            await watch.get("/healthz")
            writer.write(body)
        return await reader.read()
    finally:
        writer.close()


# --- turns that are handed over while they run -------------------------------------------------------------------


@asynccontextmanager
async def silent(start: bytes = b"", **settings: Any) -> AsyncIterator[tuple[Any, Listening, httpx.AsyncClient]]:
    """A gateway with an engine that sends nothing, or only the start of an answer, until its connection is closed."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await reader.read()
        writer.close()

    async with (
        raw_engine(hang) as engine,
        running_gateway(engine.url, **PATIENT, **settings) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as watch,
    ):
        await eventually(lambda: knows_the_engine(watch), 60)
        yield engine, gateway, watch


async def test_a_client_that_leaves_frees_the_engine(tmp_path: Path) -> None:
    """The connection to the engine is closed, and the history states `left`."""
    async with asyncio.timeout(120), silent() as (engine, gateway, watch):
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps(body_of("chat"))
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\nx-trajectory-id: t-1\r\n" % PATH.encode())
        writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await eventually(lambda: engine.num_open == 1, 60)
        writer.transport.abort()
        await eventually(lambda: engine.num_open == 0, 60)

        async def is_left() -> bool:
            turns = (await watch.get("/v1/trajectories/t-1")).json()["turns"]
            return [turn["outcome"] for turn in turns] == ["left"]

        await eventually(is_left, 60)


async def test_a_client_that_leaves_after_a_long_body_frees_the_engine() -> None:
    """Its body comes after the head, as that of most clients does, with more than 64 KB at once. That paused reading,
    which did not go on once the body was complete: nobody saw the client leave.
    """
    async with asyncio.timeout(120), silent() as (engine, gateway, _):
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps(body_of("chat", text="a long context " * 10_000))
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\nexpect: 100-continue\r\n\r\n"
        writer.write(head % (PATH.encode(), len(body)))
        await reader.readuntil(b"\r\n\r\n")  # the gateway waits for the body
        writer.write(body)
        await eventually(lambda: engine.num_open == 1, 60)
        writer.transport.abort()
        await eventually(lambda: engine.num_open == 0, 60)


async def test_an_engine_that_is_silent_for_too_long_is_an_error() -> None:
    """The client gets a 50x that states the timeout or the engine's failure."""
    async with asyncio.timeout(120), silent(turn_timeout_s=1, max_attempts=1) as (_, gateway, watch):
        answer = await answer_to(gateway, watch, orjson.dumps(body_of("chat")), is_together=True)
        assert b"no answer within 1 s" in answer or b'"code":"engine_failed"' in answer, answer
        assert answer.startswith(b"HTTP/1.1 50")


@pytest.mark.parametrize("is_together", [True, False], ids=["hot", "cold"])
async def test_an_engine_that_sends_only_comments_is_not_silent(is_together: bool) -> None:
    """They may fill a pause that is longer than `silence_timeout_s`, as they keep the connection open."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(CHAT_EVENT))
        for _ in range(40):
            await asyncio.sleep(0.1)
            writer.write(chunk(b": at work\n\n"))
        writer.write(LAST)

    async with (
        asyncio.timeout(120),
        raw_engine(answer, keeps_open=True) as engine,
        running_gateway(engine.url, silence_timeout_s=2, **PATIENT) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as watch,
    ):
        await eventually(lambda: knows_the_engine(watch), 60)
        told = await answer_to(gateway, watch, orjson.dumps(body_of("chat", stream=True)), is_together)
        assert b"engine_late" not in told and told.count(b"[DONE]") == 1


async def test_deleting_a_trajectory_stops_its_turn() -> None:
    """The client is told, and the engine is freed."""
    async with asyncio.timeout(120), silent() as (engine, gateway, watch):
        asking = asyncio.create_task(answer_to(gateway, watch, orjson.dumps(body_of("chat")), is_together=True))
        await eventually(lambda: engine.num_open == 1, 60)
        await watch.delete("/v1/trajectories/t-1")
        assert b"trajectory_aborted" in await asking
        await eventually(lambda: engine.num_open == 0, 60)


async def test_a_repeated_request_joins_a_turn_served_by_callbacks() -> None:
    """Both clients get the same answer, and one of the turns counts as joined."""
    async with (
        asyncio.timeout(120),
        serve_engine(SimulatedEngineSettings(speed_up=5)) as engine,
        running_gateway(engine, **PATIENT) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as watch,
    ):
        body = orjson.dumps(body_of("chat", tokens=60))
        first, second = await asyncio.gather(
            answer_to(gateway, watch, body, is_together=True), answer_to(gateway, watch, body, is_together=True)
        )
        assert first.partition(b"\r\n\r\n")[2] == second.partition(b"\r\n\r\n")[2]
        assert "heddle_joined_turns_total 1.0" in (await watch.get("/metrics")).text


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_joined_a_turn_is_told_of_a_shutdown_after_the_first_client_has_left(
    is_stream: bool,
) -> None:
    """A turn served by callbacks has no task until then, and the connection that a shutdown would hand over is gone."""
    body = orjson.dumps(body_of("chat", is_stream))
    start = STREAM_HEAD + chunk(CHAT_EVENT) if is_stream else b""
    async with asyncio.timeout(120):
        async with silent(start) as (engine, gateway, watch):

            async def counts(sample: str) -> bool:
                return sample in (await watch.get("/metrics")).text

            first = asyncio.create_task(answer_to(gateway, watch, body, is_together=True))
            await eventually(lambda: engine.num_open == 1, 60)
            second = asyncio.create_task(answer_to(gateway, watch, body, is_together=True))
            await eventually(lambda: counts("heddle_joined_turns_total 1.0"), 60)
            first.cancel()
            await eventually(lambda: counts('heddle_hot_turns_total{until="handed_over"} 1.0'), 60)
        answer = await second
    assert b'"code":"shutting_down"' in answer
    assert answer.startswith(b"HTTP/1.1 200" if is_stream else b"HTTP/1.1 503")


async def test_a_turn_is_freed_without_a_garbage_collection() -> None:
    """A reference cycle would keep it until a collection: its memory could not be reused, and collections would stop
    turns."""
    gc.collect()
    gc.disable()
    try:
        async with (
            asyncio.timeout(120),
            raw_engine(sends(CASES[0]), keeps_open=True) as engine,
            running_gateway(engine.url, **PATIENT) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as watch,
        ):
            await eventually(lambda: knows_the_engine(watch), 60)
            host, _, port = gateway.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = orjson.dumps(body_of("chat"))
            for _ in range(20):
                writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\nx-trajectory-id: t-1\r\n" % PATH.encode())
                writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0]))
            page = (await watch.get("/metrics")).text
            writer.close()
            num_hot = float(re.findall(r'heddle_hot_turns_total{until="answer"} (\S+)', page)[0])
            num_left = sum(isinstance(one, Exchange | Turn) for one in gc.get_objects())
    finally:
        gc.enable()
    assert num_hot > 10  # all but the first, which must connect, and any whose connection a check had taken
    assert num_left < 10


@pytest.mark.parametrize("sent", ["a turn", "a stream", "a page", "half an answer"])
async def test_a_connection_is_freed_without_a_garbage_collection(sent: str) -> None:
    """Clients that connect for each turn leave many. A connection is old by the end of its turn, and old garbage is
    collected every ten minutes only."""
    body = orjson.dumps(body_of("chat", stream=sent != "a turn", tokens=10_000 if sent == "half an answer" else 2))
    request = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (PATH.encode(), len(body), body)
    if sent == "a page":
        request = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
    gc.collect()
    gc.disable()
    try:
        async with (
            asyncio.timeout(120),
            serve_engine(SimulatedEngineSettings(speed_up=20)) as engine,
            running_gateway(engine, **PATIENT) as gateway,
        ):
            host, _, port = gateway.url.removeprefix("http://").partition(":")
            for _ in range(20):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                if b"chunked" not in head:
                    await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0]))
                elif sent != "half an answer":
                    await reader.readuntil(b"\r\n0\r\n\r\n")
                writer.close()
            await eventually(lambda: num_connections() < 5, 60)
    finally:
        gc.enable()


def num_connections() -> int:
    return sum(isinstance(one, HttpToolsProtocol) for one in gc.get_objects())
