"""What the gateway and a byte worker say to each other.

Orders are packets: each is whole, and has the descriptors that belong to it. Reports are a stream of bytes, since what
was passed on may be long.
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
    """Give it back; nothing if it is on its way already."""
    ASK = 3
    """Say that you are there."""


class Kind(IntEnum):
    """What a report is."""

    READY = 1
    """It is there, and takes orders."""
    COUNT = 2
    BACK = 3


class Why(IntEnum):
    """Why a stream came back."""

    TOLD = 0
    """The engine said something that is not just text; most often the end."""
    ENGINE = 1
    """The engine's connection ended, or is not HTTP."""
    CLIENT = 2
    """The client takes no more for now, or has left."""
    FULL = 3
    """As much was passed on as the worker may keep, or it may have no more streams."""
    RECALLED = 4


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's word on a stream.

    Args:
        num_events: that were passed on since it was lent.
        passed: these events.
        unsent: the end of what was to be written to the client, in chunks, and was not.
        unread: what came from the engine since the last event that was passed on, as it came.
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
    """The reports that are whole, which are taken out of the buffer."""
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
