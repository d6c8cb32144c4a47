"""A JSON object whose values are parsed when they are first read.

Of an agent's long context, a turn of a known trajectory reads a few short members. Parsing all of it takes three times
as long as finding where its members begin and end, and makes thousands of objects that are freed again.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import orjson
from msgspec import DecodeError, Raw
from msgspec.json import Decoder

Members = dict[str, Raw | memoryview]
"""An object's members, each as its JSON."""

_members = Decoder(dict[str, Raw]).decode


class BrokenValue(ValueError):
    """A value is not JSON after all. The client's mistake."""


def members_of(body: bytes) -> Members:
    """The members of the object in these bytes; of a repeated name, the last value counts. They keep the bytes alive.

    All of it is checked, except that text is UTF-8, that numbers are not too large and, from Python 3.12 on, that no
    value is nested too deeply to be read.

    Raises:
        ValueError: it is not JSON, not an object, or nested too deeply.
    """
    try:
        return cast(Members, _members(body))
    except (DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


class Growth(NamedTuple):
    """What a request adds to the conversation of an earlier one.

    Args:
        name: of the list of messages.
        before: digest of the request's bytes up to the last message of the earlier one; None if there was none.
        after: the same up to its own last message.
        added: the messages in between, as a JSON list behind a first element that means nothing; "" if there was no
            earlier one.
    """

    name: str
    before: bytes | None
    after: bytes
    added: bytes


class LazyObject(Mapping[str, Any]):
    """The object with these members. Reading a value that `members_of` did not find broken, and is, raises BrokenValue.

    Args:
        growth: of its conversation, if it is known.
    """

    __slots__ = ("_parsed", "_raw", "growth")

    def __init__(self, members: Members, growth: Growth | None = None) -> None:
        self._raw = members
        self._parsed: dict[str, Any] = {}
        self.growth = growth

    def parse(self) -> None:
        """Parse all values. Raises BrokenValue."""
        for name in self._raw:
            self[name]

    def raw(self, name: str) -> bytes:
        """A member's JSON; empty if there is no such member."""
        return bytes(self._raw.get(name, b""))

    def __getitem__(self, name: str) -> Any:
        parsed = self._parsed
        if name not in parsed:
            try:
                parsed[name] = orjson.loads(memoryview(self._raw[name]))
            except orjson.JSONDecodeError as error:
                raise BrokenValue(str(error)) from None
        return parsed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._raw else default
