"""uvicorn's HTTP protocol, with limits on the size and time of a request's head. Input that is not HTTP is answered in
OpenAI's form. A request is an `Exchange`, so that turns can be served below ASGI.
"""

import asyncio
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.errors import error_body
from gateway.http.exchange import UNAWAITED, Exchange
from gateway.http.refusals import Refused, bad_request, headers_too_large

_UPGRADE_FIELDS = frozenset({b"connection", b"upgrade", b"http2-settings"})
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


def bounded_protocol(
    max_header_bytes: int, head_timeout_s: float, unread_timeout_s: float, take: Callable[[Exchange], bool]
) -> Callable[..., HttpToolsProtocol]:
    """A factory of connection protocols with these limits; its other arguments are uvicorn's.

    Args:
        max_header_bytes: half of what a request line with all headers, a chunk's head, or trailers may take here. That
            protects memory only, because it is checked as bytes arrive; the exact limit on headers is enforced by the
            code that serves requests.
        head_timeout_s: from the connection, or a later head's first byte, to that head's end; not while reading stops
            because of earlier requests.
        unread_timeout_s: a client that takes nothing for this long, with more waiting than the system's buffers hold,
            has left.
        take: serves a complete request without a task; False leaves it to the application. Raises nothing.
    """
    return partial(_BoundedProtocol, max_header_bytes, head_timeout_s, unread_timeout_s, take)


