"""`python -m simulator.experiments`: plays the study, two rollouts at a time, and keeps every result.

A result is a line of `.work/experiments/rows.jsonl`, with its job and a hash of the sources it came from. So a stopped
study continues where it was, and results of other code are never mixed in, except with `--any-source`. For the
scenarios that plots show, the runs of the first seed are kept whole.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from simulator.outcome import Labels, run_json
from simulator.planned_fleets import planned_fleet
from simulator.results_page import write_page
from simulator.rollout import Rollout
from simulator.runs import bounds_of, experienced
from simulator.scenario import Scenario, load_scenario
from simulator.study import BLIND, CLAIRVOYANT, LEARNED, MAIN, SEEDS, Case, Job, Row, detail_path, jobs, policy_named
from workloads.trajectories import Workload

FOLDER = Path(".work/experiments")
NUM_PROCESSES = 2
_ROOT = Path(__file__).parent.parent
_SOURCES = (
    "scheduling/*.py",
    "predictor/*.py",
    "engines/simulated/*.py",
    "engines/profiles/*.toml",
    "workloads/*.py",
    "simulator/*.py",
)
# Files that choose and show results do not change them.
_NOT_SOURCES = {
    *("study.py", "experiments.py", "comparison.py", "results_page.py", "figures.py", "plots.py", "chart.py"),
    *("display.py", "fidelity.py"),
}
# A trainer waits for its rollout as long as it takes; a gateway's half hour would end it for slow policies.
_QUEUE_TIMEOUT_S = 24 * 3_600.0
_SUMMARY = (
    *("num_trajectories", "num_finished", "p95_trajectory_s", "p99_trajectory_s", "mean_queued_s"),
    *("num_moves", "num_preemptions", "prefix_hit_share"),
)


@dataclass(frozen=True, slots=True)
class Size:
    """Changes to a scenario: `shrink` times fewer trajectories and GPUs, and a trace if it has no agents."""

    shrink: int = 1
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """What is to be played, and where everything is.

    Args:
        scenarios: the folder of scenario files.
        folder: where results are kept.
        source: the value of `source_hash`.
    """

    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    size: Size
    scenarios: Path
    folder: Path
    source: str


class Cache:
    """The results so far, in a file that only grows.

    Args:
        source: the only source whose results count. None: all do, the latest of each job.
    """

    def __init__(self, folder: Path, source: str | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "rows.jsonl"
        self.rows: dict[Job, Row] = {}
        for row in self._read():
            if source is None or row.source == source:
                self.rows[row.job] = row

    def add(self, row: Row) -> None:
        """Keep a result."""
        self.rows[row.job] = row
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    @property
    def makespans(self) -> dict[Job, float]:
        return {job: row.makespan_s for job, row in self.rows.items()}

    def _read(self) -> Iterator[Row]:
        if not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                fields = json.loads(line)
                job = fields.pop("job")
                case = Case(**{**job["case"], "tps": tuple(job["case"]["tps"])})
                row = Row(job=Job(**{**job, "case": case}), **fields)
            except (ValueError, KeyError, TypeError):
                continue  # from a run that was killed while it wrote, or in an older form
            yield row


def run_all(study: Study, cache: Cache, budget_s: float, num_processes: int = NUM_PROCESSES) -> int:
    """Play missing jobs until none is left or the time is used up; runs that have begun are finished.

    Returns:
        How many are still missing, as far as that is known.
    """
    ends_at = time.monotonic() + budget_s
    commit = commit_of(_ROOT)
    running: dict[Future[Row], Job] = {}
    failed: set[Job] = set()
    with ProcessPoolExecutor(max_workers=num_processes) as pool:
        while True:
            wanted = dict.fromkeys(jobs(study.cases, study.seeds, cache.makespans))
            missing = [job for job in wanted if job not in cache.rows]
            if time.monotonic() < ends_at:
                waiting = [job for job in missing if job not in running.values() and job not in failed]
                for job in waiting[: num_processes - len(running)]:
                    running[pool.submit(play, job, study, commit)] = job
            if not running:
                return len(missing)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    row = future.result()
                except Exception as error:
                    # One policy that breaks on one fleet must not cost the night.
                    failed.add(job)
                    print(f"FAILED {job}: {type(error).__name__}: {error}", flush=True)
                else:
                    cache.add(row)
                    _report(row, len(missing) - 1)


def play(job: Job, study: Study, commit: str) -> Row:
    """One rollout from start to end; with several epochs all of them, and the last one counts."""
    began_at = time.process_time()
    path = study.scenarios / f"{job.case.name}.toml"
    scenario = read_scenario(path, study.size)
    if job.fleet:
        fleet = planned_fleet(scenario, job.fleet, job.seed)
    else:
        fleet = next(fleet for fleet in scenario.fleets() if fleet.profiles[0].tp == job.tp)
    workloads = _workloads(path, study.size, job.seed)
    name = scenario.predictor if job.predictor == LEARNED else job.predictor
    # Policies that use no predictions get the cheapest predictor.
    predictor = experienced(scenario, CLAIRVOYANT if job.policy in BLIND else name, workloads, job.seed)
    limits = replace(scenario.limits, queue_timeout_s=_QUEUE_TIMEOUT_S)
    policy, conditions = policy_named(job.policy), scenario.conditions
    outcomes = [
        Rollout(
            workload,
            fleet.profiles,
            policy,
            limits,
            predictor,
            conditions=conditions,
            family=fleet.family,
            seed=job.seed,
        ).run()
        for workload in workloads
    ]
    bounds = bounds_of(scenario, fleet, workloads[-1], job.seed)
    if job.case.is_shown and job.seed == study.seeds[0] and not job.fleet:
        labels = Labels(job.policy, fleet.name, name, job.seed, len(workloads) - 1)
        detail = detail_path(study.folder, job)
        detail.parent.mkdir(parents=True, exist_ok=True)
        detail.write_bytes(gzip.compress(json.dumps(run_json(labels, outcomes[-1], bounds)).encode(), mtime=0))
    summary = outcomes[-1].summary()
    return Row(
        job=job,
        source=study.source,
        commit=commit,
        makespan_s=outcomes[-1].makespan_s,
        bound_s=bounds.fleet_s,
        best_fleet_bound_s=bounds.best_fleet_s,
        figures={name: round(summary[name], 4) for name in _SUMMARY},
        took_s=round(time.process_time() - began_at, 1),
        fleet=fleet.name,
    )


def read_scenario(path: Path, size: Size) -> Scenario:
    """The scenario in that size.

    Raises:
        ValueError: it is malformed.
        OSError: it cannot be read.
    """
    scenario = load_scenario(path)
    workload, fleet = scenario.workload, scenario.fleet
    if workload.law is None and workload.trace is None:
        workload = replace(workload, trace=size.trace)
    if size.shrink > 1 and workload.trajectories and fleet.gpus:
        smallest = min(fleet.tp)  # of its engines; whole ones are left, with as many trajectories per GPU as before
        gpus = max(1, fleet.gpus // size.shrink // smallest) * smallest
        workload = replace(workload, trajectories=workload.trajectories * gpus // fleet.gpus)
        fleet = replace(fleet, gpus=gpus, tp=tuple(tp for tp in fleet.tp if gpus % tp == 0))
    return replace(scenario, workload=workload, fleet=fleet)


def read_cases(folder: Path, size: Size) -> list[Case]:
    """A case for each scenario with homogeneous fleets, main ones first; scenarios that need a trace only if there is
    one."""
    cases = []
    for path in sorted(folder.glob("*.toml")):
        scenario = read_scenario(path, size)
        if scenario.fleet.tp and (scenario.workload.law or scenario.workload.trace):
            played = replace(scenario, about="", policies=("any",), seeds=(0,))
            digest = hashlib.sha256(repr(played).encode()).hexdigest()[:8]
            number, gpus = scenario.workload.trajectories or 0, scenario.fleet.gpus or 0
            cases.append(Case(path.stem, digest, scenario.fleet.tp, number, gpus))
    return sorted(cases, key=lambda case: MAIN.index(case.name) if case.is_main else len(MAIN))


def source_hash(root: Path = _ROOT) -> str:
    """A hash of everything that a result depends on, except scenarios."""
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(root.glob(pattern)):
            if path.name not in _NOT_SOURCES:
                digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit_of(root: Path) -> str:
    """The commit, marked if files differ from it; empty outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()


