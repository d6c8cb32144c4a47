"""docs/results-simulated.md from the rows of a study: tables, plots, and sentences on what does not pay.

Every sentence follows from the figures beside it. Ratios are paired: the same workload, seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

from scheduling.policy import HEDDLE
from simulator.comparison import Results, Spread, ablation_ratios
from simulator.figures import draw_plots
from simulator.planned_fleets import MIXED, PLANNED
from simulator.study import CLAIRVOYANT, MECHANISMS, Case, Job, Row, baselines, variants

# Smaller differences of means tell nothing (policy study: with three seeds, 2 %).
_SAME = 0.01


def write_page(rows: Mapping[Job, Row], cases: Sequence[Case], folder: Path, path: Path, command: str) -> None:
    """Writes the page and, in `plots/` beside it, its plots.

    Args:
        folder: where the study keeps the runs that plots show.
        command: the command that makes the page.
    """
    results = Results(rows)
    plots = draw_plots(results, cases, folder, path.parent / "plots")
    sections = [
        _against_baselines(results, cases),
        _in_words(results, cases),
        "\n".join(f"![{title}](plots/{name})\n" for name, title in plots),
        _all_policies(results, cases),
        _variants(results, cases),
        _ablations(results, cases),
        _planned(results, cases),
    ]
    parts = [_head(results, rows, command), *(section for section in sections if section)]
    path.write_text("\n".join(parts), encoding="utf-8")


def _head(results: Results, rows: Mapping[Job, Row], command: str) -> str:
    sources = {row.source for row in rows.values()}
    cases = {job.case for job in rows}
    seeds = ", ".join(map(str, sorted({job.seed for job in rows})))
    sizes = sorted({f"{case.num_trajectories:,} trajectories on {case.gpus} GPUs" for case in cases})
    minutes = sum(row.took_s for row in rows.values()) / 60
    warning = "" if len(sources) <= 1 else f" **The rows come from {len(sources)} versions of the sources.**"
    unfinished = [job for job, row in rows.items() if row.figures["num_finished"] < row.figures["num_trajectories"]]
    if unfinished:
        names = ", ".join(sorted({job.case.name for job in unfinished}))
        warning += f" **{len(unfinished)} rollouts lost trajectories ({names}).**"
    played = f"{len(rows):,} rollouts, {minutes:,.0f} minutes of one core: {'; '.join(sizes)}.{warning}"
    made_by = f"*`{command}`, seeds {seeds}; commits: {_commits(results, rows)}*"
    return f"""# Simulated results

The scheduler that ships, run in virtual time (`simulator/`) on engines modelled after measured profiles. Nothing on
this page ran on a GPU. Makespans are virtual seconds. Each policy, Heddle and the baselines alike, has the homogeneous
TP size that is its best in hindsight, and the same number of slots per GPU. Ratios are paired by seed: mean (smallest
to largest). The clairvoyant is Heddle with true lengths; the bound is a makespan that no policy on any fleet of these
GPUs can beat. [results.md](results.md) has the summary and the other measurements.

{_wrapped(played)}

