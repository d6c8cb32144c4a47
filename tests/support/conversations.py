"""Generated trajectories at token level, as trees of turns, for the token book and its exports."""

from array import array
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from gateway.tokens.turn_tokens import TurnTokens, VersionSpan

IDS = st.integers(0, 2**32 - 1)
LOGPROBS = st.floats(-100, 0, width=32)


@dataclass(frozen=True)
class Step:
    """A future turn: its tokens, and the number of the earlier turn that it continues, modulo the number of turns."""

    parent: int | None
    new: list[int]
    output: list[int]
    logprobs: list[float] | None
    cut: int


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any turn; half of them have arrays, as turns of engines have, and half have lists."""
    output = draw(st.lists(IDS, min_size=1, max_size=6))
    return Step(
        parent=draw(st.none() | st.integers(0, 20)),
        new=draw(st.lists(IDS, min_size=1, max_size=6)),
        output=output,
        logprobs=draw(st.none() | st.lists(LOGPROBS, min_size=len(output), max_size=len(output))),
        cut=draw(st.integers(0, len(output))),
    )


def conversation(plan: list[Step], trajectory_id: str = "t", at: float = 1000.0) -> list[TurnTokens]:
    """The turns of such a plan, in the order of their ends."""
    turns: list[TurnTokens] = []
    for number, step in enumerate(plan):
        parent = turns[step.parent % len(turns)] if turns and step.parent is not None else None
        before = [*parent.prompt_ids, *parent.output_ids] if parent else []
        spans = (VersionSpan("1", 0, step.cut), VersionSpan("2", step.cut, len(step.output)))
        turns.append(
            TurnTokens(
                trajectory_id,
                turn_id=f"{trajectory_id}-{number}",
                prompt_ids=array("I", before + step.new) if number % 2 else before + step.new,
                output_ids=array("I", step.output) if number % 2 else step.output,
                logprobs=step.logprobs,
                versions=tuple(span for span in spans if span.end > span.start),
                finish_reason="stop" if number % 2 else "tool_calls",
                parent=parent.turn_id if parent else None,
                history=f"history-{trajectory_id}-{number}",
                ended_at=at + number,
            )
        )
    return turns


def comparable(turn: TurnTokens) -> tuple[object, ...]:
    """What must be the same of a turn after it was stored; log-probabilities have 32 bits."""
    logprobs = None if turn.logprobs is None else np.asarray(turn.logprobs, np.float32).tolist()
    return (
        *(list(turn.prompt_ids), list(turn.output_ids), logprobs),
        *(
            turn.trajectory_id,
            turn.turn_id,
            turn.versions,
            turn.finish_reason,
            turn.parent,
            turn.history,
            turn.ended_at,
        ),
    )
