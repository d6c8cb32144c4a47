"""Plays trajectories to a predictor in the order in which things would happen, and records its predictions.

Time is what tokens and tools take; engines are not modelled, so nothing waits. The predictor sees a sibling as finished
only when it would be.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Literal

from predictor.progress import Predictor, Progress
from workloads.trajectories import Trajectory, Turn

STEPS = (0, 1, 2, 4, 8)
"""Numbers of finished turns after which predictions are compared."""

Arrival = Literal["together", "chained"]
"""All trajectories start at once, as in a rollout; or each sibling starts when the one before it has ended."""

_TOKEN_S = 0.02
# A person at lunch is not a tool; such a pause would only keep siblings from finishing.
_MAX_TOOL_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplayedPrediction:
    """One prediction and the true value; tokens of output.

    Args:
        quantiles: the 50th and the 90th percentile of the total, if the predictor gives them.
    """

    step: int
    trajectory_id: str
    made_tokens: int
    total_tokens: int
    predicted_tokens: float
    quantiles: tuple[float, float] | None


Ask = Callable[[Progress], tuple[float, tuple[float, float] | None]]


def play(
    trajectories: Sequence[Trajectory], predictor: Predictor, ask: Ask, arrival: Arrival
) -> Iterator[ReplayedPrediction]:
    """The predictions of `ask` at each of STEPS. `predictor` is told every turn and every end; `ask` may read its
    state."""
    waiting: dict[str, list[Trajectory]] = {}
    heap: list[tuple[float, int, Progress, Trajectory]] = []
    for number, trajectory in enumerate(trajectories):
        if arrival == "chained" and trajectory.group_id in waiting:
            waiting[trajectory.group_id].append(trajectory)
        else:
            waiting[trajectory.group_id] = []
            heappush(heap, (0.0, number, _beginning(trajectory), trajectory))
    while heap:
        at, number, progress, trajectory = heappop(heap)
        turn = progress.num_turns
        if turn == len(trajectory.turns):
            predictor.ended(progress)
            if waiting[trajectory.group_id]:
                sibling = waiting[trajectory.group_id].pop(0)
                heappush(heap, (at, number, _beginning(sibling), sibling))
            continue
        if turn in STEPS:
            predicted, quantiles = ask(progress)
            made, total = progress.output_tokens, trajectory.output_tokens
            yield ReplayedPrediction(turn, trajectory.trajectory_id, made, total, predicted, quantiles)
        else:
            predictor.predict(progress)
        done = trajectory.turns[turn]
        done_at = at + done.output_tokens * _TOKEN_S + min(done.tool_s, _MAX_TOOL_S)
        heappush(heap, (done_at, number, _after(progress, done, trajectory), trajectory))


def _beginning(trajectory: Trajectory) -> Progress:
    """What a predictor is told of a trajectory before its first turn."""
    return Progress(
        trajectory.trajectory_id,
        trajectory.group_id,
        prompt_tokens=trajectory.context_tokens,
        context_tokens=trajectory.context_tokens,
    )


def _after(progress: Progress, done: Turn, trajectory: Trajectory) -> Progress:
    """What it is told after that turn; updated rather than summed again, because some trajectories have thousands of
    turns."""
    num_turns = progress.num_turns + 1
    given = trajectory.turns[num_turns].new_tokens if num_turns < len(trajectory.turns) else 0
    return replace(
        progress,
        context_tokens=progress.context_tokens + done.output_tokens + given,
        output_tokens=progress.output_tokens + done.output_tokens,
        last_output_tokens=done.output_tokens,
        num_turns=num_turns,
    )
