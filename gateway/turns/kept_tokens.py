"""The tokens of turns on their way into the record: of one that runs now and then, of one that has ended as a whole.

A gateway that was killed made tokens for turns whose clients ask again. The turn is known again by its trajectory and
its very request, and goes on from what was written down.
"""

from collections.abc import Set
from typing import Any

import orjson

from gateway.clock import Clock
from gateway.messages.transcripts import digest_with_answer
from gateway.tokens.book import StoredTokens
from gateway.tokens.partials import Partials
from gateway.tokens.turn_tokens import TurnTokens, VersionSpan
from gateway.turns.repeats import digest_of
from gateway.turns.turn import Made, Turn
from store.port import StoreError


class KeptTokens:
    """Writes down and finds again.

    Args:
        save_s: between two writes of a turn.
        before: trajectories of an earlier process, whose turns may have been cut off with it.
    """

    def __init__(self, book: StoredTokens, partials: Partials, clock: Clock, save_s: float, before: Set[str]) -> None:
        self._book = book
        self._partials = partials
        self._clock = clock
        self._save_s = save_s
        self._before = set(before)

    async def prepare(self, turn: Turn, may_repeat: bool) -> None:
        """Have at hand what a turn at token level may begin with.

        Args:
            may_repeat: the same request from before the start of this process is the same turn.
        """
        trajectory_id = turn.ask.trajectory_id
        if turn.ask.keeps_tokens:
            await self._book.ready(trajectory_id)
        if may_repeat and trajectory_id in self._before:
            try:
                parts = await self._partials.get(trajectory_id, digest_of(turn))
            except StoreError:
                return
            turn.num_parts = len(parts)
            turn.made_before = _made(parts)

    def save(self, turn: Turn) -> None:
        """Write down what is new of a running turn, if it is time."""
        chain, now = turn.chain, self._clock()
        if chain is None or now - turn.saved_at < self._save_s:
            return
        start = min(turn.num_saved, len(chain.output_ids))
        spans = [(span.version, span.start, span.end) for span in chain.versions]
        part = orjson.dumps([start, chain.output_ids[start:], chain.logprobs[start:], spans])
        self._partials.put(turn.ask.trajectory_id, digest_of(turn), turn.num_parts, part)
        turn.saved_at, turn.num_saved, turn.num_parts = now, len(chain.output_ids), turn.num_parts + 1

    def ended(self, turn: Turn, content: Any) -> None:
        """Keep a finished turn's tokens.

        Args:
            content: the answer as its client will send it back.
        """
        self._drop(turn)
        chain, ask = turn.chain, turn.ask
        if chain is None or not ask.keeps_tokens:
            return
        has_message = ask.api == "chat" and isinstance(content, dict)
        self._book.add(
            TurnTokens(
                trajectory_id=ask.trajectory_id,
                turn_id=turn.turn_id,
                prompt_ids=chain.prompt_ids,
                output_ids=chain.output_ids,
                logprobs=[entry["logprob"] for entry in chain.logprobs] if chain.logprobs else None,
                versions=tuple(chain.versions),
                finish_reason=chain.finish_reason or "",
                parent=chain.parent,
                history=digest_with_answer(ask.request, content) if has_message else "",
                ended_at=self._clock(),
            )
        )

    def _drop(self, turn: Turn) -> None:
        if turn.num_parts:
            self._partials.drop(turn.ask.trajectory_id, digest_of(turn))


def _made(parts: list[bytes]) -> Made | None:
    ids: list[int] = []
    logprobs: list[dict[str, Any]] = []
    spans: list[list[Any]] = []
    for part in parts:
        start, more_ids, more_logprobs, spans = orjson.loads(part)
        ids[start:], logprobs[start:] = more_ids, more_logprobs
    return (ids, logprobs, [VersionSpan(*span) for span in spans]) if ids else None
