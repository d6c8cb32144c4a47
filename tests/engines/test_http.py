"""The HTTP client against a server of raw bytes."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engines.http.response
from engines.http import (
    AnswerTooLarge,
    BadResponse,
    ConnectionBroken,
    EngineUnreachable,
    HttpClient,
    HttpLimits,
    NoMoreConnections,
    Response,
    ResponseTimeout,
)

from .raw_server import Peer, Play, RawServer, raw_server

LIMIT_BYTES = 64 * 1024 * 1024
TIMEOUT_S = 20.0
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nserver: old\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def talking(play: Play, **limits: float) -> AsyncIterator[tuple[RawServer, HttpClient]]:
    """A server that plays so, and a client of it."""
    async with raw_server(play) as server:
        http = HttpClient(server.url, HttpLimits(**limits))  # type: ignore[arg-type]
        try:
            yield server, http
        finally:
            http.close()


def answering(*parts: bytes, then_closes: bool = False) -> Play:
    """The same answer to every request."""

    async def play(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(*parts)
            if then_closes:
                return

    return play


def starting(*parts: bytes) -> Play:
    """The beginning of an answer, and then nothing until the client leaves."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(*parts)
        await peer.until_left()

    return play


async def read(response: Response, timeout_s: float = TIMEOUT_S) -> bytes:
    return await response.body(LIMIT_BYTES, timeout_s)


async def gets(http: HttpClient, body: bytes = b"hello") -> None:
    assert await http.get("/", TIMEOUT_S) == (200, body)


async def until_left(server: RawServer) -> None:
    """Returns when the first connection is over, where only its client can end it."""
    async with asyncio.timeout(60):
        await server.peers[0].over.wait()


@pytest.mark.parametrize(
    "answer", [HELLO, CHUNKED, INTERIM + HELLO, UNTIL_CLOSE], ids=["length", "chunked", "interim", "until close"]
)
async def test_an_answer_is_the_same_wherever_it_is_cut(answer: bytes) -> None:
    """In two at every byte, and into single bytes; whatever tells its length, and behind interim answers."""
    cuts = [[answer[:at], answer[at:]] for at in range(1, len(answer))] + [
        [answer[i : i + 1] for i in range(len(answer))]
    ]
    closes = answer is UNTIL_CLOSE

    async def play(peer: Peer) -> None:
        while cuts:
            await peer.request()
            await peer.send(*cuts.pop())
            if closes:
                return

    async with talking(play) as (server, http):
        for _ in range(len(answer)):
            response = await http.request("GET", "/", timeout_s=TIMEOUT_S)
            assert b"link" not in response.headers
            assert await read(response) == b"hello"
        assert len(server.peers) == (len(answer) if closes else 1)


@settings(max_examples=60)
@given(st.binary(max_size=300), st.booleans(), st.data())
async def test_any_body_survives_any_chunks_and_any_cuts(body: bytes, is_chunked: bool, data: st.DataObject) -> None:
    """Chunk sizes and segments are the network's business."""
    wire = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    if is_chunked:
        chunks = _pieces(body, data.draw(st.sets(st.integers(1, 300), max_size=5)))
        wire = STREAM_HEAD + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    parts = _pieces(wire, data.draw(st.sets(st.integers(1, len(wire)), max_size=8)))
    async with talking(answering(*parts)) as (server, http):
        for _ in range(2):
            await gets(http, body)
        assert len(server.peers) == 1


def _pieces(whole: bytes, cuts: set[int]) -> list[bytes]:
    ends = [*sorted(cuts), len(whole)]
    return [part for begin, end in zip([0, *ends], ends, strict=False) if (part := whole[begin:end])]


