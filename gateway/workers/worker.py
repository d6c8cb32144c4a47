"""The loop of a byte worker: from one socket to the other, as long as there is nothing but text.

On the path of every chunk, hence descriptors and epoll instead of a framework: one call of Python for a chunk, five of
C. A stream is always given back at the end of a chunk and of an event, so who goes on needs no state of ours.
"""

import os
import select
import socket
import time
from collections.abc import Callable

import httptools

from gateway.http.errors import Api
from gateway.messages.streams import plain_events
from gateway.workers.wire import ORDER_BYTES, Kind, Order, Why, read_order, report

# A chunk of a stream has 200 to 300 bytes; many come together only if this process is late.
_READ_BYTES = 32 * 1024
# What came of an event that has not ended. A longer one is no text of a model's.
_LIMIT_UNREAD_BYTES = 256 * 1024
# How often the gateway hears how far its streams are.
_COUNT_S = 1.0
# An engine's answer as the parser has to see it: the gateway has read its head.
_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT_END, _CHUNK_END = b"}\n\n\r\n", b"\r\n"


class Worker:
    """Passes streams on until the gateway is gone.

    Args:
        orders: packets of the gateway's.
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
        self._readers: dict[int, Callable[[], None]] = {orders.fileno(): self._obey, reports.fileno(): self._report_on}
        self._is_behind = False
        self._is_ending = False

    def run(self) -> None:
        """Work until the gateway is gone."""
        self._say(report(Kind.READY, 0, 0))
        readers, poll = self._readers, self._epoll.poll
        count_at = time.monotonic() + _COUNT_S
        while not self._is_ending:
            for descriptor, _ in poll(_COUNT_S if self._streams else None):
                reader = readers.get(descriptor)
                if reader is not None:  # else it was given back within this round
                    reader()
            if time.monotonic() >= count_at:
                count_at = time.monotonic() + _COUNT_S
                self._count()

    def give_back(self, stream: "_Stream", why: Why, unsent: bytes = b"") -> None:
        """Have the gateway go on with a stream."""
        del self._streams[stream.loan], self._readers[stream.engine]
        self._epoll.unregister(stream.engine)
        os.close(stream.engine)
        os.close(stream.client)
        passed, unread = b"".join(stream.passed), b"".join(stream.unread)
        self._say(report(Kind.BACK, stream.loan, stream.num_events, why, passed, unsent, unread))

    def _obey(self) -> None:
        """Read an order."""
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
        if kind is Order.LEND:
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
                self._say(report(Kind.COUNT, stream.loan, stream.num_events))

    def _say(self, data: bytes) -> None:
        self._unreported += data
        if not self._is_behind:
            self._report_on()

    def _report_on(self) -> None:
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
    """One that was lent."""

    __slots__ = (
        "_count_plain",
        "_feed",
        "_limit_bytes",
        "_num_bytes",
        "_pieces",
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
        self._count_plain = plain_events(api)
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self.loan = loan
        self.client = client
        self.engine = engine
        self.num_events = self.num_told = 0
        self.passed: list[bytes] = []
        self.unread: list[bytes] = []
        parser = httptools.HttpResponseParser(_Body(self._pieces))
        parser.feed_data(_HEAD)
        self._feed = parser.feed_data

    def read(self) -> None:
        """Pass on what came, or give the stream back. Raises nothing."""
        try:
            data = os.read(self.engine, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._worker.give_back(self, Why.ENGINE)
            return
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.unread.append(data)
            self._worker.give_back(self, Why.ENGINE)
            return
        if self.unread:
            data = b"".join((*self.unread, data))
            self.unread.clear()
        if data.endswith(_EVENT_END):
            # The body ends as the chunk does before its last two bytes: so these are the end of the chunk.
            pieces = self._pieces
            block = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            num_events = self._count_plain(block)
            if num_events:
                self._pass(data, block, num_events)
                return
        self.unread.append(data)
        if data.endswith(_CHUNK_END) or len(data) > _LIMIT_UNREAD_BYTES:
            self._worker.give_back(self, Why.TOLD)

    def _pass(self, data: bytes, block: bytes, num_events: int) -> None:
        self._pieces.clear()
        self.passed.append(block)
        self.num_events += num_events
        self._num_bytes += len(block)
        if len(data) - len(block) != 4 + (len(block).bit_length() + 3) // 4:  # other than one chunk, and nothing else
            data = b"%x\r\n%b\r\n" % (len(block), block)
        try:
            num_sent = os.write(self.client, data)
        except OSError:
            num_sent = 0
        if num_sent < len(data):
            self._worker.give_back(self, Why.CLIENT, data[num_sent:])
        elif self._num_bytes > self._limit_bytes:
            self._worker.give_back(self, Why.FULL)


class _Body:
    """What a parser calls: nothing but the body counts, and to add it to a list is no call of Python's."""

    __slots__ = ("on_body",)

    def __init__(self, pieces: list[bytes]) -> None:
        self.on_body = pieces.append
