"""Trajectories found in single calls."""

from hypothesis import given
from hypothesis import strategies as st

from workloads.importers.calls import Call, workload_by_prefix, workload_of_sessions

CALLS = st.lists(
    st.builds(
        Call,
        prompt_tokens=st.integers(1, 100),
        output_tokens=st.just(1),
        blocks=st.lists(st.integers(0, 1), max_size=5).map(tuple),
        started_at_s=st.none() | st.integers(0, 9).map(float),
        ended_at_s=st.none() | st.integers(0, 9).map(float),
    ),
    max_size=12,
)


def kept_share(last: Call, call: Call) -> float:
    if not last.blocks or not call.blocks:
        return min(1.0, call.prompt_tokens / last.prompt_tokens)
    kept = next((n for n in range(len(last.blocks), 0, -1) if last.blocks[:n] == call.blocks[:n]), 0)
    return kept / len(last.blocks)


@given(CALLS)
def test_a_call_of_a_session_continues_the_strand_of_which_it_keeps_most(calls: list[Call]) -> None:
    """At least half, and of equals the longest, then the latest. None continues a call that still runs."""
    strands: list[list[Call]] = []
    for call in calls:
        fitting = [
            (kept_share(strand[-1], call), strand[-1].prompt_tokens, number)
            for number, strand in enumerate(strands)
            if kept_share(strand[-1], call) >= 0.5
            and (call.started_at_s is None or call.started_at_s >= (strand[-1].ended_at_s or 0.0))
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
