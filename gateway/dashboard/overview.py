"""What the dashboard shows beside the engines: the work at hand, by rollout, and how the load was lately."""

import asyncio
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace, nlargest
from typing import Any

import numpy as np

from gateway.clock import Clock
from gateway.metrics import Metrics
from gateway.passes import Passes
from gateway.state.driver import Driver
from gateway.state.ledger import Entry, Ledger
from scheduling.types import TrajectoryRecord, TrajectoryState

# A look is shown to everybody who asks within a second, and for longer if it took long: looks take at most this share
# of the gateway's time.
_LOOK_MAX_AGE_S = 1.0
_LOOK_MAX_SHARE = 0.02
# Trajectories of a slice, for which turns wait: 1 ms.
_SLICE = 400
_NUM_ROLLOUTS = 12
_NUM_LONGEST = 20
# Points of a rollout's curve of ended trajectories: as many as one can tell apart in a small picture.
_NUM_POINTS = 60
# An hour of history, at 40 bytes a sample.
_SAMPLE_S = 5.0
_NUM_SAMPLES = 720


@dataclass(slots=True)
class _Live:
    """The live turns of a trajectory: whether one of them runs, and the chunks that they sent so far."""

    is_running: bool = False
    num_chunks: int = 0


_NO_TURN = _Live()

_Remaining = tuple[float, str, str, TrajectoryRecord]
"""Predicted output still to come, the trajectory's id, what it is doing, and its record."""

_DOING = ("declared", "waiting", "running", "in_tool_call", "finished", "aborted")


@dataclass(slots=True)
class _Rollout:
    """The sums of one rollout; `ended_at` has the time of each ended trajectory, in no order."""

    began_at: float
    last_at: float = 0.0
    num_turns: int = 0
    output_tokens: int = 0
    remaining_tokens: float = 0.0
    doing: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_DOING, 0))
    ended_at: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, record: TrajectoryRecord, doing: str, remaining_tokens: float) -> None:
        """Count a trajectory."""
        self.doing[doing] += 1
        self.num_turns += record.num_turns
        self.output_tokens += record.output_tokens
        self.remaining_tokens += remaining_tokens
        if record.created_at < self.began_at:
            self.began_at = record.created_at
        if record.last_at > self.last_at:
            self.last_at = record.last_at
        if record.state is not TrajectoryState.ACTIVE:
            self.ended_at.append(record.last_at)

    def view(self, rollout_id: str | None, now: float) -> dict[str, Any]:
        """As the API shows it. Its curve ends with its last trajectory, or now if it goes on."""
        until = self.last_at if len(self.ended_at) == sum(self.doing.values()) else now
        counts, _ = np.histogram(self.ended_at, _NUM_POINTS, (self.began_at, max(until, self.began_at + 1e-3)))
        return {
            "id": rollout_id,
            "num_trajectories": self.doing,
            "num_turns": self.num_turns,
            "output_tokens": self.output_tokens,
            "remaining_tokens": round(self.remaining_tokens),
            "began_at": self.began_at,
            "until": until,
            "num_ended": counts.cumsum().tolist(),
        }


class _Found:
    """What a look found.

    Args:
        live: the live turns, by trajectory.
    """

    def __init__(self, live: dict[str, _Live]) -> None:
        self._live = live
        self._rollouts: dict[str | None, _Rollout] = {}
        self._longest: list[_Remaining] = []  # a heap

    def add(self, record: TrajectoryRecord) -> None:
        """Count a trajectory."""
        doing, remaining_tokens = record.state.value, 0.0
        if record.state is TrajectoryState.ACTIVE:
            doing = _doing(record, self._live.get(record.trajectory_id, _NO_TURN))
            remaining_tokens = max(record.predicted_tokens - record.output_tokens, 1.0)
            if len(self._longest) < _NUM_LONGEST:
                heappush(self._longest, (remaining_tokens, record.trajectory_id, doing, record))
            elif remaining_tokens > self._longest[0][0]:
                heapreplace(self._longest, (remaining_tokens, record.trajectory_id, doing, record))
        rollout = self._rollouts.get(record.rollout_id)
        if rollout is None:
            rollout = self._rollouts[record.rollout_id] = _Rollout(record.created_at)
        rollout.add(record, doing, remaining_tokens)

    def view(self, now: float) -> dict[str, Any]:
        """As the API shows it."""
        rollouts = self._rollouts
        latest = nlargest(_NUM_ROLLOUTS, rollouts.items(), key=lambda item: item[1].last_at)
        return {
            "num_trajectories": {name: sum(one.doing[name] for one in rollouts.values()) for name in _DOING},
            "num_rollouts": len(rollouts),
            "rollouts": [rollout.view(rollout_id, now) for rollout_id, rollout in latest],
            "longest": [
                _long(record, doing, remaining_tokens, self._live.get(record.trajectory_id, _NO_TURN))
                for remaining_tokens, _, doing, record in sorted(self._longest, reverse=True)
            ],
        }


