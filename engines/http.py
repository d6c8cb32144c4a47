"""The one HTTP client of this project: pooled keep-alive connections to one engine, over httptools.

An asyncio.Protocol that hands bytes to its reader as they come, because the HTTP client is most of what a gateway in
Python costs per request. Rules:

1. A connection idles for less than the engines' keep-alive (5 s), so a request hardly ever meets a closed socket.
2. Where it does, before a byte of the answer came on a *reused* connection, it is sent once more on a new one.
3. Reading stops while the reader is slow, so an answer never piles up in memory.
4. Leaving a response before its end closes its connection; that is how an engine learns to stop.
5. Behind the last event of a stream comes an empty chunk. A released response lets it come, so that the connection
   is used again, but nobody waits for it.
6. Who can do without a coroutine sends with `post_now` and is called back (`Response.watch`); it may begin to await the
   same response at any time after that.
"""

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

HIGH_WATER_BYTES = 256 * 1024
HEAD_LIMIT_BYTES = 64 * 1024
# Engines send the empty chunk within a millisecond of the last event.
TRAILER_TIMEOUT_S = 1.0
# Heads of requests that are kept ready: there are some ten targets without a query.
_MAX_STARTS = 64


class EngineUnreachable(Exception):
    """No connection: refused, unknown host or timed out. Nothing was sent; safe to repeat."""


class NoMoreConnections(Exception):
    """This process may open no more connections: no fault of the engine, and nothing was sent; safe to repeat later."""


class ConnectionBroken(Exception):
    """The connection ended inside a response."""


class BadResponse(Exception):
    """What came is not HTTP, or not what was asked for."""


class AnswerTooLarge(Exception):
    """The body is larger than its reader allows. The request asked for it, so the engine is not at fault."""


class ResponseTimeout(Exception):
    """The engine was silent for longer than the timeout."""


CONNECTION_FAULTS = (EngineUnreachable, ConnectionBroken, BadResponse)
"""What says that a server is not well."""

FAULTS = (*CONNECTION_FAULTS, ResponseTimeout, AnswerTooLarge, NoMoreConnections)
"""All that a request may raise."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of the client.

    Args:
        connect_timeout_s: an engine on the same network accepts in milliseconds; 5 s is a dead one.
        max_idle_s: below the 5 s after which vLLM's and SGLang's uvicorn close an idle connection.
        max_connections: per engine; twice the largest `max_num_seqs` in use, and few enough for 64 engines under the
            usual limit of a million file descriptors.
    """

    connect_timeout_s: float = 5.0
    max_idle_s: float = 3.0
    max_connections: int = 4096


