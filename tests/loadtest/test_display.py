"""Results and their display: figures computed by hand, ratios above one are better, unknown is not zero."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from loadtest.display import RolloutProgress, print_results
from loadtest.results import RolloutResult, TrajectoryResult, TurnResult, percentile
from workloads.trajectories import Trajectory, Turn, Workload


def turn(trajectory_id: str, tokens: int, llm_s: float, queued_s: float | None, error: str | None = None) -> TurnResult:
    return TurnResult(trajectory_id, 0, tokens, 0.0, llm_s / 2, llm_s, 100, 0, tokens, 0, queued_s, error)


def rollout(name: str, seconds: list[float], queued_s: list[float | None], error: str | None = None) -> RolloutResult:
    trajectories = tuple(
        TrajectoryResult(f"t{n}", "g", 1, 0.0, time_s, (turn(f"t{n}", 10 * (n + 1), time_s, queued, error),))
        for n, (time_s, queued) in enumerate(zip(seconds, queued_s, strict=True))
    )
    return RolloutResult(name, "r", max(seconds), trajectories)


def shown(*results: RolloutResult) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_results(results, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_figures_equal_those_computed_by_hand() -> None:
    """Mean, percentiles, throughput, and the longest tenth by requested output."""
    result = rollout("a", [float(n) for n in range(1, 11)], [float(n) for n in range(10)])
    assert (result.makespan_s, result.output_tokens, result.tokens_per_s) == (10.0, 550, 55.0)
    assert (result.mean_trajectory_s, result.p50_trajectory_s, result.p99_trajectory_s) == (5.5, 5.0, 10.0)
    assert result.mean_queued_s == 4.5
    assert result.mean_first_token_s == 2.75
    assert (result.mean_waited_s, result.mean_waited_longest_s) == (2.75, 5.0)


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 50), (99, 99), (100, 100)])
def test_percentiles_are_by_nearest_rank(percent: float, value: int) -> None:
    """Of the numbers 1 to 100, the P50 is 50: a value that occurred, not one between two values."""
    assert percentile(list(range(100, 0, -1)), percent) == value


def test_turns_never_sent_count_as_failed() -> None:
    """A trajectory that ended after the first of its five turns failed five times, once with a reason."""
    failed = TrajectoryResult("t", "g", 5, 0.0, 1.0, (turn("t", 10, 1.0, None, "HTTP 503"),))
    result = RolloutResult("a", "r", 1.0, (failed,))
    assert (result.num_failed_turns, result.errors) == (5, ("t, turn 0: HTTP 503",))


def test_a_ratio_above_one_is_better_for_times_and_throughput() -> None:
    """Half the makespan and twice the tokens a second are both x2.00."""
    text = shown(rollout("before", [4.0, 8.0], [1.0, 3.0]), rollout("after", [2.0, 4.0], [0.5, 1.5]))
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    for label in (
        "makespan",
        "tokens/s",
        "trajectory time, mean",
        "trajectory time, P99",
        "queueing and prefill, longest tenth",
    ):
        assert "x2.00" in rows[label], label


def test_a_rollout_with_failed_turns_has_no_ratio() -> None:
    """Nor has any with the first if that one's failed: what they take lacks what failed."""
    whole, failed = rollout("whole", [8.0], [1.0]), rollout("failed", [2.0], [1.0], error="HTTP 503")
    for text in (shown(whole, failed), shown(failed, whole)):
        rows = text[: text.index("failed turns")]
        assert "2.00 s" in rows and "8.00 s" in rows and " x" not in rows
    assert shown(whole, failed, rollout("other", [4.0], [1.0])).count("x2.00") > 1


def test_waiting_is_unknown_without_streaming() -> None:
    """Unknown is not zero, and has no ratio."""
    whole = TrajectoryResult("t", "g", 1, 0.0, 1.0, (replace(turn("t", 10, 1.0, None), first_token_at=None),))
    text = shown(RolloutResult("whole", "r", 1.0, (whole,)), rollout("streamed", [1.0], [None]))
    [row] = [line for line in text.splitlines() if "queueing and prefill, mean" in line]
    assert "not told" in row
    assert "0.50 s" in row
    assert "x" not in row.replace("prefill", "")


def test_a_slowed_rollout_multiplies_every_duration() -> None:
    """A rollout that is 20 times as slow takes 20 times as long in every figure and generates as many tokens."""
    result = rollout("a", [1.0, 2.0], [0.5, 1.0])
    slowed = result.times(20)
    assert (slowed.makespan_s, slowed.mean_queued_s, slowed.mean_waited_s) == (40.0, 15.0, 15.0)
    assert (slowed.output_tokens, slowed.tokens_per_s) == (result.output_tokens, result.tokens_per_s / 20)


def test_errors_are_shown_verbatim_and_cut_off() -> None:
    """Brackets in a server's text are not markup. Beyond five, errors are only counted."""
    text = shown(rollout("a", [1.0] * 7, [None] * 7, error="[bold]no[/bold]"))
    assert "t0, turn 0: [bold]no[/bold]" in text
    assert "and 2 more errors" in text


def test_progress_counts_turns_trajectories_and_tokens() -> None:
    """The bar moves by turns, and a trajectory ends with its last turn."""
    turns = (Turn(0, 10, 0.0), Turn(5, 10, 0.0))
    workload = Workload("w", (Trajectory("t0", "g", 9, turns), Trajectory("t1", "g", 9, turns[:1])))
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with RolloutProgress(workload, "rollout", console) as progress:
        progress.on_turn(turn("t0", 10, 1.0, None))
        progress.on_turn(turn("t1", 20, 1.0, None))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2/3" in text
    assert "1/2 trajectories" in text
    assert "30 tokens" in text


def test_progress_fits_into_80_columns() -> None:
    """The usual terminal: turns and time are not cut off, even in a rollout with thousands of turns."""
    trajectories = tuple(Trajectory(f"t{n}", "g", 9, (Turn(0, 10, 0.0),) * 12) for n in range(1_600))
    console = Console(file=io.StringIO(), width=80)
    with RolloutProgress(Workload("w", trajectories), "plans carried out", console):
        pass
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0/19200 turns, 0/1600 trajectories" in text
    assert "0:00:00" in text
