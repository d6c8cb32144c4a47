"""An event that matches a text-only event has only text."""

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.messages.plain import plain_events
from gateway.messages.streams import StreamReader
from gateway.messages.text_only import TextOnlyEvents

WORDS = [
    "error",
    "usage",
    "finish_reason",
    "content",
    '"',
    "\\",
    "\n",
    "\n\ndata: {}",
    ":",
    "}",
    "null",
    "stop",
    "",
    "é",
]
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=4).map("".join)


def event(text: str, name: str = "content", reason: str | None = None, **more: Any) -> bytes:
    """One chunk of a chat."""
    choice = {"index": 0, "delta": {name: text}, "logprobs": None, "finish_reason": reason}
    return b"data: " + orjson.dumps({"id": "c", "choices": [choice], **more}) + b"\n\n"


EVENTS = st.builds(
    event,
    TEXTS,
    st.sampled_from(["content", "reasoning_content", "role"]),
    st.sampled_from([None, None, None, "stop", "tool_calls"]),
)
OTHERS = st.sampled_from(
    [
        event("x", usage={"prompt_tokens": 1, "completion_tokens": 1}),
        event("x", error={"message": "no"}),
        b'data: {"error":{"message":"x"}}\n\n',
        event("x")[:-1],
        event("x") * 2,
        event("x")[:-3] + b'\n"}\n\n',
        b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"\n\n"},"logprobs":null,"finish_reason":null}]}\n\n',
        b": ping\n\n",
        b"data: [DONE]\n\n",
    ]
)


@given(st.lists(EVENTS | OTHERS, max_size=12))
def test_a_matching_event_has_only_text(events: list[bytes]) -> None:
    """It is one whole event without a finish reason, usage or error, whatever its text is."""
    text_only, is_plain = TextOnlyEvents(), plain_events("chat")
    for candidate in events:
        if text_only.matches(candidate):
            assert candidate.count(b"\n") == 2 and candidate.startswith(b"data: ")
            chunk = orjson.loads(candidate[6:])
            assert set(chunk) == {"id", "choices"} and chunk["choices"][0]["finish_reason"] is None
        elif is_plain(candidate) == 1:
            text_only.learn(candidate)


@given(TEXTS, st.text(st.characters(exclude_characters='"\\', exclude_categories=["C"])))
def test_events_that_differ_only_in_text_match(first: str, second: str) -> None:
    """Unless the first text has an escape, such as a quote: that event is no example. One that is shorter than the
    example is unlike it; as machine code, this failed.
    """
    text_only = TextOnlyEvents()
    text_only.learn(event(first))
    is_example = b"\\" not in orjson.dumps(first)
    assert text_only.matches(event(second)) == is_example
    assert not text_only.matches(event(second, reason="stop"))
    assert not text_only.matches(event(second, "role"))
    assert not text_only.matches(b"data: [DONE]\n\n")


def test_an_example_is_replaced_when_the_stream_changes() -> None:
    """Some engines send a new time every second: a few events later, one with that time is the example."""
    text_only, num_unlike = TextOnlyEvents(), 0
    for number in range(320):
        candidate = event(str(number), created=number // 64)
        if not text_only.matches(candidate):
            num_unlike += 1
            text_only.learn(candidate)
    assert num_unlike < 16 * 5 + 5


def test_nothing_passes_unread_after_the_end() -> None:
    """Neither after [DONE] nor after an error."""
    for end in (b"data: [DONE]\n\n", b'data: {"error":{"message":"no","code":500}}\n\n'):
        reader = StreamReader("chat")
        reader.read(event("a"))
        assert [reader.passes(event(text)) for text in ("b", "c")] == [True, True]
        reader.read(end)
        assert not reader.passes(event("d"))
