"""One turn's tokens as bytes: so they lie in memory, and so they are stored.

A turn holds what is new in its prompt, beyond the prompt and output of the turn that it continues, so that a long
trajectory costs each of its tokens once. Ids are the digits that engines send: nothing is made of them until a trainer
asks.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from engines.token_ids import ID_BYTES, TokenIds, put_together
from gateway.tokens.turn_tokens import TurnTokens, VersionSpan
from scheduling.values import value_class

LOGPROB_BYTES = 4
_HEAD_LENGTH = 4
"""Bytes that say how long the head is, which is a JSON list of the fields of KeptTurn; the rest follows it."""
_VERSIONS = 5
"""Where in the head the versions are."""
_FIELDS = 11
"""Of a head. It had one less when ids were kept as 32-bit integers; it has one more, the base, in a piece with one."""


@value_class(frozen=True, slots=True)
class KeptTurn:
    """One ended turn.

    Args:
        num_before: how many tokens of its prompt are those of its parent, prompt and output; 0 without a parent.
        num_new: how many tokens of its prompt come after them.
        new_bytes: how long their text is.
        start: where in `data` the log-probabilities begin; the text of the new ids and that of the output's follow.
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
    new_bytes: int
    data: bytes
    start: int

    @property
    def num_tokens(self) -> int:
        """Of its whole prompt and its output."""
        return self.num_before + self.num_new + self.num_output

    @property
    def new_ids(self) -> TokenIds:
        """Of its prompt, beyond its parent's."""
        start = self.text_start
        return TokenIds(self.data[start : start + self.new_bytes], self.num_new)

    @property
    def output_ids(self) -> TokenIds:
        return TokenIds(self.data[self.text_start + self.new_bytes :], self.num_output)

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        return np.frombuffer(self.data, np.float32, self.num_output, self.start) if self.has_logprobs else None

    @property
    def text_start(self) -> int:
        """Where in `data` the ids begin."""
        return self.start + LOGPROB_BYTES * self.num_output * self.has_logprobs


def kept(tokens: TurnTokens, parent: str | None, prompt: TokenIds, before: TokenIds) -> KeptTurn:
    """A turn as it is kept; `decoded` makes the same of its `piece`.

    Args:
        parent: the kept turn that it continues.
        prompt: all ids of its prompt.
        before: those that are its parent's, with which it begins.
    """
    output = TokenIds.of(tokens.output_ids)
    logprobs = b"" if tokens.logprobs is None else _floats(tokens.logprobs)
    assert tokens.logprobs is None or len(logprobs) == LOGPROB_BYTES * len(output), "one log-probability per token"
    # Behind a comma, where something comes before it.
    new = TokenIds(prompt.text[len(before.text) + bool(before.text) :], len(prompt) - len(before))
    names = tokens.turn_id, parent, tokens.history, tokens.finish_reason, tokens.ended_at
    return _encoded(names, tokens.versions, len(before), new, output, None if tokens.logprobs is None else logprobs)


def _encoded(
    names: tuple[str, str | None, str, str, float],
    versions: tuple[VersionSpan, ...],
    num_before: int,
    new: TokenIds,
    output: TokenIds,
    logprobs: bytes | None,
) -> KeptTurn:
    counts = num_before, len(new), len(output), logprobs is not None, len(new.text)
    head = orjson.dumps((*names, [(span.version, span.start, span.end) for span in versions], *counts))
    head = _padded(head)
    data = b"".join((len(head).to_bytes(_HEAD_LENGTH), head, logprobs or b"", new.text, output.text))
    return KeptTurn(*names, versions, *counts, data, _HEAD_LENGTH + len(head))


