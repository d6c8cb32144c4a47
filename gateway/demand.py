"""What the fleet's controller must know of the work at hand: what each trajectory still needs, and how far to trust
those figures.

The controller asks for it (`GET /v1/demand`) with any store, or reads it from a stream in a Redis store
(demand_stream.py). Each look also notes what was predicted of trajectories. When they have ended, the prediction is
compared with the outcome, because a fleet is reshaped within a rollout only if the predictor has proven itself.
"""

import asyncio
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.clock import Clock
from gateway.passes import Passes
from gateway.state.driver import Driver
from gateway.state.ledger import Entry, Ledger
from gateway.turns.progress import first_prompt_tokens
from predictor.scoring import log_pearson
from scheduling.reshaping import still_needed
from scheduling.types import TrajectoryRecord, TrajectoryState

_MAX_WATCHED = 20_000
_MAX_COMPARED = 1_000
# Of one rollout: 7 MB.
_MAX_FORGOTTEN = 20_000
# Trajectories looked at before other tasks run: 2 ms.
_SLICE = 400
# With fewer, a correlation is chance.
_MIN_COMPARED = 8

_Ended = dict[str, tuple[float, dict[str, int]]]


@dataclass(slots=True)
class _Found:
    """What a pass found.

    Args:
        remaining: of each active trajectory, as JSON.
        going_on: rollouts with active trajectories.
        finished: finished trajectories, by rollout and id: when each one ended, and what it came to.
        ended_at: when the last of them ended, by rollout.
    """

    remaining: list[bytes] = field(default_factory=list)
    going_on: set[str | None] = field(default_factory=set)
    finished: defaultdict[str | None, _Ended] = field(default_factory=lambda: defaultdict(dict))
    ended_at: defaultdict[str | None, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, entry: Entry) -> None:
        """Count a trajectory."""
        record = entry.record
        rollout_id = record.rollout_id
        if record.state is TrajectoryState.ACTIVE:
            self.going_on.add(rollout_id)
            self.remaining.append(orjson.dumps(_remaining(record)))
        elif record.state is TrajectoryState.FINISHED and record.num_turns:
            self.finished[rollout_id][record.trajectory_id] = record.last_at, _whole(entry)
            self.ended_at[rollout_id] = max(self.ended_at[rollout_id], record.last_at)

    def add_forgotten(self, before: Mapping[str | None, _Ended]) -> None:
        """Count what an earlier pass found finished and is forgotten by now, as long as anything of its rollout is
        here: a rollout may take longer than `max_token_age_s`.
        """
        for rollout_id in before.keys() & (self.going_on | self.finished.keys()):
            there = self.finished[rollout_id]
            forgotten = [one for one in before[rollout_id].items() if one[0] not in there]
            self.finished[rollout_id] = dict(forgotten[-_MAX_FORGOTTEN:]) | there


class Demand:
    """The work at hand, for callers that ask repeatedly."""

    def __init__(self, clock: Clock, driver: Driver, ledger: Ledger, passes: Passes) -> None:
        self._clock = clock
        self._began_at = clock()
        self._driver = driver
        self._ledger = ledger
        self._passes = passes
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[_Found] | None = None
        self._finished: Mapping[str | None, _Ended] = {}
        self._watched: OrderedDict[str, float] = OrderedDict()
        self._compared: deque[tuple[float, float]] = deque(maxlen=_MAX_COMPARED)

    async def look(self, since: float = 0.0) -> dict[str, Any]:
        """The work at hand, as the API shows it; orjson encodes it.

        `trajectories`: for each active one, predicted output tokens still to come, its context now, tokens that tools
        will still add to it, and its home. `last_rollout`: the rollout that ended last, if that was after `since`. A
        `since` that is still to come is of an earlier process, and the machine's clock was set back: what this process
        saw end came after it.

        Cost: 6,400 trajectories take about 35 ms, in slices between which turns are served.
        """
        if since > self._clock():
            since = self._began_at
        if self._next is None:  # all who ask before it begins share it
            self._next = asyncio.create_task(self._pass(), name="demand")
        found = await asyncio.shield(self._next)
        return {
            "at": self._clock(),
            "trajectories": orjson.Fragment(b"[" + b",".join(found.remaining) + b"]"),
            "last_rollout": _last_rollout(found, since),
            "num_waiting_turns": self._driver.scheduler.num_waiting,
            "correlation": _correlation(self._compared),
            "num_compared": len(self._compared),
        }

    async def _pass(self) -> _Found:
        async with self._one_at_a_time:
            self._next = None
            found = _Found()

            def look(entries: Sequence[Entry]) -> None:
                for entry in entries:
                    self._watch(entry.record)
                    found.add(entry)

            await self._passes.over(self._ledger, _SLICE, look)
            found.add_forgotten(self._finished)
            self._finished = found.finished
            return found

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


def _last_rollout(found: _Found, since: float) -> dict[str, Any] | None:
    """All of the rollout that ended last. Trajectories without a rollout count as one, if they ended after `since`."""
    ended_at = {rollout_id: at for rollout_id, at in found.ended_at.items() if rollout_id not in found.going_on}
    last = max(ended_at, key=ended_at.__getitem__, default=None)
    if last not in ended_at or ended_at[last] <= since:
        return None
    trajectories = [whole for last_at, whole in found.finished[last].values() if last or last_at > since]
    return {"rollout_id": last, "ended_at": ended_at[last], "trajectories": trajectories}


def _whole(entry: Entry) -> dict[str, int]:
    """What an ended trajectory came to: its first prompt, what tools added, and what it made."""
    record = entry.record
    first = first_prompt_tokens(entry)
    added = max(record.context_tokens - record.output_tokens - first, 0)
    return {"output_tokens": record.output_tokens, "context_tokens": first, "new_tokens": added}


def _correlation(pairs: Collection[tuple[float, float]]) -> float | None:
    """Of the logarithms; None if there are too few pairs or no variation."""
    if len(pairs) < _MIN_COMPARED:
        return None
    predicted, made = zip(*pairs, strict=True)
    return log_pearson(predicted, made) or None
