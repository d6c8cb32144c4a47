"""Runs for people: progress while they are played, and a table of their results."""

from collections.abc import Callable, Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from simulator.outcome import Ending
from simulator.runs import Run
from simulator.scenario import Scenario
from workloads.trajectories import Workload

REDRAW_EVERY = 64
"""Trajectories between two updates of the bar, because an update costs more than an event of the rollout."""


NUM_NARROW = 4
"""Figures that mostly fit beside policy and fleet in 80 columns; the others go into tables below."""

MOST_COLUMNS = 10_000
"""More than a table has; measured for a console, a table is never wider than that."""

LEAST_FLEET = 12
"""Characters of a fleet's name that stay in one line, however narrow the console."""


class RunProgress:
    """A bar for all runs, and one for the trajectories of the current run."""

    def __init__(self, num_runs: int, console: Console) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._console = console
        self._all = self._progress.add_task("runs", total=num_runs)
        self._one = self._progress.add_task("", total=None)

    def __enter__(self) -> "RunProgress":
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, title: str, num_trajectories: int) -> Callable[[float], None]:
        """Begin a run. Returns the function to call at the end of each trajectory."""
        self._progress.reset(self._one, description=title, total=num_trajectories)
        num_ended = 0

        def ended(at: float) -> None:
            nonlocal num_ended
            num_ended += 1
            if num_ended % REDRAW_EVERY == 0:
                self._progress.update(self._one, completed=num_ended, description=f"{title}: {at:,.0f} s")

        return ended

    def end(self, title: str, run: Run) -> None:
        """End a run, and leave one line about it, so that long scenarios give results all along, in a file too."""
        self._progress.advance(self._all)
        over = "" if run.regret is None else f", {run.regret:.2f} times the bound"
        self._console.print(
            f"{title}: {_seconds(run.outcome.makespan_s)} s{over}{_lost(run)}",
            soft_wrap=True,
            highlight=False,
        )


def print_head(scenario: Scenario, workload: Workload, console: Console) -> None:
    """Print what is played."""
    console.print(f"{scenario.name}: {scenario.about}" if scenario.about else scenario.name)
    console.print(
        f"{len(workload.trajectories):,} trajectories, {workload.num_turns:,} turns, "
        f"{workload.output_tokens:,} output tokens of {workload.total_tokens:,}; predictor: {scenario.predictor}"
    )


def print_runs(runs: Sequence[Run], policies: Sequence[str], console: Console) -> None:
    """A line for each policy and fleet, means over seeds; the fleet on which a policy is fastest, of those on which it
    refuses the fewest trajectories, has a star."""
    lines: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        lines.setdefault((run.labels.policy, run.labels.fleet), []).append(run)
    best = {policy: _best_line(lines, policy) for policy in policies}
    base = lines[best[policies[0]]]
    rows: list[tuple[str, str, dict[str, str]]] = []
    for (policy, fleet), line in sorted(lines.items(), key=lambda item: policies.index(item[0][0])):
        star = " *" if best[policy] == (policy, fleet) and len(best) < len(lines) else ""
        rows.append((policy, fleet + star, _cells(line, base)))
    for table in _tables(rows, console):
        console.print(table)
    console.print("* its best fleet. ratio: first policy's best makespan / this one. regret: makespan / bound.")
    console.print(f"No policy ends all trajectories before {_bounds(runs)}.", soft_wrap=True)


def _tables(rows: Sequence[tuple[str, str, dict[str, str]]], console: Console) -> list[Table]:
    """One table with all figures, or several with fewer, so that none is wider than the console."""
    names = list(rows[0][2])
    can_fold = max(max(len(fleet) for _, fleet, _ in rows) - LEAST_FLEET, 0)
    at_any_width = console.options.update(width=MOST_COLUMNS)
    for at_once in (len(names), *range(NUM_NARROW, 0, -1)):
        groups = [names[begin : begin + at_once] for begin in range(0, len(names), at_once)]
        tables = [_table(rows, some) for some in groups]
        widest = max(console.measure(table, options=at_any_width).maximum for table in tables)
        if widest - can_fold <= console.width:
            break
    return tables


