"""The HTTP client against a server that sends raw bytes."""

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
from tests.support.gateway import eventually

from .raw_server import Handler, Peer, RawServer, raw_server

LIMIT_BYTES = 64 * 1024 * 1024
TIMEOUT_S = 20.0
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nserver: old\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def server_and_client(handler: Handler, **limits: float) -> AsyncIterator[tuple[RawServer, HttpClient]]:
    """A server with this handler, and a client for it."""
    async with raw_server(handler) as server:
        http = HttpClient(server.url, HttpLimits(**limits))  # type: ignore[arg-type]
        try:
            yield server, http
        finally:
            http.close()


def always_sends(*parts: bytes, then_closes: bool = False) -> Handler:
    """Send the same answer to every request."""

    async def handler(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(*parts)
            if then_closes:
                return

    return handler


def sends_then_waits(*parts: bytes) -> Handler:
    """Send the start of an answer, then nothing until the client leaves."""

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(*parts)
        await peer.until_client_leaves()

    return handler


async def read(response: Response, timeout_s: float = TIMEOUT_S) -> bytes:
    return await response.body(LIMIT_BYTES, timeout_s)


async def assert_gets(http: HttpClient, body: bytes = b"hello") -> None:
    assert await http.get("/", TIMEOUT_S) == (200, body)


async def until_client_leaves(server: RawServer) -> None:
    """Returns when the first connection has ended, if only its client can end it."""
    async with asyncio.timeout(60):
        await server.peers[0].ended.wait()


@pytest.mark.parametrize(
    "answer", [HELLO, CHUNKED, INTERIM + HELLO, UNTIL_CLOSE], ids=["length", "chunked", "interim", "until close"]
)
async def test_an_answer_is_the_same_wherever_its_segments_split(answer: bytes) -> None:
    """Split in two at every byte, and into single bytes; for each way to mark the length, and after interim
    responses."""
    splits = [[answer[:at], answer[at:]] for at in range(1, len(answer))] + [
        [answer[i : i + 1] for i in range(len(answer))]
    ]
    closes = answer is UNTIL_CLOSE

    async def handler(peer: Peer) -> None:
        while splits:
            await peer.request()
            await peer.send(*splits.pop())
            if closes:
                return

    async with server_and_client(handler) as (server, http):
        for _ in range(len(answer)):
            response = await http.request("GET", "/", timeout_s=TIMEOUT_S)
            assert b"link" not in response.headers
            assert await read(response) == b"hello"
        assert len(server.peers) == (len(answer) if closes else 1)


@settings(max_examples=60)
@given(st.binary(max_size=300), st.booleans(), st.data())
async def test_any_body_survives_any_chunks_and_segments(body: bytes, is_chunked: bool, data: st.DataObject) -> None:
    """Chunk sizes and segment boundaries do not matter."""
    wire = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    if is_chunked:
        chunks = _pieces(body, data.draw(st.sets(st.integers(1, 300), max_size=5)))
        wire = STREAM_HEAD + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    parts = _pieces(wire, data.draw(st.sets(st.integers(1, len(wire)), max_size=8)))
    async with server_and_client(always_sends(*parts)) as (server, http):
        for _ in range(2):
            await assert_gets(http, body)
        assert len(server.peers) == 1


def _pieces(whole: bytes, splits: set[int]) -> list[bytes]:
    ends = [*sorted(splits), len(whole)]
    return [part for begin, end in zip([0, *ends], ends, strict=False) if (part := whole[begin:end])]


async def test_a_request_has_its_target_headers_and_body() -> None:
    """The base path before the target, the host, the client's and the caller's headers, and the body's length and
    type."""
    requests: list[bytes] = []

    async def handler(peer: Peer) -> None:
        while True:
            requests.append(await peer.request())
            await peer.send(HELLO)

    async with raw_server(handler) as server:
        http = HttpClient(f"{server.url}/base/", headers=(("authorization", "Bearer k"),))
        await read(await http.request("POST", "/v1/x?y=1", b'{"a":1}', b"x-request-id: r\r\n"))
        await http.get("/v1/models", TIMEOUT_S)
        http.close()
    head, body = requests[0].split(b"\r\n\r\n")
    start, *lines = head.split(b"\r\n")
    host = server.url.removeprefix("http://").encode()
    assert (start, body) == (b"POST /base/v1/x?y=1 HTTP/1.1", b'{"a":1}')
    assert {b"host: " + host, b"authorization: Bearer k", b"x-request-id: r", b"content-length: 7"} < set(lines)
    assert b"content-type: application/json" in lines
    assert requests[1].startswith(b"GET /base/v1/models HTTP/1.1\r\n") and b"content-length" not in requests[1]


async def test_a_connection_is_reused() -> None:
    """Sequential requests share one connection, also if answers have no body."""
    async with server_and_client(always_sends(b"HTTP/1.1 204 No Content\r\n\r\n")) as (server, http):
        for _ in range(3):
            assert await http.get("/", TIMEOUT_S) == (204, b"")
        assert len(server.peers) == 1


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nconnection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
async def test_a_connection_that_the_server_closes_is_not_reused(head: bytes) -> None:
    """If the server announces the close, or speaks HTTP/1.0. It need not wait for the server to do so."""
    answers = always_sends(head + b"content-length: 5\r\n\r\nhello")
    async with server_and_client(answers, max_idle_s=60.0) as (server, http):
        await assert_gets(http)
        await until_client_leaves(server)
        await assert_gets(http)
        assert len(server.peers) == 2


async def test_a_request_on_a_stale_connection_is_sent_again() -> None:
    """The server closed the connection while the request was on its way, and sent no byte, so a repeat is safe."""
    requests: list[int] = []

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(HELLO)
        if peer.number == 0:
            await peer.request()
            requests.append(peer.number)
            return
        await peer.until_client_leaves()

    async with server_and_client(handler, may_be_stale_s=TIMEOUT_S) as (server, http):
        await assert_gets(http)
        await assert_gets(http)
        assert requests == [0] and len(server.peers) == 2


async def test_a_request_that_its_server_worked_on_is_not_sent_again() -> None:
    """A reused connection that ends without a byte, but later than a stale one does: the server died over the request,
    or is slow to answer it and its proxy gave up. The caller decides.
    """

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(HELLO)
        await peer.request()

    async with server_and_client(handler, may_be_stale_s=0.0) as (server, http):
        await assert_gets(http)
        with pytest.raises(ConnectionBroken):
            await http.get("/", TIMEOUT_S)
        assert len(server.peers) == 1


@pytest.mark.parametrize("start_of_answer", [b"", b"H"])
async def test_a_request_that_may_have_arrived_is_not_sent_again(start_of_answer: bytes) -> None:
    """On a new connection, or once a byte of the answer has arrived, the caller decides."""

    async def handler(peer: Peer) -> None:
        if start_of_answer:
            await peer.request()
            await peer.send(HELLO)
        await peer.request()
        await peer.send(start_of_answer)

    async with server_and_client(handler) as (server, http):
        if start_of_answer:
            await assert_gets(http)
        with pytest.raises(ConnectionBroken):
            await http.get("/", TIMEOUT_S)
        assert len(server.peers) == 1


async def test_bytes_that_come_before_their_request_is_sent_are_no_answer_to_it() -> None:
    """On a busy gateway a request waits until the round of the event loop ends, and an answer that nobody asked for is
    read in that round. It was taken for the request's, and the next turn got the one that the engine then gave.
    """

    async def handler(peer: Peer) -> None:
        while True:
            target = (await peer.request()).split()[1]
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(target), target))

    async with server_and_client(handler) as (server, http):
        for _ in range(2):  # on idle connections both leave in one round, so the next one counts as busy
            await asyncio.gather(assert_gets(http, b"/"), assert_gets(http, b"/"))
        for peer in server.peers:
            peer.writer.write(HELLO)
        await asyncio.sleep(0)  # the client's sockets are read after this task has gone on
        for target in ("/one", "/two"):
            assert await http.get(target, TIMEOUT_S) == (200, target.encode())