{made_by}
"""


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _commits(results: Results, rows: Mapping[Job, Row]) -> str:
    """The commits of the rows that are shown: those on the TP size that is best in hindsight."""
    kinds: dict[str, set[str]] = {}
    for job, row in rows.items():
        best = results.best(job.case, job.policy, job.predictor)
        if best is not None and best.tp == job.tp:
            kind = "the clairvoyant" if job.predictor == CLAIRVOYANT else _kind(job.policy)
            kinds.setdefault(kind, set()).add(row.commit)
    return "; ".join(f"{kind} {', '.join(sorted(kinds[kind]))}" for kind in sorted(kinds))


def _kind(policy: str) -> str:
    if policy == HEDDLE.name:
        return "Heddle"
    return "baselines" if policy in baselines() else "variants of Heddle"


def _against_baselines(results: Results, cases: Sequence[Case]) -> str:
    lines = [
        "## Against the best and the worst baseline\n",
        "| case | Heddle, s | best baseline, s | x | worst baseline | x | over clairvoyant | over the bound | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        ours, best = results.best(case, HEDDLE.name), results.best_baseline(case)
        worst, clairvoyant = results.worst_baseline(case), results.best(case, HEDDLE.name, CLAIRVOYANT)
        if ours is None:
            continue
        ratio = results.ratio(case, best, ours)
        cells = [
            case.name,
            f"{_seconds(results.makespan(case, ours))}, TP{ours.tp}",
            "-" if best is None else f"{_seconds(results.makespan(case, best))}, {best}",
            f"**{_spread(ratio)}**" if ratio else "-",
            "-" if worst is None else str(worst),
            _spread(results.ratio(case, worst, ours)),
            _spread(results.ratio(case, ours, clairvoyant)),
            _spread(results.to_bound(case, ours)),
            str(ratio.num if ratio else 0),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _all_policies(results: Results, cases: Sequence[Case]) -> str:
    words = "Each policy's makespan divided by Heddle's, paired by seed; its TP in brackets. Bold: it beats Heddle.\n\n"
    return "## Every policy at its best TP\n\n" + words + _matrix(results, cases, baselines())


def _variants(results: Results, cases: Sequence[Case]) -> str:
    shown = [case for case in cases if any(results.best(case, name) for name in variants())]
    if not shown:
        return ""
    words = "Residency, placement and all else are Heddle's, except what the name states.\n\n"
    return "## Heddle with one thing changed\n\n" + words + _matrix(results, shown, variants())


def _matrix(results: Results, cases: Sequence[Case], policies: Sequence[str]) -> str:
    """A row for each case."""
    lines = [f"| case | heddle, s | {' | '.join(policies)} |", "|---" * (len(policies) + 2) + "|"]
    for case in cases:
        ours = results.best(case, HEDDLE.name)
        if ours is None:
            continue
        makespan = results.makespan(case, ours)
        cells = [f"{makespan.mean:,.0f} [{ours.tp}]" if makespan else "-"]
        for policy in policies:
            choice = results.best(case, policy)
            ratio = results.ratio(case, choice, ours)
            cells.append("-" if choice is None or ratio is None else _cell(ratio.mean, choice.tp))
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(ratio: float, tp: int) -> str:
    words = f"x{ratio:.2f} [{tp}]"
    return f"**{words}**" if ratio < 1 - _SAME else words


def _ablations(results: Results, cases: Sequence[Case]) -> str:
    tables = {case: ratios for case in cases if (ratios := ablation_ratios(results, case))}
    if not tables:
        return ""
    lines = [
        "## What each mechanism is worth\n",
        "On Heddle's best fleet. *Needed*: makespan without the mechanism, divided by Heddle's. *Alone*: makespan of",
        "sticky round robin (`verl`), divided by its makespan with this mechanism alone. Above 1 the mechanism pays.\n",
        f"| mechanism | {' | '.join(f'{case.name}: needed | alone' for case in tables)} |",
        "|---" * (2 * len(tables) + 1) + "|",
    ]
    for name in MECHANISMS:
        pairs = [ratios.get(name) for ratios in tables.values()]
        cells = [_spread(pair[kind]) if pair else "-" for pair in pairs for kind in ("without", "alone")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _planned(results: Results, cases: Sequence[Case]) -> str:
    shown = [case for case in cases if any(results.planned(case, kind) for kind in (PLANNED, MIXED))]
    if not shown:
        return ""
    lines = [
        "## Fleets that are planned\n",
        "Heddle on the fleet that `scheduling.scaling.plan` chooses for the GPUs from the lengths of an earlier",
        "rollout of other prompts. *Planned*: a mixed fleet only if it promises 5 %. *Mixed*: whatever promises most.",
        "x: makespan on the best homogeneous fleet in hindsight, divided by that on the planned fleet; below 1 the",
        "plan loses.\n",
        "| case | best homogeneous, s | planned | x | mixed | x |",
        "|---" * 6 + "|",
    ]
    for case in shown:
        ours = results.best(case, HEDDLE.name)
        cells = [case.name, "-" if ours is None else f"{_seconds(results.makespan(case, ours))}, TP{ours.tp}"]
        for kind in (PLANNED, MIXED):
            fleets = sorted({row.fleet for row in results.planned(case, kind).values()})
            cells += ["; ".join(fleets) or "-", _spread(results.gain_of_plan(case, kind))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _in_words(results: Results, cases: Sequence[Case]) -> str:
    """What the tables show about where Heddle and its mechanisms do not pay."""
    sentences, level, unsure = [], [], []
    for case in cases:
        best = results.best_baseline(case)
        ratio = results.ratio(case, best, results.best(case, HEDDLE.name))
        if ratio is not None and ratio.mean < 1 - _SAME:
            sentences.append(
                f"Heddle loses {case.name}: the best baseline, {best}, takes only "
                f"{ratio.mean:.2f} of its makespan ({ratio.low:.2f} to {ratio.high:.2f})."
            )
        elif ratio is not None and ratio.mean <= 1 + _SAME:
            level.append(f"{case.name} {_spread(ratio)}")
        elif ratio is not None and ratio.low < 1:
            unsure.append(f"{case.name} {_spread(ratio)}")
    if level:
        sentences.append(f"Heddle gains nothing over the best baseline: {', '.join(level)}.")
    if unsure:
        sentences.append(f"Heddle gains on average, but not with every seed: {', '.join(unsure)}.")
    for name in MECHANISMS:
        sentences += _verdicts(name, results, cases)
    if not sentences:
        sentences = ["In nothing that was measured."]
    return "## Where it does not pay\n\n" + "\n".join(_wrapped(f"- {sentence}", "  ") for sentence in sentences) + "\n"


def _verdicts(mechanism: str, results: Results, cases: Sequence[Case]) -> list[str]:
    """The cases in which Heddle is no slower without the mechanism."""
    costs, same = [], []
    for case in cases:
        pair = ablation_ratios(results, case).get(mechanism)
        if pair is not None and pair["without"].mean < 1 - _SAME:
            costs.append(f"{case.name} {_spread(pair['without'])}")
        elif pair is not None and pair["without"].mean <= 1 + _SAME:
            same.append(f"{case.name} {_spread(pair['without'])}")
    words = (f"{mechanism.capitalize()} costs; the makespan without it:", costs)
    idle = (f"{mechanism.capitalize()} makes no difference; the makespan without it:", same)
    return [f"{text} {', '.join(shown)}." for text, shown in (words, idle) if shown]


def _seconds(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.mean:,.0f}" + (f" ({spread.low:,.0f} to {spread.high:,.0f})" if spread.num > 1 else "")


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"x{spread.mean:.2f}" + (f" ({spread.low:.2f} to {spread.high:.2f})" if spread.num > 1 else "")