async def test_a_request_says_what_it_must() -> None:
    """Path before target, host, the client's and the caller's headers, length and kind of the body."""
    heard: list[bytes] = []

    async def play(peer: Peer) -> None:
        while True:
            heard.append(await peer.request())
            await peer.send(HELLO)

    async with raw_server(play) as server:
        http = HttpClient(f"{server.url}/base/", headers=(("authorization", "Bearer k"),))
        await read(await http.request("POST", "/v1/x?y=1", b'{"a":1}', b"x-request-id: r\r\n"))
        await http.get("/v1/models", TIMEOUT_S)
        http.close()
    head, body = heard[0].split(b"\r\n\r\n")
    start, *lines = head.split(b"\r\n")
    host = server.url.removeprefix("http://").encode()
    assert (start, body) == (b"POST /base/v1/x?y=1 HTTP/1.1", b'{"a":1}')
    assert {b"host: " + host, b"authorization: Bearer k", b"x-request-id: r", b"content-length: 7"} < set(lines)
    assert b"content-type: application/json" in lines
    assert heard[1].startswith(b"GET /base/v1/models HTTP/1.1\r\n") and b"content-length" not in heard[1]


async def test_a_connection_is_used_again() -> None:
    """One after the other all go over one; also answers without a body."""
    async with talking(answering(b"HTTP/1.1 204 No Content\r\n\r\n")) as (server, http):
        for _ in range(3):
            assert await http.get("/", TIMEOUT_S) == (204, b"")
        assert len(server.peers) == 1


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nconnection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
async def test_a_connection_that_ends_is_not_used_again(head: bytes) -> None:
    """Where the server says so, or is too old to keep it."""
    async with talking(answering(head + b"content-length: 5\r\n\r\nhello")) as (server, http):
        await gets(http)
        await gets(http)
        assert len(server.peers) == 2


async def test_a_request_that_met_a_stale_connection_is_sent_again() -> None:
    """The server closed while the request was on its way and said nothing: nothing was done, so no harm is done."""
    heard: list[int] = []

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(HELLO)
        if peer.number == 0:
            await peer.request()
            heard.append(peer.number)
            return
        await peer.until_left()

    async with talking(play) as (server, http):
        await gets(http)
        await gets(http)
        assert heard == [0] and len(server.peers) == 2


@pytest.mark.parametrize("said", [b"", b"H"])
async def test_a_request_is_never_sent_twice_where_it_may_have_been_heard(said: bytes) -> None:
    """On a new connection, or once a byte of the answer came, the caller decides."""

    async def play(peer: Peer) -> None:
        if said:
            await peer.request()
            await peer.send(HELLO)
        await peer.request()
        await peer.send(said)

    async with talking(play) as (server, http):
        if said:
            await gets(http)
        with pytest.raises(ConnectionBroken):
            await http.get("/", TIMEOUT_S)
        assert len(server.peers) == 1


async def test_idle_connections_are_closed_before_the_server_does_it() -> None:
    """After `max_idle_s`, whether or not another request comes."""
    async with talking(answering(HELLO), max_idle_s=0.05) as (server, http):
        await gets(http)
        await until_left(server)
        await gets(http)
        assert len(server.peers) == 2


@pytest.mark.parametrize("extra", [b"x", HELLO])
async def test_what_nobody_asked_for_ends_the_connection(extra: bytes) -> None:
    """Bytes behind an answer would be taken for the next one's."""
    async with talking(starting(HELLO, extra)) as (server, http):
        await gets(http)
        await until_left(server)
        await gets(http)
        assert len(server.peers) == 2


async def test_a_slow_reader_slows_the_server() -> None:
    """An answer of 32 MiB waits at the server instead of in our memory, and is all there once it is read."""
    size = 32 * 1024 * 1024
    all_sent = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // 65_536):
            peer.writer.write(bytes(65_536))
            await peer.writer.drain()
        all_sent.set()
        await peer.until_left()

    async with talking(play) as (_, http):
        response = await http.request("GET", "/")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(all_sent.wait(), 0.5)
        held = await response.piece(TIMEOUT_S)
        assert len(held) < 4 * engines.http.response.HIGH_WATER_BYTES
        assert len(held) + len(await read(response)) == size


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000,
        b"".join((b"HTTP/1.1 200 OK\r\n", *(b"x-%d: %b\r\n" % (i, b"x" * 900) for i in range(80)))),
    ],
    ids=["another protocol", "bad length", "long header", "many headers"],
)
async def test_what_is_not_http_is_refused(answer: bytes) -> None:
    """And its connection closed."""
    async with talking(starting(answer)) as (server, http):
        with pytest.raises(BadResponse):
            await http.get("/", TIMEOUT_S)
        await until_left(server)


