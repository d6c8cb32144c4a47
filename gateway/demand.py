"""What the fleet's controller must know of the work at hand: what each trajectory still needs, and how far to trust
those figures.

The controller asks for it (`GET /v1/demand`) with any store, or reads it from a stream in a Redis store
(demand_stream.py). Each look also notes what was predicted of trajectories. When they have ended, the prediction is
compared with the outcome, because a fleet is reshaped within a rollout only if the predictor has proven itself.
"""

import asyncio
import math
from collections import OrderedDict, defaultdict, deque
from typing import Any

from gateway.clock import Clock
from gateway.state.driver import Driver
from gateway.state.ledger import Entry, Ledger
from scheduling.reshaping import still_needed
from scheduling.types import TrajectoryRecord, TrajectoryState

_MAX_WATCHED = 20_000
_MAX_COMPARED = 1_000
# Trajectories looked at before other tasks run: 2 ms.
_SLICE = 400
# With fewer, a correlation is chance.
_MIN_COMPARED = 8


class Demand:
    """The work at hand, for callers that ask repeatedly."""

    def __init__(self, clock: Clock, driver: Driver, ledger: Ledger) -> None:
        self._clock = clock
        self._began_at = clock()
        self._driver = driver
        self._ledger = ledger
        self._watched: OrderedDict[str, float] = OrderedDict()
        self._compared: deque[tuple[float, float]] = deque(maxlen=_MAX_COMPARED)

    async def look(self, since: float = 0.0) -> dict[str, Any]:
        """The work at hand, as the API shows it.

        `trajectories`: for each active one, predicted output tokens still to come, its context now, tokens that tools
        will still add to it, and its home. `last_rollout`: the rollout that ended last, if that was after `since`. A
        `since` that is still to come is of an earlier process, and the machine's clock was set back: what this process
        saw end came after it.

        Cost: 6,400 trajectories take about 35 ms, in slices between which turns are served.
        """
        if since > self._clock():
            since = self._began_at
        active: list[TrajectoryRecord] = []
        finished: list[Entry] = []
        remaining: list[dict[str, Any]] = []
        for number, entry in enumerate(list(self._ledger)):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            record = entry.record
            self._watch(record)
            if record.state is TrajectoryState.ACTIVE:
                active.append(record)
                remaining.append(_remaining(record))
            elif record.state is TrajectoryState.FINISHED:
                finished.append(entry)
        return {
            "at": self._clock(),
            "trajectories": remaining,
            "last_rollout": _last_rollout(active, finished, since),
            "num_waiting_turns": self._driver.scheduler.num_waiting,
            "correlation": _log_pearson(self._compared),
            "num_compared": len(self._compared),
        }

    def _watch(self, record: TrajectoryRecord) -> None:
        """Note the first prediction seen for a trajectory; at its end, pair it with the outcome."""
        known = self._watched.get(record.trajectory_id)
        if record.state is not TrajectoryState.ACTIVE:
            self._watched.pop(record.trajectory_id, None)
            if known is not None and record.state is TrajectoryState.FINISHED and record.output_tokens:
                self._compared.append((known, record.output_tokens))
        elif known is None and record.predicted_tokens > 0:
            self._watched[record.trajectory_id] = record.predicted_tokens
            if len(self._watched) > _MAX_WATCHED:
                self._watched.popitem(last=False)


def _remaining(record: TrajectoryRecord) -> dict[str, Any]:
    needed = still_needed(record)
    return {
        "output_tokens": round(needed.output_tokens),
        "context_tokens": record.context_tokens,
        "new_tokens": round(needed.new_tokens),
        "home": record.home,
    }


def _last_rollout(active: list[TrajectoryRecord], finished: list[Entry], since: float) -> dict[str, Any] | None:
    """All of the rollout that ended last. Trajectories without a rollout count as one, if they ended after `since`."""
    going_on = {record.rollout_id for record in active}
    rollouts: defaultdict[str | None, list[Entry]] = defaultdict(list)
    for entry in finished:
        rollout_id = entry.record.rollout_id
        if rollout_id not in going_on and entry.record.num_turns and (rollout_id or entry.record.last_at > since):
            rollouts[rollout_id].append(entry)
    ends = {rollout_id: max(one.record.last_at for one in entries) for rollout_id, entries in rollouts.items()}
    last = max(ends, key=lambda rollout_id: ends[rollout_id], default=None)
    if last not in ends or ends[last] <= since:
        return None
    trajectories = [_whole(entry) for entry in rollouts[last]]
    return {"rollout_id": last, "ended_at": ends[last], "trajectories": trajectories}


def _whole(entry: Entry) -> dict[str, int]:
    """What an ended trajectory came to: its first prompt, what tools added, and what it made."""
    record = entry.record
    first = (entry.turns[0].get("prompt_tokens") or 0) if entry.turns else 0
    added = max(record.context_tokens - record.output_tokens - first, 0)
    return {"output_tokens": record.output_tokens, "context_tokens": first, "new_tokens": added}


def _log_pearson(pairs: "deque[tuple[float, float]]") -> float | None:
    """Correlation of the logarithms; None if there are too few pairs or no variation."""
    if len(pairs) < _MIN_COMPARED:
        return None
    xs, ys = ([math.log(pair[side]) for pair in pairs] for side in (0, 1))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = math.sqrt(sum((x - mean_x) ** 2 for x in xs) * sum((y - mean_y) ** 2 for y in ys))
    if spread < 1e-9:
        return None
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