async def test_a_reused_connection_that_the_server_gave_up_is_not_used() -> None:
    """Its 408 was on its way when the request was sent, so the request is sent again, on a new connection. It was the
    request's answer, and failed a leg. On a new connection it is an answer."""
    late = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

    async def handler(peer: Peer) -> None:
        if peer.number == 0:
            await peer.request()
            await peer.send(HELLO)
        await peer.request()
        await peer.send(late)

    async with server_and_client(handler, may_be_stale_s=TIMEOUT_S) as (server, http):
        await assert_gets(http)
        assert await http.get("/", TIMEOUT_S) == (408, b"")
        assert len(server.peers) == 2


async def test_idle_connections_are_closed_after_max_idle_s() -> None:
    """The client closes them itself, before another request comes."""
    async with server_and_client(always_sends(HELLO), max_idle_s=0.05) as (server, http):
        await assert_gets(http)
        await until_client_leaves(server)
        await assert_gets(http)
        assert len(server.peers) == 2


@pytest.mark.parametrize("extra", [b"x", HELLO])
async def test_bytes_after_an_answer_end_the_connection(extra: bytes) -> None:
    """They would be taken for the next answer."""
    async with server_and_client(sends_then_waits(HELLO, extra), max_idle_s=60.0) as (server, http):
        await assert_gets(http)
        await until_client_leaves(server)
        await assert_gets(http)
        assert len(server.peers) == 2


