"""Token ids on their way between engines and the store: kept as the digits in which they came.

A prompt has thousands of them, arrives again with every turn and is sent on up to three times. A list would create that
many objects at every turn. 32-bit integers would be a third smaller, but parsing them from an answer's digits takes
seven times as long as everything else done with them (26 ns an id). So they become numbers only where someone computes
with them: in a trainer's export, which happens once.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import orjson
from numpy.typing import NDArray

from engines.upstream import encoded

ID_BYTES = 4
"""Size of an id as an integer."""
_COMMA = ord(",")
_COMMAS = np.array(_COMMA, np.uint8)  # made once: to convert an integer takes half as long as the comparison
_NINE, _NO_DIGITS = ord("9") - _COMMA, (b"-", b".", b"/")
"""The nine's distance from the comma, and the characters between them that are not digits. Those are searched with
`find`: `in` first tries them as integers, which takes seven times as long (2,000 instructions).
"""
# Of an id and its comma: the largest vocabularies have some 260,000 tokens.
_LETTERS = 7


class TokenIds(Sequence[int]):
    """An immutable sequence of token ids.

    Args:
        text: in decimal, separated by commas, without blanks.
        number: how many there are, if known.
    """

    __slots__ = ("_number", "text")

    def __init__(self, text: bytes, number: int | None = None) -> None:
        self.text = text
        self._number = number

    @classmethod
    def of(cls, ids: Sequence[int]) -> "TokenIds":
        """These ids as TokenIds. Raises TypeError or ValueError if they are not ids."""
        try:
            if isinstance(ids, list):  # checked first: for other classes the check against Sequence is expensive
                return cls(orjson.dumps(array("I", ids).tolist())[1:-1], len(ids))
            if isinstance(ids, TokenIds):
                return ids
            known = np.asarray(ids, np.uint32)
        except OverflowError as error:
            raise ValueError(str(error)) from None
        return cls(orjson.dumps(known, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1], len(known))

    @property
    def numbers(self) -> NDArray[np.uint32]:
        """As numbers. Cost: 26 ns an id."""
        return np.fromstring(self.text, np.uint32, sep=",") if self.text else np.empty(0, np.uint32)

    def begins_with(self, *parts: "TokenIds") -> bool:
        """Whether these parts, put together, are a prefix of these ids; equal counts too."""
        return self.end_of(*parts) is not None

    def end_of(self, *parts: "TokenIds", start: int = 0) -> int | None:
        """Where what follows these parts, put together, begins in the text; None if they do not come at `start`, where
        an id begins. Nothing is copied.
        """
        for part in parts:
            if part.text:
                end = start + len(part.text)
                if not self.text.startswith(part.text, start) or self.text[end : end + 1] not in (b"", b","):
                    return None
                start = end + 1
        return start

    def tail(self, number: int) -> "TokenIds":
        """At least this many of the last ids, or all."""
        cut = len(self.text) - _LETTERS * number
        return self if cut <= 0 else TokenIds(self.text[self.text.index(b",", cut - 1) + 1 :])

    def __add__(self, more: Sequence[int]) -> "TokenIds":
        if not more:
            return self
        further = TokenIds.of(more)
        return TokenIds(b"%b,%b" % (self.text, further.text), len(self) + len(further)) if self.text else further

    def __len__(self) -> int:
        if self._number is None:
            self._number = _num_commas(self.text) + bool(self.text)
        return self._number

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> list[int]: ...
    def __getitem__(self, key: int | slice) -> int | list[int]:
        found: int | list[int] = self.numbers[key].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def messages(ids: TokenIds, end_of_turn: int) -> list[TokenIds]:
    """The ids, cut after each such token; the part after the last one comes last, even if it is empty.

    Cost: 0.3 ms for 100,000 ids and 100 cuts.
    """
    text, mark = b",%b," % ids.text, b",%d," % end_of_turn
    cuts, at = [0], text.find(mark)
    while at >= 0:
        cuts.append(at + len(mark) - 1)
        at = text.find(mark, cuts[-1])  # from its last comma: two such tokens may follow each other
    return [TokenIds(text[start + 1 : end]) for start, end in pairwise((*cuts, len(text) - 1))]


def put_together(parts: Iterable[TokenIds]) -> TokenIds:
    """The concatenation of these."""
    parts = [part for part in parts if part.text]
    return TokenIds(b",".join([part.text for part in parts]), sum(map(len, parts)))


def with_ids(call: Any) -> bytes:
    """JSON of a value that contains TokenIds. Raises TooDeep."""
    return encoded(call, _fragment)


def with_prompt(call: dict[str, Any], name: str, ids: TokenIds) -> tuple[bytes, ...]:
    """JSON of a call, with these ids as its last field, in pieces: `with_ids` would copy them three times.

    Raises: TooDeep.
    """
    return b'%b,"%b":[' % (encoded(call)[:-1], name.encode()), ids.text, b"]}"


def _fragment(value: object) -> orjson.Fragment:
    if isinstance(value, TokenIds):
        return orjson.Fragment(b"[%b]" % value.text)
    raise TypeError


def cut_ids(answer: bytes, name: str) -> tuple[Any, TokenIds | None]:
    """An answer's JSON with its only list of this name emptied, and the ids of that list; None if there is no such
    list.

    Raises: ValueError if it is not JSON.
    Cost: 2 ns an id.
    """
    mark = b'"%b":[' % name.encode()  # within a string the quotes would be escaped
    start = answer.find(mark) + len(mark)
    end = answer.find(b"]", start)
    if start < len(mark) or end < 0 or answer.find(mark, end) >= 0:
        return orjson.loads(answer), None
    text = answer[start:end]
    number = _num_ids(text)
    if number is None:
        return orjson.loads(answer), None
    return orjson.loads(b"%b%b" % (answer[:start], answer[end:])), TokenIds(text, number)


def _num_ids(text: bytes) -> int | None:
    """How many ids it has; None if it is not a list of ids."""
    if not text:
        return 0
    marks = np.frombuffer(text, np.uint8) - _COMMAS  # 0 is a comma; characters before it wrap around to above the nine
    # This check takes a quarter of the time of testing each character for being a digit; finding the maximum's position
    # takes half the time of finding the maximum.
    if marks[marks.argmax()] > _NINE or max(map(text.find, _NO_DIGITS)) >= 0:
        return None
    pairs = marks[1:] | marks[:-1]
    if not marks[0] or not marks[-1] or (len(pairs) and not pairs[pairs.argmin()]):
        return None
    return len(text) - int(np.count_nonzero(marks)) + 1


def _num_commas(text: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _COMMAS))
