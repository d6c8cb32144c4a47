"""A conversation read from where its last turn ended is the same as one that is read whole."""

from hashlib import sha256
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.messages.beginnings import Beginnings
from gateway.messages.histories import Histories
from gateway.messages.lazy_object import BrokenValue, LazyObject
from gateway.messages.transcripts import History

LONG = {"role": "system", "content": "s" * 9_000}
ANSWER, QUESTION = {"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"b": 1, "a": 2}'}}
MESSAGES = st.lists(
    st.sampled_from(
        [
            QUESTION,
            {"role": "user", "content": [{"type": "text", "text": "q "}]},
            ANSWER,
            {"role": "assistant", "content": "<think>x</think>a", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "é\n"},
            {"type": "reasoning", "id": "r1"},
            {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
            {"role": "system", "content": "more"},
            "q",
            1,
            12,
        ]
    ),
    max_size=6,
)


def seen(history: History) -> tuple[object, ...]:
    digests = history.digest(), history.digest(ANSWER)
    return history.digests, history.asked, *digests, history.num_calls, history.before_last


class Reader:
    """Reads requests and their conversations, of one trajectory each or of clients that name none."""

    def __init__(self, limit: int = 100) -> None:
        self._beginnings = Beginnings(sha256, 100)
        self.histories = Histories(sha256, limit)

    def lazily(self, body: bytes, within: str = "") -> tuple[LazyObject, History]:
        lazy = self._beginnings.read(within or None, body)
        return lazy, self.histories.read(lazy, within)

    def read(self, request: dict[str, Any], within: str = "") -> History:
        return self.lazily(orjson.dumps(request), within)[1]

    def parses(self, *messages: object, within: str = "", name: str = "messages") -> bool:
        """Whether the whole conversation of a request is parsed."""
        body = orjson.dumps({name: [LONG, *messages]})
        lazy, history = self.lazily(body, within)
        assert seen(history) == seen(History(orjson.loads(body)))
        return name in lazy._parsed


@given(
    st.lists(MESSAGES, min_size=1, max_size=5),
    st.sampled_from(["messages", "input"]),
    st.sampled_from([{}, {"system": "Be brief."}, {"instructions": "Be brief."}, {"system": [], "instructions": "x"}]),
    st.booleans(),
    st.sampled_from(["", "t"]),
    st.data(),
)
def test_a_growing_conversation_is_read_as_if_whole(
    turns: list[list[Any]], name: str, preamble: dict[str, Any], is_after: bool, within: str, data: st.DataObject
) -> None:
    """Whatever each turn adds, where the preamble stands, and if it goes back to an earlier turn."""
    reader = Reader()
    messages = [LONG]
    for added in turns:
        messages = messages[: data.draw(st.integers(1, len(messages)))] if data.draw(st.booleans()) else messages
        messages = messages + added
        said = {name: messages}
        request = {"model": "m", **(said | preamble if is_after else preamble | said)}
        assert seen(reader.read(request, within)) == seen(History(request))


@pytest.mark.parametrize("name", ["messages", "input"])
def test_only_what_is_new_is_parsed(name: str) -> None:
    """One history of a conversation is kept, its last. The very same request again needs no parsing either."""
    reader = Reader()
    assert reader.parses(name=name)
    assert not reader.parses(ANSWER, QUESTION, name=name)
    assert not reader.parses(ANSWER, QUESTION, name=name)
    assert len(reader.histories) == 1


def test_a_conversation_is_read_from_the_last_known_message() -> None:
    """A shorter one stays known, for others that continue it."""
    reader = Reader()
    reader.parses(ANSWER)
    assert reader.parses()
    assert not reader.parses(ANSWER, QUESTION)
    assert not reader.parses(QUESTION)


def test_messages_are_not_taken_for_others_of_the_same_bytes() -> None:
    """No engine accepts numbers as messages."""
    reader = Reader()
    assert reader.parses(1, 12)
    assert reader.parses(11, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"system": "x", "messages": [LONG, ANSWER]},
        {"messages": [LONG, ANSWER], "system": "x"},
        {"messages": [LONG, ANSWER], "instructions": "x"},
        {"messages": [LONG | {"content": "t" * 9_000}, ANSWER]},
        {"messages": [ANSWER, LONG]},
    ],
)
def test_another_conversation_is_read_whole(other: dict[str, Any]) -> None:
    """Another preamble, an edited message, another order."""
    reader = Reader()
    reader.read({"messages": [LONG]})
    assert seen(reader.read(other)) == seen(History(other))
    assert len(reader.histories) == 2


