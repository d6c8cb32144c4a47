"""The best fleet for the work, and whether a change pays. Pure; the searches are those of `scheduling.scaling`.

There are two occasions. During a rollout, the plan is for the work at hand: a change must leave a clear gain after the
relaunch is paid, and the predictor must have shown that it can be trusted. After a rollout, the plan is for the next
one, based on the lengths of recent rollouts. Nothing is predicted then, and the gain comes again with each rollout, but
the fleet stays as long as lengths stay. The rules of both are in `scheduling.reshaping`. A relaunch is assumed to take
as long as it took here before.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from controller.demand import Work
from controller.journal import State
from controller.layout import Floor, fitting
from controller.steps import SleepState
from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining
from scheduling.fleets import GpuBudget, TPs, in_words, largest_first
from scheduling.partition import Presorted
from scheduling.reshaping import BETWEEN_ROLLOUTS, COLD_RELAUNCH_S, ReshapeRule, worth_reshaping
from scheduling.running_sums import LoadedEngine
from scheduling.scaling import MIXED_FLEET_GAIN, makespan_s, plan, usable_kinds

# Wake time of an engine before any was measured: weights of 28 GB come from host memory in 1 to 6 s.
WAKE_S = 6.0

PhaseTimes = Mapping[tuple[str, int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A fleet, and the case for and against it.

    Args:
        tps: its TP sizes, largest first.
        current_s: estimated time of the work on the present fleet; infinite if there is none.
        planned_s: the same on the proposed fleet, once it is there.
        relaunch_s: time until it is there.
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
        """What is left after the relaunch is paid."""
        return self.current_s - self.planned_s - self.relaunch_s


def propose(
    work: Work,
    state: State,
    profiles: Mapping[int, EngineProfile],
    floor: Floor,
    rule: ReshapeRule,
    min_trajectories: int = 1,
    max_starting: int = 8,
) -> Proposal | str:
    """The fleet for the work at hand, or the reason why none is proposed.

    Args:
        profiles: of the TP sizes that engines may have.
        rule: what a change must promise.
        min_trajectories: with fewer, no plan is made.
        max_starting: see `relaunch_s`.

    Cost: as `scheduling.scaling.plan`; 6,400 trajectories take 40 ms.
    """
    if len(work.remaining) < max(min_trajectories, 1):
        return f"{len(work.remaining)} trajectories are at work: too few to plan for"
    about = f"{len(work.remaining)} trajectories"
    found = _weighed(about, work.remaining, state, profiles, floor, rule, max_starting)
    if isinstance(found, str) or not found.is_worth_it or found.current_s == float("inf"):
        return found
    if max(work.correlation or 0.0, 0.0) < rule.min_correlation:
        shown = "nothing" if work.correlation is None else f"{work.correlation:.2f}"
        why = (
            f"{found.why}; but the predictor has shown {shown} (planning.min_correlation is {rule.min_correlation:.2f})"
        )
        return replace(found, is_worth_it=False, why=why)
    return found


def propose_next(
    state: State, profiles: Mapping[int, EngineProfile], floor: Floor, max_starting: int = 8
) -> Proposal | str:
    """The fleet for the next rollout, or the reason why none is proposed. At least one rollout must have ended."""
    history = state.history
    trajectories = history.next_rollout()
    about = f"the next rollout: {len(trajectories)} trajectories like those of the last {len(history.alike)} rollouts"
    rule = BETWEEN_ROLLOUTS
    if is_chosen(state):
        return f"{about}, for which the fleet was chosen"
    if not history.is_for_other_lengths():
        rule = replace(rule, num_rollouts=1)  # it was reshaped on the way, and will be again
    return _weighed(about, trajectories, state, profiles, floor, rule, max_starting)


def is_chosen(state: State) -> bool:
    """Whether the present fleet was chosen, or kept, for the newest rollout's lengths."""
    return not state.history.is_for_other_lengths() and present_tps(state) == state.history.chosen_tps


def present_tps(state: State) -> tuple[int, ...]:
    """Sizes of the fleet that is wanted now, largest first."""
    return largest_first(one.tp for one in state.wanted)


def relaunch_s(
    phase_s: PhaseTimes,
    current: Sequence[int],
    wanted: Sequence[int],
    asleep: Sequence[int] = (),
    max_starting: int = 8,
) -> float:
    """Seconds from the end of the old engines until the new ones serve, as measured here, else as known from elsewhere.

    Args:
        asleep: TP sizes of sleeping engines: as many of the new ones are woken, not launched.
        max_starting: engines that start at once, the slowest ones first; the others wait for them.
    """
    leaving, coming = Counter(current) - Counter(wanted), Counter(wanted) - Counter(current)
    woken = coming & Counter(asleep)
    end_s = [_median(phase_s, "sleep" if ("sleep", tp) in phase_s else "stop", tp, 0.0) for tp in leaving]
    launched = (coming - woken).elements()
    start_s = [_median(phase_s, "start", tp, COLD_RELAUNCH_S) + _register_s(phase_s, tp) for tp in launched]
    starts_s = sum(sorted(start_s, reverse=True)[::max_starting])
    wake_s = [_median(phase_s, "wake", tp, WAKE_S) + _register_s(phase_s, tp) for tp in woken]
    return max(end_s, default=0.0) + max([starts_s, *wake_s])


