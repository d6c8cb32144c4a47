"""One turn's tokens as bytes, in the form in which they are held in memory and stored.

A turn holds the part of its prompt that is new beyond the prompt and output of the turn that it continues, so that a
long trajectory stores each of its tokens once. Ids stay the digits that engines send, and are not converted until a
trainer asks.
"""

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from engines.token_ids import ID_BYTES, TokenIds, put_together
from gateway.tokens.turn_tokens import TurnTokens, VersionSpan
from scheduling.values import value_class

LOGPROB_BYTES = 4
_HEAD_LENGTH = 4
"""Bytes that hold the length of the head, which is a JSON list of the fields of KeptTurn; the rest follows it."""
_VERSIONS = 5
"""The index of the versions in the head."""
_FIELDS = 11
"""Fields of a head. It had one fewer when ids were 32-bit integers; a piece with a base has one more, the base. What a
newer version adds follows that one, which is then null in a piece without a base; it is not read here.
"""


@value_class(frozen=True, slots=True)
class KeptTurn:
    """One ended turn.

    Args:
        num_before: how many tokens of its prompt are its parent's prompt and output; 0 without a parent.
        new_ids: the ids of its prompt after these.
        floats: the log-probabilities of its output as 32-bit floats; None if the engine gave none.
    """

    turn_id: str
    parent: str | None
    history: str
    finish_reason: str
    ended_at: float
    versions: tuple[VersionSpan, ...]
    num_before: int
    new_ids: TokenIds
    output_ids: TokenIds
    floats: bytes | None

    @property
    def num_new(self) -> int:
        return len(self.new_ids)

    @property
    def num_output(self) -> int:
        return len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of its whole prompt and its output."""
        return self.num_before + len(self.new_ids) + len(self.output_ids)

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        return None if self.floats is None else np.frombuffer(self.floats, np.float32)


def kept(tokens: TurnTokens, parent: str | None, prompt: TokenIds, before: TokenIds) -> KeptTurn:
    """A turn as it is kept; `decoded` gives the same from its `piece`.

    Args:
        parent: the kept turn that it continues.
        prompt: all ids of its prompt.
        before: its parent's ids, with which the prompt begins.
    """
    output = TokenIds.of(tokens.output_ids)
    floats = None if tokens.logprobs is None else array("f", tokens.logprobs).tobytes()
    assert floats is None or len(floats) == LOGPROB_BYTES * len(output), "one log-probability per token"
    if before.text:  # after the comma
        prompt = TokenIds(prompt.text[len(before.text) + 1 :], len(prompt) - len(before))
    return KeptTurn(
        tokens.turn_id,
        parent,
        tokens.history,
        tokens.finish_reason,
        tokens.ended_at,
        tokens.versions,
        len(before),
        prompt,
        output,
        floats,
    )


def piece(turn: KeptTurn, base: KeptTurn | None) -> bytes:
    """What to store of a turn: all of it, or, if its prompt begins with the base's, all but that beginning.

    So the choices of a turn, and repeated questions, store their prompt once.

    Args:
        base: of the same trajectory, stored whole, and a root like the turn.
    """
    new, output, floats = turn.new_ids, turn.output_ids, turn.floats
    head = orjson.dumps(
        (
            turn.turn_id,
            turn.parent,
            turn.history,
            turn.finish_reason,
            turn.ended_at,
            [(span.version, span.start, span.end) for span in turn.versions],
            turn.num_before,
            len(new),
            len(output),
            floats is not None,
            len(new.text),
            *(() if base is None else (base.turn_id,)),
        )
    )
    text = new.text if base is None else new.text[len(base.new_ids.text) :]
    return b"".join((len(head).to_bytes(_HEAD_LENGTH), head, floats or b"", text, output.text))


def decoded(pieces: Iterable[bytes]) -> list[KeptTurn]:
    """The turns in all of a trajectory's pieces, except those whose base is missing."""
    turns: dict[str, KeptTurn] = {}
    based: list[tuple[list[Any], bytes, int]] = []
    for data in pieces:
        start = _HEAD_LENGTH + int.from_bytes(data[:_HEAD_LENGTH])
        head: list[Any] = orjson.loads(data[_HEAD_LENGTH:start])
        head[_VERSIONS] = tuple(VersionSpan(*span[:3]) for span in head[_VERSIONS])
        if len(head) > _FIELDS and head[_FIELDS] is not None:
            based.append((head, data, start))
            continue
        turn = _of_integers(head, data, start) if len(head) < _FIELDS else _of_digits(head, data, start, None)
        turns[turn.turn_id] = turn
    whole = [_of_digits(*each, base) for each in based if (base := turns.get(each[0][_FIELDS])) is not None]
    return [*turns.values(), *whole]


def _of_digits(head: list[Any], data: bytes, start: int, base: KeptTurn | None) -> KeptTurn:
    num_before, num_new, num_output, has_logprobs, new_bytes = head[_VERSIONS + 1 : _FIELDS]
    text_start = start + LOGPROB_BYTES * num_output * has_logprobs
    floats = data[start:text_start] if has_logprobs else None
    output_start = text_start + new_bytes - (len(base.new_ids.text) if base else 0)
    new, output = data[text_start:output_start], TokenIds(data[output_start:], num_output)
    if base is None:
        new_ids = TokenIds(new, num_new)
    else:
        new_ids = TokenIds(base.new_ids.text + new, num_new) if new else base.new_ids
    return KeptTurn(*[*head[: _VERSIONS + 1], num_before, new_ids, output, floats])


def _of_integers(head: list[Any], data: bytes, start: int) -> KeptTurn:
    num_before, num_new, num_output, has_logprobs = head[_VERSIONS + 1 :]
    ids = np.frombuffer(data, np.uint32, num_new + num_output, start).tolist()
    new, output = TokenIds.of(ids[:num_new]), TokenIds.of(ids[num_new:])
    floats = data[start + ID_BYTES * len(ids) :] if has_logprobs else None
    return KeptTurn(*[*head[: _VERSIONS + 1], num_before, new, output, floats])


def chain(turns: dict[str, KeptTurn], last: KeptTurn) -> list[KeptTurn]:
    """The turns from a root to this one; each continues the one before."""
    found = [last]
    while (parent := found[-1].parent) is not None:
        found.append(turns[parent])
    return found[::-1]


def all_ids(turns: Iterable[KeptTurn]) -> TokenIds:
    """All ids of such a chain: the last one's prompt and output."""
    return put_together(ids for turn in turns for ids in (turn.new_ids, turn.output_ids))


def rooted(turns: list[KeptTurn]) -> dict[str, KeptTurn]:
    """The turns whose ancestors are all present, by id, in the order of their ends."""
    kept: set[str] = set()
    # A turn's parent has fewer tokens before it than the turn itself.
    for turn in sorted(turns, key=lambda turn: (turn.num_before, turn.ended_at)):
        if turn.parent is None or turn.parent in kept:
            kept.add(turn.turn_id)
    in_order = sorted(turns, key=lambda turn: turn.ended_at)
    return {turn.turn_id: turn for turn in in_order if turn.turn_id in kept}
