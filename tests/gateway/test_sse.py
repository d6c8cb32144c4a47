"""SSE events reassembled from reads that end anywhere."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.sse import EventSplitter, EventTooLarge, data_of, split_events

LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
FIELDS = st.sampled_from(["data: ", "data:", "event: ", "id: ", ": comment ", "retry: "])
LINES = st.tuples(FIELDS, st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12))


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """A stream of whole events with any line ends, multi-byte characters and comments."""
    text = ""
    for _ in range(draw(st.integers(1, 5))):
        for field, value in draw(st.lists(LINES, min_size=1, max_size=3)):
            text += field + value + draw(LINE_ENDS)
        # CR and then LF would be one line end, not a blank line.
        text += draw(st.sampled_from(["\r", "\r\n"]) if text.endswith("\r") else LINE_ENDS)
    return text.encode()


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in pairwise(ends)]


def parsed(stream: bytes) -> list[list[str]]:
    """The events by the standard's grammar, obvious and slow: groups of lines, each ended by a blank line."""
    lines = stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    events: list[list[str]] = [[]]
    for line in lines:
        if line:
            events[-1].append(line)
        elif events[-1]:
            events.append([])
    return [event for event in events if event]


@given(streams(), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_split_gives_the_same_events(stream: bytes, places: list[int]) -> None:
    """However TCP cuts a stream, even in a character or a line end: the same bytes, in blocks of whole events."""
    splitter = EventSplitter()
    blocks = [splitter.feed(chunk) for chunk in cut(stream, places)]
    assert b"".join(blocks) + splitter.rest == stream
    assert splitter.rest.strip(b"\r\n") == b""
    assert EventSplitter().feed(stream) == stream, "an LF that is there goes with its CR"
    events = [event for block in blocks for event in split_events(block)]
    assert b"".join(events) == b"".join(blocks)
    assert [found for event in events for found in parsed(event)] == parsed(stream)
    assert all(len(parsed(event)) <= 1 for event in events)


@given(streams())
def test_an_event_leaves_as_soon_as_it_is_whole(stream: bytes) -> None:
    """Fed byte by byte, an event leaves with its blank line: it never waits for the next one."""
    splitter = EventSplitter()
    passed = b""
    for place in range(len(stream)):
        passed += splitter.feed(stream[place : place + 1])
        so_far = stream[: place + 1]
        if so_far.endswith((b"\n\n", b"\r\r", b"\n\r")):
            assert passed == so_far


def test_a_read_of_whole_events_is_not_copied() -> None:
    """This is the common case."""
    chunk = b"data: a\n\ndata: b\n\n"
    assert EventSplitter().feed(chunk) is chunk


def test_half_an_event_is_held_back() -> None:
    """An incomplete event is not passed on: an error event may take its place if the engine dies."""
    splitter = EventSplitter()
    assert splitter.feed(b'data: {"a"') == b""
    assert splitter.rest == b'data: {"a"'
    assert splitter.feed(b":1}\n\ndata: ") == b'data: {"a":1}\n\n'
    assert splitter.rest == b"data: "


def test_the_lf_of_a_split_crlf_is_not_an_incomplete_event() -> None:
    """Between CR and LF, an event leaves at the CR; the LF follows by itself and leaves nothing behind."""
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\r\n\r") == b"data: a\r\n\r"
    assert splitter.feed(b"\n") == b"\n"
    assert splitter.rest == b""


def test_an_endless_event_is_an_error() -> None:
    """An engine that never ends its line does not fill the gateway's memory."""
    splitter = EventSplitter(limit=1000)
    with pytest.raises(EventTooLarge):
        for _ in range(200):
            splitter.feed(b"x" * 10)


def test_the_limit_is_per_event_not_per_stream() -> None:
    """Any number of events passes as long as each is within the limit."""
    splitter = EventSplitter(limit=12)
    stream = b"data: 1\n\n" * 50
    passed = [splitter.feed(stream[place : place + 4]) for place in range(0, len(stream), 4)]
    assert b"".join(passed) + splitter.rest == stream


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\r\n\r\n", b"a"),
        (b"event: x\ndata: a\ndata:  b\n\n", b"a\n b"),
        (b": keep-alive\n\n", b""),
        (b"\ndata: a\r\r", b"a"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
    ],
)
def test_data_is_the_data_lines_joined(event: bytes, data: bytes) -> None:
    """One blank after the colon is not part of the value; a comment has no data."""
    assert data_of(event) == data
