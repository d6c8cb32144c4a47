"""Trajectories without a live turn, the longest idle first: which ones expire, and which go when room is short."""

from collections import OrderedDict

from scheduling.limits import Limits
from scheduling.state import Trajectory
from scheduling.types import ACTIVE


class IdleTrajectories:
    """Active and ended trajectories without a live turn.

    They are added in the order of `last_at`, the time of the current event, so each dictionary is sorted by it.
    """

    def __init__(self) -> None:
        self._active: OrderedDict[str, Trajectory] = OrderedDict()
        self._ended: OrderedDict[str, Trajectory] = OrderedDict()

    def add(self, trajectory: Trajectory) -> None:
        is_active = trajectory.state is ACTIVE
        (self._active if is_active else self._ended)[trajectory.trajectory_id] = trajectory

    def remove(self, trajectory: Trajectory) -> None:
        if self._active.pop(trajectory.trajectory_id, None) is None:
            self._ended.pop(trajectory.trajectory_id, None)

    def next_due_at(self, limits: Limits) -> float | None:
        """When the next trajectory expires; None if there is none."""
        due_at = [trajectory.last_at + limits.trajectory_ttl_s for trajectory in _first(self._active)]
        due_at += [trajectory.last_at + limits.retention_s for trajectory in _first(self._ended)]
        return min(due_at, default=None)

    def to_finish(self, at: float, limits: Limits) -> list[Trajectory]:
        """Active trajectories that were idle for their whole time to live."""
        return _until(self._active, at - limits.trajectory_ttl_s)

    def to_forget(self, at: float, limits: Limits) -> list[Trajectory]:
        """Ended trajectories that were kept for their whole retention."""
        return _until(self._ended, at - limits.retention_s)

    def first_to_go(self) -> Trajectory | None:
        """The trajectory to forget when room is short: the longest ended, else the longest idle."""
        return next(iter(_first(self._ended) + _first(self._active)), None)


def _first(trajectories: "OrderedDict[str, Trajectory]") -> list[Trajectory]:
    return [next(iter(trajectories.values()))] if trajectories else []


def _until(trajectories: "OrderedDict[str, Trajectory]", last_at: float) -> list[Trajectory]:
    due: list[Trajectory] = []
    for trajectory in trajectories.values():
        if trajectory.last_at > last_at:
            break
        due.append(trajectory)
    return due
