"""The loop of a byte worker: from one socket to the other, as long as only text comes.

This runs for every chunk, so it uses descriptors and epoll instead of a framework: one Python call for a chunk, and
five C calls. A stream is always given back at the end of a chunk and of an event, so its owner needs no state of the
worker to continue.
"""

import os
import select
import socket
import time
from collections.abc import Callable

import httptools

from gateway.http.errors import Api
from gateway.messages.plain import plain_events
from gateway.messages.text_only import TextOnlyEvents
from gateway.workers.wire import ORDER_BYTES, Kind, Order, Why, read_order, report

# Large enough for all that is there, so that a read ends where an engine's write did. A chunk of a stream has 200 to
# 300 bytes.
_BUFFER = bytearray(256 * 1024)
_BUFFERS, _VIEW = (_BUFFER,), memoryview(_BUFFER)
# The bytes of an event that has not ended. A longer one is not a model's text.
_LIMIT_UNREAD_BYTES = 256 * 1024
# How often the gateway is told how far its streams are.
_COUNT_S = 1.0
# An engine's answer as the parser must see it: the gateway has already read its head.
_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT_END, _CHUNK_END = b"}\n\n\r\n", b"\r\n"


class Worker:
    """Passes streams on until the gateway is gone.

    Args:
        orders: packets from the gateway.
        reports: a stream to it.
    """

    def __init__(self, orders: socket.socket, reports: socket.socket) -> None:
        self._orders = orders
        self._reports = reports
        self._reports.setblocking(False)
        self._unreported = bytearray()
        self._epoll = select.epoll()
        self._epoll.register(orders.fileno(), select.EPOLLIN)
        self._streams: dict[int, _Stream] = {}
        self._readers: dict[int, Callable[[], None]] = {
            orders.fileno(): self._take_order,
            reports.fileno(): self._send_on,
        }
        self._is_behind = False
        self._is_ending = False

    def run(self) -> None:
        """Work until the gateway is gone."""
        self._send(report(Kind.READY, 0, 0))
        readers, poll = self._readers, self._epoll.poll
        count_at = time.monotonic() + _COUNT_S
        while not self._is_ending:
            for descriptor, _ in poll(_COUNT_S if self._streams else None):
                reader = readers.get(descriptor)
                if reader is not None:  # otherwise it was given back in this pass
                    reader()
            if time.monotonic() >= count_at:
                count_at = time.monotonic() + _COUNT_S
                self._count()

    def give_back(self, stream: "_Stream", why: Why, unsent: bytes = b"") -> None:
        """Return a stream to the gateway, which continues it."""
        del self._streams[stream.loan], self._readers[stream.engine]
        self._epoll.unregister(stream.engine)
        os.close(stream.engine)
        os.close(stream.client)
        self._send(
            report(Kind.BACK, stream.loan, stream.num_events, why, b"".join(stream.passed), unsent, stream.unread)
        )

    def _take_order(self) -> None:
        """Take an order."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._orders, ORDER_BYTES, 2, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._is_ending = True
            return
        kind, loan, api, limit_bytes = read_order(data)
        if kind is Order.ASK:
            self._send(report(Kind.READY, 0, 0))
        elif kind is Order.LEND and len(descriptors) < 2:  # this process may have no more of them
            for descriptor in descriptors:
                os.close(descriptor)
            self._send(report(Kind.BACK, loan, 0, Why.FULL))
        elif kind is Order.LEND:
            client, engine = descriptors
            stream = self._streams[loan] = _Stream(self, loan, api, client, engine, limit_bytes)
            self._readers[engine] = stream.read
            self._epoll.register(engine, select.EPOLLIN)
        elif (lent := self._streams.get(loan)) is not None:
            self.give_back(lent, Why.RECALLED)

    def _count(self) -> None:
        for stream in self._streams.values():
            if stream.num_events != stream.num_told:
                stream.num_told = stream.num_events
                self._send(report(Kind.COUNT, stream.loan, stream.num_events))

    def _send(self, data: bytes) -> None:
        self._unreported += data
        if not self._is_behind:
            self._send_on()

    def _send_on(self) -> None:
        try:
            del self._unreported[: self._reports.send(self._unreported)]
        except BlockingIOError:
            pass
        except OSError:
            self._is_ending = True
            return
        if self._is_behind != bool(self._unreported):
            self._is_behind = not self._is_behind
            if self._is_behind:
                self._epoll.register(self._reports.fileno(), select.EPOLLOUT)
            else:
                self._epoll.unregister(self._reports.fileno())


class _Stream:
    """A stream that was lent."""

    __slots__ = (
        "_count_plain",
        "_feed",
        "_limit_bytes",
        "_num_bytes",
        "_pieces",
        "_text_only",
        "_worker",
        "client",
        "engine",
        "loan",
        "num_events",
        "num_told",
        "passed",
        "unread",
    )

    def __init__(self, worker: Worker, loan: int, api: Api, client: int, engine: int, limit_bytes: int) -> None:
        self._worker = worker
        self._limit_bytes = limit_bytes
        self._text_only = TextOnlyEvents()
        self._count_plain = plain_events(api)
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self.loan = loan
        self.client = client
        self.engine = engine
        self.num_events = self.num_told = 0
        self.passed: list[bytes] = []
        self.unread = b""
        parser = httptools.HttpResponseParser(_Body(self._pieces))
        parser.feed_data(_HEAD)
        self._feed = parser.feed_data

    def read(self) -> None:
        """Pass on what came, or give the stream back. Raises nothing."""
        try:
            num_bytes = os.readv(self.engine, _BUFFERS)  # on a line of its own: mypyc duplicates it inside the slice
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        if not num_bytes:
            self._worker.give_back(self, Why.ENGINE)
            return
        data = _VIEW[:num_bytes].tobytes()
        if self.unread:
            data = self.unread + data
        # Bytes up to the end of both a chunk and an event are passed on; the rest waits, unseen by the parser.
        end = len(data) if data.endswith(_EVENT_END) else data.rfind(_EVENT_END) + len(_EVENT_END)
        if end >= len(_EVENT_END):
            block = self._body(data[:end])
            # A body that ends with an event shows that the two bytes after it end the chunk, and are not part of it.
            num_events = 1 if self._text_only.matches(block) else self._count(block)
            if not num_events:
                self.unread = data
                self._worker.give_back(self, Why.TOLD)
                return
            self.unread = data[end:]
            self._pass(data[:end], block, num_events)
        else:
            self.unread = data
            self._wait()

    def _body(self, data: bytes) -> bytes:
        """The content of these chunks; empty if they are not valid."""
        try:
            self._feed(data)
        except httptools.HttpParserError:
            return b""
        pieces = self._pieces
        block = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return block

    def _count(self, block: bytes) -> int:
        """The number of its events, if they are text only; else 0."""
        num_events = self._count_plain(block)
        if num_events == 1:
            self._text_only.learn(block)
        return num_events

    def _pass(self, data: bytes, block: bytes, num_events: int) -> None:
        self.passed.append(block)
        self.num_events += num_events
        self._num_bytes += len(block)
        if len(data) - len(block) != 4 + (len(block).bit_length() + 3) // 4:  # anything other than exactly one chunk
            data = b"%x\r\n%b\r\n" % (len(block), block)
        try:
            num_sent = os.write(self.client, data)
        except OSError:
            num_sent = 0
        if num_sent < len(data):
            self._worker.give_back(self, Why.CLIENT, data[num_sent:])
        elif self._num_bytes > self._limit_bytes:
            self._worker.give_back(self, Why.FULL)
        elif self.unread:
            self._wait()

    def _wait(self) -> None:
        """Wait for the rest of an event that has begun, unless it cannot be one."""
        if self.unread.endswith(_CHUNK_END) or len(self.unread) > _LIMIT_UNREAD_BYTES:
            self._worker.give_back(self, Why.TOLD)


class _Body:
    """The parser's callbacks: only the body matters, and adding it to a list takes no Python call."""

    __slots__ = ("on_body",)

    def __init__(self, pieces: list[bytes]) -> None:
        self.on_body = pieces.append
