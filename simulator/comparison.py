"""What the rows of a study show: makespans, paired ratios, and which fleets and baselines are best in hindsight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from scheduling.policy import HEDDLE, VERL
from simulator.study import LEARNED, MECHANISMS, SEEDS, Case, Job, Makespans, Row, baselines, best_tp, by_seed, leaders


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy on the fleet that is its best, or worst, in hindsight."""

    policy: str
    tp: int
    predictor: str = LEARNED

    def __str__(self) -> str:
        return f"{self.policy}, TP{self.tp}"


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, smallest and largest over seeds."""

    mean: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None if there are no values."""
        return cls(fmean(values), min(values), max(values), len(values)) if values else None


class Results:
    """What the rows show."""

    def __init__(self, rows: Mapping[Job, Row]) -> None:
        self.rows = rows
        self.done: Makespans = {job: row.makespan_s for job, row in rows.items()}

    def makespan(self, case: Case, choice: Choice) -> Spread | None:
        return Spread.of(list(self._by_seed(case, choice).values()))

    def ratio(self, case: Case, slower: Choice | None, faster: Choice | None) -> Spread | None:
        """How many times as long the first one takes, over the seeds that both have."""
        if slower is None or faster is None:
            return None
        above, below = self._by_seed(case, slower), self._by_seed(case, faster)
        return Spread.of([above[seed] / below[seed] for seed in above if seed in below])

    def to_bound(self, case: Case, choice: Choice | None) -> Spread | None:
        """The makespan over the bound of the best fleet of these GPUs."""
        if choice is None:
            return None
        rows = [self.rows.get(Job(case, choice.policy, choice.tp, seed, choice.predictor)) for seed in SEEDS]
        return Spread.of([row.makespan_s / row.best_fleet_bound_s for row in rows if row is not None])

    def best(self, case: Case, policy: str, predictor: str = LEARNED) -> Choice | None:
        tp = best_tp(case, policy, self.done, predictor)
        return None if tp is None else Choice(policy, tp, predictor)

    def best_baseline(self, case: Case) -> Choice | None:
        """The baseline with the least mean over the seeds that all leading baselines have; None before each
        was tried."""
        choices = [choice for policy in leaders(case, self.done) if (choice := self.best(case, policy)) is not None]
        runs = {choice: self._by_seed(case, choice) for choice in choices}
        common = set.intersection(*(set(by_seed) for by_seed in runs.values())) if runs else set()
        return min(runs, key=lambda choice: fmean(runs[choice][seed] for seed in common)) if common else None

    def planned(self, case: Case, kind: str) -> dict[int, Row]:
        """Heddle's runs on planned fleets, by seed."""
        jobs = {seed: Job(case, HEDDLE.name, 0, seed, fleet=kind) for seed in SEEDS}
        return {seed: self.rows[job] for seed, job in jobs.items() if job in self.rows}

    def gain_of_plan(self, case: Case, kind: str) -> Spread | None:
        """How many times as long Heddle takes on its best homogeneous fleet in hindsight, over the seeds that both
        have."""
        best = self.best(case, HEDDLE.name)
        uniform = self._by_seed(case, best) if best else {}
        runs = self.planned(case, kind)
        return Spread.of([uniform[seed] / row.makespan_s for seed, row in runs.items() if seed in uniform])

    def slowest_policy(self, case: Case) -> Choice | None:
        """Of all baselines, each at its best, the slowest one with the first seed that each has."""
        choices = [choice for policy in baselines() if (choice := self.best(case, policy)) is not None]
        firsts = {choice: min(self._by_seed(case, choice).items())[1] for choice in choices}
        return max(firsts, key=lambda choice: firsts[choice]) if firsts else None

    def worst_baseline(self, case: Case) -> Choice | None:
        """The slowest combination of policy and fleet."""
        tried = [
            (spread.mean, policy, tp)
            for policy in baselines()
            for tp in case.tps
            if (spread := self.makespan(case, Choice(policy, tp))) is not None
        ]
        return Choice(*max(tried)[1:]) if tried else None

    def _by_seed(self, case: Case, choice: Choice) -> dict[int, float]:
        return by_seed(case, choice.policy, choice.tp, self.done, choice.predictor)


def ablation_ratios(results: Results, case: Case) -> dict[str, dict[str, Spread]]:
    """By mechanism: how much longer Heddle takes `without` it, and how much longer sticky round robin takes without it
    than with it `alone`. Above 1 the mechanism pays. All runs are on Heddle's best fleet."""
    ours = results.best(case, HEDDLE.name)
    if ours is None:
        return {}
    ratios: dict[str, dict[str, Spread]] = {}
    for name in MECHANISMS:
        without = results.ratio(case, Choice(f"without {name}", ours.tp), ours)
        alone = results.ratio(case, Choice(VERL.name, ours.tp), Choice(f"{name} alone", ours.tp))
        if without is not None and alone is not None:
            ratios[name] = {"without": without, "alone": alone}
    return ratios
