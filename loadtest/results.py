"""What a replay measured. Instants are seconds since the rollout began, so two rollouts can be laid side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn as the agent saw it.

    Args:
        asked_tokens: What the trajectory asked for; `output_tokens` is what the server counted.
        first_token_at: None if the answer came whole or not at all.
        queued_s: How long the turn waited for an engine, as the gateway reports; None if it does not.
        error: Why the turn failed; None if it did not.
    """

    trajectory_id: str
    index: int
    asked_tokens: int
    started_at: float
    first_token_at: float | None
    ended_at: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_retries: int
    queued_s: float | None
    error: str | None

    @property
    def llm_s(self) -> float:
        return self.ended_at - self.started_at

    def times(self, factor: float) -> TurnResult:
        """The same with every duration multiplied."""
        return replace(
            self,
            started_at=self.started_at * factor,
            first_token_at=None if self.first_token_at is None else self.first_token_at * factor,
            ended_at=self.ended_at * factor,
            queued_s=None if self.queued_s is None else self.queued_s * factor,
        )


@dataclass(frozen=True, slots=True)
class TrajectoryResult:
    """One agent from its first question to the end of its last turn, without the wait for the concurrency limit.

    Args:
        num_turns: How many turns it should have had; after a turn without an answer the rest cannot be asked.
        error: What went wrong outside the turns; None if nothing did.
    """

    trajectory_id: str
    group_id: str
    num_turns: int
    started_at: float
    ended_at: float
    turns: tuple[TurnResult, ...]
    error: str | None = None

    @property
    def time_s(self) -> float:
        return self.ended_at - self.started_at

    @property
    def llm_s(self) -> float:
        return sum(turn.llm_s for turn in self.turns)

    @property
    def asked_tokens(self) -> int:
        return sum(turn.asked_tokens for turn in self.turns)

    @property
    def queued_s(self) -> float | None:
        """Queueing time summed over the turns; None if that of any turn is unknown."""
        known = [turn.queued_s for turn in self.turns if turn.queued_s is not None]
        return sum(known) if known and len(known) == len(self.turns) else None

    @property
    def waited_s(self) -> float | None:
        """Time to first token, summed over the turns: queueing in the gateway or engine, and prefill. None if a turn
        did not stream.
        """
        waits = [turn.first_token_at - turn.started_at for turn in self.turns if turn.first_token_at is not None]
        return sum(waits) if waits and len(waits) == len(self.turns) else None

    def times(self, factor: float) -> TrajectoryResult:
        """The same with every duration multiplied."""
        started_at, ended_at = self.started_at * factor, self.ended_at * factor
        turns = tuple(turn.times(factor) for turn in self.turns)
        return replace(self, started_at=started_at, ended_at=ended_at, turns=turns)

    @property
    def num_failed_turns(self) -> int:
        """Turns that failed, and those that were never asked because of it."""
        return sum(turn.error is not None for turn in self.turns) + self.num_turns - len(self.turns)


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """All trajectories of one rollout; `name` is its name in tables."""

    name: str
    rollout_id: str
    makespan_s: float
    trajectories: tuple[TrajectoryResult, ...]

    @property
    def turns(self) -> tuple[TurnResult, ...]:
        return tuple(turn for trajectory in self.trajectories for turn in trajectory.turns)

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.makespan_s

    @property
    def mean_trajectory_s(self) -> float:
        return _mean([trajectory.time_s for trajectory in self.trajectories])

    @property
    def p50_trajectory_s(self) -> float:
        return percentile([trajectory.time_s for trajectory in self.trajectories], 50)

    @property
    def p99_trajectory_s(self) -> float:
        return percentile([trajectory.time_s for trajectory in self.trajectories], 99)

    @property
    def mean_first_token_s(self) -> float | None:
        """Mean time to first token over the turns that streamed; None if none did."""
        waits = [turn.first_token_at - turn.started_at for turn in self.turns if turn.first_token_at is not None]
        return _mean(waits) if waits else None

    @property
    def mean_queued_s(self) -> float | None:
        """A trajectory's mean queueing time in the gateway; None if the server does not report it."""
        return _mean_known([trajectory.queued_s for trajectory in self.trajectories])

    @property
    def mean_waited_s(self) -> float | None:
        """A trajectory's mean wait for its first tokens; None if one did not stream."""
        return _mean_known([trajectory.waited_s for trajectory in self.trajectories])

    @property
    def mean_waited_longest_s(self) -> float | None:
        """The same for the tenth of trajectories with the most requested tokens: the same ones in every rollout."""
        longest = sorted(self.trajectories, key=lambda trajectory: -trajectory.asked_tokens)
        return _mean_known([trajectory.waited_s for trajectory in longest[: math.ceil(len(longest) / 10)]])

    def times(self, factor: float) -> RolloutResult:
        """The same with every duration multiplied: a rollout on sped-up engines, in their own seconds."""
        trajectories = tuple(trajectory.times(factor) for trajectory in self.trajectories)
        return replace(self, makespan_s=self.makespan_s * factor, trajectories=trajectories)

    @property
    def num_failed_turns(self) -> int:
        return sum(trajectory.num_failed_turns for trajectory in self.trajectories)

    @property
    def num_retries(self) -> int:
        return sum(turn.num_retries for turn in self.turns)

    @property
    def errors(self) -> tuple[str, ...]:
        """Everything that went wrong, and where."""
        of_turns = [f"{turn.trajectory_id}, turn {turn.index}: {turn.error}" for turn in self.turns if turn.error]
        return (*of_turns, *(f"{t.trajectory_id}: {t.error}" for t in self.trajectories if t.error))

    def to_json(self) -> dict[str, Any]:
        """Summary and every trajectory, in JSON's types."""
        summary = (
            "name rollout_id makespan_s output_tokens tokens_per_s mean_trajectory_s p50_trajectory_s "
            "p99_trajectory_s mean_first_token_s mean_queued_s mean_waited_s mean_waited_longest_s "
            "num_failed_turns num_retries"
        )
        return {name: getattr(self, name) for name in summary.split()} | {
            "trajectories": [asdict(trajectory) for trajectory in self.trajectories]
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least this percentage of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_known(values: Sequence[float | None]) -> float | None:
    """The mean; None if any value is unknown, because the mean of the others would be a different figure."""
    known = [value for value in values if value is not None]
    return _mean(known) if known and len(known) == len(values) else None
