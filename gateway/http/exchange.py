"""One request and its answer on a uvicorn connection, below ASGI.

A turn needs little of what ASGI does for each message. Here a body that came with its head is read without waiting, a
client's departure is a callback instead of a waiting task, and an answer's head and body leave in one segment: together
they save a tenth of a turn's cost. Everything else, and every route that is not hot, is served by uvicorn's own cycle,
of which this is a subclass.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway.http.client import AsgiClient, Client, Headers, Receive, Send, header_lines

_EXTENSION = "heddle"
_CLOSE = b"connection: close\r\n"
_own_lines = lru_cache(maxsize=1)(header_lines)  # of uvicorn's own headers, which change once a second


class _Unawaited:
    """An asyncio.Event for which nothing will wait."""

    def set(self) -> None: ...

    def clear(self) -> None: ...


UNAWAITED = cast(asyncio.Event, _Unawaited())
"""An exchange's event until an application sees it: creating its own takes 3,400 instructions more."""


class Exchange(RequestResponseCycle):
    """A Client.

    Attributes:
        hand_over: moves an exchange that is served without a task into one, so that a shutdown can wait for it and end
            it.
    """

    start_task: "Callable[[Exchange, Any], None]"

    # Most exchanges differ from these in one or two values, and do without a constructor of their own.
    hand_over: Callable[[], object] | None = None
    _on_left: Callable[[], object] | None = None
    _head = b""
    _is_chunked = False
    _has_body = True

    @property
    def is_full(self) -> bool:
        """Whether the connection takes no more for now."""
        return bool(self.flow.write_paused) and not self.disconnected

    def show(self) -> None:
        """Let the application find this below its scope: `client_of`.

        Called only once an application is needed: until it has ended, the scope and the exchange refer to each other.
        """
        self.scope["extensions"] = {_EXTENSION: {"exchange": self}}
        self.message_event = asyncio.Event()
        if cast(Any, self).body or not self.more_body or self.disconnected:
            self.message_event.set()

    async def run_asgi(self, app: Any) -> None:
        """Run an application for this request."""
        try:
            await super().run_asgi(app)
        finally:
            self.scope.pop("extensions", None)

    def spawn(self, rest: Coroutine[Any, Any, None]) -> None:
        """Have the server run the rest of this request as one of its tasks."""

        async def serve(*_: Any) -> None:
            await rest

        self.start_task(self, serve)

    def body_at_once(self, limit_bytes: int) -> bytes | None:
        """The body of the request, if it is here and not too large."""
        came = cast(Any, self).body  # bytes, if it is the first piece (protocol.py); uvicorn's types say bytearray
        if self.more_body or self.disconnected or len(came) > limit_bytes:
            return None
        body, self.body = bytes(came), bytearray()
        self.flow.resume_reading()  # a large body paused it, and only reading notices a client that leaves
        return body

    async def read(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The body of the request."""
        body = self.body_at_once(limit_bytes)
        if body is None:
            body = await AsgiClient(self.scope, self.receive, self.send).read(limit_bytes, timeout_s)  # type: ignore[arg-type]
            self.flow.resume_reading()  # its last piece, too, may have paused it
        else:
            self.message_event.clear()
        return body

    def when_left(self, call: Callable[[], object]) -> None:
        """Call this if the client leaves."""
        if self.disconnected:
            call()
        else:
            self._on_left = call

    def unwatch(self) -> None:
        """Do not call anything."""
        self._on_left = None

    def left(self) -> None:
        """The connection is gone."""
        if self.response_complete:
            return
        self.disconnected = True
        self.message_event.set()
        call, self._on_left = self._on_left, None
        if call is not None:
            call()

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """Begin the answer; its head leaves with the first bytes of its body."""
        assert not self.response_started
        self.response_started = True
        self.waiting_for_100_continue = False
        # HTTP/1.0 has no chunks: the stream ends with the connection, as `keep_alive` says.
        self._is_chunked = length is None and self.scope["http_version"] != "1.0"
        self._has_body = self.scope["method"] != "HEAD"
        head = STATUS_LINE[status] + _own_lines(tuple(self.default_headers)) + headers
        if length is not None:
            head += b"content-length: %d\r\n" % length
        elif self._is_chunked:
            head += b"transfer-encoding: chunked\r\n"
        if status >= 400 and headers.find(_CLOSE) >= 0:  # a request that was refused before its end
            self.keep_alive = False
        elif not self.keep_alive:
            head += _CLOSE
        self._head = head + b"\r\n"

    def write(self, data: bytes, more: bool) -> bool:
        """Write part of the body; returns `is_full`."""
        if self.disconnected:
            return False
        if not self._has_body:
            data = b""
        elif self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            if not more:
                data += b"0\r\n\r\n"
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.transport.write(data)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
        return bool(self.flow.write_paused)

    def lend(self) -> int | None:
        """The descriptor of its connection, to which a byte worker may write chunks until `take_back`; None if
        impossible now. A client that leaves is still noticed here.
        """
        transport = self.transport
        if self.disconnected or self._head or not self._is_chunked or not self._has_body or transport.is_closing():
            return None
        if transport.get_write_buffer_size() or transport.get_extra_info("sslcontext") is not None:
            return None
        return int(transport.get_extra_info("socket").fileno())

    def take_back(self, unsent: bytes) -> None:
        """Continue writing; `unsent` are chunks that the byte worker did not write."""
        if unsent and not self.disconnected:
            self.transport.write(unsent)

    def cut(self) -> None:
        """Close the connection, because it is unknown what its client has received. The client has not left, so nothing
        is called.
        """
        self.unwatch()
        self.transport.abort()
        self.left()

    async def drain(self) -> None:
        """Wait until the connection takes more."""
        if self.is_full:
            await self.flow.drain()


def client_of(scope: dict[str, Any], receive: Receive, send: Send) -> Client:
    """The client behind a request: below ASGI if this gateway's own server runs it."""
    extension: dict[str, Exchange] | None = scope.get("extensions", {}).get(_EXTENSION)
    return AsgiClient(scope, receive, send) if extension is None else extension["exchange"]
