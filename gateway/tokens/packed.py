"""One turn's tokens as bytes: so they lie in memory, and so they are stored.

A turn holds what is new in its prompt, beyond the prompt and output of the turn that it continues, so that a long
trajectory costs each of its tokens once.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from engines.token_ids import ID_BYTES, TokenIds
from gateway.tokens.turn_tokens import TurnTokens, VersionSpan
from scheduling.values import value_class

LOGPROB_BYTES = 4
_HEAD_LENGTH = 4
"""Bytes that say how long the head is, which is a JSON list of the fields of KeptTurn; the arrays follow it."""
_VERSIONS = 5
"""Where in the head the versions are."""


@value_class(frozen=True, slots=True)
class KeptTurn:
    """One ended turn. The arrays are views of `data`.

    Args:
        num_before: how many tokens of its prompt are those of its parent, prompt and output; 0 without a parent.
        num_new: how many tokens of its prompt come after them.
        start: where in `data` the arrays begin.
    """

    turn_id: str
    parent: str | None
    history: str
    finish_reason: str
    ended_at: float
    versions: tuple[VersionSpan, ...]
    num_before: int
    num_new: int
    num_output: int
    has_logprobs: bool
    data: bytes
    start: int

    @property
    def num_tokens(self) -> int:
        """Of its whole prompt and its output."""
        return self.num_before + self.num_new + self.num_output

    @property
    def ids(self) -> memoryview:
        """Bytes of the new prompt's ids and the output's."""
        return memoryview(self.data)[self.start : self.start + ID_BYTES * (self.num_new + self.num_output)]

    @property
    def new_ids(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.data, np.uint32, self.num_new, self.start)

    @property
    def output_ids(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.data, np.uint32, self.num_output, self.start + ID_BYTES * self.num_new)

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        if not self.has_logprobs:
            return None
        start = self.start + ID_BYTES * (self.num_new + self.num_output)
        return np.frombuffer(self.data, np.float32, self.num_output, start)


def kept(tokens: TurnTokens, parent: str | None, prompt: bytes, num_before: int) -> KeptTurn:
    """A turn as it is kept; `decoded` makes the same of its bytes.

    Args:
        parent: the kept turn that it continues.
        prompt: bytes of all ids of its prompt.
        num_before: how many of them are its parent's.
    """
    output = id_bytes(tokens.output_ids)
    num_output = len(output) // ID_BYTES
    logprobs = b"" if tokens.logprobs is None else _numbers("f", tokens.logprobs)
    assert tokens.logprobs is None or len(logprobs) == LOGPROB_BYTES * num_output, "one log-probability per token"
    names = tokens.turn_id, parent, tokens.history, tokens.finish_reason, tokens.ended_at
    counts = num_before, len(prompt) // ID_BYTES - num_before, num_output, tokens.logprobs is not None
    versions = [(span.version, span.start, span.end) for span in tokens.versions]
    head = orjson.dumps((*names, versions, *counts))
    head += b" " * (-len(head) % ID_BYTES)
    data = b"".join((len(head).to_bytes(_HEAD_LENGTH), head, prompt[ID_BYTES * num_before :], output, logprobs))
    return KeptTurn(*names, tokens.versions, *counts, data, _HEAD_LENGTH + len(head))


def decoded(data: bytes) -> KeptTurn:
    """The turn that was kept as these bytes."""
    start = _HEAD_LENGTH + int.from_bytes(data[:_HEAD_LENGTH])
    head: list[Any] = orjson.loads(data[_HEAD_LENGTH:start])
    head[_VERSIONS] = tuple(VersionSpan(*span) for span in head[_VERSIONS])
    return KeptTurn(*[*head, data, start])


def id_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as bytes; free of conversion where they are an array of 32-bit integers already."""
    if isinstance(ids, TokenIds):
        return ids.packed
    return _numbers("I", ids)


def chain(turns: dict[str, KeptTurn], last: KeptTurn) -> list[KeptTurn]:
    """The turns from a root to this one; each of them continues the one before."""
    found = [last]
    while (parent := found[-1].parent) is not None:
        found.append(turns[parent])
    return found[::-1]


def all_ids(turns: Iterable[KeptTurn]) -> bytes:
    """Bytes of all ids of such a chain: the last one's prompt and output."""
    return b"".join([turn.ids for turn in turns])


def rooted(turns: Iterable[KeptTurn]) -> dict[str, KeptTurn]:
    """By id, in the order of their ends, those of the turns all of whose ancestors are there."""
    kept: set[str] = set()
    # A turn's parent has less before it than the turn itself.
    for turn in sorted(turns := list(turns), key=lambda turn: (turn.num_before, turn.ended_at)):
        if turn.parent is None or turn.parent in kept:
            kept.add(turn.turn_id)
    in_order = sorted(turns, key=lambda turn: turn.ended_at)
    return {turn.turn_id: turn for turn in in_order if turn.turn_id in kept}


def _numbers(kind: str, values: Sequence[Any]) -> bytes:
    # From a list, array is twice as fast as numpy; from any buffer, numpy copies or converts.
    return (array(kind, values) if isinstance(values, list | tuple) else np.asarray(values, kind)).tobytes()
