"""`heddle simulate`: policies side by side in virtual time, on any fleet, under any workload."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import orjson
from rich.console import Console

from heddle.arguments import count, out_file, seed, why
from scheduling.policy import POLICIES
from simulator.display import RunProgress, print_head, print_runs
from simulator.outcome import FORMAT, run_json
from simulator.replay import LogWriter, replay
from simulator.rollout import too_long_for
from simulator.runs import Run, bounds_of, play, policy_named, predictor_named
from simulator.scenario import Fleet, Scenario, WorkloadSettings, load_scenario
from workloads.result_files import write_whole
from workloads.trajectories import Workload

SCENARIOS = Path(__file__).parents[1] / "scenarios"
REPLAY = "replay"
# The log tells everything else. A replay has no agents of its own, no engines and no figures.
_NOT_WITH_REPLAY = ("seed", "predictor", "trace", "trajectories", "max_context_tokens", "fleet", "tp", "log", "json")
# What a fleet file may set as well, for a trace.
_BESIDE_ENGINES = ("predictor", "limits", "features", "transfer", "faults", "reshape")
_EPILOG = f"""examples:
  heddle simulate coding-14b
  heddle simulate coding-14b --policy heddle --policy verl --seed 1 --seed 2 --predictor oracle
  heddle simulate sessions-14b --trace sessions.jsonl.gz --json runs.json
  heddle simulate --trace sessions.jsonl.gz --fleet fleet.toml
  heddle simulate coding-14b --tp 4 --policy heddle --seed 1 --log events.jsonl
  heddle simulate replay events.jsonl

A fleet file, the same as the [fleet] of a scenario; `heddle sim-engine --profile list` names the profiles:
  [fleet]
  gpus = 16
  profile = "qwen3-14b-h100"
  tp = [1, 2, 4]              # a fleet for each

Policies: {", ".join(POLICIES)}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "scenario", type=Path, nargs="?", metavar="SCENARIO", help="a file, the name of one of Heddle's own, or replay"
    )
    parser.add_argument("events", type=Path, nargs="?", metavar="EVENTS.jsonl", help="the log to replay")
    parser.add_argument(
        "--policy", action="append", help="replaces the scenario's policies; the others are compared with the first"
    )
    parser.add_argument("--seed", action="append", type=seed, help="replaces the scenario's seeds")
    parser.add_argument("--predictor", help="siblings, tabular, tree, oracle, or noisy:CORRELATION")
    parser.add_argument(
        "--trace", metavar="FILE", help="agents from this file (JSON lines, .gz or not) instead of the scenario's"
    )
    parser.add_argument("--trajectories", type=count, metavar="N", help="number of trajectories")
    parser.add_argument(
        "--max-context-tokens", type=count, metavar="N", help="scale a trace's lengths until every trajectory fits"
    )
    parser.add_argument("--fleet", type=Path, metavar="FLEET.toml", help="engines from this file")
    parser.add_argument("--tp", action="append", type=count, help="only this TP size of the scenario's")
    parser.add_argument("--log", type=out_file, metavar="FILE", help="write the scheduler's events (of the last run)")
    parser.add_argument(
        "--json", type=out_file, metavar="FILE", help="write everything: figures, timelines, predictions"
    )


def run(parsed: argparse.Namespace) -> int:
    """Play; 2 if the arguments make no sense."""
    console = Console(markup=False)
    if str(parsed.scenario) == REPLAY:
        return _replay(parsed, console)
    try:
        if parsed.events:
            raise ValueError(f"{parsed.events}: a second file goes with `replay` only")
        scenario = _scenario(parsed, console)
        runs = _play_all(scenario, parsed.log, console)
        try:  # before the table, whose reader may have read enough, as in `| head`
            if parsed.json:
                _write_json(parsed.json, scenario, runs)
        finally:
            print_runs(runs, scenario.policies, console)
    except (ValueError, OSError) as error:
        print(f"heddle simulate: {why(error)}", file=sys.stderr)
        return 2
    return 0


def _scenario(parsed: argparse.Namespace, console: Console) -> Scenario:
    path = parsed.scenario or parsed.fleet
    if path is None:
        raise ValueError("give a scenario, or --trace and --fleet; see `heddle simulate --help`")
    scenario = load_scenario(_found(path))
    if parsed.fleet:
        given = load_scenario(parsed.fleet)
        if parsed.scenario:
            _tell_what_is_left_out(given, parsed.fleet, console)
        scenario = dataclasses.replace(scenario, fleet=given.fleet)
    if parsed.trace is not None:
        is_law = scenario.workload.law is not None
        workload = (
            WorkloadSettings(trace=parsed.trace)
            if is_law
            else dataclasses.replace(scenario.workload, trace=parsed.trace)
        )
        # A user's own trace is one rollout, without earlier ones.
        scenario = dataclasses.replace(scenario, workload=workload, epochs=1, earlier=0)
    if parsed.max_context_tokens:
        if scenario.workload.trace is None:
            raise ValueError("--max-context-tokens is for traces; this scenario draws from a law")
        workload = dataclasses.replace(scenario.workload, max_context_tokens=parsed.max_context_tokens)
        scenario = dataclasses.replace(scenario, workload=workload)
    if parsed.trajectories:
        scenario = dataclasses.replace(
            scenario, workload=dataclasses.replace(scenario.workload, trajectories=parsed.trajectories)
        )
    if parsed.tp:
        missing = [tp for tp in parsed.tp if tp not in scenario.fleet.tp]
        if not scenario.fleet.tp:
            raise ValueError("--tp chooses among the sizes of `tp`; this fleet lists its engines")
        if missing:
            raise ValueError(f"the fleet has no TP {missing[0]}; it has {', '.join(map(str, scenario.fleet.tp))}")
        tp = tuple(dict.fromkeys(parsed.tp))
        scenario = dataclasses.replace(scenario, fleet=dataclasses.replace(scenario.fleet, tp=tp))
    return dataclasses.replace(
        scenario,
        policies=tuple(dict.fromkeys(parsed.policy or scenario.policies)),
        seeds=tuple(dict.fromkeys(parsed.seed or scenario.seeds)),
        predictor=scenario.predictor if parsed.predictor is None else parsed.predictor,
    )


