"""The protocol between the gateway and a byte worker.

Orders are packets: each is whole, and carries the descriptors that belong to it. Reports are a stream of bytes, because
what was passed on may be long.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from gateway.http.errors import Api

APIS: tuple[Api, ...] = ("chat", "completions", "responses", "messages", "generate")

# Kind, index in APIS, loan, bytes that the worker may keep before it gives the stream back.
_ORDER = struct.Struct("<BBQQ")
# Kind, reason, loan, events passed on, and the lengths of the three parts that follow.
_REPORT = struct.Struct("<BBQQQQQ")

ORDER_BYTES = _ORDER.size


class Order(IntEnum):
    """What a worker is to do."""

    LEND = 1
    """Take the stream whose client's and engine's sockets come with this."""
    RECALL = 2
    """Give it back; does nothing if it is already on its way."""
    ASK = 3
    """Report that you are alive."""


class Kind(IntEnum):
    """What a report means."""

    READY = 1
    """The worker is alive, and takes orders."""
    COUNT = 2
    BACK = 3


class Why(IntEnum):
    """Why a stream came back."""

    TOLD = 0
    """The engine sent something other than plain text; usually the end."""
    ENGINE = 1
    """The engine's connection ended, or is not HTTP."""
    CLIENT = 2
    """The client takes no more for now, or has left."""
    FULL = 3
    """The worker has passed on as much as it may keep, or can take no more streams."""
    RECALLED = 4


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's report on a stream.

    Args:
        num_events: passed on since it was lent.
        passed: these events.
        unsent: the end of what was to be written to the client, in chunks, and was not.
        unread: the engine's bytes since the last event that was passed on, as they came.
    """

    kind: Kind
    why: Why
    loan: int
    num_events: int
    passed: bytes
    unsent: bytes
    unread: bytes


def order(kind: Order, loan: int, api: Api = "chat", limit_bytes: int = 0) -> bytes:
    """An order in bytes."""
    return _ORDER.pack(kind, APIS.index(api), loan, limit_bytes)


def read_order(data: bytes) -> tuple[Order, int, Api, int]:
    """Kind, loan, API, limit."""
    kind, api, loan, limit_bytes = _ORDER.unpack(data)
    return Order(kind), loan, APIS[api], limit_bytes


def report(
    kind: Kind,
    loan: int,
    num_events: int,
    why: Why = Why.TOLD,
    passed: bytes = b"",
    unsent: bytes = b"",
    unread: bytes = b"",
) -> bytes:
    """A report in bytes."""
    head = _REPORT.pack(kind, why, loan, num_events, len(passed), len(unsent), len(unread))
    return b"".join((head, passed, unsent, unread))


def read_reports(buffer: bytearray) -> list[Report]:
    """The complete reports, which are removed from the buffer."""
    reports = []
    at = 0
    while len(buffer) - at >= _REPORT.size:
        kind, why, loan, num_events, *lengths = _REPORT.unpack_from(buffer, at)
        begin, end = at + _REPORT.size, at + _REPORT.size + sum(lengths)
        if len(buffer) < end:
            break
        parts = []
        for length in lengths:
            parts.append(bytes(buffer[begin : begin + length]))
            begin += length
        reports.append(Report(Kind(kind), Why(why), loan, num_events, *parts))
        at = end
    del buffer[:at]
    return reports