def test_a_conversation_is_known_within_its_trajectory_only() -> None:
    reader = Reader()
    assert [reader.parses(within=within) for within in ("a", "b", "a")] == [True, True, False]


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": "s" * 9_000},
        {"input": "s" * 9_000},
        {"messages": None, "input": "s" * 9_000},
        {"messages": {"role": "user"}, "pad": "s" * 9_000},
        {"prompt": "s" * 9_000},
        {"messages": [], "pad": "s" * 9_000},
        {"messages": None, "input": [LONG]},
    ],
)
def test_every_form_of_a_conversation_is_read(request_: dict[str, Any]) -> None:
    reader = Reader()
    for _ in range(2):
        assert seen(reader.read(request_)) == seen(History(request_))


def test_of_a_repeated_name_the_last_value_counts() -> None:
    """As when it is parsed whole."""
    reader = Reader()
    one, other = orjson.dumps([LONG]), orjson.dumps([LONG | {"content": "t" * 9_000}])
    for body in (b'{"messages":%s}' % other, b'{"messages":%s,"messages":%s}' % (one, other)):
        assert seen(reader.lazily(body)[1]) == seen(History(orjson.loads(body)))


def test_a_new_message_that_is_no_text_is_refused() -> None:
    """What is read after it is right."""
    reader = Reader()
    body = orjson.dumps({"messages": [LONG]})
    reader.lazily(body)
    with pytest.raises(BrokenValue):
        reader.lazily(body[:-2] + b',{"role":"user","content":"\xff"}]}')
    reader.parses(ANSWER)
    assert not reader.parses(ANSWER, QUESTION)


def test_a_short_conversation_is_not_kept() -> None:
    """It is parsed when it is read (gateway/turns/request_reader.py)."""
    histories = Histories(sha256, 100)
    request = {"messages": [ANSWER]}
    assert seen(histories.read(request)) == seen(History(request))
    assert len(histories) == 0


def test_the_least_recently_read_is_forgotten_first() -> None:
    """The limit counts answers: two conversations of three have room where one of ten has."""
    reader = Reader(limit=1)
    for number in range(3):
        reader.read({"messages": [LONG, *[ANSWER] * 3]}, f"t{number}")
    assert len(reader.histories) == 2
    assert not reader.parses(*[ANSWER] * 3, within="t2")
    assert reader.parses(*[ANSWER] * 3, within="t0")


@pytest.mark.parametrize("limit", [0, 1])
def test_a_history_larger_than_the_limit_is_read_and_not_kept(limit: int) -> None:
    reader = Reader(limit)
    request = {"messages": [LONG, *[ANSWER] * 10]}
    for _ in range(2):
        assert seen(reader.read(request)) == seen(History(request))
    assert len(reader.histories) == 0


def test_the_calls_of_a_conversation_are_counted() -> None:
    """As far as it has come, whether or not it was parsed whole."""
    reader = Reader()
    called = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    requests = [{"messages": [LONG, *[called, QUESTION] * number, ANSWER]} for number in range(4)]
    assert [reader.read(request).num_calls for request in requests] == [0, 2, 4, 6]
    assert reader.read({"messages": [LONG, 1, {"role": "assistant", "tool_calls": 7}, called]}).num_calls == 2