def _weighed(
    about: str,
    trajectories: Sequence[Remaining],
    state: State,
    profiles: Mapping[int, EngineProfile],
    floor: Floor,
    rule: ReshapeRule,
    max_starting: int,
) -> Proposal | str:
    """The best fleet for these trajectories, and whether the change pays; whether the predictor can be trusted is left
    out."""
    usable = {tp: profile for tp, profile in profiles.items() if tp not in state.blocked_tps}
    current = present_tps(state)
    if unknown := [tp for tp in current if tp not in profiles]:
        return f"engines of TP {unknown[0]} run, and engine.profiles has no profile of TP {unknown[0]}"
    try:
        wanted, kinds = _plan_on(floor, trajectories, usable)
    except ValueError as error:
        return str(error)
    asleep = [one.tp for one in state.spares if state.rest.get(one.server_id) == SleepState.ASLEEP]
    presorted = Presorted(trajectories)
    planned_s = makespan_s(presorted, kinds, wanted)
    relaunch = relaunch_s(state.phase_s, current, wanted, asleep, max_starting)
    if wanted == current:
        return Proposal(current, planned_s, planned_s, 0.0, False, f"{about}: the fleet is the best one")
    if not current:
        return Proposal(wanted, float("inf"), planned_s, relaunch, True, "there is no fleet")
    current_s = makespan_s(presorted, {**{tp: LoadedEngine(profiles[tp]) for tp in current}, **kinds}, current)
    if not current_s:
        return Proposal(current, 0.0, 0.0, 0.0, False, f"{about}: by the profiles they take no time on any fleet")
    is_worth_it = worth_reshaping(current_s, planned_s, relaunch, rule)
    gain_share = (current_s - planned_s - relaunch / rule.num_rollouts) / current_s
    why = (
        f"{about} end in {current_s:.0f} s on {in_words(current)}, in {planned_s:.0f} s on {in_words(wanted)}; "
        f"the relaunch takes {relaunch:.0f} s"
    )
    if rule.num_rollouts > 1:
        why += f", for {rule.num_rollouts} rollouts"
    why += f": {abs(gain_share):.0%} {'gained' if gain_share > 0 else 'lost'}"
    if not is_worth_it:
        why += f"; {rule.min_gain_share:.0%} is the least that pays"
    return Proposal(wanted, current_s, planned_s, relaunch, is_worth_it, why)


def _plan_on(
    floor: Floor, trajectories: Sequence[Remaining], profiles: Mapping[int, EngineProfile]
) -> tuple[TPs, dict[int, LoadedEngine]]:
    """The best fleet that fits onto the floor, and the engines that it was chosen from.

    The search counts GPUs in nodes of equal size, and does not divide one into several sizes. Unequal nodes and resting
    devices have fewer blocks for large engines than it counts. If it plans too many of a size, those that fit are
    compared with the best fleet without that size. What is left of nodes gets smaller engines, if that promises what a
    mixed fleet must.

    Raises:
        ValueError: no engine fits.
    """
    num_gpus = len(set(floor.devices) - floor.resting)
    placeable = {tp: profile for tp, profile in profiles.items() if floor.blocks(tp)}
    budget = GpuBudget(num_gpus, min(max([*map(len, floor.nodes()), *placeable], default=0), num_gpus))
    kinds = usable_kinds(trajectories, placeable, budget, None)
    left, fleets = {tp: placeable[tp] for tp in kinds}, []
    while left:
        planned = plan(trajectories, left, budget).tps
        fleets.append(fitting(planned, floor))
        if not (lacking := Counter(planned) - Counter(fleets[-1])):
            break
        del left[max(lacking)]
    presorted = Presorted(trajectories)

    def time_s(fleet: TPs) -> float:
        return makespan_s(presorted, kinds, fleet)

    best = min(fleets, key=time_s)
    uniform = ((tp,) * num_gpus for tp in kinds)
    fullest = min((fitting(fleet, floor, kinds) for fleet in (*fleets, *uniform)), key=time_s)
    return (fullest if time_s(fullest) < (1 - MIXED_FLEET_GAIN) * time_s(best) else best), kinds


def _register_s(phase_s: PhaseTimes, tp: int) -> float:
    return _median(phase_s, "register", tp, 0.0)


def _median(phase_s: PhaseTimes, phase: str, tp: int, default_s: float) -> float:
    """The median of the last times of this size; if there is none, the longest median of the measured sizes."""
    if times := phase_s.get((phase, tp)):
        return median(times)
    return max((median(times) for (other, _), times in phase_s.items() if other == phase), default=default_s)
