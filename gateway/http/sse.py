"""Server-sent events as bytes: finds whole events in what TCP delivers, and never re-encodes them.

What goes in comes out, byte for byte and in order; only the cuts move to the ends of events. Lines end in LF, CRLF or
CR (WHATWG HTML, server-sent events); a blank line ends an event.
"""

import re
from itertools import pairwise

# The atomic group keeps CRLF one line end. An event that begins with LF is the rest of a split CRLF.
_EVENT_ENDS = re.compile(rb"(?>\r\n|\n|\r){2}")
_LINE_ENDS = re.compile(rb"\r\n|\n|\r")


class EventTooLarge(ValueError):
    """An event beyond the limit: the stream cannot go on."""


class EventSplitter:
    """Whole events from reads that end anywhere.

    Args:
        limit: bytes per event. 16 MB holds a final event that repeats a long conversation.
    """

    def __init__(self, limit: int = 16 * 1024 * 1024) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._ended_in_cr = False

    @property
    def rest(self) -> bytes:
        """What came after the last whole event; at the end of a stream, a sign that it was cut off."""
        return bytes(self._buffer)

    @property
    def is_at_start(self) -> bool:
        """Whether the next byte is the first of an event."""
        return not self._buffer and not self._ended_in_cr

    def feed(self, chunk: bytes) -> bytes:
        """The whole events so far, b"" if none. Cost: 0.2 us for a read that ends with an event."""
        if self.is_at_start and chunk.endswith(b"\n\n"):
            return chunk
        searched = max(len(self._buffer) - 3, 0)
        self._buffer += chunk
        cut = self._end_of_last_event(searched)
        if len(self._buffer) - cut > self._limit:
            raise EventTooLarge(f"An event of the engine's stream is larger than {self._limit} bytes")
        if cut == 0:
            return b""
        whole = bytes(self._buffer[:cut])
        del self._buffer[:cut]
        self._ended_in_cr = whole.endswith(b"\r")
        return whole

    def _end_of_last_event(self, searched: int) -> int:
        buffer = self._buffer
        last = max(buffer.rfind(blank, searched) for blank in (b"\n\n", b"\n\r", b"\r\r"))
        if last >= 0:
            # A CR ends the event at once, because the LF may never come; an LF that is here goes with it.
            return last + 3 if buffer[last + 1 : last + 3] == b"\r\n" else last + 2
        return 1 if self._ended_in_cr and buffer.startswith(b"\n") else 0


def split_events(block: bytes) -> list[bytes]:
    """The events of a block of whole events, each with its blank line; joined, they give the block back."""
    if block.find(b"\r") < 0:
        if block.find(b"\n\n") == len(block) - 2:  # one event, as most blocks are
            return [block]
        events = [event + b"\n\n" for event in block.split(b"\n\n")]
        events[-1] = events[-1][:-2]
    else:
        ends = [0, *(match.end() for match in _EVENT_ENDS.finditer(block)), len(block)]
        events = [block[start:end] for start, end in pairwise(ends)]
    return [event for event in events if event]


def data_of(event: bytes) -> bytes:
    """The data of one event: its `data` lines joined by LF; b"" for a comment."""
    is_one_line = event.startswith(b"data: ") and event.endswith(b"\n\n") and event.find(b"\n") == len(event) - 2
    if is_one_line and event.find(b"\r") < 0:
        return event[6:-2]
    lines = [line[5:] for line in _LINE_ENDS.split(event) if line.startswith(b"data:")]
    return b"\n".join(line[1:] if line.startswith(b" ") else line for line in lines)
