"""Fleet plans: the TP sizes of engines under a GPU budget, for the trajectories at hand.

A fleet is as good as the presorted partition of the trajectories on it (partition.py). Four searches share one
signature and that measure:

* `homogeneous`: one TP size everywhere, the best of them.
* `enumerated`: every composition of nodes: 165 for 8 nodes of 8 GPUs and four TP sizes. A fleet that does not reach the
  end of the list within the best makespan so far costs one fill.
* `longest_reach`: Libra's dynamic program `dp[gpus][i]`, turned round. It asks not for the least makespan of the first
  i trajectories but how far down the list so many GPUs get within a bound, and bisects the bound. It finds the same
  fleets without a table over trajectories.
* `annealed`: the Heddle paper's simulated annealing, which begins with large TP for long trajectories and small TP for
  short ones.

The gain of a mixed fleet depends on the predictions: in the policy study it is 2 % with true lengths and a loss with
learned ones, because an unexpectedly long trajectory on a small TP size meets that engine's floor. So a mixed fleet is
planned only if it promises clearly more than the best homogeneous one.

Sources: Heddle, arXiv 2603.28101 (sort-initialised annealing); Libra, arXiv 2606.03077 (planner).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from scheduling.cost import EngineProfile
from scheduling.estimate import USABLE_KV_SHARE, Remaining
from scheduling.fleets import GpuBudget, TPs, in_words, largest_first, on_nodes
from scheduling.partition import PRECISION, Presorted, least_bound_s
from scheduling.running_sums import LoadedEngine, Speculation

# What a mixed fleet must promise over the best homogeneous one: real predictions cost it 1 to 6 % (policy study).
MIXED_FLEET_GAIN = 0.05

# An engine speculates if that shortens its estimated finish by more than this share; drafting costs memory, too.
SPECULATION_GAIN = 0.01

Kinds = Mapping[int, LoadedEngine]


class Role(StrEnum):
    """What an engine is launched for."""

    BULK = "bulk"
    TAIL = "tail"  # few, long trajectories: it decodes speculatively while its batch is small


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine: `tp` GPUs of a node; nodes count from 0."""

    tp: int
    node: int
    role: Role


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The fleet that the controller should bring up.

    Args:
        engines: in the order of their groups, longest trajectories first.
        makespan_s: estimated, from now, without relaunches.
        method: the search that found it.
        why: the reason in a few words, for people.
    """

    engines: tuple[PlannedEngine, ...]
    makespan_s: float
    method: str
    why: str

    @property
    def tps(self) -> TPs:
        return tuple(engine.tp for engine in self.engines)


class Search(Protocol):
    """Finds the TP sizes of a fleet, largest first."""

    __name__: str

    def __call__(self, presorted: Presorted, kinds: Kinds, budget: GpuBudget, /) -> TPs: ...


def plan(
    trajectories: Sequence[Remaining],
    profiles: Mapping[int, EngineProfile],
    budget: GpuBudget,
    search: Search | None = None,
    *,
    speculation: Speculation | None = None,
    min_gain_share: float = MIXED_FLEET_GAIN,
) -> FleetPlan:
    """The fleet for these trajectories.

    Args:
        trajectories: at least one.
        profiles: by TP size, a power of two. Sizes whose KV does not hold the longest trajectory are left out; if none
            holds it, the size with the most KV is used.
        search: None: `longest_reach`.
        speculation: what an engine gains if it is launched with speculative decoding. None: no engine can be.
        min_gain_share: what a mixed fleet must promise over the best homogeneous one to be planned.

    Raises:
        ValueError: no engine fits into the budget.
    """
    search = search or longest_reach
    presorted = Presorted(trajectories)
    kinds = usable_kinds(trajectories, profiles, budget, speculation)

    def measured(fleet: TPs) -> tuple[TPs, float]:
        return fleet, makespan_s(presorted, kinds, fleet)

    uniform, found = measured(homogeneous(presorted, kinds, budget)), measured(search(presorted, kinds, budget))
    fleet, why = _preferred(uniform, found, min_gain_share)
    return _planned(presorted, kinds, budget, fleet, search.__name__, why)


def _preferred(uniform: tuple[TPs, float], found: tuple[TPs, float], min_gain_share: float) -> tuple[TPs, str]:
    """The fleet to take and why, given one with a single TP size and another one, each with its makespan."""
    (uniform_tps, uniform_s), (found_tps, found_s) = uniform, found
    if found_s >= uniform_s:
        return uniform_tps, "no other fleet promises more"
    gain_share = 1 - found_s / uniform_s
    why = f"{in_words(found_tps)} promises {gain_share:.1%} over {in_words(uniform_tps)}"
    if gain_share < min_gain_share:
        return uniform_tps, f"{why}: too little"
    return found_tps, why


def makespan_s(presorted: Presorted, kinds: Kinds, fleet: TPs) -> float:
    """The estimated makespan of the partition on a fleet: the measure of every search."""
    return presorted.bound_s([presorted.filler(kinds[tp]) for tp in fleet])


# --- searches -----------------------------------------------------------------------------------------------


def homogeneous(presorted: Presorted, kinds: Kinds, budget: GpuBudget) -> TPs:
    """The best fleet of one TP size."""
    return _best(presorted, kinds, budget.uniform_fleets(largest_first(kinds)))


def enumerated(presorted: Presorted, kinds: Kinds, budget: GpuBudget) -> TPs:
    """The best of all fleets. Cost: 165 fleets and 6,400 trajectories take 0.1 s; 969 of mixed nodes 0.35 s."""
    return _best(presorted, kinds, budget.fleets(largest_first(kinds)))


def longest_reach(presorted: Presorted, kinds: Kinds, budget: GpuBudget) -> TPs:
    """The fleet of `best_in_any_order`, sorted. Cost: 6,400 trajectories take 40 ms, with mixed nodes 65 ms."""
    return largest_first(best_in_any_order(presorted, kinds, budget)[1])


def best_in_any_order(presorted: Presorted, kinds: Kinds, budget: GpuBudget) -> tuple[float, TPs]:
    """The least makespan if smaller engines may also take longer trajectories than larger ones, and its fleet.

    The fleet is in the order of its groups. A larger engine for longer trajectories is nearly always as good.
    """
    fleet = homogeneous(presorted, kinds, budget)

    def suffices(bound_s: float) -> bool:
        nonlocal fleet
        end, found = _furthest(presorted, kinds, budget, bound_s)
        if end == len(presorted):
            fleet = found
        return end == len(presorted)

    return least_bound_s(suffices, makespan_s(presorted, kinds, fleet)), fleet


def _furthest(presorted: Presorted, kinds: Kinds, budget: GpuBudget, bound_s: float) -> tuple[int, TPs]:
    """How far down the list all GPUs get within the bound, and as which engines."""
    sizes = largest_first(kinds)
    fillers = {tp: presorted.filler(kinds[tp]) for tp in sizes}
    furthest: dict[int, tuple[int, TPs]] = {0: (0, ())}
    for gpus in range(budget.gpus):
        if gpus not in furthest:
            continue
        start, fleet = furthest[gpus]
        for num_more, shape in budget.parts_after(gpus, sizes):
            end = presorted.reach([fillers[tp] for tp in shape], bound_s, start)
            if end > furthest.get(gpus + num_more, (-1,))[0]:
                furthest[gpus + num_more] = end, fleet + shape
    _, (end, fleet) = max(furthest.items(), key=lambda item: (item[1][0], item[0]))
    return end, fleet


def annealed(dice: Callable[[], float], num_steps: int = 300) -> Search:
    """Simulated annealing over the shapes of nodes.

    Args:
        dice: each call returns a number in [0, 1), such as `random.Random(seed).random`.
    """

    def annealing(presorted: Presorted, kinds: Kinds, budget: GpuBudget) -> TPs:
        energies: dict[TPs, float] = {}

        def energy_s(nodes: Sequence[TPs]) -> float:
            fleet = largest_first(sum(nodes, ()))
            if fleet not in energies:
                energies[fleet] = makespan_s(presorted, kinds, fleet)
            return energies[fleet]

        choices = budget.choices(largest_first(kinds))
        nodes = [shapes[place * len(shapes) // len(choices)] for place, shapes in enumerate(choices)]
        for step in range(num_steps):
            place = int(dice() * len(nodes))
            shape = choices[place][int(dice() * len(choices[place]))]
            neighbour = [*nodes[:place], shape, *nodes[place + 1 :]]
            loss_s = energy_s(neighbour) - energy_s(nodes)
            if loss_s <= 0 or dice() < math.exp(-loss_s / (energy_s(nodes) * _temperature(step / num_steps))):
                nodes = neighbour
        return min(energies, key=lambda fleet: energies[fleet])

    return annealing


def _temperature(done_share: float) -> float:
    """Falls from accepting a 10 % loss now and then to accepting hardly a 0.1 % loss."""
    return float(0.1 ** (1 + 2 * done_share))


def _best(presorted: Presorted, kinds: Kinds, fleets: Iterator[TPs]) -> TPs:
    best = next(fleets)
    best_s = makespan_s(presorted, kinds, best)
    for fleet in fleets:
        fillers = [presorted.filler(kinds[tp]) for tp in fleet]
        better_s = (1 - PRECISION) * best_s
        if presorted.reach(fillers, better_s) == len(presorted):
            best, best_s = fleet, presorted.bound_s(fillers, high_s=better_s)
    return best


# --- from TP sizes to a plan --------------------------------------------------------------------------------


def _planned(presorted: Presorted, kinds: Kinds, budget: GpuBudget, fleet: TPs, method: str, why: str) -> FleetPlan:
    """The plan for a fleet: which engines are for the tail, and the node of each one."""
    engines: list[PlannedEngine] = []
    finishes_s = []
    start = 0
    cuts = presorted.cuts([kinds[tp] for tp in fleet])
    for (tp, node), end in zip(on_nodes(fleet, budget.gpus_per_node), cuts, strict=True):
        plain_s = presorted.running_sums.finish_s(replace(kinds[tp], speculation=None), start, end)
        fast_s = presorted.running_sums.finish_s(kinds[tp], start, end)
        role = Role.TAIL if fast_s < (1 - SPECULATION_GAIN) * plain_s else Role.BULK
        engines.append(PlannedEngine(tp, node, role))
        finishes_s.append(fast_s if role is Role.TAIL else plain_s)
        start = end
    return FleetPlan(tuple(engines), max(finishes_s), method, why)


def usable_kinds(
    trajectories: Sequence[Remaining],
    profiles: Mapping[int, EngineProfile],
    budget: GpuBudget,
    speculation: Speculation | None,
) -> dict[int, LoadedEngine]:
    """TP sizes that fit into a node and hold the longest context; if none holds it, the one that comes nearest."""
    fitting = {tp: profile for tp, profile in profiles.items() if tp <= min(budget.gpus, budget.gpus_per_node)}
    if not fitting:
        raise ValueError(f"no engine fits into {budget.gpus} GPUs in nodes of {budget.gpus_per_node}")
    longest = max(one.context_tokens + one.output_tokens + one.new_tokens for one in trajectories)

    def room(tp: int) -> float:
        return USABLE_KV_SHARE * fitting[tp].kv_capacity_tokens or math.inf

    holding = [tp for tp in fitting if room(tp) >= longest] or [max(fitting, key=room)]
    return {tp: LoadedEngine(fitting[tp], speculation=speculation) for tp in holding}
