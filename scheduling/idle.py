"""Trajectories without a live turn: which ones expire, which are forgotten, and which go when room is short.

Retention counts from the end of the rollout: whoever reads one wants all of it, and its short trajectories end first. A
rollout goes on while one of its trajectories is active or has a live turn. A trajectory without a rollout is one by
itself.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile

from scheduling.limits import Limits
from scheduling.state import Trajectory
from scheduling.types import ACTIVE

# Trajectories forgotten at one tick: some 2 ms. A rollout's are due together, and turns would wait for thousands.
FORGOTTEN_AT_ONCE = 200

_Name = tuple[str | None, str]


@dataclass(slots=True)
class _Rollout:
    """What is known of a rollout, until its last trajectory is forgotten.

    Args:
        ended: its trajectories that ended and have no live turn.
        num_others: while there are any, it goes on.
        last_at: when the last one ended.
        num_forgotten: of its trajectories.
    """

    ended: dict[str, Trajectory] = field(default_factory=dict)
    num_others: int = 0
    last_at: float = 0.0
    num_forgotten: int = 0


class IdleTrajectories:
    """Active and ended trajectories without a live turn, and their rollouts.

    They are added in the order of `last_at`, the time of the current event, so each dictionary is sorted by it.

    Attributes:
        num_forgotten_early: trajectories that were forgotten before their rollout was over for its retention.
    """

    def __init__(self) -> None:
        self.num_forgotten_early = 0
        self._active: OrderedDict[str, Trajectory] = OrderedDict()
        self._ended: OrderedDict[str, Trajectory] = OrderedDict()
        self._rollouts: dict[_Name, _Rollout] = {}
        self._over: OrderedDict[_Name, _Rollout] = OrderedDict()  # those that do not go on

    def begin(self, trajectory: Trajectory) -> None:
        """Know a trajectory, which has no live turn yet."""
        self._enter(trajectory)
        self.add(trajectory)

    def join(self, trajectory: Trajectory, rollout_id: str) -> None:
        """One with a live turn, and without a rollout until now, is of this one."""
        del self._rollouts[_name(trajectory)]
        trajectory.rollout_id = rollout_id
        self._enter(trajectory)

    def add(self, trajectory: Trajectory) -> None:
        """It has no live turn any more."""
        if trajectory.state is ACTIVE:
            self._active[trajectory.trajectory_id] = trajectory
            return
        if trajectory.trajectory_id in self._ended:
            return
        name = _name(trajectory)
        rollout = self._rollouts[name]
        self._ended[trajectory.trajectory_id] = rollout.ended[trajectory.trajectory_id] = trajectory
        rollout.num_others -= 1
        rollout.last_at = trajectory.last_at
        if not rollout.num_others:
            self._over[name] = rollout

    def remove(self, trajectory: Trajectory) -> None:
        """It has a live turn, or is about to change its state."""
        if self._active.pop(trajectory.trajectory_id, None) is not None:
            return
        if self._ended.pop(trajectory.trajectory_id, None) is not None:
            name = _name(trajectory)
            rollout = self._rollouts[name]
            del rollout.ended[trajectory.trajectory_id]
            rollout.num_others += 1
            self._over.pop(name, None)

    def forget(self, trajectory: Trajectory, at: float, limits: Limits) -> None:
        """Know it no more."""
        name = _name(trajectory)
        rollout = self._rollouts[name]
        self.num_forgotten_early += name not in self._over or rollout.last_at > at - limits.retention_s
        rollout.num_forgotten += 1
        if self._active.pop(trajectory.trajectory_id, None) is not None:
            rollout.num_others -= 1
        else:
            del self._ended[trajectory.trajectory_id], rollout.ended[trajectory.trajectory_id]
        if not rollout.num_others and not rollout.ended:
            del self._rollouts[name]
            self._over.pop(name, None)

    def num_forgotten(self, rollout_id: str) -> int:
        """How many trajectories of a rollout were forgotten, while others of it are known."""
        rollout = self._rollouts.get((rollout_id, ""))
        return rollout.num_forgotten if rollout is not None else 0

    def next_due_at(self, limits: Limits) -> float | None:
        """When the next trajectory expires; None if there is none."""
        due_at = [trajectory.last_at + limits.trajectory_ttl_s for trajectory in islice(self._active.values(), 1)]
        due_at += [rollout.last_at + limits.retention_s for rollout in islice(self._over.values(), 1)]
        due_at += [trajectory.last_at + _longest_s(limits) for trajectory in islice(self._ended.values(), 1)]
        return min(due_at, default=None)

    def to_finish(self, at: float, limits: Limits) -> list[Trajectory]:
        """Active trajectories that were idle for their whole time to live."""
        return list(_until(self._active, at - limits.trajectory_ttl_s))

    def to_forget(self, at: float, limits: Limits) -> list[Trajectory]:
        """Ended trajectories that were kept for their whole retention, or as long as any is; some of them if there are
        many."""
        over = takewhile(lambda rollout: rollout.last_at <= at - limits.retention_s, self._over.values())
        kept = chain.from_iterable(rollout.ended.values() for rollout in over)
        due = chain(kept, _until(self._ended, at - _longest_s(limits)))
        return list(dict.fromkeys(islice(due, FORGOTTEN_AT_ONCE)))

    def first_to_go(self) -> Trajectory | None:
        """The trajectory to forget when room is short: the longest ended, else the longest idle."""
        return next(chain(self._ended.values(), self._active.values()), None)

    def _enter(self, trajectory: Trajectory) -> None:
        name = _name(trajectory)
        self._rollouts.setdefault(name, _Rollout()).num_others += 1
        self._over.pop(name, None)


def _name(trajectory: Trajectory) -> _Name:
    if trajectory.rollout_id is None:
        return None, trajectory.trajectory_id
    return trajectory.rollout_id, ""


def _longest_s(limits: Limits) -> float:
    """How long an ended trajectory is kept at most."""
    return max(limits.retention_s, limits.max_token_age_s)


def _until(trajectories: "OrderedDict[str, Trajectory]", last_at: float) -> Iterator[Trajectory]:
    return takewhile(lambda trajectory: trajectory.last_at <= last_at, trajectories.values())
