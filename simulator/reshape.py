"""The fleet cut anew while a rollout runs: what a controller would make of it, asked at intervals.

An engine that is relaunched keeps no KV; turns that run on it keep their tokens and go elsewhere, or wait.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining
from scheduling.fleets import GpuBudget, largest_first, on_nodes
from scheduling.partition import Presorted
from scheduling.reshaping import ReshapeRule, nodes_to_relaunch, renumbered, worth_reshaping
from scheduling.scaling import FleetPlan, PlannedEngine, Role, makespan_s, plan, usable_kinds
from simulator.conditions import Reshape


@dataclass(frozen=True, slots=True)
class Change:
    """What to do: nodes whose engines stop, and the profiles of those that take their place, by node."""

    nodes: frozenset[int]
    launches: tuple[tuple[int, EngineProfile], ...]


class Reshaper:
    """Plans against the engines that are there.

    Args:
        profiles: one for each TP degree.
    """

    def __init__(self, settings: Reshape, profiles: Sequence[EngineProfile], gpus: int) -> None:
        self.settings = settings
        self._profiles = {profile.tp: profile for profile in profiles}
        self._budget = GpuBudget(gpus, settings.gpus_per_node)

    def nodes_of(self, fleet: Sequence[EngineProfile]) -> list[int]:
        """The node of each engine of the first fleet."""
        order = sorted(range(len(fleet)), key=lambda index: -fleet[index].tp)
        placed = on_nodes(largest_first(profile.tp for profile in fleet), self.settings.gpus_per_node)
        nodes = [0] * len(fleet)
        for index, (_, node) in zip(order, placed, strict=True):
            nodes[index] = node
        return nodes

    def change(self, remaining: Sequence[Remaining], engines: Iterable[tuple[int, int]]) -> Change | None:
        """What to change now, for these trajectories; None: nothing that pays.

        Args:
            engines: TP degree and node of each that is there.
        """
        present = FleetPlan(tuple(PlannedEngine(tp, node, Role.BULK) for tp, node in engines), 0.0, "", "")
        rule = ReshapeRule(self.settings.min_gain_share)
        wanted = plan(remaining, self._profiles, self._budget)
        current_s = self._estimate_s(remaining, self._profiles, present)
        if not worth_reshaping(current_s, wanted.makespan_s, self.settings.relaunch_s, rule):
            return None
        wanted = renumbered(wanted, present)
        nodes = frozenset(nodes_to_relaunch(wanted, present))
        launches = tuple((one.node, self._profiles[one.tp]) for one in wanted.engines if one.node in nodes)
        return Change(nodes, launches)

    def _estimate_s(
        self, remaining: Sequence[Remaining], profiles: Mapping[int, EngineProfile], fleet: FleetPlan
    ) -> float:
        kinds = usable_kinds(remaining, profiles, self._budget, None)
        return makespan_s(Presorted(remaining), kinds, largest_first(fleet.tps))