class Response:
    """An answer in the making: status and headers are there, the body is read piece by piece."""

    __slots__ = (
        "_buffered",
        "_complete",
        "_connection",
        "_deadline",
        "_error",
        "_loop",
        "_on_news",
        "_pieces",
        "_released",
        "_take",
        "_timeout_s",
        "_timer",
        "_waiter",
        "has_begun",
        "headers",
        "status",
    )

    def __init__(self, connection: "_Connection", loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.has_begun = False
        self._connection = connection
        self._loop = loop
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._complete = False
        self._released = False
        self._error: Exception | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_news: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_s = self._deadline = 0.0

    # --- for a reader that is called back ---------------------------------------------------------------------

    def watch(self, on_news: Callable[[], None] | None) -> None:
        """Call this when the head came, a body that nothing takes piles up, or the end came. None: no more.

        A reader that begins to await stops to watch before.
        """
        self._on_news = on_news

    def take(self, take: Callable[[bytes], bool] | None) -> None:
        """Give the body's bytes to this as they come, until it returns False. None: no more."""
        self._take = take

    @property
    def is_complete(self) -> bool:
        """Whether all of it has come."""
        return self._complete

    @property
    def is_broken(self) -> bool:
        """Whether no more of it will come; who awaits it gets the reason."""
        return self._error is not None

    @property
    def is_piled_up(self) -> bool:
        """Whether no more of it is read until somebody takes what came."""
        return self._buffered > HIGH_WATER_BYTES

    @property
    def was_stale(self) -> bool:
        """Whether it was asked for on a connection that had been closed meanwhile: safe to repeat."""
        return isinstance(self._error, ConnectionBroken) and not self._connection.has_answered

    def so_far(self) -> bytes:
        """What came of the body and nothing has taken; it stays here."""
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def break_off(self, error: Exception) -> None:
        """Have who awaits it get this."""
        self.finish(error)
        self._connection.abort()

    # --- for one that awaits ----------------------------------------------------------------------------------

    async def begun(self, timeout_s: float | None) -> None:
        """Wait for status and headers; None waits as long as the engine lives.

        Raises:
            ConnectionBroken, BadResponse, ResponseTimeout: no usable answer.
        """
        while not self.has_begun and self._error is None:
            await self._wait(timeout_s)
        if not self.has_begun and self._error is not None:
            raise self._error

    async def piece(self, timeout_s: float) -> bytes:
        """The next bytes of the body, all that are there; b"" at its end.

        Raises:
            ConnectionBroken, BadResponse, ResponseTimeout: the answer is not complete.
        """
        if not self._pieces and not self._complete and self._error is None:
            await self._wait(timeout_s)
        if self._pieces:
            data = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            if self._buffered > HIGH_WATER_BYTES:
                self._connection.resume()
            self._buffered = 0
            return data
        if self._error is not None:
            raise self._error
        return b""

    async def pour(self, take: Callable[[bytes], bool], timeout_s: float) -> bool:
        """Give the body's bytes to `take` as they come, within the callback that brings them, until it returns False.

        A reader that awaits `piece` is woken for each of them, which costs more than most do with it.

        Returns: False at the body's end, else True.
        Raises: as `piece` does, and what `take` raises.
        """
        while self._pieces or not (self._complete or self._error):
            if self._pieces:
                if not take(await self.piece(timeout_s)):
                    return True
                continue
            self._take = take
            try:
                await self._wait(timeout_s)
            finally:
                wants_more, self._take = self._take is not None, None
            if not wants_more:
                return True
        if self._error is not None:
            raise self._error
        return False

    async def body(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole body. Raises as `piece` does, and AnswerTooLarge above the limit."""
        if self._complete and self._buffered <= min(limit_bytes, HIGH_WATER_BYTES):  # as most that are not streams
            return self.so_far()
        pieces: list[bytes] = []
        size = 0
        while data := await self.piece(timeout_s):
            pieces.append(data)
            size += len(data)
            if size > limit_bytes:
                self.close()
                raise AnswerTooLarge(f"the engine's answer is larger than {limit_bytes} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Leave it. Unless it is complete or released, its connection is closed, and the engine stops."""
        if not self._complete and not self._released:
            self._connection.abort()

    def release(self) -> None:
        """Leave it, knowing that all that matters has come."""
        if not self._complete:
            self._released = True
            self._loop.call_later(TRAILER_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if not self._complete:
            self._connection.abort()

    # --- called by the connection ---------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        take = self._take
        if take is not None:
            self._pour(take, data)
            return
        self._pieces.append(data)
        self._buffered += len(data)
        is_piled_up = self._buffered > HIGH_WATER_BYTES
        if is_piled_up:
            self._connection.pause()
        if is_piled_up or self._waiter is not None:
            self._wake()

    def _pour(self, take: Callable[[bytes], bool], data: bytes) -> None:
        if self._waiter is not None:
            self._deadline = self._loop.time() + self._timeout_s
        try:
            if take(data):
                return
        except Exception as error:  # the reader's; it is told where it waits
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
            elif self._on_news is not None:
                self.break_off(error)
        self._take = None
        self._wake()

    def finish(self, error: Exception | None) -> None:
        if self._complete or self._error is not None:
            return
        if error is None:
            self._complete = True
        else:
            self._error = error
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def begin(self) -> None:
        self.has_begun = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self._on_news is not None:
            self._on_news()

    async def _wait(self, timeout_s: float | None) -> None:
        waiter = self._waiter = self._loop.create_future()
        if timeout_s is not None:
            self._timeout_s, self._deadline = timeout_s, self._loop.time() + timeout_s
            # A timer that fires too early looks again; a new one for each chunk would cost more.
            if self._timer is None or self._timer.when() > self._deadline:
                self._set_timer()
        try:
            await waiter
        finally:
            self._waiter = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._deadline:
            self._set_timer()
            return
        self._connection.abort()
        silence = "no byte for" if self.has_begun else "no answer within"
        self._waiter.set_exception(ResponseTimeout(f"{silence} {self._timeout_s:g} s"))


class _Connection(asyncio.Protocol):
    """One TCP connection: at most one response at a time."""

    def __init__(self, client: "HttpClient", loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self.loop = loop  # to ask for the running one costs a system call each time
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._response: Response | None = None
        self._head_bytes = 0
        self._keeps_alive = False
        self._ends_at_eof = False
        self.has_answered = False
        self.idle_since = 0.0
        self.closed = False

    def send(self, data: bytes) -> Response:
        """Write a request; its response has not begun yet."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        response = self._response = Response(self, self.loop)
        self._head_bytes = 0
        self.has_answered = False
        self._transport.write(data)
        return response

    def abort(self) -> None:
        if not self.closed and self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if not self.closed and self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self.closed and self._transport is not None:
            self._transport.resume_reading()

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but not by inheritance

    def data_received(self, data: bytes) -> None:
        if self._parser is None:  # bytes that nobody asked for
            self.abort()
            return
        self.has_answered = True
        response = self._response
        if response is None or not response.has_begun:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BadResponse(f"the engine does not speak HTTP: {error}"))
            self.abort()
            return
        if response is not None and not response.has_begun and self._head_bytes > HEAD_LIMIT_BYTES:
            self._fail(BadResponse(f"the head of the engine's answer is larger than {HEAD_LIMIT_BYTES} bytes"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._client.connection_closed(self)
        if self._ends_at_eof and exc is None and self._response is not None and self._response.has_begun:
            self._response.finish(None)
            self._response = None
        else:
            self._fail(ConnectionBroken("the engine closed the connection before its answer was complete"))

    def _fail(self, error: Exception) -> None:
        response = self._response
        self._response = self._parser = None
        if response is not None:
            response.finish(error)

    # --- httptools ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._response is None:  # a second answer to one request: what would come next is anyone's guess
            self._keeps_alive = False
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is not None:
            self._response.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        parser, response = self._parser, self._response
        if parser is None or response is None:
            return
        response.status = parser.get_status_code()
        if response.status < 200:  # an interim answer; the real one follows
            response.headers.clear()
            return
        self._keeps_alive = bool(parser.should_keep_alive())
        has_length = b"content-length" in response.headers or b"transfer-encoding" in response.headers
        self._ends_at_eof = not has_length and response.status not in (204, 304)
        response.begin()

    def on_body(self, data: bytes) -> None:
        if self._response is not None:
            self._response.feed(data)

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or response.status < 200:
            return
        self._response = self._parser = None
        response.finish(None)
        if self._keeps_alive:
            self._client.connection_idle(self)
        elif self._transport is not None:
            self._transport.close()


class HttpClient:
    """Requests to one engine.

    Args:
        base_url: scheme, host and port; a path is put before every target.
        limits: bounds.
        headers: sent with every request, such as the engine's own API key.
    """

    def __init__(
        self, base_url: str, limits: HttpLimits | None = None, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        parts = urlsplit(base_url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or "localhost"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").encode()
        common = f"host: {parts.netloc.rpartition('@')[2]}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers)
        self._common = common.encode("latin-1")
        self._limits = limits or HttpLimits()
        self._starts: dict[tuple[str, str], bytes] = {}
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._reaper: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def request(
        self, method: str, target: str, body: bytes = b"", headers: bytes = b"", timeout_s: float | None = None
    ) -> Response:
        """Send a request and give its response as soon as the head is there.

        Args:
            target: path and query.
            headers: further header lines, each ended by CRLF.
            timeout_s: longest wait for the head; None waits as long as the engine lives.

        Raises:
            EngineUnreachable, NoMoreConnections: nothing was sent.
            ConnectionBroken, BadResponse, ResponseTimeout: no usable answer.
        """
        data = self._request(method, target, body, headers)
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._answered(connection, data, timeout_s)
            except ConnectionBroken:
                if connection.has_answered or self._is_closed:
                    raise
        return await self._answered(await self._connect(), data, timeout_s)

    def post_now(self, target: str, body: bytes, headers: bytes) -> Response | None:
        """Send a POST on an idle connection; None where there is none. Nothing of its response has come yet."""
        connection = self._take_idle()
        return None if connection is None else connection.send(self._request("POST", target, body, headers))

    async def get(self, target: str, timeout_s: float, limit_bytes: int = 16 * 1024 * 1024) -> tuple[int, bytes]:
        """Status and whole body of a GET."""
        response = await self.request("GET", target, timeout_s=timeout_s)
        return response.status, await response.body(limit_bytes, timeout_s)

    async def post(
        self, target: str, body: bytes, timeout_s: float, limit_bytes: int = 16 * 1024 * 1024
    ) -> tuple[int, bytes]:
        """Status and whole body of a POST."""
        response = await self.request("POST", target, body, timeout_s=timeout_s)
        return response.status, await response.body(limit_bytes, timeout_s)

    def close(self) -> None:
        """Close every connection; responses under way break."""
        self._is_closed = True
        if self._reaper is not None:
            self._reaper.cancel()
        for connection in list(self._all):
            connection.abort()

    def _request(self, method: str, target: str, body: bytes, headers: bytes) -> bytes:
        start = self._starts.get((method, target))
        if start is None:
            start = f"{method} ".encode() + self._prefix + target.encode() + b" HTTP/1.1\r\n" + self._common
            if len(self._starts) < _MAX_STARTS:
                self._starts[method, target] = start
        if body:
            return b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b" % (
                start,
                len(body),
                headers,
                body,
            )
        return b"%b%b%b\r\n" % (start, b"content-length: 0\r\n" if method == "POST" else b"", headers)

    async def _answered(self, connection: _Connection, data: bytes, timeout_s: float | None) -> Response:
        response = connection.send(data)
        try:
            await response.begun(timeout_s)
        except asyncio.CancelledError:
            connection.abort()
            raise
        return response

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            idle_s = connection.loop.time() - connection.idle_since
            if not connection.closed and idle_s < self._limits.max_idle_s:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        if len(self._all) >= self._limits.max_connections:
            raise NoMoreConnections(f"all {self._limits.max_connections} connections to the engine are in use")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, loop), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoMoreConnections(f"no more file descriptors: {error.strerror}") from None
            raise EngineUnreachable(f"no connection to the engine: {error or 'timed out'}") from None
        self._all.add(connection)
        return connection

    # --- called by the connections --------------------------------------------------------------------------

    def connection_idle(self, connection: _Connection) -> None:
        connection.idle_since = connection.loop.time()
        self._idle.append(connection)
        if self._reaper is None:
            self._reaper = connection.loop.call_later(self._limits.max_idle_s, self._reap)

    def connection_closed(self, connection: _Connection) -> None:
        self._all.discard(connection)

    def _reap(self) -> None:
        """Close connections before the engine does; the idle list is ordered by age."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._limits.max_idle_s
        for connection in self._idle:
            if connection.idle_since <= oldest:
                connection.abort()
        self._idle = [connection for connection in self._idle if connection.idle_since > oldest]
        self._reaper = loop.call_later(self._limits.max_idle_s / 2, self._reap) if self._idle else None
