"""Trajectories found in single calls."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.importers.calls import Call, blocks_of, workload_by_prefix, workload_of_sessions

CALLS = st.lists(
    st.builds(
        Call,
        prompt_tokens=st.integers(1, 100),
        output_tokens=st.integers(1, 40),
        blocks=st.lists(st.integers(0, 1), max_size=5).map(lambda bits: blocks_of(bits, 1)),
        started_at_s=st.none() | st.integers(0, 9).map(float),
        ended_at_s=st.none() | st.integers(0, 9).map(float),
        early_s=st.sampled_from([0.0, 0.0, 1.0]),
    ),
    max_size=12,
)


def kept_share(last: Call, call: Call) -> float:
    if not last.blocks or not call.blocks:
        return min(1.0, call.prompt_tokens / last.prompt_tokens)
    kept = next((n for n in range(len(last.blocks), 0, -1) if last.blocks[:n] == call.blocks[:n]), 0)
    return kept / len(last.blocks)


def overlaps(last: Call, call: Call) -> bool:
    return call.started_at_s is not None and call.started_at_s + call.early_s < (last.ended_at_s or 0.0)


@given(CALLS)
def test_a_call_continues_the_deepest_prompt_that_it_repeats_with_its_answer(calls: list[Call]) -> None:
    """Of equally deep ones, the one that came first. None continues a call that still runs."""
    strands: list[list[int]] = []
    for number, call in enumerate(calls):
        fitting = [
            (-len(last.blocks), strand[-1], strand)
            for strand in strands
            for last in [calls[strand[-1]]]
            if last.blocks
            and last.blocks == call.blocks[: len(last.blocks)]
            and call.prompt_tokens >= last.prompt_tokens + last.output_tokens
            and not overlaps(last, call)
        ]
        if fitting:
            min(fitting)[-1].append(number)
        else:
            strands.append([number])
    workload = workload_by_prefix("calls", calls)
    assert [[turn.output_tokens for turn in one.turns] for one in workload.trajectories] == [
        [calls[number].output_tokens for number in strand] for strand in strands
    ]


@given(CALLS)
def test_a_call_of_a_session_continues_the_strand_of_which_it_keeps_most(calls: list[Call]) -> None:
    """At least half, and of equals the longest, then the latest. None continues a call that still runs."""
    strands: list[list[Call]] = []
    for call in calls:
        fitting = [
            (kept_share(strand[-1], call), strand[-1].prompt_tokens, number)
            for number, strand in enumerate(strands)
            if kept_share(strand[-1], call) >= 0.5 and not overlaps(strand[-1], call)
        ]
        if fitting:
            strands[max(fitting)[-1]].append(call)
        else:
            strands.append([call])
    workload = workload_of_sessions("calls", [("s", calls)])
    assert [t.trajectory_id for t in workload.trajectories] == [f"s-{number}" for number in range(len(strands))]
    for trajectory, strand in zip(workload.trajectories, strands, strict=True):
        assert (trajectory.context_tokens, len(trajectory.turns)) == (strand[0].prompt_tokens, len(strand))


def test_requests_with_one_prompt_are_linked_in_linear_time() -> None:
    """A load generator repeats a prompt many times. None continues another, and each is compared a few times at
    most."""
    num_comparisons = 0

    class Prompt(int):
        def __add__(self, other: int) -> int:
            nonlocal num_comparisons
            num_comparisons += 1
            return int(self) + other

    calls = [Call(Prompt(1_100), 20, (1, 2), started_at_s=float(number)) for number in range(1_000)]
    workload = workload_by_prefix("load", calls)
    assert (len(workload.trajectories), len(workload.groups)) == (1_000, 1)
    assert num_comparisons <= 3 * len(calls)


@pytest.mark.parametrize("repeated", ["longest first", "while half of them run"])
def test_answers_of_many_lengths_to_one_prompt_are_continued_in_near_linear_time(repeated: str) -> None:
    """The second turns of 8,000 took several seconds to place; while other requests hung, most of a minute."""
    num_comparisons = 0

    class Prompt(int):
        def __lt__(self, other: int) -> bool:
            nonlocal num_comparisons
            num_comparisons += 1
            return int(self) < other

        def __ge__(self, other: int) -> bool:
            return not self < other

        __hash__ = int.__hash__

    number = 2_000
    if repeated == "longest first":
        first = [Call(1_000, 1 + made, (1, 2), 0.0, 1.0) for made in range(number)]
        second = [Call(Prompt(1_000 + made), 1, (1, 2, 3), 2.0 + number - made) for made in range(number, 0, -1)]
    else:
        first = [Call(1_000, 9, (1, 2), 0.0, 1e9), Call(1_000, 900, (1, 2), 0.0, 1.0)] * (number // 2)
        second = [Call(Prompt(1_500), 1, (1, 2, 3), 2.0 + began) for began in range(number)]
    workload_by_prefix("load", [*first, *second])
    assert 0 < num_comparisons <= 3 * number * math.log2(number)


def test_unlike_contexts_of_a_session_are_not_compared() -> None:
    """A session of 8,000 took two minutes."""
    num_comparisons = 0

    class Block(int):
        __hash__ = int.__hash__

        def __ne__(self, other: object) -> bool:
            nonlocal num_comparisons
            num_comparisons += 1
            return int.__ne__(self, other)  # type: ignore[arg-type]

    starts = range(0, 20_000, 20)
    calls = [Call(500, 20, tuple(map(Block, range(start, start + 20)))) for start in starts]
    workload = workload_of_sessions("load", [("s", [*calls, *calls])])
    assert [len(t.turns) for t in workload.trajectories] == [2] * len(starts)
    assert 0 < num_comparisons <= 20 * len(calls)
