"""What is taken for text because it is like an event that was text, is nothing else."""

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.messages.streams import StreamReader, plain_events
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
def test_what_is_like_a_text_is_one(events: list[bytes]) -> None:
    """One whole event without a reason to end, usage or error, whatever its text says."""
    alike, is_plain = TextOnlyEvents(), plain_events("chat")
    for said in events:
        if alike.matches(said):
            assert said.count(b"\n") == 2 and said.startswith(b"data: ")
            chunk = orjson.loads(said[6:])
            assert set(chunk) == {"id", "choices"} and chunk["choices"][0]["finish_reason"] is None
        elif is_plain(said) == 1:
            alike.learn(said)


@given(TEXTS, st.text(st.characters(exclude_characters='"\\', exclude_categories=["C"])))
def test_another_text_is_like_the_first(first: str, second: str) -> None:
    """Else nothing is gained: an escaped quote in the first is no example, any other text is."""
    alike = TextOnlyEvents()
    alike.learn(event(first))
    is_example = b"\\" not in orjson.dumps(first)
    assert alike.matches(event(second)) == is_example
    assert not alike.matches(event(second, reason="stop"))
    assert not alike.matches(event(second, "role"))


def test_an_example_is_replaced_when_the_stream_changes() -> None:
    """Some engines say a new time every second: a few events later that one is the example."""
    alike, num_unlike = TextOnlyEvents(), 0
    for number in range(320):
        said = event(str(number), created=number // 64)
        if not alike.matches(said):
            num_unlike += 1
            alike.learn(said)
    assert num_unlike < 16 * 5 + 5


def test_nothing_passes_after_an_end() -> None:
    """What follows [DONE], or an error, is never passed on unread."""
    for end in (b"data: [DONE]\n\n", b'data: {"error":{"message":"no","code":500}}\n\n'):
        reader = StreamReader("chat")
        reader.read(event("a"))
        assert [reader.passes(event(text)) for text in ("b", "c")] == [True, True]
        reader.read(end)
        assert not reader.passes(event("d"))
