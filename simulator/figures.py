"""The plots of docs/results-simulated.md, drawn from the runs that a study kept whole."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduling.policy import HEDDLE
from simulator.comparison import Choice, Results, ablation_ratios
from simulator.plots import Bar, Curve, EngineUse, Panel, Predicted, ablation, calibration, completion, timeline
from simulator.study import CLAIRVOYANT, SEEDS, Case, Job, detail_path

Run = dict[str, Any]
CALIBRATED_TURNS = (0, 4)


def draw_plots(results: Results, cases: Sequence[Case], folder: Path, plots: Path) -> list[tuple[str, str]]:
    """Write all plots whose data are there.

    Returns:
        File names, each with its title.
    """
    drawn: dict[str, tuple[str, str]] = {}
    for case in cases:
        if case.is_shown:
            drawn |= _of_case(results, case, folder)
    groups = _bars(results, cases)
    if groups:
        title = "What each mechanism is worth"
        words = "Without: Heddle's makespan without it over its own. Alone: sticky round robin's over its own with it."
        drawn["ablation.svg"] = title, ablation(groups, title, words)
    plots.mkdir(parents=True, exist_ok=True)
    for name, (_, svg) in drawn.items():
        (plots / name).write_text(svg, encoding="utf-8")
    return [(name, title) for name, (title, _) in drawn.items()]


def _of_case(results: Results, case: Case, folder: Path) -> dict[str, tuple[str, str]]:
    """File names, titles and plots; none while a run that they show is missing."""
    choices = (
        results.best(case, HEDDLE.name),
        results.best_baseline(case),
        results.slowest_policy(case),
        results.best(case, HEDDLE.name, CLAIRVOYANT),
    )
    runs = [(choice, run) for choice in choices if choice and (run := _run(folder, case, choice)) is not None]
    if len(runs) < len(choices):
        return {}
    where = f"{case.name}, {case.num_trajectories:,} trajectories on {case.gpus} GPUs, seed {SEEDS[0]}"
    curves = [Curve(_label(choice), run["trajectories"]["ended_at"]) for choice, run in runs]
    panels = [_panel(choice, run) for choice, run in runs[:2]]
    steps = [_predicted(runs[0][1], turn) for turn in CALIBRATED_TURNS]
    done, use, predicted = f"Trajectories done: {where}", f"KV use: {where}", f"Predicted and true totals: {where}"
    return {
        f"{case.name}-completion.svg": (done, completion(curves, runs[0][1]["best_fleet_bound_s"], done)),
        f"{case.name}-timeline.svg": (use, timeline(panels, use)),
        f"{case.name}-calibration.svg": (predicted, calibration(steps, predicted)),
    }


def _run(folder: Path, case: Case, choice: Choice) -> Run | None:
    path = detail_path(folder, Job(case, choice.policy, choice.tp, SEEDS[0], choice.predictor))
    if not path.exists():
        return None
    run: Run = json.loads(gzip.decompress(path.read_bytes()))
    return run


def _label(choice: Choice) -> str:
    return f"{choice}{', true lengths' if choice.predictor == CLAIRVOYANT else ''}"


def _panel(choice: Choice, run: Run) -> Panel:
    engines = [
        EngineUse(
            engine["timeline"]["at"],
            engine["timeline"]["kv_share"],
            [number / engine["slots"] for number in engine["timeline"]["num_running"]],
        )
        for engine in run["engines"]
    ]
    return Panel(_label(choice), run["makespan_s"], engines)


def _predicted(run: Run, turn: int) -> Predicted:
    table = run["predictions"]
    true_totals = run["trajectories"]["output_tokens"]
    rows = [index for index, at in enumerate(table["turn"]) if at == turn]
    return Predicted(
        turn,
        [table["total"][index] for index in rows],
        [table["p90"][index] for index in rows],
        [true_totals[table["trajectory"][index]] for index in rows],
    )


def _bars(results: Results, cases: Sequence[Case]) -> list[tuple[str, list[Bar]]]:
    groups = []
    for case in cases:
        bars = [
            Bar(f"{kind} {name}" if kind == "without" else f"{name} alone", spread.mean, spread.low, spread.high)
            for name, pair in ablation_ratios(results, case).items()
            for kind, spread in pair.items()
        ]
        if bars:
            groups.append((case.name, bars))
    return groups
