"""What is simulated for docs/results-simulated.md: scenarios, policies, fleets and seeds, and in which order.

A *case* is a scenario of `scenarios/`. Every policy plays it on each of its homogeneous fleets with the first seed.
With the other seeds it plays only on fleets that came within `CONTENDER_SHARE` of its best, because a fleet that is
worse than that with one seed is not the best of five. Baselines that came near the best one go first. Everything here
is pure: the next runs follow from those that are done, so a stopped study continues where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from scheduling.policy import HEDDLE, POLICIES, VERL, Policy
from simulator.planned_fleets import MIXED, PLANNED

SEEDS = (1, 2, 3, 4, 5)
CONTENDER_SHARE = 1.1
MECHANISMS = {"residency": "residency", "order": "order", "placement": "place", "migration": "move"}
"""The field of a policy that switches each of Heddle's mechanisms."""

BLIND = (
    *("round-robin", "slime", "power-of-two", "cache-aware"),
    *("verl", "verl-hybrid", "vllm-router", "thunderagent"),
)
"""Baselines that use no prediction, so none is computed for them: predictions are a third of a rollout's time."""

LEARNED, CLAIRVOYANT = "learned", "oracle"
"""Predictors: the scenario's own, and one that is told the true lengths."""


MAIN = (
    "coding-14b",
    "coding-32b",
    "coding-light-14b",
    "coding-8b",
    "search-14b",
    "math-14b",
    "coding-heavy-14b",
    "coding-pareto-14b",
)
"""The scenarios of the first table, the most telling first."""

SHOWN = ("coding-14b", "coding-32b")
"""Scenarios whose runs are kept whole, for plots: one in which KV hardly binds, and one in which it binds."""

SCALED = ("coding-14b", "coding-32b", "coding-light-14b", "coding-14b-speculation")
"""Scenarios that Heddle also plays on fleets that were planned for them."""

ABLATED = ("coding-14b", "coding-32b", "coding-light-14b", "math-14b")


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario, by the name of its file.

    Args:
        digest: of the scenario's content, so that results of another version of it do not count.
        tps: TP sizes of its fleets.
        num_trajectories, gpus: its size, for the page.
    """

    name: str
    digest: str
    tps: tuple[int, ...]
    num_trajectories: int
    gpus: int

    @property
    def is_main(self) -> bool:
        return self.name in MAIN

    @property
    def is_shown(self) -> bool:
        return self.name in SHOWN

    @property
    def is_ablated(self) -> bool:
        return self.name in ABLATED

    @property
    def is_scaled(self) -> bool:
        return self.name in SCALED


@dataclass(frozen=True, slots=True)
class Job:
    """One simulated rollout.

    Args:
        tp: of all engines; 0 if `fleet` names how they are planned (planned_fleets.py).
    """

    case: Case
    policy: str
    tp: int
    seed: int
    predictor: str = LEARNED
    fleet: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One result.

    Args:
        bound_s, best_fleet_bound_s: makespans that no policy can beat on this fleet, and on any fleet of as many GPUs.
        figures: some of `Outcome.summary`.
        took_s: time of one core.
        fleet: its engines, in words.
    """

    job: Job
    source: str
    commit: str
    makespan_s: float
    bound_s: float
    best_fleet_bound_s: float
    figures: dict[str, float]
    took_s: float
    fleet: str = ""


Makespans = Mapping[Job, float]


def baselines() -> tuple[str, ...]:
    """Policies of other systems: those that do not hold KV as Heddle does. The rest are Heddle with one thing
    changed."""
    return tuple(name for name, policy in POLICIES.items() if policy.residency is not HEDDLE.residency)


def variants() -> tuple[str, ...]:
    """Heddle with another order, placement or migration."""
    return tuple(name for name in POLICIES if name not in baselines() and name != HEDDLE.name)


def ablations() -> dict[str, Policy]:
    """Heddle without each of its mechanisms, and each mechanism alone on top of sticky round robin."""
    without = [
        replace(HEDDLE, name=f"without {name}", **{field: getattr(VERL, field)}) for name, field in MECHANISMS.items()
    ]
    # An order needs turns to order, and residency needs turns to hold back.
    alone = [
        replace(VERL, name=f"{name} alone", holds_turns=True, **{field: getattr(HEDDLE, field)})
        for name, field in MECHANISMS.items()
    ]
    return {policy.name: policy for policy in (*without, *alone)}


def policy_named(name: str) -> Policy:
    """A policy or an ablation."""
    return POLICIES[name] if name in POLICIES else ablations()[name]


def jobs(cases: Sequence[Case], seeds: Sequence[int], done: Makespans) -> Iterator[Job]:
    """All jobs that are known already, the most valuable first, including those that are done."""
    main = [case for case in cases if case.is_main]
    others = [case for case in cases if not case.is_main]
    compared = (HEDDLE.name, *baselines())
    for some in (main, others):
        yield from _first_seed(some, compared, seeds[0])
        for case in some:
            yield from _other_seeds(case, (HEDDLE.name, *leaders(case, done)), seeds, done)
            yield from (Job(case, policy, tp, seed) for policy, tp in _worst(case, compared, done) for seed in seeds)
            yield from _clairvoyant(case, seeds, done)
        for case in some:
            yield from _ablated(case, seeds, done)
        for case in some:
            yield from _scaled(case, seeds)
    yield from _first_seed(main[:2], variants(), seeds[0])
    for case in main[:2]:
        yield from _other_seeds(case, variants(), seeds, done)
    for case in (*main, *others):
        yield from _other_seeds(case, compared, seeds, done)