async def test_a_connection_with_unsent_bytes_is_not_reused() -> None:
    """A server may answer before it has read the request, and leave the rest unread until it closes the connection. The
    next request stood behind that rest, and failed in its place.
    """

    async def handler(peer: Peer) -> None:
        if peer.number == 0:
            await peer.reader.readuntil(b"\r\n\r\n")
            await peer.send(HELLO)
            await has_asked_again.wait()
        else:
            has_asked_again.set()
            await always_sends(HELLO)(peer)

    has_asked_again = asyncio.Event()
    async with server_and_client(handler, may_be_stale_s=0.0) as (server, http):
        assert await http.post("/", bytes(64 * 1024 * 1024), TIMEOUT_S) == (200, b"hello")
        await assert_gets(http)
        assert len(server.peers) == 2


async def test_a_slow_reader_holds_back_the_server() -> None:
    """An answer of 32 MiB stays at the server instead of in our memory, and is complete once it is read."""
    size = 32 * 1024 * 1024
    all_sent = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // 65_536):
            peer.writer.write(bytes(65_536))
            await peer.writer.drain()
        all_sent.set()
        await peer.until_client_leaves()

    async with server_and_client(handler) as (_, http):
        response = await http.request("GET", "/")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(all_sent.wait(), 0.5)
        held = await response.piece(TIMEOUT_S)
        assert len(held) < 4 * engines.http.response.HIGH_WATER_BYTES
        assert len(held) + len(await read(response)) == size


_UNTAKEN_BYTES = engines.http.response.HIGH_WATER_BYTES + 1


@asynccontextmanager
async def after_a_complete_untaken_answer(then: bytes) -> AsyncIterator[tuple[HttpClient, Response]]:
    """An answer whose last byte both stopped further reading and was its end; the next one on its connection is
    `then`."""
    may_end = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % _UNTAKEN_BYTES, bytes(_UNTAKEN_BYTES - 1))
        await may_end.wait()
        await peer.send(b"!")
        await peer.request()
        await peer.send(then)
        await peer.until_client_leaves()

    async with server_and_client(handler) as (server, http):
        response = await http.request("GET", "/")
        await eventually(lambda: len(response.so_far()) == _UNTAKEN_BYTES - 1)
        may_end.set()
        await eventually(lambda: response.is_complete)
        yield http, response
        assert len(server.peers) == 1


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "left"])
async def test_a_complete_untaken_answer_leaves_a_connection_that_is_read(is_read: bool) -> None:
    """Whether its reader takes it then or leaves it: the next answer comes."""
    async with after_a_complete_untaken_answer(HELLO) as (http, response):
        if is_read:
            assert len(await read(response)) == _UNTAKEN_BYTES
        response.close()
        await assert_gets(http)


async def test_a_complete_answer_that_is_read_late_does_not_disturb_the_next_one() -> None:
    """The next answer on its connection has a slow reader too, and stays at the server meanwhile."""
    size = 32 * 1024 * 1024
    then = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)
    async with after_a_complete_untaken_answer(then) as (http, first):
        second = await http.request("GET", "/", timeout_s=TIMEOUT_S)
        await eventually(second.is_stuck)
        held = len(second.so_far())
        assert len(await read(first)) == _UNTAKEN_BYTES
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(second.so_far()) == held
        assert len(await read(second)) == size


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000,
        b"".join((b"HTTP/1.1 200 OK\r\n", *(b"x-%d: %b\r\n" % (i, b"x" * 900) for i in range(80)))),
    ],
    ids=["another protocol", "a switch to another protocol", "bad length", "long header", "many headers"],
)
async def test_a_malformed_head_is_refused(answer: bytes) -> None:
    """And the connection is closed."""
    async with server_and_client(sends_then_waits(answer)) as (server, http):
        with pytest.raises(BadResponse):
            await http.get("/", TIMEOUT_S)
        await until_client_leaves(server)


async def test_a_malformed_chunk_fails_the_answer() -> None:
    """What came before it is still read."""
    async with server_and_client(sends_then_waits(STREAM_HEAD, b"2\r\nhe\r\n", b"zz\r\n")) as (server, http):
        response = await http.request("GET", "/")
        assert await response.piece(TIMEOUT_S) == b"he"
        with pytest.raises(BadResponse):
            await response.piece(TIMEOUT_S)
        await until_client_leaves(server)


