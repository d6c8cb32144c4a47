"""The lengths of the last rollouts, for which the fleet of the next one is planned. Pure.

The last few rollouts with similar lengths are taken together. When lengths drift by more than chance, everything before
is forgotten.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from scheduling.estimate import Remaining
from scheduling.reshaping import BETWEEN_ROLLOUTS, has_drifted

# Points kept of one rollout: its quantiles, 0.2 % apart; 12 KB in the journal.
MAX_POINTS = 500
# As many rollouts as a change is expected to serve.
MAX_ROLLOUTS = BETWEEN_ROLLOUTS.num_rollouts

Json = dict[str, Any]
Point = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """Trajectories of one rollout, shortest first.

    Args:
        points: output tokens, tokens of the first prompt, and tokens that tools added.
        num_trajectories: how many trajectories the points stand for.
    """

    points: tuple[Point, ...]
    num_trajectories: int

    def lengths(self) -> list[int]:
        """Output tokens of each trajectory."""
        return [point[0] for point in self._spread(self.num_trajectories)]

    def trajectories(self, num: int) -> list[Remaining]:
        """So many of them, evenly chosen, as work from their start."""
        return [Remaining(output, first, added, first) for output, first, added in self._spread(num)]

    def _spread(self, num: int) -> list[Point]:
        return [self.points[index * len(self.points) // num] for index in range(num)]


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of rollouts.

    Args:
        alike: the last ones between which lengths did not drift, newest last; empty: none has ended yet.
        ended_at: of the newest, by the gateway's clock.
        chosen_tps: the fleet that was chosen, or kept, for `chosen_for`; empty: none was.
    """

    alike: tuple[Sample, ...] = ()
    ended_at: float = 0.0
    chosen_tps: tuple[int, ...] = ()
    chosen_for: Sample | None = None

    @property
    def num_trajectories(self) -> int:
        """Of the newest rollout."""
        return self.alike[-1].num_trajectories

    def next_rollout(self) -> list[Remaining]:
        """The expected next rollout: as many trajectories as in the newest, drawn from all similar ones in
        equal parts."""
        total, count = self.num_trajectories, len(self.alike)
        parts = [total * (index + 1) // count - total * index // count for index in range(count)]
        return [one for sample, num in zip(self.alike, parts, strict=True) for one in sample.trajectories(num)]

    def is_for_other_lengths(self) -> bool:
        """Whether the newest rollout's lengths differ from those that the fleet was chosen for."""
        return self.chosen_for is None or _differ(self.chosen_for, self.alike[-1])


def after(history: History, trajectories: Sequence[Remaining], ended_at: float) -> History:
    """The history with one more rollout, of at least one trajectory."""
    newest = _sample(trajectories)
    alike = history.alike if history.alike and not _differ(history.alike[-1], newest) else ()
    return replace(history, alike=(*alike, newest)[-MAX_ROLLOUTS:], ended_at=ended_at)


def chosen(history: History, tps: Sequence[int]) -> History:
    """The history with this fleet for the newest rollout's lengths, whether changed or kept."""
    return replace(history, chosen_tps=tuple(tps), chosen_for=history.alike[-1])


def dumped(history: History) -> Json:
    """As JSON."""
    return asdict(history)


def loaded(fields: Json) -> History:
    """The inverse of `dumped`; other fields that an earlier version wrote are ignored."""
    alike, chosen_for = map(_loaded, fields["alike"]), fields["chosen_for"]
    return History(
        tuple(alike), fields["ended_at"], tuple(fields["chosen_tps"]), _loaded(chosen_for) if chosen_for else None
    )


def _loaded(sample: Json) -> Sample:
    return Sample(
        tuple((output, first, added) for output, first, added in sample["points"]), sample["num_trajectories"]
    )


def _sample(trajectories: Sequence[Remaining]) -> Sample:
    ordered = sorted((round(t.output_tokens), round(t.context_tokens), round(t.new_tokens)) for t in trajectories)
    num_points = min(len(ordered), MAX_POINTS)
    points = tuple(ordered[(2 * index + 1) * len(ordered) // (2 * num_points)] for index in range(num_points))
    return Sample(points, len(ordered))


def _differ(before: Sample, now: Sample) -> bool:
    return has_drifted(before.lengths(), now.lengths())