async def test_a_chunk_that_is_none_breaks_the_answer() -> None:
    """What came before it is still read."""
    async with talking(starting(STREAM_HEAD, b"2\r\nhe\r\n", b"zz\r\n")) as (server, http):
        response = await http.request("GET", "/")
        assert await response.piece(TIMEOUT_S) == b"he"
        with pytest.raises(BadResponse):
            await response.piece(TIMEOUT_S)
        await until_left(server)


@pytest.mark.parametrize("sent", [STREAM_HEAD + b"2\r\nhe\r\n", HELLO[:-1]], ids=["chunked", "length"])
async def test_an_answer_cut_short_is_no_answer(sent: bytes) -> None:
    """The connection closed before all had come."""
    async with talking(answering(sent, then_closes=True)) as (_, http):
        with pytest.raises(ConnectionBroken):
            await http.get("/", TIMEOUT_S)


async def test_a_reset_is_not_the_end_of_an_answer() -> None:
    """Not even of one that ends when the connection does."""
    was_read = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(UNTIL_CLOSE)
        await was_read.wait()
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        peer.writer.transport.abort()

    async with talking(play) as (_, http):
        response = await http.request("GET", "/")
        assert await response.piece(TIMEOUT_S) == b"hello"
        was_read.set()
        with pytest.raises(ConnectionBroken):
            await response.piece(TIMEOUT_S)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200"])
async def test_a_head_that_does_not_come_times_out(sent: bytes) -> None:
    """The connection is closed, for its answer may come yet."""
    async with talking(starting(sent)) as (server, http):
        with pytest.raises(ResponseTimeout):
            await http.request("GET", "/", timeout_s=0.05)
        await until_left(server)


async def test_a_body_that_goes_silent_times_out() -> None:
    """Counted from the last byte; the connection is closed."""
    async with talking(starting(HELLO[:-2])) as (server, http):
        response = await http.request("GET", "/")
        assert await response.piece(TIMEOUT_S) == b"hel"
        with pytest.raises(ResponseTimeout):
            await response.piece(0.05)
        await until_left(server)


async def test_leaving_an_answer_closes_its_connection() -> None:
    """That is how an engine learns to stop: in the middle of a body, and before the head."""
    async with talking(starting(STREAM_HEAD)) as (server, http):
        (await http.request("GET", "/")).close()
        await until_left(server)
    was_heard = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        was_heard.set()
        await peer.until_left()

    async with talking(play) as (server, http):
        asking = asyncio.create_task(http.request("GET", "/"))
        await was_heard.wait()
        asking.cancel()
        await until_left(server)


async def test_a_body_above_its_readers_limit_is_left() -> None:
    """The reader is told, and the connection closed."""
    async with talking(starting(HELLO[:-1])) as (server, http):
        with pytest.raises(AnswerTooLarge):
            await http.get("/", TIMEOUT_S, limit_bytes=3)
        await until_left(server)


@pytest.mark.parametrize("pause_every", [1, 2, 100])
async def test_a_body_is_poured_whole_however_often_its_reader_pauses(pause_every: int) -> None:
    """Every byte in order; what comes during a pause waits for its end."""
    words = [b"word %d " % number for number in range(7)]
    chunks = [b"%x\r\n%s\r\n" % (len(word), word) for word in words]
    async with talking(answering(STREAM_HEAD, *chunks, b"0\r\n\r\n")) as (_, http):
        response = await http.request("GET", "/")
        taken: list[bytes] = []

        def take(data: bytes) -> bool:
            taken.append(data)
            return len(taken) % pause_every != 0

        num_pauses = 0
        while await response.pour(take, TIMEOUT_S):
            num_pauses += 1
            await asyncio.sleep(0)
        assert b"".join(taken) == b"".join(words)
        assert num_pauses == len(taken) // pause_every