@pytest.mark.parametrize("sent", [STREAM_HEAD + b"2\r\nhe\r\n", HELLO[:-1]], ids=["chunked", "length"])
async def test_a_truncated_answer_fails(sent: bytes) -> None:
    """The connection closed before the end."""
    async with server_and_client(always_sends(sent, then_closes=True)) as (_, http):
        with pytest.raises(ConnectionBroken):
            await http.get("/", TIMEOUT_S)


async def test_a_reset_is_not_the_end_of_an_answer() -> None:
    """Not even of an answer that ends when its connection does."""
    was_read = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(UNTIL_CLOSE)
        await was_read.wait()
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        peer.writer.transport.abort()

    async with server_and_client(handler) as (_, http):
        response = await http.request("GET", "/")
        assert await response.piece(TIMEOUT_S) == b"hello"
        was_read.set()
        with pytest.raises(ConnectionBroken):
            await response.piece(TIMEOUT_S)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200"])
async def test_a_missing_head_times_out(sent: bytes) -> None:
    """The connection is closed, because its answer may still come."""
    async with server_and_client(sends_then_waits(sent)) as (server, http):
        with pytest.raises(ResponseTimeout):
            await http.request("GET", "/", timeout_s=0.05)
        await until_client_leaves(server)


async def test_a_stalled_body_times_out() -> None:
    """The time counts from the last byte; the connection is closed."""
    async with server_and_client(sends_then_waits(HELLO[:-2])) as (server, http):
        response = await http.request("GET", "/")
        assert await response.piece(TIMEOUT_S) == b"hel"
        with pytest.raises(ResponseTimeout):
            await response.piece(0.05)
        await until_client_leaves(server)


async def test_a_waiting_reader_gets_each_piece_when_it_comes() -> None:
    """It need not wait for the next one, so the time that it allows counts for each."""
    was_read = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for part in (b"1\r\na\r\n", b"1\r\nb\r\n"):
            await peer.send(part)
            await was_read.wait()
            was_read.clear()

    async with server_and_client(handler) as (_, http):
        response = await http.request("GET", "/")
        for letter in (b"a", b"b"):
            assert await response.piece(TIMEOUT_S) == letter
            was_read.set()
        response.close()


async def test_abandoning_an_answer_closes_its_connection() -> None:
    """In the middle of a body, and before the head. The close tells the engine to stop."""
    async with server_and_client(sends_then_waits(STREAM_HEAD)) as (server, http):
        (await http.request("GET", "/")).close()
        await until_client_leaves(server)
    has_arrived = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        has_arrived.set()
        await peer.until_client_leaves()

    async with server_and_client(handler) as (server, http):
        pending = asyncio.create_task(http.request("GET", "/"))
        await has_arrived.wait()
        pending.cancel()
        await until_client_leaves(server)


@pytest.mark.parametrize("is_post", [False, True], ids=["get", "post"])
async def test_abandoning_a_body_closes_its_connection(is_post: bool) -> None:
    """Its reader is cancelled while it comes, and nobody else has the response."""
    is_coming = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % 2**25, bytes(2**24))
        is_coming.set()
        await peer.until_client_leaves()

    async with server_and_client(handler) as (server, http):
        asked = http.post("/", b"{}", TIMEOUT_S, LIMIT_BYTES) if is_post else http.get("/", TIMEOUT_S, LIMIT_BYTES)
        pending = asyncio.create_task(asked)
        await is_coming.wait()
        pending.cancel()
        await until_client_leaves(server)


async def test_a_body_above_the_readers_limit_is_abandoned() -> None:
    """The reader gets an error, and the connection is closed."""
    async with server_and_client(sends_then_waits(HELLO[:-1])) as (server, http):
        with pytest.raises(AnswerTooLarge):
            await http.get("/", TIMEOUT_S, limit_bytes=3)
        await until_client_leaves(server)


@pytest.mark.parametrize("pause_every", [1, 2, 100])
async def test_pour_delivers_the_whole_body_despite_pauses(pause_every: int) -> None:
    """Every byte in order; bytes that arrive during a pause wait for its end."""
    parts_sent = [b"word %d " % number for number in range(7)]
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts_sent]
    async with server_and_client(always_sends(STREAM_HEAD, *chunks, b"0\r\n\r\n")) as (_, http):
        response = await http.request("GET", "/")
        taken: list[bytes] = []

        def take(data: bytes) -> bool:
            taken.append(data)
            return len(taken) % pause_every != 0

        num_pauses = 0
        while await response.pour(take, TIMEOUT_S):
            num_pauses += 1
            await asyncio.sleep(0)
        assert b"".join(taken) == b"".join(parts_sent)
        assert num_pauses == len(taken) // pause_every


