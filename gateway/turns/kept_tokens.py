"""Writes the tokens of turns into the record: of a running turn at intervals, of an ended turn as a whole.

When a gateway is killed, its clients ask again for turns whose tokens were partly made. Such a turn is recognised by
its trajectory and its exact request, and continues from what was written down: of several turns, from the newest that
no other turn continues. If its prompt is another one now, it begins anew: an engine with more room in its context, or
the end of another turn, decides whether the prompt has the thoughts of earlier answers.
"""

from collections.abc import Set
from contextlib import suppress
from typing import Any

import orjson
from xxhash import xxh3_128

from engines.token_ids import TokenIds
from engines.tokens import TokenRoutes
from gateway.clock import Clock
from gateway.messages.transcripts import whole_answer
from gateway.tokens.book import TokenBook, choice_id
from gateway.tokens.partials import Partials
from gateway.tokens.turn_tokens import ONLY_WHOLE, TurnTokens, VersionSpan
from gateway.turns.chain import Chain
from gateway.turns.choice import Choice
from gateway.turns.kept_legs import KeptLegs, name_of
from gateway.turns.repeats import digest_of
from gateway.turns.turn import Made, Turn
from scheduling.types import Dispatch
from store.port import StoreError


class KeptTokens:
    """Writes tokens down and finds them again.

    Args:
        legs: the legs whose responses outlive this process; None if nothing keeps them.
        save_s: between two writes of a turn.
        before: trajectories of an earlier process, whose turns may have been cut off with it.
    """

    def __init__(
        self,
        book: TokenBook,
        partials: Partials,
        legs: KeptLegs | None,
        clock: Clock,
        save_s: float,
        before: Set[str],
    ) -> None:
        self._book = book
        self.legs = legs
        self._partials = partials
        self._clock = clock
        self._save_s = save_s
        self._before = set(before)
        self._written: dict[tuple[str, str], set[str]] = {}  # the turns now written down, by trajectory and request

    async def prepare(self, turn: Turn, may_repeat: bool) -> None:
        """Load what a turn at token level may begin with.

        Args:
            may_repeat: the same request from before this process started is the same turn.
        """
        trajectory_id = turn.ask.trajectory_id
        if may_repeat and self.legs is not None:
            self.legs.claim(turn)
        if turn.ask.keeps_tokens:
            await self._book.ready(trajectory_id)
        if may_repeat and trajectory_id in self._before:
            with suppress(StoreError):
                await self._take_up(turn)

    async def begin(self, turn: Turn) -> None:
        """Have in memory what a turn may continue, until it is over; meanwhile it may have waited long."""
        if turn.ask.keeps_tokens:
            await self._book.hold(turn.ask.trajectory_id, turn.turn_id)

    def placed(self, turn: Turn, dispatch: Dispatch) -> Dispatch:
        """Where a turn's leg is to run: a leg of an earlier process continues where it still runs."""
        return dispatch if self.legs is None else self.legs.placed(turn, dispatch)

    def made_before(self, turn: Turn, index: int, routes: TokenRoutes, prompt: TokenIds) -> Made | None:
        """What an earlier process made of a choice behind this very prompt; None if nothing."""
        kept = self.legs.made_before(turn, index, routes, prompt) if self.legs is not None else None
        if kept is not None or index >= len(turn.made_before):
            return kept
        return turn.made_before[index] if turn.prompt_before in ("", name_of(prompt)) else None

    def leg_ended(self, turn: Turn) -> None:
        """Write down the output of choices that did not finish, because their legs are no longer kept."""
        unfinished = [choice for choice in turn.choices if choice.chain.finish_reason is None]
        if self.legs is not None and unfinished:
            self.save(turn, at_once=True)
            for choice in unfinished:
                self.legs.leg_ended(turn, choice)

    def save(self, turn: Turn, at_once: bool = False) -> None:
        """Write down what is new of a running turn, if it is time."""
        now = self._clock()
        is_time = at_once or now - turn.saved_at >= self._save_s
        if not is_time or turn.is_made:  # a turn that is made is kept as a whole in a moment
            return
        if not turn.written_as:
            self._writes_as(turn, f"{turn.arrived_at:017.6f}-{turn.turn_id}")
        part = orjson.dumps([_unsaved(choice) for choice in turn.choices])
        self._partials.put(*_request(turn), turn.written_as, turn.num_parts, part)
        turn.saved_at, turn.num_parts = now, turn.num_parts + 1

    def ended(self, turn: Turn) -> None:
        """Keep a finished turn's tokens."""
        self._drop(turn)
        if turn.ask.keeps_tokens:
            for choice in turn.choices:
                self._keep(turn, choice)

    def over(self, turn: Turn) -> None:
        """A turn is over, finished or not."""
        self._book.release(turn.ask.trajectory_id, turn.turn_id)
        if turn.written_as:
            written = self._written[_request(turn)]
            written.remove(turn.written_as)
            if not written:
                del self._written[_request(turn)]
        if self.legs is not None:
            self.legs.over(turn)

    def _keep(self, turn: Turn, choice: Choice) -> None:
        ask, chain, history = turn.ask, choice.chain, ""
        if choice.history is not None:
            known, answer = whole_answer(ask.request, choice.history, choice.content(), xxh3_128)
            history = " ".join(known.digests_of(answer))
            if _was_cut(turn, chain):
                history += f" {ONLY_WHOLE}"
        self._book.add(
            TurnTokens(
                ask.trajectory_id,
                choice_id(turn.turn_id, choice.index),
                chain.prompt_ids,
                chain.output_ids,
                chain.chosen_logprobs,
                tuple(chain.versions),
                choice.finish_reason,
                chain.parent,
                history,
                self._clock(),
            )
        )

    async def _take_up(self, turn: Turn) -> None:
        """Have a turn continue what an earlier process wrote of it. Raises StoreError."""
        found = await self._partials.get(*_request(turn))
        free = found.keys() - self._written.get(_request(turn), ())
        if free:
            self._writes_as(turn, max(free))
            turn.num_parts = len(found[turn.written_as])
            turn.made_before, turn.prompt_before = _made(found[turn.written_as])
            turn.versions_before += [span.version for _, _, spans in turn.made_before for span in spans]
            await self._partials.drop_behind(*_request(turn), turn.written_as, turn.num_parts)

    def _writes_as(self, turn: Turn, name: str) -> None:
        self._written.setdefault(_request(turn), set()).add(name)
        turn.written_as = name

    def _drop(self, turn: Turn) -> None:
        if turn.written_as:  # with those of earlier turns, whose clients left, but not of siblings that still run
            is_only = len(self._written[_request(turn)]) == 1
            self._partials.drop(*_request(turn), None if is_only else turn.written_as)