def _table(rows: Sequence[tuple[str, str, dict[str, str]]], names: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("fleet", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for policy, fleet, cells in rows:
        table.add_row(policy, fleet, *(cells[name] for name in names))
    return table


def _cells(line: Sequence[Run], base: Sequence[Run]) -> dict[str, str]:
    outcomes = [run.outcome for run in line]
    makespans = [outcome.makespan_s for outcome in outcomes]
    spread = f" ±{_spread(makespans)}" if len(makespans) > 1 else ""
    summaries = [outcome.summary() for outcome in outcomes]

    def mean(name: str) -> float:
        return fmean(summary[name] for summary in summaries)

    return {
        "makespan s": f"{_seconds(fmean(makespans))}{spread}",
        "ratio": "-" if _num_failed(line) or _num_failed(base) else f"{_makespan_s(base) / fmean(makespans):.2f}",
        "regret": _regret(line),
        "tokens/s": f"{mean('tokens_per_s'):,.0f}",
        "mean s": _seconds(mean("mean_trajectory_s")),
        "p99 s": _seconds(mean("p99_trajectory_s")),
        "queued s": _seconds(mean("mean_queued_s")),
        "prefix hits": f"{100 * mean('prefix_hit_share'):.1f} %",
        "preempted": f"{mean('num_preemptions') + mean('num_pauses'):,.0f}",
        "moves": f"{mean('num_moves'):,.0f}",
        "lost": f"{mean('num_trajectories') - mean('num_finished'):,.0f}",
    }


def _best_line(lines: dict[tuple[str, str], list[Run]], policy: str) -> tuple[str, str]:
    own = (key for key in lines if key[0] == policy)
    return min(own, key=lambda key: (_num_failed(lines[key]), _makespan_s(lines[key])))


def _num_failed(line: Sequence[Run]) -> int:
    """Trajectories with a turn that was refused for good: a rollout without them is another one, not a faster one."""
    return sum(trajectory.ending is Ending.FAILED for run in line for trajectory in run.outcome.trajectories)


def _makespan_s(line: Sequence[Run]) -> float:
    return fmean(run.outcome.makespan_s for run in line)


def _regret(line: Sequence[Run]) -> str:
    """The mean, or `-` if a run has none."""
    regrets = [run.regret for run in line if run.regret is not None]
    return f"{fmean(regrets):.2f}" if len(regrets) == len(line) else "-"


def _lost(run: Run) -> str:
    """What the makespan leaves out."""
    num = len(run.outcome.trajectories)
    num_lost = num - run.outcome.num_finished
    return f"; {num_lost:,} of {num:,} trajectories lost" if num_lost else ""


def _seconds(seconds: float) -> str:
    """A tenth of a second is precise enough for a rollout, but not for one that takes less than ten seconds."""
    return f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:.3f}"


def _spread(makespans: Sequence[float]) -> str:
    """Half the range over seeds, in whole seconds; below 100 s, with the digits of the makespan."""
    digits = 0 if fmean(makespans) >= 100 else 1 if fmean(makespans) >= 10 else 3
    return f"{(max(makespans) - min(makespans)) / 2:,.{digits}f}"


def _bounds(runs: Sequence[Run]) -> str:
    of_fleets = {
        run.labels.fleet: fmean(r.bounds.fleet_s for r in runs if r.labels.fleet == run.labels.fleet) for run in runs
    }
    texts = [f"{_seconds(bound)} s on {fleet}" for fleet, bound in of_fleets.items()]
    best_s = fmean(run.bounds.best_fleet_s for run in runs)
    return ", ".join([*texts, f"{_seconds(best_s)} s on any fleet of as many GPUs"])