def piece(turn: KeptTurn, base: KeptTurn | None) -> bytes:
    """What to store of a turn: all of it, or without the beginning of its prompt where that is all of the base's.

    So the choices of a turn, and questions asked again, store their prompt once.

    Args:
        base: of the same trajectory, stored whole, and a root as the turn is.
    """
    if base is None or not turn.new_ids.begins_with(base.new_ids):
        return turn.data
    head_end = _HEAD_LENGTH + int.from_bytes(turn.data[:_HEAD_LENGTH])
    fields = orjson.loads(turn.data[_HEAD_LENGTH:head_end])
    head = _padded(orjson.dumps((*fields, base.turn_id)))
    text_start = turn.text_start
    rest = turn.data[turn.start : text_start], turn.data[text_start + base.new_bytes :]
    return b"".join((len(head).to_bytes(_HEAD_LENGTH), head, *rest))


def decoded(pieces: Iterable[bytes]) -> list[KeptTurn]:
    """The turns that all of a trajectory's pieces are, but those whose base is not there."""
    turns: dict[str, KeptTurn] = {}
    based: list[tuple[list[Any], bytes, int]] = []
    for data in pieces:
        start = _HEAD_LENGTH + int.from_bytes(data[:_HEAD_LENGTH])
        head: list[Any] = orjson.loads(data[_HEAD_LENGTH:start])
        head[_VERSIONS] = tuple(VersionSpan(*span) for span in head[_VERSIONS])
        if len(head) > _FIELDS:
            based.append((head, data, start))
            continue
        turn = _of_integers(head, data, start) if len(head) < _FIELDS else KeptTurn(*[*head, data, start])
        turns[turn.turn_id] = turn
    whole = [_with_base(*each, base) for each in based if (base := turns.get(each[0][-1])) is not None]
    return [*turns.values(), *whole]


def _with_base(head: list[Any], data: bytes, start: int, base: KeptTurn) -> KeptTurn:
    *names, versions, num_before, num_new, num_output, has_logprobs, new_bytes, _ = head
    text_start = start + LOGPROB_BYTES * num_output * has_logprobs
    logprobs = data[start:text_start] if has_logprobs else None
    text = base.new_ids.text + data[text_start:]
    new, output = TokenIds(text[:new_bytes], num_new), TokenIds(text[new_bytes:], num_output)
    return _encoded(tuple(names), versions, num_before, new, output, logprobs)


def _of_integers(head: list[Any], data: bytes, start: int) -> KeptTurn:
    *_, num_before, num_new, num_output, has_logprobs = head
    ids = np.frombuffer(data, np.uint32, num_new + num_output, start).tolist()
    new, output = TokenIds.of(ids[:num_new]), TokenIds.of(ids[num_new:])
    logprobs = data[start + ID_BYTES * len(ids) :] if has_logprobs else None
    return _encoded(tuple(head[:_VERSIONS]), head[_VERSIONS], num_before, new, output, logprobs)


def _padded(head: bytes) -> bytes:
    """So that the numbers behind it lie as numbers should."""
    return head + b" " * (-len(head) % LOGPROB_BYTES)


def chain(turns: dict[str, KeptTurn], last: KeptTurn) -> list[KeptTurn]:
    """The turns from a root to this one; each of them continues the one before."""
    found = [last]
    while (parent := found[-1].parent) is not None:
        found.append(turns[parent])
    return found[::-1]


def all_ids(turns: Iterable[KeptTurn]) -> TokenIds:
    """All ids of such a chain: the last one's prompt and output."""
    return put_together(ids for turn in turns for ids in (turn.new_ids, turn.output_ids))


def rooted(turns: Iterable[KeptTurn]) -> dict[str, KeptTurn]:
    """By id, in the order of their ends, those of the turns all of whose ancestors are there."""
    kept: set[str] = set()
    # A turn's parent has less before it than the turn itself.
    for turn in sorted(turns := list(turns), key=lambda turn: (turn.num_before, turn.ended_at)):
        if turn.parent is None or turn.parent in kept:
            kept.add(turn.turn_id)
    in_order = sorted(turns, key=lambda turn: turn.ended_at)
    return {turn.turn_id: turn for turn in in_order if turn.turn_id in kept}


def _floats(values: Sequence[float]) -> bytes:
    # From a list, array is twice as fast as numpy; from any buffer, numpy copies or converts.
    return (array("f", values) if isinstance(values, list | tuple) else np.asarray(values, np.float32)).tobytes()
