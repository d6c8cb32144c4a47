"""The result of a simulated rollout: figures for tables, and timelines for plots, with their JSON form.

The JSON of `heddle simulate --json FILE` is

    {"format": 1, "scenario": NAME, "trace": PATH or null, "runs": [RUN, ...]}

and a RUN is `run_json` of one outcome: the labels `policy, fleet, predictor, seed, epoch`, the figures of
`Outcome.summary`, `bound_s, regret, best_fleet_bound_s` (`regret` may be null, as in `Outcome.regret`), and three
tables, as columns of equal length in one object:

* `trajectories`: `id, group, state, ended_at, num_turns, output_tokens, context_tokens, queued_s, engine_s, tool_s,
  num_legs, num_moves, engine` (index into `engines`, of the last one), in the order of their start;
* `engines`: a list of `{id, profile, tp, slots, kv_capacity_tokens, began_at, ended_at, num_preemptions, timeline}`,
  whose `timeline` has the columns `at, num_running, num_waiting, kv_share, kv_claimed_share`;
* `predictions`: `trajectory` (index), `turn, made, total, p90`: the predictions made before turns 0, 1, 2, 4 and 8.

Times are virtual seconds since the rollout's start; an engine that outlived it has no `ended_at` (null).
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any

FORMAT = 1

PREDICTED_TURNS = (0, 1, 2, 4, 8)
"""The turns before which predictions are kept."""


class Ending(StrEnum):
    """How a trajectory ended: with all its turns, because its client left, or because a turn was refused for good."""

    FINISHED = "finished"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PredictionMade:
    """A prediction made before a turn.

    Args:
        made_tokens: the trajectory's output at that time.
        total_tokens, p90_tokens: its predicted total.
    """

    turn: int
    made_tokens: int
    total_tokens: float
    p90_tokens: float


@dataclass(frozen=True, slots=True)
class TrajectoryOutcome:
    """One trajectory's course through the rollout.

    Args:
        ended_at: when its last turn ended; all trajectories start at 0.
        queued_s: time that its turns waited in the scheduler, in an engine's queue, or for KV in transfer.
        engine_s: time in which an engine ran them, prefill included.
        tool_s: time in tools.
        num_legs: turns, plus the extra legs caused by preemption and dead engines.
        num_moves: turns that began on another engine than the one before.
        engine_id: where its last turn ran; None if none did.
        num_pauses: legs that the scheduler preempted, with their tokens kept.
    """

    trajectory_id: str
    group_id: str
    ending: Ending
    ended_at: float
    num_turns: int
    output_tokens: int
    context_tokens: int
    queued_s: float
    engine_s: float
    tool_s: float
    num_legs: int
    num_moves: int
    engine_id: str | None
    num_pauses: int = 0
    predictions: tuple[PredictionMade, ...] = ()


@dataclass(slots=True)
class Timeline:
    """What an engine held, sampled as columns of equal length; a value holds until the next."""

    at: list[float] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)
    kv_share: list[float] = field(default_factory=list)
    kv_claimed_share: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """One engine's part in the rollout; `ended_at` is None if it outlived the rollout."""

    engine_id: str
    profile: str
    tp: int
    slots: int
    kv_capacity_tokens: int
    began_at: float
    ended_at: float | None
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Bounds:
    """Makespans that no policy can beat: on this fleet, and on the best fleet of as many GPUs."""

    fleet_s: float
    best_fleet_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a rollout. Times in seconds since its start."""

    policy: str
    trajectories: tuple[TrajectoryOutcome, ...]
    engines: tuple[EngineOutcome, ...]
    num_relaunches: int = 0

    @property
    def makespan_s(self) -> float:
        return max(trajectory.ended_at for trajectory in self.trajectories)

    @property
    def num_preemptions(self) -> int:
        """Preemptions by engines that ran out of KV."""
        return sum(engine.num_preemptions for engine in self.engines)

    @property
    def num_finished(self) -> int:
        return sum(trajectory.ending is Ending.FINISHED for trajectory in self.trajectories)

    @property
    def num_moves(self) -> int:
        return sum(trajectory.num_moves for trajectory in self.trajectories)

    @property
    def output_tokens(self) -> int:
        return sum(trajectory.output_tokens for trajectory in self.trajectories)

    @property
    def tokens_per_s(self) -> float:
        # A rollout whose turns are all refused at once takes no time.
        return self.output_tokens / self.makespan_s if self.output_tokens else 0.0

    @property
    def prefix_hit_share(self) -> float:
        """Share of prompt tokens that were found in an engine's cache."""
        prompt_tokens = sum(engine.num_prompt_tokens for engine in self.engines)
        return sum(engine.num_cached_tokens for engine in self.engines) / prompt_tokens if prompt_tokens else 0.0

    def regret(self, bounds: Bounds) -> float | None:
        """The makespan over the bound on this fleet. None: turns that the bound counts were refused for good, or every
        client left at its first turn."""
        if not bounds.fleet_s or any(trajectory.ending is Ending.FAILED for trajectory in self.trajectories):
            return None
        return self.makespan_s / bounds.fleet_s

    def ended_share_at(self, share: float) -> float:
        """When this share of the trajectories had ended."""
        ends = sorted(trajectory.ended_at for trajectory in self.trajectories)
        return ends[max(math.ceil(share * len(ends)) - 1, 0)]

    def summary(self) -> dict[str, float | int]:
        """The figures, by their names in the JSON."""
        trajectories = self.trajectories
        return {
            "makespan_s": self.makespan_s,
            "tokens_per_s": self.tokens_per_s,
            "output_tokens": self.output_tokens,
            "num_trajectories": len(trajectories),
            "num_finished": self.num_finished,
            "mean_trajectory_s": fmean(trajectory.ended_at for trajectory in trajectories),
            "p95_trajectory_s": self.ended_share_at(0.95),
            "p99_trajectory_s": self.ended_share_at(0.99),
            "mean_queued_s": fmean(trajectory.queued_s for trajectory in trajectories),
            "mean_engine_s": fmean(trajectory.engine_s for trajectory in trajectories),
            "num_legs": sum(trajectory.num_legs for trajectory in trajectories),
            "num_preemptions": self.num_preemptions,
            "num_pauses": sum(trajectory.num_pauses for trajectory in trajectories),
            "num_moves": self.num_moves,
            "num_relaunches": self.num_relaunches,
            "prefix_hit_share": self.prefix_hit_share,
        }


