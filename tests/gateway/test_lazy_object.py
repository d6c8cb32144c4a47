"""A lazily parsed JSON object reads like one that is parsed whole."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.messages.lazy_object import BrokenValue, LazyObject, members_of

TEXTS = st.text(max_size=6) | st.sampled_from(['"', "\\", "\n", "é", "\U0001f600"])
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)
# What turns JSON into something else, or into other JSON.
PIECES = [
    b'"',
    b"\\",
    b"\\u12",
    b"\\ud800",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"0",
    b"e999",
    b"-",
    b"tru",
    b"\xff",
    b"\xc3",
    b"\x01",
    b"\n",
    b"a",
]


def parsed_whole(body: bytes) -> Any:
    """The object, or None for anything else."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def parsed_lazily(body: bytes) -> Any:
    """The same, member by member."""
    try:
        return dict(LazyObject(members_of(body)))
    except ValueError:
        return None


@given(OBJECTS, st.booleans(), TEXTS)
def test_it_holds_what_was_encoded(value: dict[str, Any], is_indented: bool, name: str) -> None:
    """Whatever the white space between its values."""
    lazy = LazyObject(members_of(json.dumps(value, indent=1).encode() if is_indented else orjson.dumps(value)))
    assert dict(lazy) == value and list(lazy) == list(value) and len(lazy) == len(value)
    assert (name in lazy, lazy.get(name), lazy.get(name, 7)) == (name in value, value.get(name), value.get(name, 7))


@given(OBJECTS, st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), st.sampled_from(PIECES)), max_size=3))
def test_broken_json_is_refused_at_once_or_when_it_is_read(
    value: dict[str, Any], changes: list[tuple[int, int, bytes]]
) -> None:
    """Bytes are inserted and removed anywhere."""
    body = orjson.dumps(value)
    for at, num_removed, piece in changes:
        at %= len(body) + 1
        body = body[:at] + piece + body[at + num_removed :]
    assert parsed_lazily(body) == parsed_whole(body)


@pytest.mark.parametrize("broken", [b'"\xff"', b"1e999", b'["\xed\xa0\x80"]'])
def test_what_is_not_read_may_be_broken(broken: bytes) -> None:
    """Text that is not UTF-8, and a number that is too large."""
    lazy = LazyObject(members_of(b'{"model":"m","x":%s,"n":1}' % broken))
    assert (lazy["model"], lazy["n"], "x" in lazy) == ("m", 1, True)
    with pytest.raises(BrokenValue):
        lazy.get("x")


def test_of_a_repeated_name_the_last_value_counts() -> None:
    """As where JSON is parsed whole."""
    assert dict(LazyObject(members_of(b'{"a":1,"b":2,"a":3}'))) == {"a": 3, "b": 2}


def test_an_absent_name_is_a_key_error() -> None:
    """As in a dictionary."""
    with pytest.raises(KeyError):
        LazyObject(members_of(b"{}"))["a"]


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"a":', b'{"a":1}x'])
def test_anything_but_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        members_of(body)


@pytest.mark.parametrize("num_levels", [5_000, 1_000_000])
def test_what_is_nested_too_deeply_is_refused_at_once_or_when_it_is_read(num_levels: int) -> None:
    """It depends on Python's version (3.11: from 1,000 levels on) and on the stack."""
    with pytest.raises(ValueError):
        LazyObject(members_of(b'{"a":' + b"[" * num_levels + b"]" * num_levels + b"}")).parse()