def detail_path(folder: Path, job: Job) -> Path:
    """Where the whole of a run is kept."""
    words = f"{job.case.name} {job.case.num_trajectories} {job.policy} tp{job.tp} {job.predictor} seed{job.seed}"
    return folder / "detail" / f"{words.replace(',', '').replace(' ', '-')}.json.gz"


def best_tp(case: Case, policy: str, done: Makespans, predictor: str = LEARNED) -> int | None:
    """The best fixed TP in hindsight: by the mean over the seeds that all contenders have. None: not known yet."""
    contenders = _contenders(case, policy, done, predictor)
    runs = {tp: by_seed(case, policy, tp, done, predictor) for tp in case.tps if tp in contenders}
    common = set.intersection(*map(set, runs.values())) if runs else set()
    return min(runs, key=lambda tp: fmean(runs[tp][seed] for seed in common)) if common else None


def leaders(case: Case, done: Makespans) -> tuple[str, ...]:
    """Baselines that may be the best: those that came near the best with the first seed. Empty before all
    were tried."""
    first = {policy: _first(case, policy, done) for policy in baselines()}
    known = {policy: makespan_s for policy, makespan_s in first.items() if makespan_s is not None}
    if len(known) < len(first):
        return ()
    return tuple(policy for policy in known if known[policy] <= CONTENDER_SHARE * min(known.values()))


def by_seed(case: Case, policy: str, tp: int, done: Makespans, predictor: str = LEARNED) -> dict[int, float]:
    """The makespans that are known, by seed."""
    runs = {seed: done.get(Job(case, policy, tp, seed, predictor)) for seed in SEEDS}
    return {seed: makespan_s for seed, makespan_s in runs.items() if makespan_s is not None}


def _first_seed(cases: Sequence[Case], policies: Sequence[str], seed: int) -> Iterator[Job]:
    return (Job(case, policy, tp, seed) for case in cases for policy in policies for tp in case.tps)


def _other_seeds(case: Case, policies: Sequence[str], seeds: Sequence[int], done: Makespans) -> Iterator[Job]:
    for seed in seeds[1:]:
        for policy in policies:
            yield from (Job(case, policy, tp, seed) for tp in sorted(_contenders(case, policy, done)))


def _clairvoyant(case: Case, seeds: Sequence[int], done: Makespans) -> Iterator[Job]:
    yield from (Job(case, HEDDLE.name, tp, seeds[0], CLAIRVOYANT) for tp in case.tps)
    tps = sorted(_contenders(case, HEDDLE.name, done, CLAIRVOYANT))
    yield from (Job(case, HEDDLE.name, tp, seed, CLAIRVOYANT) for seed in seeds[1:] for tp in tps)


def _ablated(case: Case, seeds: Sequence[int], done: Makespans) -> Iterator[Job]:
    """All ablations on the fleet that is best for Heddle, with the runs they are compared with."""
    tp = best_tp(case, HEDDLE.name, done) if case.is_ablated else None
    if tp is not None:
        names = (HEDDLE.name, VERL.name, *ablations())
        yield from (Job(case, name, tp, seed) for seed in seeds for name in names)


def _scaled(case: Case, seeds: Sequence[int]) -> Iterator[Job]:
    if case.is_scaled:
        yield from (Job(case, HEDDLE.name, 0, seed, fleet=kind) for seed in seeds for kind in (PLANNED, MIXED))


def _first(case: Case, policy: str, done: Makespans) -> float | None:
    """Its makespan on its best fleet with the first seed; None before all fleets were tried."""
    by_tp = [by_seed(case, policy, tp, done) for tp in case.tps]
    return min(runs[min(runs)] for runs in by_tp) if all(by_tp) else None


def _contenders(case: Case, policy: str, done: Makespans, predictor: str = LEARNED) -> set[int]:
    """Fleets that may be the policy's best; none before all were tried with one seed."""
    by_tp = {tp: by_seed(case, policy, tp, done, predictor) for tp in case.tps}
    if not all(by_tp.values()):
        return set()
    first = {tp: runs[min(runs)] for tp, runs in by_tp.items()}
    return {tp for tp, makespan_s in first.items() if makespan_s <= CONTENDER_SHARE * min(first.values())}


def _worst(case: Case, policies: Sequence[str], done: Makespans) -> list[tuple[str, int]]:
    """The slowest of the runs with one seed, which has a row of its own: at most one."""
    tried = {
        (policy, tp): min(runs.items())[1]
        for policy in policies
        for tp in case.tps
        if (runs := by_seed(case, policy, tp, done))
    }
    return [max(tried, key=lambda key: tried[key])] if len(tried) == len(policies) * len(case.tps) else []