async def test_pouring_fails_as_reading_does_or_as_its_reader_does() -> None:
    """Silence, an end before the end, and what `take` raises all come out where it was asked for."""

    def refuse(data: bytes) -> bool:
        raise ValueError(data)

    async with talking(starting(STREAM_HEAD + b"5\r\nhello\r\n")) as (_, http):
        with pytest.raises(ResponseTimeout):
            await (await http.request("GET", "/")).pour(lambda data: True, 0.05)
    async with talking(answering(STREAM_HEAD, b"5\r\nhello\r\n", then_closes=True)) as (_, http):
        with pytest.raises(ConnectionBroken):
            await (await http.request("GET", "/")).pour(lambda data: True, TIMEOUT_S)
    for parts in ((STREAM_HEAD + b"5\r\nhello\r\n",), (STREAM_HEAD, b"5\r\nhello\r\n")):
        async with talking(starting(*parts)) as (_, http):
            response = await http.request("GET", "/")
            with pytest.raises(ValueError, match="hello"):
                await response.pour(refuse, TIMEOUT_S)
            response.close()


async def test_a_released_answer_gives_its_connection_back() -> None:
    """The empty chunk may come later; nobody waits for it, and the connection is used again."""
    may_end = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + b"5\r\nhello\r\n")
        await may_end.wait()
        await peer.send(b"0\r\n\r\n")
        await peer.request()
        await peer.send(HELLO)
        await peer.until_left()

    async with talking(play) as (server, http):
        response = await http.request("GET", "/")
        assert await response.piece(TIMEOUT_S) == b"hello"
        response.release()
        response.close()
        may_end.set()
        assert await response.piece(TIMEOUT_S) == b""
        await gets(http)
        assert len(server.peers) == 1


async def test_a_released_answer_that_does_not_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that sends on has not understood."""
    monkeypatch.setattr(engines.http.response, "TRAILER_TIMEOUT_S", 0.05)
    async with talking(starting(STREAM_HEAD)) as (server, http):
        (await http.request("GET", "/")).release()
        await until_left(server)


async def test_connections_are_bounded() -> None:
    """The one too many is refused at once; when one is free again, the next goes through."""
    async with talking(answering(HELLO[:-1]), max_connections=1) as (server, http):
        first = await http.request("GET", "/")
        with pytest.raises(NoMoreConnections):
            await http.get("/", TIMEOUT_S)
        first.close()
        await until_left(server)
        (await http.request("GET", "/", timeout_s=TIMEOUT_S)).close()
        assert len(server.peers) == 2


async def test_nobody_there_is_told_from_a_broken_answer() -> None:
    """Nothing was sent, so it is safe to repeat."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        http = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(EngineUnreachable):
            await http.get("/", TIMEOUT_S)


@pytest.mark.parametrize("host", ["localhost", "::1"])
async def test_names_and_ipv6_addresses_are_reached(host: str) -> None:
    """In a URL an IPv6 address has brackets, and so it has in the host header."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    heard: list[bytes] = []

    async def play(peer: Peer) -> None:
        heard.append(await peer.request())
        await peer.send(HELLO)

    async with raw_server(play, host) as server:
        http = HttpClient(server.url)
        await gets(http)
        assert b"host: %b\r\n" % server.url.removeprefix("http://").encode() in heard[0]
        http.close()


async def test_closing_the_client_breaks_what_is_under_way() -> None:
    """Its readers are told, and the engine stops."""
    async with talking(starting(STREAM_HEAD)) as (server, http):
        response = await http.request("GET", "/")
        http.close()
        with pytest.raises(ConnectionBroken):
            await response.piece(TIMEOUT_S)
        await until_left(server)