@lru_cache(maxsize=2)
def _workloads(path: Path, size: Size, seed: int) -> list[Workload]:
    return read_scenario(path, size).workloads(seed)


def _report(row: Row, num_left: int) -> None:
    job = row.job
    print(
        f"{time.strftime('%H:%M:%S')} {job.case.name:20} {job.policy:20} {row.fleet} seed {job.seed} {job.predictor:8} "
        f"{row.makespan_s:8.1f} s (bound {row.bound_s:.0f}), {row.took_s:.0f} s of a core, {num_left} or more to go",
        flush=True,
    )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulator.experiments", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="MINUTES", help="do as much as fits in this time"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="scenarios whose name it matches")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many")
    parser.add_argument("--shrink", type=int, default=1, help="divide trajectories and GPUs by this, for a trial")
    parser.add_argument("--trace", help="for scenarios that have no agents of their own")
    parser.add_argument("--processes", type=int, default=NUM_PROCESSES, help="rollouts at a time (%(default)s)")
    parser.add_argument("--any-source", action="store_true", help="also count results of other versions of the source")
    parser.add_argument("--fresh", action="store_true", help="forget all results first")
    parser.add_argument("--scenarios", type=Path, default=Path("scenarios"), help="where scenarios are")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results are kept")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="the page to write, with plots beside it")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Play, and write the page."""
    parsed = _arguments(arguments)
    if parsed.fresh:
        (parsed.folder / "rows.jsonl").unlink(missing_ok=True)
    size = Size(parsed.shrink, parsed.trace)
    cases = tuple(case for case in read_cases(parsed.scenarios, size) if re.search(parsed.only, case.name))
    source = source_hash()
    study = Study(cases, SEEDS[: parsed.seeds], size, parsed.scenarios, parsed.folder, source)
    cache = Cache(parsed.folder, None if parsed.any_source else source)
    num_missing = 0
    try:
        num_missing = run_all(study, cache, 60 * parsed.budget, parsed.processes)
    except KeyboardInterrupt:
        print("Stopped; the same command goes on.")
    if parsed.write is not None:
        rows = {job: row for job, row in cache.rows.items() if job.case in cases}
        command = shlex.join(["python", "-m", "simulator.experiments", *(arguments or sys.argv[1:])])
        write_page(rows, cases, parsed.folder, parsed.write, command)
        print(f"{parsed.write}: {len(rows)} results, {num_missing} or more missing.")


if __name__ == "__main__":
    main()
