"""One connection to an engine: bytes from the socket through httptools into the response that they belong to.

Anything that is not an answer to a request closes it: unsolicited bytes, two answers to one request, a head without
end. So does an answer that comes before its request was sent completely. An engine that gives up an idle connection
may say so with a 408 (RFC 9110, 15.5.9) while the next request is on its way: that is no answer to it.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import httptools

from engines.http.faults import BadResponse, ConnectionBroken, StaleConnection
from engines.http.outbox import outbox_of
from engines.http.response import Response
from engines.keepalive import probe_when_idle

HEAD_LIMIT_BYTES = 64 * 1024
_TIMED_OUT = 408


class Connection(asyncio.Protocol):
    """One TCP connection: at most one response at a time.

    Args:
        on_idle: called when it may be used again.
        on_lost: called once, when it may not.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_idle: Callable[["Connection"], None],
        on_lost: Callable[["Connection"], None],
    ) -> None:
        self._on_idle = on_idle
        self._on_lost = on_lost
        self.loop = loop  # asking for the running loop costs a system call each time
        self._outbox = outbox_of(loop)
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._response: Response | None = None
        self._head_bytes = 0
        self._keeps_alive = False
        self._last_read = b""
        self.idle_since = 0.0
        self.may_be_stale_until = 0.0
        self.closed = False
        self.on_body: Callable[[bytes], None] = _for_nobody

    def send(self, data: tuple[bytes, ...]) -> Response:
        """Send a request, at the latest when this round of the event loop ends; its response has not begun yet."""
        response = self.expect()
        assert self._transport is not None
        self._outbox.put(self.loop, self._transport, data)
        return response

    def expect(self) -> Response:
        """The response to a request that was or will be written."""
        assert self._transport is not None
        response = self._response = Response(self._transport, self.loop, self)
        self.on_body = response.feed  # straight from the parser to the reader: it is called for each chunk
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        if self.closed:  # while the keeper took its socket
            self._fail(ConnectionBroken("the engine closed the connection before it was asked"))
        return response

    def lend(self) -> int | None:
        """The descriptor of its socket, which is not read here until `give_back`; None if a byte worker could not
        continue: within a chunk, or with TLS.
        """
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_extra_info("sslcontext") is not None:
            return None
        # When an event ends the data read so far, a body ends before the last two of these bytes, so they end a chunk.
        if self._response is None or not self._last_read.endswith(b"\n\n\r\n"):
            return None
        transport.pause_reading()
        return int(transport.get_extra_info("socket").fileno())

    def give_back(self, unread: bytes) -> None:
        """Continue reading; `unread` came meanwhile, since the end of a chunk."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            if unread:
                self.data_received(unread)

    def abort(self) -> None:
        """Close it at once; a response under way breaks."""
        if not self.closed and self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but not by inheritance
        with suppress(OSError):  # it may have ended
            probe_when_idle(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._parser is None:  # unsolicited bytes
            self.abort()
            return
        response = self._response
        self._last_read = data
        if response is not None:
            if not response.has_answered and self._outbox.has_for(self._transport):
                self._fail(StaleConnection("the engine sent something before it was asked"))
                self.abort()
                return
            response.has_answered = True
            if not response.has_begun:
                self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BadResponse(f"the engine does not speak HTTP: {error}"))
            self.abort()
            return
        except httptools.HttpParserUpgrade:  # no HttpParserError
            self._fail(BadResponse("the engine switches to another protocol"))
            self.abort()
            return
        if response is not None and not response.has_begun and self._head_bytes > HEAD_LIMIT_BYTES:
            self._fail(BadResponse(f"the head of the engine's answer is larger than {HEAD_LIMIT_BYTES} bytes"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._on_lost(self)
        response = self._response
        if exc is None and response is not None and response.has_begun and response.ends_at_eof:
            response.finish(None)
            self._response = None
        else:
            is_stale = response is not None and not response.has_answered and self.loop.time() < self.may_be_stale_until
            broken = StaleConnection if is_stale else ConnectionBroken
            self._fail(broken("the engine closed the connection before its answer was complete"))

    def _fail(self, error: Exception) -> None:
        response = self._response
        self._response = self._parser = None
        self.on_body = _for_nobody
        if response is not None:
            response.finish(error)

    # --- httptools ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._response is None:  # a second answer to one request: what would follow is unknown
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
        if response.status == _TIMED_OUT and self.loop.time() < self.may_be_stale_until:
            self._fail(StaleConnection("the engine gave the connection up"))
            self.abort()
            return
        self._keeps_alive = bool(parser.should_keep_alive())
        has_length = b"content-length" in response.headers or b"transfer-encoding" in response.headers
        response.ends_at_eof = not has_length and response.status not in (204, 304)
        response.begin()

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or response.status < 200:
            return
        self._response = self._parser = None
        self._last_read = b""
        self.on_body = _for_nobody
        response.finish(None)
        assert self._transport is not None
        if self._transport.get_write_buffer_size():  # answered before it was read, which may never happen now
            self.abort()
        elif self._keeps_alive:
            self._on_idle(self)
        else:
            self._transport.close()


def _for_nobody(data: bytes) -> None:
    """No response is under way."""
