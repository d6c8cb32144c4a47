"""How turns end: what is recorded where, and what the client gets last."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import orjson

from gateway.clock import Clock
from gateway.http.client import Client, ClientLeft
from gateway.http.outlet import Outlet
from gateway.http.refusals import Refused, internal_error, invalid_json
from gateway.kv.moves import KvMoves
from gateway.messages.conversations import Conversations
from gateway.messages.lazy_object import BrokenValue
from gateway.messages.transcripts import History
from gateway.metrics import Metrics
from gateway.state.driver import Driver
from gateway.state.ledger import Ledger
from gateway.turnlog import TurnLog
from gateway.turns.arrivals import Arrivals
from gateway.turns.ask import Ask
from gateway.turns.kept_tokens import KeptTokens
from gateway.turns.outcome import Outcome
from gateway.turns.repeats import Repeats
from gateway.turns.text_predictions import TextPredictions
from gateway.turns.turn import Turn
from scheduling.types import Dispatch, Fault, TurnFailed, TurnFinished

# Turns of a conversation kept in its record, which is written at every turn; after a restart no branch goes back
# further.
_MAX_STORED_DIGESTS = 64


class Endings:
    """Ends turns: informs the scheduler, the ledger, the history, the metrics and the log of each one.

    Args:
        kv: tracks what an engine's KV holds of a trajectory.
        texts: predict from conversations; None if no text predictor runs.
    """

    def __init__(
        self,
        clock: Clock,
        driver: Driver,
        ledger: Ledger,
        conversations: Conversations,
        repeats: Repeats,
        arrivals: Arrivals,
        kept_tokens: KeptTokens,
        kv: KvMoves,
        metrics: Metrics,
        log: TurnLog,
        texts: TextPredictions | None,
    ) -> None:
        self._clock = clock
        self._driver = driver
        self._ledger = ledger
        self._conversations = conversations
        self._repeats = repeats
        self._arrivals = arrivals
        self._kept_tokens = kept_tokens
        self._kv = kv
        self._metrics = metrics
        self._log = log
        self._texts = texts

    def outdate_answer(self, turn: Turn) -> None:
        """A turn begins that repeats none: what the same question was answered before is not for its retries."""
        if self._repeats.outdated_by(turn):
            self._ledger.outdated(turn.ask.trajectory_id)

    def finished(self, turn: Turn, dispatch: Dispatch | None, outcome: Outcome) -> None:
        """Record everywhere that a turn finished. Its client may learn it once the store has it."""
        usage = turn.usage
        prompt_tokens = usage.prompt_tokens if usage else self._arrivals.prompt_tokens(turn.ask)
        output_tokens = usage.completion_tokens if usage else turn.num_chunks
        now = self._clock()
        if usage and usage.prompt_tokens > 0:
            self._arrivals.learn(turn.ask, usage)
            self._metrics.tokens(usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens)
        self._kept_tokens.ended(turn)
        if turn.ask.history is not None:
            self._remember(turn, turn.ask.history, outcome.content())
        if dispatch is not None:
            self._kv.finished(turn, turn.last_engine_id, prompt_tokens + output_tokens)
        stored = self._repeats.to_store(turn, outcome.end)
        if stored is not None:
            self._ledger.answered(turn.ask.trajectory_id, stored)
        self._driver.post(TurnFinished(now, turn.turn_id, turn.leg, prompt_tokens, output_tokens))
        self.close(turn, "finished", dispatch, None, now)
        if self._texts is not None and (entry := self._ledger.get(turn.ask.trajectory_id)) is not None:
            self._texts.turn_ended(turn, outcome, entry, prompt_tokens + output_tokens)

    def broken(self, turn: Turn, dispatch: Dispatch | None, error: BaseException) -> None:
        """An unexpected error ended a turn, and is being handled: free its slot all the same."""
        now = self._clock()
        self._driver.post(TurnFailed(now, turn.turn_id, turn.leg, Fault.REQUEST, can_retry=False))
        self.close(turn, "failed", dispatch, _refused(error), now)

    def given_up(self, ask: Ask) -> None:
        """The request gets no answer, or no new one: its conversation can continue from where it was, unless the same
        request still has a running turn.
        """
        if ask.history is not None and not self._repeats.has_beside(ask):
            self._conversations.release(ask.trajectory_id)

    def close(
        self, turn: Turn, outcome: str, dispatch: Dispatch | None, refused: Refused | None, ended_at: float
    ) -> None:
        """Add a turn that has ended, in whatever way, to the history; `dispatch` was that of its last leg."""
        if outcome != "finished":
            self.given_up(turn.ask)
            self._arrivals.unanswered(turn.ask)
        engine_id = turn.last_engine_id or (dispatch.engine_id if dispatch else None)
        row = turn.row(outcome, ended_at, engine_id, dispatch.why if dispatch else "", refused)
        encoded = orjson.dumps(row)
        self._ledger.add_turn(turn.ask.trajectory_id, row, encoded)
        self._metrics.turn_ended(turn.ask.api, outcome, ended_at - turn.arrived_at)
        self._log.turn(turn.ask.trajectory_id, turn.ask.rollout_id, encoded)

    def _remember(self, turn: Turn, history: History, content: Any) -> None:
        trajectory_id = turn.ask.trajectory_id
        self._conversations.remember(trajectory_id, turn.ask.request, history, content)
        entry = self._ledger.get(trajectory_id)
        if entry is not None:
            before = entry.conversation[1 - _MAX_STORED_DIGESTS :]
            entry.conversation = [*before, self._conversations.dump(trajectory_id)]

    # --- what the client gets -------------------------------------------------------------------------------

    def send(self, turn: Turn, outcome: Outcome) -> None:
        """Send the answer's end."""
        outcome.send_end()
        self._repeats.answered(turn)

    def tell(self, error: Exception, outlet: Outlet, request_id: str) -> None:
        """Answer with an error; called while that error is being handled."""
        if not isinstance(error, Refused | BrokenValue):
            self._log.defect(request_id)
        refused = _refused(error)
        self._metrics.refused.labels(str(refused.error.status)).inc()
        outlet.refuse(refused)

    async def serving(self, rest: Coroutine[Any, Any, None], client: Client, outlet: Outlet, request_id: str) -> None:
        """Await the rest of serving a request, and tell its client if that fails."""
        try:
            await rest
        except ClientLeft:
            return
        except Exception as error:
            self.tell(error, outlet, request_id)
        with suppress(asyncio.CancelledError):  # uvicorn's, when its shutdown timeout ends: all is written
            await client.drain()


def _refused(error: BaseException) -> Refused:
    """What a client is told: its mistake, also if it shows only when a value is read at last, else a defect."""
    if isinstance(error, BrokenValue):
        return invalid_json(str(error))
    return error if isinstance(error, Refused) else internal_error()