def _tell_what_is_left_out(given: Scenario, path: Path, console: Console) -> None:
    """Print what a fleet file sets beside its engines: the scenario that they are for has its own."""
    plain = Scenario(given.fleet)
    others = [name for name in _BESIDE_ENGINES if getattr(given, name) != getattr(plain, name)]
    if others:
        console.print(
            f"{path}: only its [fleet] counts beside a scenario; left out: {', '.join(others)}.",
            soft_wrap=True,
            highlight=False,
        )


def _found(path: Path) -> Path:
    """The file itself, or the scenario of that name that comes with Heddle."""
    if path.exists() or path.name != str(path) or path.suffix:
        return path
    named = SCENARIOS / f"{path}.toml"
    if not named.exists():
        known = ", ".join(sorted(file.stem for file in SCENARIOS.glob("*.toml")))
        raise ValueError(f"{path} is neither a file nor a scenario that comes with Heddle: {known}")
    return named


def _play_all(scenario: Scenario, log: Path | None, console: Console) -> Sequence[Run]:
    for policy in scenario.policies:
        policy_named(policy)
    workloads_of = {seed: scenario.workloads(seed) for seed in scenario.seeds}
    first = workloads_of[scenario.seeds[0]]
    predictor_named(scenario.predictor, first[0].trajectories, 0)
    print_head(scenario, first[-1], console)
    fleets = _large_enough(scenario.fleets(), [one for some in workloads_of.values() for one in some], console)
    runs: list[Run] = []
    with RunProgress(len(scenario.seeds) * len(fleets) * len(scenario.policies), console) as progress:
        for seed, workloads in workloads_of.items():
            for fleet in fleets:
                bounds = bounds_of(scenario, fleet, workloads[-1], seed)
                for policy in scenario.policies:
                    title = f"{policy}, {fleet.name}, seed {seed}"
                    on_ended = progress.begin(title, len(workloads[-1].trajectories))
                    with _log_writer(log, policy, scenario) as write:
                        run = play(
                            scenario, policy, fleet, scenario.predictor, seed, workloads, bounds, on_ended, write
                        )
                    runs.append(run)
                    progress.end(title, run)
    return runs


def _large_enough(fleets: Sequence[Fleet], workloads: Sequence[Workload], console: Console) -> Sequence[Fleet]:
    """The fleets on which every workload can be played; prints which cannot, and why.

    Raises:
        ValueError: none can.
    """
    reasons = {
        fleet.name: next(filter(None, (too_long_for(workload, fleet.profiles) for workload in workloads)), None)
        for fleet in fleets
    }
    if all(reasons.values()):
        raise ValueError(next(reason for reason in reasons.values() if reason))
    for name, reason in reasons.items():
        if reason is not None:
            console.print(f"{name} is left out: {reason}.", soft_wrap=True, highlight=False)
    return [fleet for fleet in fleets if reasons[fleet.name] is None]


def _log_writer(path: Path | None, policy: str, scenario: Scenario) -> AbstractContextManager[LogWriter | None]:
    return nullcontext() if path is None else LogWriter(path, policy_named(policy), scenario.limits)


def _replay(parsed: argparse.Namespace, console: Console) -> int:
    """Replay a log; 1 if something differs."""
    try:
        if parsed.events is None:
            raise ValueError("replay needs an event log: heddle simulate replay EVENTS.jsonl")
        given = [f"--{name.replace('_', '-')}" for name in _NOT_WITH_REPLAY if getattr(parsed, name) is not None]
        if given:
            raise ValueError(f"a replay takes all from its log: leave out {', '.join(given)}")
        if parsed.policy and len(parsed.policy) > 1:
            raise ValueError("a replay has one policy: give --policy once, and only if the log names none")
        replayed = replay(parsed.events, parsed.policy[0] if parsed.policy else None)
    except (ValueError, OSError) as error:
        print(f"heddle simulate: {why(error)}", file=sys.stderr)
        return 2
    console.print(f"{replayed.num_events:,} events led to {replayed.num_actions:,} actions, the same as recorded.")
    if replayed.cut_line is not None:
        console.print(
            f"{parsed.events}, line {replayed.cut_line}, the last, is cut off and was skipped.", soft_wrap=True
        )
    difference = replayed.difference
    if difference is None:
        return 0
    nothing = b"nothing more"
    console.print(f"Then {parsed.events}, line {difference.line_number}, differs. After", soft_wrap=True)
    for text, line in (
        ("", difference.event),
        ("was recorded:", difference.recorded or nothing),
        ("is decided now:", difference.replayed or nothing),
    ):
        console.print(text, line.decode().strip(), soft_wrap=True, highlight=False)
    return 1


def _write_json(path: Path, scenario: Scenario, runs: Sequence[Run]) -> None:
    content = {
        "format": FORMAT,
        "scenario": scenario.name,
        "trace": scenario.workload.trace,
        "runs": [run_json(run.labels, run.outcome, run.bounds) for run in runs],
    }
    write_whole(path, orjson.dumps(content))