def _request(turn: Turn) -> tuple[str, str]:
    return turn.ask.trajectory_id, digest_of(turn)


def _was_cut(turn: Turn, chain: Chain) -> bool:
    """Whether its limit ended it, or a stop string or token of its client's: any token, or the one that ends a
    message.
    """
    stop = chain.stop_reason
    return (
        chain.finish_reason == "length"
        or isinstance(stop, str)
        or (stop is not None and stop in (turn.ask.request.get("stop_token_ids") or ()))
    )


def _unsaved(choice: Choice) -> tuple[Any, ...]:
    chain, end = choice.chain, choice.chain.num_sure
    if chain.finish_reason is not None:  # its last token is made again, and ends it again: nothing else tells that
        end = min(end, max(len(chain.output_ids) - 1, 0))
    start, choice.num_saved = min(choice.num_saved, end), end
    spans = [(span.version, span.start, span.end) for span in chain.versions if span.start < end]
    prompt = "" if start else name_of(chain.prompt_ids)
    return start, chain.output_ids[start:end], chain.logprobs[start:end], spans, prompt


def _made(parts: list[bytes]) -> tuple[list[Made], str]:
    """What was made, and the prompt behind which it was."""
    made: list[Made] = []
    prompt = ""
    for part in parts:
        # A newer version may add fields; an older one did not name the prompt.
        for index, (start, ids, logprobs, spans, *more) in enumerate(orjson.loads(part)):
            if index == len(made):
                made.append(([], [], []))
            known_ids, known_logprobs, versions = made[index]
            if start > len(known_ids):  # what comes between is lost
                return made, prompt
            known_ids[start:], known_logprobs[start:] = ids, logprobs
            versions[:] = [VersionSpan(*span[:3]) for span in spans]
            if not start:
                prompt = more[0] if more else ""
    return made, prompt
