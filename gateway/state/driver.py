"""The only asyncio code around the scheduler: passes it events, performs its actions, and wakes it when it asks."""

import asyncio
from collections.abc import Callable
from typing import assert_never

from gateway.clock import Clock
from gateway.state.eventlog import EventLog
from gateway.state.ledger import Ledger
from gateway.turns.turn import Turn
from scheduling.scheduler import TICK_S, Scheduler
from scheduling.types import (
    ACTIVE,
    Abort,
    Action,
    Dispatch,
    Event,
    Forget,
    Move,
    Preempt,
    Reject,
    Save,
    Tick,
    TrajectoryRecord,
)


class Driver:
    """Passes events to the scheduler, and performs its actions.

    Args:
        on_closed: called with every trajectory that ended, well or not.
        on_forget: called with every trajectory that is forgotten.
        on_move: brings a trajectory's KV to its new home.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        ledger: Ledger,
        event_log: EventLog,
        on_closed: Callable[[TrajectoryRecord], None],
        on_forget: Callable[[str], None],
        on_move: Callable[[Move], None],
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._ledger = ledger
        self._event_log = event_log
        self._on_closed = on_closed
        self._on_forget = on_forget
        self._on_move = on_move
        self._live: dict[str, Turn] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def begin(self, turn: Turn) -> None:
        """Tell this turn what the scheduler decides, until `end`."""
        self._live[turn.turn_id] = turn

    def end(self, turn_id: str) -> None:
        """The turn is over."""
        del self._live[turn_id]

    def live_turns(self) -> list[Turn]:
        """All turns between `begin` and `end`."""
        return list(self._live.values())

    def num_live(self) -> int:
        """How many turns are live."""
        return len(self._live)

    def post(self, event: Event) -> None:
        """Pass an event to the scheduler and perform its actions."""
        actions = self.scheduler.handle(event)
        if self._event_log.is_on:
            self._event_log.add(event, actions)
        for action in actions:
            self._perform(action)
        # While turns are live, a Tick comes every second anyway; asking the scheduler after every event costs 10 us.
        if self._timer is None or self._timer_at > event.at + TICK_S:
            self._set_timer(event.at)

    def close(self) -> None:
        """Stop the ticks."""
        if self._timer is not None:
            self._timer.cancel()

    def _perform(self, action: Action) -> None:
        match action:
            case Save():
                record = action.record
                before = self._ledger.save(record)
                was_active = before is None or before.state is ACTIVE
                if was_active and record.state is not ACTIVE:
                    self._on_closed(record)
            case Dispatch():
                if (turn := self._live.get(action.turn_id)) is not None:
                    turn.dispatched(action)
                    if action.send_at:
                        held_s = max(action.send_at - self.clock(), 0.0)
                        asyncio.get_running_loop().call_later(held_s, turn.release)
            case Reject():
                if (turn := self._live.get(action.turn_id)) is not None:
                    turn.rejected(action)
            case Abort():
                if (turn := self._live.get(action.turn_id)) is not None:
                    turn.aborted(action)
            case Forget(trajectory_id):
                self._ledger.forget(trajectory_id)
                self._on_forget(trajectory_id)
            case Move():
                self._on_move(action)
            case Preempt():
                if (turn := self._live.get(action.turn_id)) is not None:
                    turn.preempted(action)
            case _:
                assert_never(action)

    def _set_timer(self, at: float) -> None:
        wakeup = self.scheduler.next_wakeup()
        if wakeup is None:
            return
        if self._live:
            wakeup = min(wakeup, at + TICK_S)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(wakeup - self.clock(), 0.0), self._tick)
        self._timer_at = wakeup

    def _tick(self) -> None:
        self._timer = None
        self.post(Tick(self.clock()))
