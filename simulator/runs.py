"""Plays scenarios: one policy on one fleet with one seed, through all epochs."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from predictor import named
from predictor.progress import Predictor
from predictor.training import learn_trajectories
from scheduling.policy import POLICIES, Policy
from simulator.bound import best_fleet_bound_s, fleet_bound_s
from simulator.fault_draws import FaultDraws
from simulator.outcome import Bounds, Labels, Outcome
from simulator.predictors import LEAST_CORRELATION, Noisy, Oracle
from simulator.rollout import Log, Rollout
from simulator.scenario import Fleet, Scenario
from workloads.trajectories import Trajectory, Workload

PREDICTORS = {name: named.PREDICTORS[name] for name in ("siblings", "tabular", "tree")}
"""The predictors that learn, by name; `oracle` and `noisy:CORRELATION` know the truth."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one policy on one fleet with one seed, in the last epoch."""

    labels: Labels
    outcome: Outcome
    bounds: Bounds

    @property
    def regret(self) -> float | None:
        """The makespan over the bound on this fleet; None as in `Outcome.regret`."""
        return self.outcome.regret(self.bounds)


def play(
    scenario: Scenario,
    policy_name: str,
    fleet: Fleet,
    predictor_name: str,
    seed: int,
    workloads: Sequence[Workload],
    bounds: Bounds,
    on_ended: Callable[[float], None] | None = None,
    log: Log | None = None,
) -> Run:
    """One policy through all epochs.

    Args:
        workloads: `scenario.workloads(seed)`; they are the same for every policy, so the caller keeps them.
        bounds: `bounds_of` the last of them, kept for the same reason.
        on_ended: called with the virtual time whenever a trajectory of the last epoch has ended.
        log: called with the events and actions of the last epoch.

    Raises:
        ValueError: there is no such policy or predictor, or an engine is too small for a trajectory.
    """
    policy = policy_named(policy_name)
    predictor = experienced(scenario, predictor_name, workloads, seed)
    outcome: Outcome | None = None
    for epoch, workload in enumerate(workloads):
        is_last = epoch == len(workloads) - 1
        outcome = Rollout(
            workload,
            fleet.profiles,
            policy,
            scenario.limits,
            predictor,
            conditions=scenario.conditions,
            family=fleet.family,
            seed=seed,
            on_ended=on_ended if is_last else None,
            log=log if is_last else None,
        ).run()
    assert outcome is not None
    return Run(Labels(policy_name, fleet.name, predictor_name, seed, len(workloads) - 1), outcome, bounds)


def bounds_of(scenario: Scenario, fleet: Fleet, workload: Workload, seed: int) -> Bounds:
    """Makespans that no policy beats on this workload. They count the turns whose end their clients wait for."""
    speculation = scenario.features.speculation
    if scenario.faults.tool_timeout_share:  # a call that hangs ends then, however long it would have taken
        workload = workload.with_max_tool_s(scenario.faults.tool_timeout_s)
    draws = FaultDraws(scenario.faults, seed)
    trajectories = [kept for kept in map(draws.waited_for, workload.trajectories) if kept.turns]
    if not trajectories:
        return Bounds(0.0, 0.0)
    best_s = best_fleet_bound_s(trajectories, fleet.family, fleet.gpus, speculation)
    if scenario.reshape is not None:  # only the best fleet bounds a fleet that changes
        return Bounds(best_s, best_s)
    return Bounds(fleet_bound_s(trajectories, fleet.profiles, speculation), best_s)


def policy_named(name: str) -> Policy:
    """The policy of that name. Raises ValueError with the list of names."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        meant = f", did you mean {near[0]}?" if near else ""
        raise ValueError(f"no policy {name!r}{meant}; there are: {', '.join(POLICIES)}")
    return POLICIES[name]


def experienced(scenario: Scenario, name: str, workloads: Sequence[Workload], seed: int) -> Predictor:
    """A predictor of that name that has learned from the scenario's earlier rollouts.

    Args:
        workloads: the coming ones; predictors that know the truth know theirs.

    Raises:
        ValueError: there is no predictor of that name.
    """
    predictor = predictor_named(name, [t for workload in workloads for t in workload.trajectories], seed)
    if name in PREDICTORS and scenario.earlier:
        predictor.restore(_learned(scenario, name, seed))
    return predictor


@lru_cache(maxsize=8)
def _learned(scenario: Scenario, name: str, seed: int) -> bytes:
    """What a predictor learns from earlier rollouts: events in order, without engines, so nothing waits."""
    predictor = PREDICTORS[name]()
    for workload in scenario.earlier_workloads(seed):
        learn_trajectories(predictor, workload.trajectories)
    return predictor.dump()


def predictor_named(name: str, trajectories: Sequence[Trajectory], seed: int) -> Predictor:
    """A new predictor of that name: one of `PREDICTORS`, `oracle`, or `noisy:CORRELATION`.

    Raises:
        ValueError: there is no predictor of that name, or the correlation is not in [`LEAST_CORRELATION`, 1].
    """
    kind, separator, parameter = name.partition(":")
    if name == "oracle":
        return Oracle(trajectories)
    if kind == "noisy" and separator:
        try:
            correlation = float(parameter)
        except ValueError:
            correlation = 0.0
        if not LEAST_CORRELATION <= correlation <= 1:
            raise ValueError(
                f"predictor {name!r}: the correlation must be between {LEAST_CORRELATION} and 1, as in noisy:0.7"
            )
        return Noisy(trajectories, correlation, seed)
    if name not in PREDICTORS:
        raise ValueError(f"no predictor {name!r}; there are: {', '.join(PREDICTORS)}, oracle, noisy:CORRELATION")
    return PREDICTORS[name]()
