"""One turn of one client, from its request to its answer: what was decided about it, and what became of it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gateway.http.errors import ApiError
from gateway.http.heartbeat import Heartbeat
from gateway.http.outlet import Outlet
from gateway.http.refusals import Refused, refused_turn
from gateway.messages.answers import Usage
from gateway.tokens.turn_tokens import VersionSpan
from gateway.turns.ask import Ask
from gateway.turns.choice import Choice
from gateway.turns.outcome import Stopped
from scheduling.types import Abort, Dispatch, Fault, Preempt, Reject

Made = tuple[list[int], list[dict[str, Any]], list[VersionSpan]]
"""Output ids, their log-probabilities if requested, and the versions of the weights that made them."""


class Turn:
    """A turn under way; the driver tells it what the scheduler decides.

    Attributes:
        turn_id: also its request id; of fixed length, because SGLang aborts by prefix.
        num_clients: connections that wait for its answer.
        waits_since: when it last began to wait for a leg.
        predicted_tokens: its trajectory's total output; 0 until it arrives at the scheduler.
        priority: what its last leg's engine was given; lower is earlier.
        engine_id: where its leg runs; "" while none does.
        last_engine_id: where its last leg ran, which may be elsewhere than the scheduler chose; "" if none did.
        kv_by: how its KV reached that engine; "" if it was there already.
        choices: its choices, if it is served at token level; one, unless the client wants more.
        made_before: what an earlier process made of them.
        prompt_before: names the prompt that this was made behind; "" if that is not known.
        versions_before: of the weights that made this, or what a leg of that process has been making since.
        written_as: the name under which its tokens are written down while it runs; it begins with the time of the turn
            that first had it, so the newest is the greatest. "" until the first are.
        versions: of the weights that the engine of its last leg had during it.
        stale_version: the version among these, or among its trajectory's, that is so old that its leg is being stopped;
            None if none is.
        is_held: its leg waits to be sent, so that it begins together with others.
        last_error: why its last leg failed.
        digest: of its request, once it was needed.
        packed_answer: its answer as it is stored, once it was needed.
        on_stop: called when the turn must stop, or its client has left, while no task awaits its leg: begins one.
        key: names its client's key.
    """

    __slots__ = (
        "_can_pause",
        "_decision",
        "_fault",
        "_is_stopping",
        "_reject",
        "_task",
        "arrived_at",
        "ask",
        "choices",
        "digest",
        "dispatch",
        "engine_id",
        "finish_reason",
        "first_byte_at",
        "first_dispatch_at",
        "heartbeat",
        "is_held",
        "key",
        "kv_by",
        "last_engine_id",
        "last_error",
        "leg",
        "made_before",
        "num_chunks",
        "num_clients",
        "num_parts",
        "on_stop",
        "outlet",
        "packed_answer",
        "predicted_tokens",
        "priority",
        "prompt_before",
        "saved_at",
        "stale_version",
        "turn_id",
        "usage",
        "versions",
        "versions_before",
        "waits_since",
        "written_as",
    )

    def __init__(self, turn_id: str, ask: Ask, outlet: Outlet, arrived_at: float, key: str) -> None:
        self.turn_id = turn_id
        self.ask = ask
        self.outlet = outlet
        self.arrived_at = arrived_at
        self.key = key
        self.predicted_tokens = 0.0
        self.num_clients = 1
        self.leg = 0
        self.priority: int | None = None
        self.first_dispatch_at: float | None = None
        self.waits_since = arrived_at
        self.first_byte_at: float | None = None
        self.dispatch: Dispatch | None = None
        self.usage: Usage | None = None
        self.num_chunks = 0
        self.finish_reason: str | None = None
        self.versions: list[str] = []
        self.kv_by = ""
        self.stale_version: str | None = None
        self.last_error: ApiError | None = None
        self.digest = ""
        self.packed_answer: bytes | None = None
        self.engine_id = self.last_engine_id = ""
        self.choices: list[Choice] = []
        self.made_before: list[Made] = []
        self.prompt_before = ""
        self.versions_before: list[str] = []
        self.saved_at, self.num_parts, self.written_as = arrived_at, 0, ""  # of its tokens, while it runs
        self.is_held = False
        self._can_pause = False
        self._reject: Reject | None = None
        self._decision: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._fault: Fault | None = None
        self._task: asyncio.Task[Any] | None = None
        self.on_stop: Callable[[], None] | None = None
        self.heartbeat: Heartbeat | None = None

    # --- what the scheduler decides -------------------------------------------------------------------------

    def dispatched(self, dispatch: Dispatch) -> None:
        """Run this leg; if it is to be sent later, once it is released."""
        self.dispatch, self.leg, self.priority = dispatch, dispatch.leg, dispatch.priority
        self.is_held = dispatch.send_at > 0.0
        if not self.is_held:
            self._decide()

    def release(self) -> None:
        """Send the leg that was held."""
        self.is_held = False
        self._decide()

    def rejected(self, reject: Reject) -> None:
        """The turn will not be served."""
        self._reject = reject
        self._decide()

    def aborted(self, abort: Abort) -> None:
        """Stop the running leg."""
        if abort.leg == self.leg:
            self.stop(abort.fault)

    def preempted(self, preempt: Preempt) -> None:
        """Pause the running leg; a leg that passes through runs to its end instead."""
        if preempt.leg == self.leg:
            self.pause()

    async def next_leg(self) -> Dispatch:
        """Wait for the scheduler's decision, and until the leg may be sent. Raises Refused, or Stopped."""
        if self.is_held or (self.dispatch is None and self._reject is None):
            self._decision = asyncio.get_running_loop().create_future()
            with self.stoppable():
                await self._decision
        if self._reject is not None:
            raise refused_turn(self._reject.refusal, self._reject.retry_after_s, self.last_error)
        dispatch, self.dispatch = self.dispatch, None
        assert dispatch is not None
        return dispatch

    @property
    def is_waiting(self) -> bool:
        """Whether it awaits the scheduler's decision, or the time of its leg."""
        return self._decision is not None and not self._decision.done()

    def _decide(self) -> None:
        if self._decision is not None and not self._decision.done():
            self._decision.set_result(None)

    # --- being stopped --------------------------------------------------------------------------------------

    @property
    def can_go_on(self) -> bool:
        """Whether another leg may follow a failed one: nothing of the answer is out, or its tokens are here."""
        return bool(self.choices) or not self.outlet.has_begun

    def leg_runs_at(self, engine_id: str, can_pause: bool) -> None:
        """A leg runs at this engine; "" if none runs. A leg at token level can be paused."""
        self.engine_id, self._can_pause = engine_id, can_pause
        self.last_engine_id = engine_id or self.last_engine_id
        if not engine_id:
            self.stale_version = None  # a leg that was paused at the same moment is checked before the next one

    def pause(self) -> bool:
        """Stop the running leg and keep its tokens; the scheduler is told TurnPaused and dispatches it again.

        Returns: False if the leg cannot be paused, because it passes through, because another one would not go on
        exactly from its tokens, or because there is none: then the turn just goes on.
        """
        can_pause = self._can_pause and not any(choice.chain.needs_its_leg for choice in self.choices)
        if can_pause:
            self.stop(None)
        return can_pause

    def stop(self, fault: Fault | None) -> None:
        """Break off what is awaited within `stoppable`, now or as soon as it is entered."""
        is_first, self._is_stopping = not self._is_stopping, True
        ends_leg = fault in (None, Fault.ENGINE)  # other faults end the turn
        if is_first or not ends_leg:
            self._fault = fault
        if ends_leg and self.dispatch is not None:
            return  # that leg is about to begin, and will end then
        if is_first and self._task is not None:
            if self._task is asyncio.current_task():  # which may leave this leg before it waits and is cancelled
                asyncio.get_running_loop().call_soon(self._cancel, self._task)
            else:
                self._task.cancel()
        elif is_first and self.on_stop is not None:
            self.on_stop()

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if self._is_stopping and self._task is task:
            task.cancel()

    def begin_again(self) -> bool:
        """Drop what was made of its answer; False if some of it is out."""
        if self.outlet.has_begun:
            return False
        self.choices, self.made_before, self.versions_before, self.num_chunks = [], [], [], 0
        return True

    def leg_failed(self, error: ApiError) -> None:
        """Its leg is over, so a pause or the loss of its engine has nothing more to stop."""
        self.last_error = error
        if self._fault in (None, Fault.ENGINE):
            self._is_stopping, self._fault = False, None

    def left(self) -> None:
        """One of its clients left; the turn stops when the last one leaves. For the others, a task takes it over: a
        shutdown tells the client that began a turn, which may be the one that left, and every task.
        """
        self.num_clients -= 1
        if self.num_clients == 0:
            self.stop(Fault.CLIENT_LEFT)
        elif self.on_stop is not None:
            self.on_stop()

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Code awaited here ends with Stopped when `stop` is called; any other cancellation passes."""
        self._raise_if_stopped()
        task = self._task = asyncio.current_task()
        assert task is not None
        try:
            yield
        except asyncio.CancelledError as cancelled:
            if not self._is_stopping or task.uncancel() > 0:
                raise
            # In Python 3.12 and 3.13 it leads to a frame that holds it: a cycle, with the turn and its connection.
            cancelled.__traceback__ = None
            self._raise_if_stopped()
        finally:
            self._task = None

    def _raise_if_stopped(self) -> None:
        if self._is_stopping:
            fault, self._fault, self._is_stopping = self._fault, None, False
            raise Stopped(fault) from None

    # --- its history ----------------------------------------------------------------------------------------

    @property
    def is_made(self) -> bool:
        """Whether all tokens of its choices are made."""
        return all(choice.chain.finish_reason is not None for choice in self.choices)

    @property
    def versions_made(self) -> list[str]:
        """The weights that made its tokens, or, while it has none, those that it will begin with; [] unless it is
        served at token level.
        """
        if not self.choices:
            return self.versions_before
        return list(dict.fromkeys([span.version for choice in self.choices for span in choice.chain.versions]))

    def row(
        self, outcome: str, ended_at: float, engine_id: str | None, why: str, error: Refused | None
    ) -> dict[str, Any]:
        """The turn as its trajectory's history shows it. Times are seconds since the epoch."""
        first_dispatch_at = self.first_dispatch_at
        # An empty tuple if there is none: the garbage collector does not track a row of plain values.
        versions = (self.versions_made if self.choices else None) or self.versions or ()
        has_tokens = outcome == "finished" and bool(self.choices)
        return {
            "turn_id": self.turn_id,
            "api": self.ask.api,
            "model": self.ask.model,
            "outcome": outcome,
            "engine": engine_id,
            "why": why,
            "priority": self.priority,
            "predicted_tokens": round(self.predicted_tokens),
            "legs": self.leg,
            "arrived_at": self.arrived_at,
            "dispatched_at": first_dispatch_at,
            "first_byte_at": self.first_byte_at,
            "ended_at": ended_at,
            "queued_s": (ended_at if first_dispatch_at is None else first_dispatch_at) - self.arrived_at,
            "prompt_tokens": self.usage.prompt_tokens if self.usage else None,
            "cached_tokens": self.usage.cached_tokens if self.usage else None,
            "kv_by": self.kv_by or None,
            "output_tokens": self.usage.completion_tokens if self.usage else self.num_chunks,
            "finish_reason": self.finish_reason,
            "weight_versions": versions,
            "tokens": "none" if not has_tokens else "kept" if self.ask.keeps_tokens else "not_wanted",
            "error": error.error.openai() if error else None,
        }