class Overview:
    """The work at hand, for any number of people who look at it."""

    def __init__(self, clock: Clock, driver: Driver, ledger: Ledger, metrics: Metrics, passes: Passes) -> None:
        self._clock = clock
        self._driver = driver
        self._ledger = ledger
        self._metrics = metrics
        self._passes = passes
        self._samples: deque[tuple[float, int, int, float, int]] = deque(maxlen=_NUM_SAMPLES)
        self._lock = asyncio.Lock()
        self._seen: dict[str, Any] = {}
        self._valid_until = 0.0

    async def keep_samples(self) -> None:
        """Sample the load, until cancelled."""
        while True:
            self._samples.append(self._sample())
            await asyncio.sleep(_SAMPLE_S)

    async def look(self) -> dict[str, Any]:
        """The work at hand, as the API shows it.

        `doing` of a trajectory: `declared` (no turn yet), `waiting`, `running` or `in_tool_call`. `remaining_tokens`:
        predicted output still to come.

        Cost: 10,000 trajectories take 20 ms, in slices of 1 ms between which turns are served.
        """
        async with self._lock:
            if self._clock() >= self._valid_until:
                self._seen = await self._look()
            return self._seen

    async def _look(self) -> dict[str, Any]:
        began_at = now = self._clock()
        sample, found = self._sample(), _Found(self._live_turns())
        busy_s = self._clock() - began_at

        def look(entries: Sequence[Entry]) -> None:
            nonlocal busy_s
            began_at = self._clock()
            for entry in entries:
                found.add(entry.record)
            busy_s += self._clock() - began_at

        await self._passes.over(self._ledger, _SLICE, look)
        began_at = self._clock()
        names = ("at", "num_running_turns", "num_waiting_turns", "kv_claimed_share", "output_tokens")
        history = dict(zip(names, zip(*self._samples, sample, strict=True), strict=True))
        seen = {"at": now, **found.view(now), "history": history}
        busy_s += self._clock() - began_at
        self._valid_until = self._clock() + max(_LOOK_MAX_AGE_S, busy_s / _LOOK_MAX_SHARE)
        return seen

    def _live_turns(self) -> dict[str, _Live]:
        live: dict[str, _Live] = {}
        for turn in self._driver.live_turns():
            known = live.setdefault(turn.ask.trajectory_id, _Live())
            known.is_running = known.is_running or bool(turn.engine_id)
            known.num_chunks += turn.num_chunks
        return live

    def _sample(self) -> tuple[float, int, int, float, int]:
        engines = self._driver.scheduler.engines.values()
        known = [engine for engine in engines if engine.spec.kv_capacity_tokens]
        capacity_tokens = sum(engine.spec.kv_capacity_tokens or 0 for engine in known)
        claimed_share = sum(engine.kv_held for engine in known) / capacity_tokens if capacity_tokens else 0.0
        num_running = sum(len(engine.running) for engine in engines)
        num_waiting = self._driver.scheduler.num_waiting
        return self._clock(), num_running, num_waiting, claimed_share, self._metrics.num_output_tokens


def _doing(record: TrajectoryRecord, live: _Live) -> str:
    """What an active trajectory is doing."""
    if live is _NO_TURN:
        return "in_tool_call" if record.num_turns else "declared"
    return "running" if live.is_running else "waiting"


def _long(record: TrajectoryRecord, doing: str, remaining_tokens: float, live: _Live) -> dict[str, Any]:
    return {
        "id": record.trajectory_id,
        "rollout_id": record.rollout_id,
        "home": record.home,
        "doing": doing,
        "num_turns": record.num_turns,
        "context_tokens": record.context_tokens,
        "output_tokens": record.output_tokens,
        "remaining_tokens": round(remaining_tokens),
        "live_chunks": live.num_chunks,
        "last_at": record.last_at,
    }
