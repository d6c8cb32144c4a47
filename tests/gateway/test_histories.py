"""A conversation read from where its last turn ended is the same as one that is read whole."""

from hashlib import sha256
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def seen(history: History) -> tuple[list[str], list[tuple[str, int]], str, str]:
    return history.digests, history.asked, history.digest(), history.digest(ANSWER)


def read(histories: Histories, request: dict[str, Any], within: str = "") -> History:
    body = orjson.dumps(request)
    return histories.read(LazyObject(body), body, within)


@given(
    st.lists(MESSAGES, min_size=1, max_size=5),
    st.sampled_from(["messages", "input"]),
    st.sampled_from([{}, {"system": "Be brief."}, {"instructions": "Be brief."}, {"system": [], "instructions": "x"}]),
    st.data(),
)
def test_a_growing_conversation_is_read_as_if_whole(
    turns: list[list[Any]], name: str, preamble: dict[str, Any], data: st.DataObject
) -> None:
    """Whatever each turn adds, and if it goes back to an earlier one."""
    histories = Histories(sha256, 100)
    messages = [LONG]
    for added in turns:
        messages = messages[: data.draw(st.integers(1, len(messages)))] if data.draw(st.booleans()) else messages
        messages = messages + added
        request = {"model": "m", **preamble, name: messages}
        assert seen(read(histories, request)) == seen(History(request))


class Asked:
    """A request, and whether its conversation was parsed."""

    def __init__(self, *messages: object, name: str = "messages") -> None:
        self._name = name
        self.body = orjson.dumps({name: [LONG, *messages]})
        self.lazy = LazyObject(self.body)

    def is_parsed_by(self, histories: Histories, within: str = "") -> bool:
        assert seen(histories.read(self.lazy, self.body, within)) == seen(History(orjson.loads(self.body)))
        return self._name in self.lazy._parsed


@pytest.mark.parametrize("name", ["messages", "input"])
def test_only_what_is_new_is_parsed(name: str) -> None:
    """One history of a conversation is kept, its last. The very same request again needs no parsing either."""
    histories = Histories(sha256, 100)
    assert Asked(name=name).is_parsed_by(histories)
    assert not Asked(ANSWER, QUESTION, name=name).is_parsed_by(histories)
    assert not Asked(ANSWER, QUESTION, name=name).is_parsed_by(histories)
    assert len(histories) == 1


def test_a_conversation_is_read_from_the_last_known_message() -> None:
    """A shorter one stays known, for others that continue it."""
    histories = Histories(sha256, 100)
    Asked(ANSWER).is_parsed_by(histories)
    assert Asked().is_parsed_by(histories)
    assert not Asked(ANSWER, QUESTION).is_parsed_by(histories)
    assert not Asked(QUESTION).is_parsed_by(histories)


def test_messages_are_not_taken_for_others_of_the_same_bytes() -> None:
    """No engine accepts numbers as messages."""
    histories = Histories(sha256, 100)
    assert Asked(1, 12).is_parsed_by(histories)
    assert Asked(11, 2).is_parsed_by(histories)


@pytest.mark.parametrize(
    "other",
    [
        {"system": "x", "messages": [LONG, ANSWER]},
        {"instructions": "x", "messages": [LONG, ANSWER]},
        {"messages": [LONG | {"content": "t" * 9_000}, ANSWER]},
        {"messages": [ANSWER, LONG]},
    ],
)
def test_another_conversation_is_read_whole(other: dict[str, Any]) -> None:
    """Another preamble, an edited message, another order."""
    histories = Histories(sha256, 100)
    read(histories, {"messages": [LONG]})
    assert seen(read(histories, other)) == seen(History(other))
    assert len(histories) == 2


def test_a_conversation_is_known_within_its_trajectory_only() -> None:
    histories = Histories(sha256, 100)
    assert [Asked().is_parsed_by(histories, within) for within in ("a", "b", "a")] == [True, True, False]


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
    histories = Histories(sha256, 100)
    for _ in range(2):
        assert seen(read(histories, request_)) == seen(History(request_))


def test_of_a_repeated_name_the_last_value_counts() -> None:
    """As when it is parsed whole."""
    histories = Histories(sha256, 100)
    one, other = orjson.dumps([LONG]), orjson.dumps([LONG | {"content": "t" * 9_000}])
    for body in (b'{"messages":%s}' % other, b'{"messages":%s,"messages":%s}' % (one, other)):
        assert seen(histories.read(LazyObject(body), body)) == seen(History(orjson.loads(body)))
    assert len(histories) == 1


def test_a_new_message_that_is_no_text_is_refused() -> None:
    """The request before it stays known."""
    histories = Histories(sha256, 100)
    body = orjson.dumps({"messages": [LONG]})
    histories.read(LazyObject(body), body)
    broken = body[:-2] + b',{"role":"user","content":"\xff"}]}'
    with pytest.raises(BrokenValue):
        histories.read(LazyObject(broken), broken)
    assert not Asked(ANSWER).is_parsed_by(histories)


def test_a_short_conversation_is_not_kept() -> None:
    histories = Histories(sha256, 100)
    request = {"messages": [ANSWER]}
    assert seen(read(histories, request)) == seen(History(request))
    assert len(histories) == 0


def test_the_least_recently_read_is_forgotten_first() -> None:
    """The limit counts answers: two conversations of three have room where one of ten has."""
    histories = Histories(sha256, 1)
    for number in range(3):
        read(histories, {"messages": [LONG, *[ANSWER] * 3]}, str(number))
    assert len(histories) == 2
    assert not Asked(*[ANSWER] * 3).is_parsed_by(histories, "2")
    assert Asked(*[ANSWER] * 3).is_parsed_by(histories, "0")


@pytest.mark.parametrize("limit", [0, 1])
def test_a_history_larger_than_the_limit_is_read_and_not_kept(limit: int) -> None:
    histories = Histories(sha256, limit)
    request = {"messages": [LONG, *[ANSWER] * 10]}
    for _ in range(2):
        assert seen(read(histories, request)) == seen(History(request))
    assert len(histories) == 0