async def test_pour_raises_what_reading_or_its_reader_raises() -> None:
    """A timeout, a truncated body and an exception of `take` all reach the caller."""

    def refuse(data: bytes) -> bool:
        raise ValueError(data)

    async with server_and_client(sends_then_waits(STREAM_HEAD + b"5\r\nhello\r\n")) as (_, http):
        with pytest.raises(ResponseTimeout):
            await (await http.request("GET", "/")).pour(lambda data: True, 0.05)
    async with server_and_client(always_sends(STREAM_HEAD, b"5\r\nhello\r\n", then_closes=True)) as (_, http):
        with pytest.raises(ConnectionBroken):
            await (await http.request("GET", "/")).pour(lambda data: True, TIMEOUT_S)
    for parts in ((STREAM_HEAD + b"5\r\nhello\r\n",), (STREAM_HEAD, b"5\r\nhello\r\n")):
        async with server_and_client(sends_then_waits(*parts)) as (_, http):
            response = await http.request("GET", "/")
            with pytest.raises(ValueError, match="hello"):
                await response.pour(refuse, TIMEOUT_S)
            response.close()


async def test_a_released_answer_returns_its_connection_to_the_pool() -> None:
    """The last chunk may come later; nobody waits for it, and the connection is reused."""
    may_end = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + b"5\r\nhello\r\n")
        await may_end.wait()
        await peer.send(b"0\r\n\r\n")
        await peer.request()
        await peer.send(HELLO)
        await peer.until_client_leaves()

    async with server_and_client(handler) as (server, http):
        response = await http.request("GET", "/")
        assert await response.piece(TIMEOUT_S) == b"hello"
        response.release()
        response.close()
        may_end.set()
        assert await response.piece(TIMEOUT_S) == b""
        await assert_gets(http)
        assert len(server.peers) == 1


async def test_a_released_answer_that_does_not_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that keeps sending has not understood."""
    monkeypatch.setattr(engines.http.response, "TRAILER_TIMEOUT_S", 0.05)
    async with server_and_client(sends_then_waits(STREAM_HEAD)) as (server, http):
        (await http.request("GET", "/")).release()
        await until_client_leaves(server)


async def test_connections_are_limited() -> None:
    """One too many is refused at once. When one is free again, the next request succeeds."""
    async with server_and_client(always_sends(HELLO[:-1]), max_connections=1) as (server, http):
        first = await http.request("GET", "/")
        with pytest.raises(NoMoreConnections):
            await http.get("/", TIMEOUT_S)
        first.close()
        await until_client_leaves(server)
        (await http.request("GET", "/", timeout_s=TIMEOUT_S)).close()
        assert len(server.peers) == 2


async def test_connections_that_are_being_opened_count() -> None:
    """Of a burst, only as many are opened as may be open. Those that could not be opened leave their places."""
    async with server_and_client(always_sends(HELLO[:-1]), max_connections=3) as (server, http):
        burst = await asyncio.gather(*(http.request("GET", "/") for _ in range(10)), return_exceptions=True)
        assert [isinstance(each, NoMoreConnections) for each in burst] == [False] * 3 + [True] * 7
        assert len(server.peers) == 3
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        http = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", HttpLimits(max_connections=1))
        for _ in range(3):
            with pytest.raises(EngineUnreachable):
                await http.get("/", TIMEOUT_S)


async def test_a_refused_connection_raises_engine_unreachable() -> None:
    """Nothing was sent, so a repeat is safe."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        http = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(EngineUnreachable):
            await http.get("/", TIMEOUT_S)


@pytest.mark.parametrize("host", ["localhost", "::1"])
async def test_host_names_and_ipv6_addresses_work(host: str) -> None:
    """An IPv6 address has brackets in a URL and in the host header."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    requests: list[bytes] = []

    async def handler(peer: Peer) -> None:
        requests.append(await peer.request())
        await peer.send(HELLO)

    async with raw_server(handler, host) as server:
        http = HttpClient(server.url)
        await assert_gets(http)
        assert b"host: %b\r\n" % server.url.removeprefix("http://").encode() in requests[0]
        http.close()


async def test_closing_the_client_fails_answers_in_flight() -> None:
    """Their readers get an error, and their connections close."""
    async with server_and_client(sends_then_waits(STREAM_HEAD)) as (server, http):
        response = await http.request("GET", "/")
        http.close()
        with pytest.raises(ConnectionBroken):
            await response.piece(TIMEOUT_S)
        await until_client_leaves(server)
