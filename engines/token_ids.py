"""Token ids on their way between engines and the store: as the digits that they came in.

A prompt has thousands of them, comes anew with every turn and goes on up to three times. As a list they would be as
many objects at every turn; as 32-bit integers they would be a third smaller, but to read them out of an answer's digits
takes seven times as long as all else that is done with them (26 ns an id). So they are numbers only where somebody
counts on them: a trainer's export, which asks once.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import orjson
from numpy.typing import NDArray

ID_BYTES = 4
"""Of an id as an integer."""
_COMMA = ord(",")
_COMMAS = np.array(_COMMA, np.uint8)  # to make an array of an integer takes half as long as to compare with it
_NINE, _NO_DIGITS = ord("9") - _COMMA, (b"-", b".", b"/")
"""How far the nine is from the comma, and what is between them besides the digits. They are found: `in` tries them as
integers first, which takes seven times as long (2,000 instructions)."""
# Of an id and its comma: the largest vocabularies have some 260,000 tokens.
_LETTERS = 7


class TokenIds(Sequence[int]):
    """Some of them, that never change.

    Args:
        text: in decimal, with commas between them and no blanks.
        number: how many they are, where it is known.
    """

    __slots__ = ("_number", "text")

    def __init__(self, text: bytes, number: int | None = None) -> None:
        self.text = text
        self._number = number

    @classmethod
    def of(cls, ids: Sequence[int]) -> "TokenIds":
        """These. Raises TypeError or ValueError for what is none."""
        try:
            if isinstance(ids, list):  # asked first: of another class, a Sequence must think whether it is one
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

    def begins_with(self, others: "TokenIds") -> bool:
        """Whether these are the first of them; all are, too."""
        return _begins_with(self.text, others.text)

    def tail(self, number: int) -> "TokenIds":
        """The last ones, some more than so many, or all."""
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
    """Cut behind each such token; what follows the last one comes last, if only nothing.

    Cost: 0.3 ms for 100,000 ids and 100 cuts.
    """
    text, mark = b",%b," % ids.text, b",%d," % end_of_turn
    cuts, at = [0], text.find(mark)
    while at >= 0:
        cuts.append(at + len(mark) - 1)
        at = text.find(mark, cuts[-1])  # from its last comma: two such tokens may follow each other
    return [TokenIds(text[start + 1 : end]) for start, end in pairwise((*cuts, len(text) - 1))]


def put_together(parts: Iterable[TokenIds]) -> TokenIds:
    """One after the other."""
    parts = [part for part in parts if part.text]
    return TokenIds(b",".join([part.text for part in parts]), sum(map(len, parts)))


def with_ids(call: Any) -> bytes:
    """JSON of what has TokenIds in it."""
    return orjson.dumps(call, default=_fragment)


def with_prompt(call: dict[str, Any], name: str, ids: TokenIds) -> tuple[bytes, ...]:
    """JSON of a call, and these ids as its last field, in pieces: `with_ids` copies them three times."""
    return b'%b,"%b":[' % (orjson.dumps(call)[:-1], name.encode()), ids.text, b"]}"


def _fragment(value: object) -> orjson.Fragment:
    if isinstance(value, TokenIds):
        return orjson.Fragment(b"[%b]" % value.text)
    raise TypeError


def cut_ids(answer: bytes, name: str) -> tuple[Any, TokenIds | None]:
    """An answer's JSON with its one list of this name empty, and the ids of that; None where it has no such one.

    Raises: ValueError for what is no JSON.
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
    """How many ids it is; None for what is no list of them."""
    if not text:
        return 0
    marks = np.frombuffer(text, np.uint8) - _COMMAS  # 0 is a comma, and what comes before it is above the nine
    # To look so takes a quarter of what it takes to see of each letter whether it is a digit; to find where the most is
    # takes half of what it takes to find the most.
    if marks[marks.argmax()] > _NINE or max(map(text.find, _NO_DIGITS)) >= 0:
        return None
    pairs = marks[1:] | marks[:-1]
    if not marks[0] or not marks[-1] or (len(pairs) and not pairs[pairs.argmin()]):
        return None
    return len(text) - int(np.count_nonzero(marks)) + 1


def _num_commas(text: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _COMMAS))


def _begins_with(text: bytes, start: bytes) -> bool:
    """Whether it does where a number ends."""
    return text.startswith(start) and (not start or len(text) == len(start) or text[len(start)] == _COMMA)
