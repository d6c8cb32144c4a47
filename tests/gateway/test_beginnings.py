"""A request read from where its trajectory's last one ended is the same as one that is read whole."""

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from gateway.messages.beginnings import Beginnings
from gateway.messages.lazy_object import LazyObject
from tests.gateway.test_lazy_object import PIECES, VALUES, parsed_lazily

TASK = {"role": "user", "content": "t" * 50}
ANSWER, RESULT = {"role": "assistant", "content": 'a"]}'}, {"role": "tool", "content": "[{é\\"}
MESSAGES = st.lists(st.sampled_from([ANSWER, RESULT, {}, {"a": [{}]}, "q", 1, 12, [1]]), max_size=4)
MEMBERS = st.lists(
    st.tuples(st.sampled_from(["model", "input", "tools", "stream", "é"]), VALUES | st.just([TASK])), max_size=3
)
ENCODERS: list[Callable[[Any], bytes]] = [
    orjson.dumps,
    lambda value: json.dumps(value).encode(),
    lambda value: json.dumps(value, indent=1).encode(),
]


def read(beginnings: Beginnings, body: bytes, trajectory_id: str = "t") -> Any:
    """The object, or None for anything else."""
    try:
        return dict(beginnings.read(trajectory_id, body))
    except ValueError:
        return None


def is_continued(beginnings: Beginnings, request: dict[str, Any] | bytes, trajectory_id: str = "t") -> bool:
    """Whether a request was read from where the last one ended: then its members are views of its bytes."""
    body = request if isinstance(request, bytes) else orjson.dumps(request)
    lazy = beginnings.read(trajectory_id, body)
    assert dict(lazy) == orjson.loads(body)
    return any(isinstance(value, memoryview) for value in lazy._raw.values())


@given(
    MEMBERS,
    st.sampled_from(["messages", "input"]),
    st.lists(st.tuples(MESSAGES, MEMBERS, st.booleans()), min_size=2, max_size=5),
    st.sampled_from(ENCODERS),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 2), st.sampled_from(PIECES)), max_size=2),
    st.data(),
)
def test_a_growing_request_is_read_as_if_whole(
    before: list[tuple[str, Any]],
    name: str,
    turns: list[tuple[list[Any], list[tuple[str, Any]], bool]],
    encoded: Callable[[Any], bytes],
    changes: list[tuple[int, int, bytes]],
    data: st.DataObject,
) -> None:
    """Whatever each turn adds and what follows its messages, whatever is repeated, cut off or broken on the way."""
    beginnings = Beginnings(xxh3_128, 10)
    messages: list[Any] = [TASK]
    for number, (added, after, goes_back) in enumerate(turns):
        messages = messages[: data.draw(st.integers(0, len(messages)))] if goes_back else messages
        messages = messages + added
        members = [*before, (name, messages), *after]
        body = b"{" + b",".join(encoded(key) + b":" + encoded(value) for key, value in members) + b"}"
        for at, num_removed, piece in changes if number == len(turns) - 1 else ():
            at %= len(body) + 1
            body = body[:at] + piece + body[at + num_removed :]
        assert read(beginnings, body) == parsed_lazily(body)


def test_only_what_is_new_is_searched() -> None:
    """Also if the very same request comes again, or what follows the messages differs."""
    beginnings = Beginnings(xxh3_128, 10)
    assert not is_continued(beginnings, {"model": "m", "messages": [TASK], "stream": True})
    assert is_continued(beginnings, {"model": "m", "messages": [TASK, ANSWER, RESULT], "stream": True})
    assert is_continued(beginnings, {"model": "m", "messages": [TASK, ANSWER, RESULT], "stream": True})
    assert is_continued(beginnings, {"model": "m", "messages": [TASK, ANSWER, RESULT, TASK], "tools": []})
    assert is_continued(beginnings, json.dumps({"x": 1, "input": [TASK]}).encode(), "other") is False
    assert is_continued(beginnings, json.dumps({"x": 1, "input": [TASK, ANSWER]}).encode(), "other")


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n", "messages": [TASK, ANSWER, RESULT]},
        {"model": "m", "messages": [TASK, RESULT]},
        {"model": "m", "messages": [TASK]},
        {"messages": [TASK, ANSWER], "model": "m"},
    ],
)
def test_another_beginning_is_searched_whole(other: dict[str, Any]) -> None:
    """Another value before the messages, an edited message, fewer of them, another order. Then that one is known."""
    beginnings = Beginnings(xxh3_128, 10)
    is_continued(beginnings, {"model": "m", "messages": [TASK, ANSWER]})
    assert not is_continued(beginnings, other)
    assert is_continued(beginnings, other)


