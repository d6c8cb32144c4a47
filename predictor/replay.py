"""Plays trajectories past a predictor in the order in which things would happen, and notes what it says.

Time is what the tokens and the tools take; engines are not modelled, so nobody waits. A sibling is finished for the
predictor only when it would be.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from predictor.progress import Predictor, Progress
from workloads.trajectories import Trajectory

STEPS = (0, 1, 2, 4, 8)
"""Finished turns after which predictions are compared."""

Arrival = Literal["together", "chained"]
"""All start at once, as a rollout does; or each sibling starts when the one before it has ended."""

_TOKEN_S = 0.02
# A person who goes to lunch is not a tool; it would only keep siblings from being finished.
_MAX_TOOL_S = 60.0


@dataclass(frozen=True, slots=True)
class Said:
    """One prediction and what came true; tokens of output.

    Args:
        quantiles: the 50th and the 90th percentile of the total, where the predictor tells them.
    """

    step: int
    trajectory_id: str
    made_tokens: int
    total_tokens: int
    predicted_tokens: float
    quantiles: tuple[float, float] | None


Ask = Callable[[Progress], tuple[float, tuple[float, float] | None]]


def play(trajectories: Sequence[Trajectory], predictor: Predictor, ask: Ask, arrival: Arrival) -> Iterator[Said]:
    """What `ask` said at each of STEPS. `predictor` is told every turn and every end; `ask` may look into it."""
    waiting: dict[str, list[Trajectory]] = {}
    heap: list[tuple[float, int, int, Trajectory]] = []
    for number, trajectory in enumerate(trajectories):
        if arrival == "chained" and trajectory.group_id in waiting:
            waiting[trajectory.group_id].append(trajectory)
        else:
            waiting[trajectory.group_id] = []
            heappush(heap, (0.0, number, 0, trajectory))
    while heap:
        at, number, turn, trajectory = heappop(heap)
        progress = progress_of(trajectory, turn)
        if turn == len(trajectory.turns):
            predictor.ended(progress)
            if waiting[trajectory.group_id]:
                heappush(heap, (at, number, 0, waiting[trajectory.group_id].pop(0)))
            continue
        if turn in STEPS:
            predicted, quantiles = ask(progress)
            made, total = progress.output_tokens, trajectory.output_tokens
            yield Said(turn, trajectory.trajectory_id, made, total, predicted, quantiles)
        else:
            predictor.predict(progress)
        done = trajectory.turns[turn]
        heappush(
            heap, (at + done.output_tokens * _TOKEN_S + min(done.tool_s, _MAX_TOOL_S), number, turn + 1, trajectory)
        )


def progress_of(trajectory: Trajectory, num_turns: int) -> Progress:
    """What a predictor is told of a trajectory with so many finished turns."""
    turns = trajectory.turns
    made = sum(turn.output_tokens for turn in turns[:num_turns])
    given = sum(turn.new_tokens for turn in turns[: num_turns + 1])
    return Progress(
        trajectory.trajectory_id,
        trajectory.group_id,
        prompt_tokens=trajectory.context_tokens,
        context_tokens=trajectory.context_tokens + given + made,
        output_tokens=made,
        last_output_tokens=turns[num_turns - 1].output_tokens if num_turns else 0,
        num_turns=num_turns,
    )
