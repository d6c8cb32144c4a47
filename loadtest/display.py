"""A replay on the terminal: a progress bar while it runs, and rollouts side by side when they have ended."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtest.results import RolloutResult, TurnResult
from workloads.trajectories import Workload

MAX_ERRORS_SHOWN = 5
_WIDE = 110


class RolloutProgress:
    """A progress bar of turns, trajectories and tokens. Used with `with`; its `on_turn` goes to `replay`."""

    def __init__(self, workload: Workload, title: str, console: Console) -> None:
        self._num_turns = {t.trajectory_id: len(t.turns) for t in workload.trajectories}
        self._num_ended = 0
        self._num_tokens = 0
        # In 80 columns they would leave no room for the number of turns.
        tokens = ", {task.fields[tokens]:,} tokens" if console.width >= _WIDE else ""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("turns, {task.fields[trajectories]} trajectories" + tokens),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task(title, total=workload.num_turns, trajectories=self._ended(), tokens=0)

    def __enter__(self) -> RolloutProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def on_turn(self, turn: TurnResult) -> None:
        self._num_tokens += turn.output_tokens
        self._num_ended += turn.index + 1 == self._num_turns[turn.trajectory_id]
        self._progress.update(self._task, advance=1, trajectories=self._ended(), tokens=self._num_tokens)

    def _ended(self) -> str:
        return f"{self._num_ended}/{len(self._num_turns)}"


def comparison_table(results: Sequence[RolloutResult]) -> Table:
    """Rollouts side by side. A ratio is how many times better a rollout is than the first: above 1 is better. There is
    none if turns of either failed: its figures lack what they would have taken."""
    table = Table()
    table.add_column("")
    table.add_column(results[0].name, justify="right")
    for result in results[1:]:
        table.add_column(result.name, justify="right")
        table.add_column("ratio", justify="right")
    have_ratio = [not (results[0].num_failed_turns or result.num_failed_turns) for result in results]
    _add_row(table, "makespan", "s", [result.makespan_s for result in results], have_ratio)
    _add_row(table, "tokens/s", "", [result.tokens_per_s for result in results], have_ratio, more_is_better=True)
    _add_row(table, "trajectory time, mean", "s", [result.mean_trajectory_s for result in results], have_ratio)
    _add_row(table, "trajectory time, P99", "s", [result.p99_trajectory_s for result in results], have_ratio)
    # A step-centric gateway queues nothing itself: its turns wait in the engines. The wait for first tokens includes
    # both.
    _add_row(table, "queueing and prefill, mean", "s", [result.mean_waited_s for result in results], have_ratio)
    waited_s = [result.mean_waited_longest_s for result in results]
    _add_row(table, "queueing and prefill, longest tenth", "s", waited_s, have_ratio)
    failed = [str(result.num_failed_turns) for result in results]
    table.add_row("failed turns", failed[0], *(cell for number in failed[1:] for cell in (number, "")))
    return table


def print_results(results: Sequence[RolloutResult], console: Console) -> None:
    """Print the table, and the first errors."""
    console.print(comparison_table(results))
    for result in results:
        for error in result.errors[:MAX_ERRORS_SHOWN]:
            # An error text is a server's, and not markup.
            console.print(f"{result.name}: {error}", style="red", markup=False)
        if len(result.errors) > MAX_ERRORS_SHOWN:
            console.print(f"{result.name}: and {len(result.errors) - MAX_ERRORS_SHOWN} more errors", style="red")


def _add_row(
    table: Table,
    label: str,
    unit: str,
    values: Sequence[float | None],
    have_ratio: Sequence[bool],
    *,
    more_is_better: bool = False,
) -> None:
    first = values[0]
    cells = [_number(first, unit)]
    for value, has_ratio in zip(values[1:], have_ratio[1:], strict=True):
        cells.append(_number(value, unit))
        if first and value and has_ratio:
            cells.append(f"x{value / first if more_is_better else first / value:.2f}")
        else:
            cells.append("")
    table.add_row(label, *cells)


def _number(value: float | None, unit: str) -> str:
    # A server that does not report its queueing is not one without queueing.
    return "not told" if value is None else f"{value:,.2f} {unit}".rstrip()