@dataclass(frozen=True, slots=True)
class Labels:
    """What distinguishes a run from the others."""

    policy: str
    fleet: str
    predictor: str
    seed: int
    epoch: int = 0


def run_json(labels: Labels, outcome: Outcome, bounds: Bounds) -> dict[str, Any]:
    """One run in the form described in the module's docstring."""
    index_of = {engine.engine_id: index for index, engine in enumerate(outcome.engines)}
    return {
        "policy": labels.policy,
        "fleet": labels.fleet,
        "predictor": labels.predictor,
        "seed": labels.seed,
        "epoch": labels.epoch,
        **outcome.summary(),
        "bound_s": bounds.fleet_s,
        "regret": outcome.regret(bounds),
        "best_fleet_bound_s": bounds.best_fleet_s,
        "trajectories": _trajectory_columns(outcome, index_of),
        "engines": [_engine_json(engine) for engine in outcome.engines],
        "predictions": _prediction_columns(outcome),
    }


def _trajectory_columns(outcome: Outcome, index_of: dict[str, int]) -> dict[str, list[Any]]:
    them = outcome.trajectories
    return {
        "id": [t.trajectory_id for t in them],
        "group": [t.group_id for t in them],
        "state": [t.ending.value for t in them],
        "ended_at": [round(t.ended_at, 4) for t in them],
        "num_turns": [t.num_turns for t in them],
        "output_tokens": [t.output_tokens for t in them],
        "context_tokens": [t.context_tokens for t in them],
        "queued_s": [round(t.queued_s, 4) for t in them],
        "engine_s": [round(t.engine_s, 4) for t in them],
        "tool_s": [round(t.tool_s, 4) for t in them],
        "num_legs": [t.num_legs for t in them],
        "num_moves": [t.num_moves for t in them],
        "engine": [None if t.engine_id is None else index_of[t.engine_id] for t in them],
    }


def _engine_json(engine: EngineOutcome) -> dict[str, Any]:
    timeline = engine.timeline
    return {
        "id": engine.engine_id,
        "profile": engine.profile,
        "tp": engine.tp,
        "slots": engine.slots,
        "kv_capacity_tokens": engine.kv_capacity_tokens,
        "began_at": engine.began_at,
        "ended_at": engine.ended_at,
        "num_preemptions": engine.num_preemptions,
        "timeline": {
            "at": [round(at, 3) for at in timeline.at],
            "num_running": timeline.num_running,
            "num_waiting": timeline.num_waiting,
            "kv_share": [round(share, 4) for share in timeline.kv_share],
            "kv_claimed_share": [round(share, 4) for share in timeline.kv_claimed_share],
        },
    }


def _prediction_columns(outcome: Outcome) -> dict[str, list[Any]]:
    rows = [(index, made) for index, t in enumerate(outcome.trajectories) for made in t.predictions]
    return {
        "trajectory": [index for index, _ in rows],
        "turn": [made.turn for _, made in rows],
        "made": [made.made_tokens for _, made in rows],
        "total": [round(made.total_tokens, 1) for _, made in rows],
        "p90": [round(made.p90_tokens, 1) for _, made in rows],
    }