def test_a_beginning_is_known_within_its_trajectory_only() -> None:
    beginnings = Beginnings(xxh3_128, 10)
    assert [is_continued(beginnings, {"messages": [TASK]}, name) for name in "aba"] == [False, False, True]


def test_a_name_that_comes_twice_is_not_forgotten() -> None:
    """It comes before the messages and after them, where the next request lacks it."""
    beginnings = Beginnings(xxh3_128, 10)
    assert not is_continued(beginnings, b'{"model":"m","messages":[{"a":1}],"model":"n"}')
    assert is_continued(beginnings, b'{"model":"m","messages":[{"a":1},{"b":2}]}')


@pytest.mark.parametrize(
    "after",
    [
        b'],"messages":[{"b":2}]}',
        b'],"input":[{"a":1},{"b":2}]}',
        b"]}",
        b" , {} ] }",
        b",1]}",
    ],
)
def test_whatever_follows_is_read(after: bytes) -> None:
    """The list again, another as long, nothing; spaces, and an element that may go on in the next request."""
    beginnings = Beginnings(xxh3_128, 10)
    beginnings.read("t", b'{"messages":[{"a":1}]}')
    is_continued(beginnings, b'{"messages":[{"a":1}' + after)
    is_continued(beginnings, b'{"messages":[{"a":1}' + after.replace(b"1]", b"12]"))


@pytest.mark.parametrize("after", [b"", b"]", b"}", b"5]}", b'"]}', b"{}]}", b"]}}", b"]]}", b',"b":2}]}', b",]}"])
def test_broken_json_is_refused(after: bytes) -> None:
    """What an element known before would have to continue with."""
    beginnings = Beginnings(xxh3_128, 10)
    beginnings.read("t", b'{"messages":[{"a":1}]}')
    with pytest.raises(ValueError):
        beginnings.read("t", b'{"messages":[{"a":1}' + after)


def test_the_least_recently_read_is_forgotten_first() -> None:
    beginnings = Beginnings(xxh3_128, 2)
    for name in "abac":
        is_continued(beginnings, {"messages": [TASK]}, name)
    assert len(beginnings) == 2
    assert is_continued(beginnings, {"messages": [TASK]}, "a")
    assert not is_continued(beginnings, {"messages": [TASK]}, "b")


@pytest.mark.parametrize("body", [b"{}", b'{"a":1}', b'{"messages":[]}', b'{"messages":["q"]}', b'{"prompt":[1,2]}'])
def test_a_request_without_a_list_of_objects_is_always_searched(body: bytes) -> None:
    beginnings = Beginnings(xxh3_128, 2)
    assert [is_continued(beginnings, body) for _ in range(2)] == [False, False]
    assert len(beginnings) == 0


def test_its_values_are_parsed_when_they_are_read() -> None:
    """As those of any LazyObject."""
    beginnings = Beginnings(xxh3_128, 2)
    beginnings.read("t", orjson.dumps({"model": "m", "messages": [TASK]}))
    lazy = beginnings.read("t", orjson.dumps({"model": "m", "messages": [TASK, ANSWER], "n": 1}))
    assert isinstance(lazy, LazyObject) and not lazy._parsed
    assert (lazy["model"], lazy["messages"], lazy["n"], "x" in lazy) == ("m", [TASK, ANSWER], 1, False)
