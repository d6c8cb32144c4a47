"""Runs turns: from their arrival at the scheduler, leg after leg, until they are over.

On another engine, a turn at token level continues from its last token. A turn that passes through starts over, and only
while nothing of an answer is out.
"""

import asyncio
from contextlib import suppress

from gateway.clock import Clock
from gateway.config import Settings
from gateway.http.client import Client, ClientLeft
from gateway.http.heartbeat import Heartbeat
from gateway.http.refusals import Refused, fenced, refused_turn, shutting_down, too_many_turns
from gateway.metrics import Metrics
from gateway.state.driver import Driver
from gateway.turns.arrivals import Arrivals
from gateway.turns.endings import Endings
from gateway.turns.legs import Begun, Legs
from gateway.turns.outcome import LegFailed, Outcome, Stopped
from gateway.turns.repeats import Repeats
from gateway.turns.turn import Turn
from gateway.weights.staleness import Staleness
from scheduling.types import Dispatch, Fault, Refusal, TurnFailed, TurnPaused
from store.port import Store


class RunningTurns:
    """Runs turns.

    Args:
        repeats: may join other clients to a turn while it runs.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        driver: Driver,
        store: Store,
        repeats: Repeats,
        staleness: Staleness,
        arrivals: Arrivals,
        legs: Legs,
        endings: Endings,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._max_turns_per_key = settings.max_turns_per_key
        self._clock = clock
        self._driver = driver
        self._store = store
        self._repeats = repeats
        self._staleness = staleness
        self._arrivals = arrivals
        self._legs = legs
        self._endings = endings
        self._metrics = metrics
        self._num_of_key: dict[str, int] = {}

    # --- the beginning and the end --------------------------------------------------------------------------

    def count(self, turn: Turn) -> None:
        """Count a turn toward its key's limit, and let repeats join it, until it is over or given up. Raises Refused
        above the limit.
        """
        self._endings.outdate_answer(turn)
        num = self._num_of_key.get(turn.key, 0)
        if num >= self._max_turns_per_key:
            self._endings.given_up(turn.ask)
            raise too_many_turns(self._max_turns_per_key)
        self._num_of_key[turn.key] = num + 1
        self._repeats.began(turn)

    def give_up(self, turn: Turn) -> None:
        """A counted turn does not arrive."""
        self._endings.given_up(turn.ask)
        self._uncount(turn)

    def arrive(self, turn: Turn, client: Client) -> None:
        """Tell the scheduler of a counted turn. If this raises Refused, the turn is over."""
        ask = turn.ask
        try:
            self._staleness.check(ask.trajectory_id)
        except Refused:
            self.give_up(turn)
            raise
        self._driver.begin(turn)
        if ask.wants_stream:
            turn.heartbeat = Heartbeat(turn.outlet, self._settings.heartbeat_s)
        client.when_left(turn.left)
        try:
            self._driver.post(self._arrivals.arrival(turn))
        except BaseException as error:
            self._endings.broken(turn, None, error)
            self.over(turn, client)
            raise

    def refuse_waiting(self) -> None:
        """Refuse the turns that wait, because another gateway has taken over the fleet. Those that run go on."""
        for turn in self._driver.live_turns():
            if turn.is_waiting:
                turn.stop(Fault.CLOSED)

    def over(self, turn: Turn, client: Client) -> None:
        """A turn that arrived has ended, well or not."""
        client.unwatch()
        if turn.heartbeat is not None:
            turn.heartbeat.stop()
        self._driver.end(turn.turn_id)
        self._uncount(turn)

    def _uncount(self, turn: Turn) -> None:
        self._repeats.ended(turn)
        self._num_of_key[turn.key] -= 1

    # --- between them ---------------------------------------------------------------------------------------

    async def run(self, turn: Turn, client: Client, begun: Begun | None = None) -> None:
        """Run the legs of an arrived turn until one finishes; the first may have begun."""
        try:
            await self._run_legs(turn, begun)
        finally:
            self.over(turn, client)

    async def settled(self, turn: Turn, client: Client, outcome: Outcome) -> None:
        """Send the end of a finished turn's answer, once the store has it."""
        try:
            await self._settle(turn, outcome)
        finally:
            self.over(turn, client)

    async def _run_legs(self, turn: Turn, begun: Begun | None) -> None:
        dispatch: Dispatch | None = None
        outcome: Outcome | None = None
        try:
            while outcome is None:
                if begun is None:
                    dispatch = await turn.next_leg()
                    turn.first_dispatch_at = turn.first_dispatch_at or self._clock()
                else:
                    dispatch = begun.dispatch
                first, begun = begun, None
                outcome = await self._run_leg(turn, dispatch, first)
                turn.waits_since = self._clock()
            self._endings.finished(turn, dispatch, outcome)
        except Refused as refused:
            self._endings.close(turn, _outcome_of(turn, refused), dispatch, refused, self._clock())
            raise
        except (Stopped, asyncio.CancelledError) as stop:
            fault = (stop.fault if isinstance(stop, Stopped) else None) or Fault.CLIENT_LEFT
            is_fenced = fault is Fault.CLOSED and self._store.is_fenced  # which aborts no trajectory any more
            now = self._clock()
            # A turn that waits ends for the scheduler only when nobody wants it any more.
            cause = Fault.CLIENT_LEFT if is_fenced else fault
            self._driver.post(TurnFailed(now, turn.turn_id, turn.leg, cause, can_retry=False))
            if isinstance(stop, asyncio.CancelledError):  # uvicorn's, when its shutdown timeout ends
                told = shutting_down()
                self._endings.close(turn, "stopped", dispatch, told, now)
                raise told from None
            if is_fenced:
                self._endings.close(turn, "refused", dispatch, fenced(), now)
                raise fenced() from None
            self._endings.close(turn, "left" if fault is Fault.CLIENT_LEFT else "aborted", dispatch, None, now)
            if fault is Fault.CLIENT_LEFT:
                raise ClientLeft from None
            raise refused_turn(Refusal.TRAJECTORY_ABORTED, None) from None
        except Exception as error:
            self._endings.broken(turn, dispatch, error)
            raise
        await self._settle(turn, outcome)

    async def _run_leg(self, turn: Turn, dispatch: Dispatch, begun: Begun | None) -> Outcome | None:
        """How a leg finished; None if another leg follows, of which the scheduler knows."""
        num_before = turn.num_chunks
        try:
            if begun is None:
                self._staleness.check_leg(turn)
            return await self._legs.run(turn, dispatch, begun)
        except LegFailed as failure:
            can_retry = turn.can_go_on
            turn.leg_failed(failure.error)
            now, pause_s = self._clock(), failure.retry_after_s
            has_made = can_retry and (failure.has_made or turn.num_chunks > num_before)
            broke_off = can_retry and failure.broke_off and not has_made
            self._driver.post(
                TurnFailed(now, turn.turn_id, turn.leg, failure.fault, can_retry, pause_s, broke_off, has_made)
            )
            if not can_retry or failure.fault is Fault.REQUEST:
                raise Refused(failure.error, should_retry=failure.should_retry) from None
            self._metrics.retried_legs.labels(failure.fault.value).inc()
        except Stopped as stop:
            if stop.fault is not None:
                raise
            self._driver.post(TurnPaused(self._clock(), turn.turn_id, turn.leg, turn.num_chunks))
        return None

    async def _settle(self, turn: Turn, outcome: Outcome) -> None:
        with suppress(asyncio.CancelledError):  # uvicorn's, when its shutdown timeout ends: the answer is here
            await self._store.settle(self._settings.settle_timeout_s)
        self._endings.send(turn, outcome)


def _outcome_of(turn: Turn, refused: Refused) -> str:
    """How a turn ended whose client is told this, as its history shows it."""
    if turn.leg == 0 or refused.error.is_clients_fault:
        return "refused"
    return "aborted" if refused.error.code == Refusal.TRAJECTORY_ABORTED else "failed"
