"""Which fleet the work at hand wants, and whether a change pays. Pure; the searches are those of `scheduling.scaling`.

A change must leave a clear gain when the relaunch is paid, which takes as long as it took here before, and the
predictor must have shown that it can be trusted (`scheduling.reshaping`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from controller.gateway_client import Work
from controller.journal import State
from controller.layout import Floor
from scheduling.cost import EngineProfile
from scheduling.fleets import GpuBudget, in_words, largest_first
from scheduling.partition import Presorted
from scheduling.reshaping import COLD_RELAUNCH_S, ReshapeRule, worth_reshaping
from scheduling.row import LoadedEngine
from scheduling.scaling import makespan_s, plan, usable_kinds

PhaseTimes = Mapping[tuple[str, int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A fleet, and what speaks for it and against it.

    Args:
        tps: its TP sizes, largest first.
        current_s: estimated time that the work takes on the fleet as it is.
        planned_s: the same on the proposed one, once it is there.
        relaunch_s: until it is there.
        is_worth_it: whether to change.
        why: the reason in a few words, for people.
    """

    tps: tuple[int, ...]
    current_s: float
    planned_s: float
    relaunch_s: float
    is_worth_it: bool
    why: str

    @property
    def gain_s(self) -> float:
        """What is left when the relaunch is paid."""
        return self.current_s - self.planned_s - self.relaunch_s


def propose(
    work: Work,
    state: State,
    profiles: Mapping[int, EngineProfile],
    floor: Floor,
    rule: ReshapeRule,
    min_trajectories: int = 1,
) -> Proposal | str:
    """The fleet for this work, or the reason why none is proposed.

    Args:
        profiles: of the TP sizes that engines may have.
        rule: what a change must promise.
        min_trajectories: fewer are no reason to plan.

    Cost: as `scheduling.scaling.plan`; 6,400 trajectories take 40 ms.
    """
    if len(work.remaining) < max(min_trajectories, 1):
        return f"{len(work.remaining)} trajectories are at work: too few to plan for"
    usable = {tp: profile for tp, profile in profiles.items() if tp not in state.blocked_tps}
    num_gpus = len(floor.devices) - len(floor.resting)
    budget = GpuBudget(num_gpus, min(floor.devices_per_node, num_gpus))
    current = largest_first(one.tp for one in state.wanted)
    if unknown := [tp for tp in current if tp not in profiles]:
        return f"there is no profile of TP {unknown[0]}, of which engines run"
    try:
        wanted = plan(work.remaining, usable, budget)
        kinds = {
            **{tp: LoadedEngine(profiles[tp]) for tp in current},
            **usable_kinds(work.remaining, usable, budget, None),
        }
    except ValueError as error:
        return str(error)
    relaunch = relaunch_s(state.phase_s, current, wanted.tps)
    if wanted.tps == current:
        return Proposal(current, wanted.makespan_s, wanted.makespan_s, 0.0, False, "the fleet is the best one")
    if not current:
        return Proposal(wanted.tps, float("inf"), wanted.makespan_s, relaunch, True, "there is no fleet")
    current_s = makespan_s(Presorted(work.remaining), kinds, current)
    is_worth_it = worth_reshaping(current_s, wanted.makespan_s, relaunch, rule, correlation=work.correlation or 0.0)
    why = _why(work, current, wanted.tps, current_s, wanted.makespan_s, relaunch, rule)
    return Proposal(wanted.tps, current_s, wanted.makespan_s, relaunch, is_worth_it, why)


def relaunch_s(phase_s: PhaseTimes, current: Sequence[int], wanted: Sequence[int]) -> float:
    """Seconds from the stop of the old engines until the new ones serve, as measured here, else as known of others."""
    leaving, coming = Counter(current) - Counter(wanted), Counter(wanted) - Counter(current)
    stop_s = max((_median(phase_s, "stop", tp, 0.0) for tp in leaving), default=0.0)
    start_s = (_median(phase_s, "start", tp, COLD_RELAUNCH_S) + _median(phase_s, "register", tp, 0.0) for tp in coming)
    return stop_s + max(start_s, default=0.0)


def _median(phase_s: PhaseTimes, phase: str, tp: int, default_s: float) -> float:
    times = phase_s.get((phase, tp))
    return median(times) if times else default_s


def _why(
    work: Work,
    current: Sequence[int],
    wanted: Sequence[int],
    current_s: float,
    planned_s: float,
    relaunch: float,
    rule: ReshapeRule,
) -> str:
    words = (
        f"{len(work.remaining)} trajectories end in {current_s:.0f} s on {in_words(tuple(current)) or 'nothing'}, in "
        f"{planned_s:.0f} s on {in_words(tuple(wanted))}; the relaunch takes {relaunch:.0f} s"
    )
    gain_share = (current_s - planned_s - relaunch) / current_s
    words += f": {abs(gain_share):.0%} {'gained' if gain_share > 0 else 'lost'}"
    if gain_share <= rule.min_gain_share:
        return f"{words}; {rule.min_gain_share:.0%} is the least that pays"
    if (work.correlation or 0.0) < rule.min_correlation:
        shown = "nothing" if work.correlation is None else f"{work.correlation:.2f}"
        return f"{words}; but the predictor has shown {shown}, and {rule.min_correlation:.2f} is asked for"
    return words