class _BoundedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        max_header_bytes: int,
        head_timeout_s: float,
        unread_timeout_s: float,
        take: Callable[[Exchange], bool],
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self._max_header_bytes = max_header_bytes
        self._head_timeout_s = head_timeout_s
        self._unread_timeout_s = unread_timeout_s
        self._take = take
        self._in_head = False
        # What came since the read in which last a head, a piece of a body or a message ended.
        self._unended_bytes = 0
        self._served: Exchange | None = None
        self._unserved: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._head_timeout_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)
        if self._served is not None:
            self._served.left()
        # Exchanges refer to their connection: without this, both would wait for the garbage collector.
        self.cycle = self._served = self._unserved = None  # type: ignore[assignment]
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        self._unended_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data, upgrade)
        if self._unserved is not None:
            self._serve(self._unserved)
        if self._unended_bytes > 2 * self._max_header_bytes:
            self._refuse_endless()
        elif self._in_head:
            self._expect_head()

    def _expect_head(self) -> None:
        """The rest of a head must come in time, unless it is not read."""
        if self._timer is None and not self.flow.read_paused:
            self._timer = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _read_without_upgrade(self, data: bytes, upgrade: httptools.HttpParserUpgrade) -> None:
        """Answer a request that asks to switch protocols (RFC 9110, 7.8): the parser took what follows its head for the
        other protocol's data, but it is the rest of the request.
        """
        while self.cycle.scope["method"] != "CONNECT":  # an upgrade by itself, which no route supports
            data = self._head_without_upgrade() + data[upgrade.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            except httptools.HttpParserUpgrade as another:  # of the next request
                upgrade = another

    def _head_without_upgrade(self) -> bytes:
        """Discard the exchange made last; returns its request's head without the fields that ask for another
        protocol.
        """
        method, version = self.cycle.scope["method"], self.parser.get_http_version()
        before: Any = None
        if self._unserved is self.cycle:
            self._unserved = None
        else:
            self.pipeline.popleft()
            before = self.pipeline[0][0] if self.pipeline else self._unserved or self._served
        self.cycle = before
        lines = [b"%b %b HTTP/%b" % (method.encode(), self.url, version.encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in _UPGRADE_FIELDS]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        self._in_head = True
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which is no header (RFC 9110, 6.5.1)
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unended_bytes = 0
        self._stop_timer()
        version = self.parser.get_http_version()
        before = self.cycle
        self.cycle = Exchange(
            self._scope_of(version),
            self.transport,
            self.flow,
            self.logger,
            self.access_logger,
            self.access_log,
            self.server_state.default_headers,
            UNAWAITED,
            self.expect_100_continue,
            version != "1.0" and self.parser.should_keep_alive(),
            self.on_response_complete,
        )
        self.cycle.start_task = self._start_asgi_task
        if before is None or before.response_complete:
            self._stop_unread_timer()  # the client lives; the end of this answer sets another
            self._unserved = self.cycle  # served once all bytes that are here are parsed
        else:  # pipelined: served when the answers before it are out
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._unended_bytes = 0
        exchange: Any = self.cycle
        if exchange.body or exchange.response_complete:
            super().on_body(body)
            return
        # The first piece, usually all of the body, is kept as bytes. uvicorn appends it to a bytearray, which the
        # reader then copies: for 1 MB that is 2 of 9 MB copied.
        exchange.body = body
        if len(body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        exchange.message_event.set()

    def on_message_complete(self) -> None:
        self._unended_bytes = 0
        if not self.cycle.response_complete:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    def _scope_of(self, version: str) -> Any:
        """ASGI's scope for the request whose head is complete."""
        path, raw_path, query = _target(self.url)
        return {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "headers": self.headers,
            "state": self.app_state.copy(),
            "method": self.parser.get_method().decode("ascii"),
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
        }

    def _serve(self, exchange: Exchange) -> None:
        self._unserved = None
        self._served = exchange
        if exchange.more_body or self.transport.is_closing() or not self._take(exchange):
            self._start_asgi_task(exchange, self.app)

    def on_response_complete(self) -> None:
        if not self.flow.write_paused:  # otherwise they are expected already
            self._expect_reads()
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
        else:
            self.server_state.total_requests += 1
            self.flow.resume_reading()
            # A timer that fires too early checks again: setting one for each answer takes 3,300 instructions.
            self._idle_since = self.loop.time()
            if self._idle_timer is None:
                self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)
        if self._in_head:
            self._expect_head()

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        if self._in_head or not self.cycle.response_complete:
            return  # busy; the timer is set again after the answer
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0.0:
            self._idle_timer = self.loop.call_later(left_s, self._close_if_idle)
        else:
            self.timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reads()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def _expect_reads(self) -> None:
        """The client must take some of what waits here: a stream would wait for it, and the connection's end does."""
        self._stop_unread_timer()
        if num_bytes := self.transport.get_write_buffer_size():
            self._unread_timer = self.loop.call_later(self._unread_timeout_s, self._cut_if_unread, num_bytes)

    def _cut_if_unread(self, num_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < num_bytes:
            self._expect_reads()
        else:
            self.transport.abort()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def shutdown(self) -> None:
        super().shutdown()
        if self._served is not None and self._served.hand_over is not None:
            self._served.hand_over()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if self in self.connections:  # otherwise it is lost, and a turn goes on without its client
            self._served = cycle
        if app is self.app:
            cycle.show()
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        self._refuse(bad_request(msg, code="bad_http"))

    def _refuse_endless(self) -> None:
        if self._in_head:
            self._refuse(headers_too_large(self._max_header_bytes))
        else:  # a chunk's head or trailers: the request may have its answer already
            self.transport.close()

    def _refuse(self, refused: Refused) -> None:
        if self.cycle is None or self.cycle.response_complete:  # otherwise it would land inside another answer
            body = error_body("other", refused.error)
            head = b"HTTP/1.1 %d %s\r\n" % (refused.error.status, _REASONS[refused.error.status])
            head += b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(head + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Clients ask for a few routes again and again; paths with an identity in them all differ.
@lru_cache(maxsize=256)
def _target(url: bytes) -> tuple[str, bytes, bytes]:
    """Path, path as sent, and query of a request's target. Raises httptools.HttpParserInvalidURLError."""
    parsed: Any = httptools.parse_url(url)  # its own types claim that it always has a query, which is false
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""
