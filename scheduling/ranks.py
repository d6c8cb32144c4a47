"""Where, by rank: the Heddle paper's placement and migration, while trajectories come and go (arXiv 2603.28101).

All live trajectories are ranked by predicted remaining output, longest first. A partition gives each engine a part of
the ranks. A trajectory is placed on the engine that has its rank, and moves at a tool return if its rank has become
another engine's. Parts are shares of the number of live trajectories, so they shrink with it. The partition is made
again when the fleet changes or when there are twice as many trajectories as it was made for. If a rollout declares its
trajectories before their first turns, that is once.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from scheduling.cost import EngineProfile
from scheduling.engine import Engine
from scheduling.estimate import Remaining
from scheduling.order import TurnFacts
from scheduling.placement import Candidates, EngineFacts
from scheduling.state import Trajectory
from scheduling.types import TrajectoryState

Partitioner = Callable[[Sequence[Remaining], Sequence[EngineProfile]], list[list[int]]]
"""From trajectories and engines, the fastest first: the indices of each engine's trajectories, longest first."""


def in_rank_group(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """The engine that has the trajectory's rank; if that is not among these, the nearest to it."""
    rank = turn.rank
    for engine in engines:
        first, end = engine.ranks
        if first <= rank < end:
            return engine

    def distance(engine: EngineFacts) -> tuple[float, int]:
        first, end = engine.ranks
        return max(first - rank, rank - end), engine.num_turns

    return min(engines, key=distance)


def follow_rank(
    turn: TurnFacts, home: EngineFacts, candidates: Candidates, fleet: Sequence[EngineFacts]
) -> EngineFacts | None:
    """To the engine that has the trajectory's rank now, if it has room."""
    target = in_rank_group(turn, fleet)
    return target if target is not home and target in candidates else None


class Ranks:
    """Live trajectories, longest remaining output first, and the partition of their ranks."""

    def __init__(self, partition: Partitioner) -> None:
        self._partition = partition
        self._sorted: list[tuple[float, int]] = []
        self._key_of: dict[str, tuple[float, int]] = {}
        self._context_of: dict[int, int] = {}
        self._cut_for: tuple[int, Sequence[Engine]] = (0, ())

    def note(self, trajectory: Trajectory) -> None:
        """Update a trajectory whose remaining work has changed; one that ended has no rank."""
        self.drop(trajectory)
        if trajectory.state is TrajectoryState.ACTIVE:
            key = self._key_of[trajectory.trajectory_id] = (-trajectory.remaining_tokens(), trajectory.ordinal)
            insort(self._sorted, key)
            self._context_of[trajectory.ordinal] = trajectory.context_tokens

    def drop(self, trajectory: Trajectory) -> None:
        """Drop a trajectory that is forgotten."""
        key = self._key_of.pop(trajectory.trajectory_id, None)
        if key is not None:
            del self._sorted[bisect_left(self._sorted, key)]
            del self._context_of[trajectory.ordinal]

    def rank(self, trajectory: Trajectory) -> float:
        """The share of live trajectories ranked before this one; one that ended is behind all."""
        key = -trajectory.remaining_tokens(), trajectory.ordinal
        return bisect_left(self._sorted, key) / max(len(self._sorted), 1)

    def cut(self, engines: Sequence[Engine], at: float) -> None:
        """Give each engine its ranks, if that is due."""
        num_trajectories, seen = self._cut_for
        if not self._sorted or ((seen is engines or seen == engines) and len(self._sorted) < 2 * num_trajectories):
            return
        self._cut_for = len(self._sorted), engines
        by_speed = sorted((engine.facts(at) for engine in engines), key=lambda facts: facts.profile.decode_step_s(1, 0))
        left = [Remaining(-remaining, self._context_of[ordinal]) for remaining, ordinal in self._sorted]
        groups = self._partition(left, [facts.profile for facts in by_speed])
        bounds = pairwise(accumulate(map(len, groups), initial=0))
        ranks_of = dict(zip((facts.engine_id for facts in by_speed), bounds, strict=True))
        for engine in engines:
            first, end = ranks_of[engine.spec.engine_id]
            engine.give_ranks(first / len(self._sorted), end / len(self._sorted))
