"""Reshapes the fleet while a rollout runs, as a controller would, at intervals.

A relaunched engine keeps no KV; turns that run on it keep their tokens and go elsewhere, or wait.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engines.simulated.features import Speculation as Modelled
from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining
from scheduling.fleets import GpuBudget, largest_first, on_nodes
from scheduling.partition import Presorted
from scheduling.reshaping import ReshapeRule, nodes_to_relaunch, renumbered, worth_reshaping
from scheduling.running_sums import LoadedEngine, Speculation
from scheduling.scaling import FleetPlan, PlannedEngine, Role, plan
from simulator.conditions import Reshape


@dataclass(frozen=True, slots=True)
class Change:
    """What to do: nodes whose engines stop, and the engines that take their place."""

    nodes: frozenset[int]
    launches: tuple[PlannedEngine, ...]


class Reshaper:
    """Plans a change from the present engines.

    Args:
        profiles: one for each TP size.
        speculation: that of engines that decode speculatively; with `settings.roles` only those of the tail do.
    """

    def __init__(
        self, settings: Reshape, profiles: Sequence[EngineProfile], gpus: int, speculation: Modelled | None = None
    ) -> None:
        self.settings = settings
        self._profiles = {profile.tp: profile for profile in profiles}
        self._budget = GpuBudget(gpus, settings.gpus_per_node)
        self._speculation = Speculation(speculation.speed_up, speculation.max_batch) if speculation else None

    def nodes_of(self, fleet: Sequence[EngineProfile]) -> list[int]:
        """The node of each engine of the first fleet."""
        order = sorted(range(len(fleet)), key=lambda index: -fleet[index].tp)
        placed = on_nodes(largest_first(profile.tp for profile in fleet), self.settings.gpus_per_node)
        nodes = [0] * len(fleet)
        for index, (_, node) in zip(order, placed, strict=True):
            nodes[index] = node
        return nodes

    def profile(self, engine: PlannedEngine) -> EngineProfile:
        return self._profiles[engine.tp]

    def change(self, remaining: Sequence[Remaining], engines: Iterable[PlannedEngine]) -> Change | None:
        """The change to make now for these trajectories; None if nothing pays.

        Args:
            engines: the present ones.
        """
        present = FleetPlan(tuple(sorted(engines, key=lambda one: -one.tp)), 0.0, "", "")
        rule, cost_s = ReshapeRule(self.settings.min_gain_share), self.settings.expected_s
        if cost_s is None:
            cost_s = self.settings.relaunch_s
        wanted = plan(remaining, self._profiles, self._budget, speculation=self._speculation)
        current_s = self._estimate_s(remaining, present)
        if not worth_reshaping(current_s, wanted.makespan_s, cost_s, rule):
            return None
        wanted = self._with_roles(renumbered(wanted, present), present)
        nodes = frozenset(nodes_to_relaunch(wanted, present))
        return Change(nodes, tuple(one for one in wanted.engines if one.node in nodes))

    def _with_roles(self, wanted: FleetPlan, present: FleetPlan) -> FleetPlan:
        """A node is launched for the tail as a whole, and stays so; without `settings.roles`, none is."""
        both = (*wanted.engines, *present.engines) if self.settings.roles else ()
        tail = {one.node for one in both if one.role is Role.TAIL}
        engines = (replace(one, role=Role.TAIL if one.node in tail else Role.BULK) for one in wanted.engines)
        return replace(wanted, engines=tuple(engines))

    def _estimate_s(self, remaining: Sequence[Remaining], fleet: FleetPlan) -> float:
        """The makespan with the best partition on the present engines."""
        presorted = Presorted(remaining)
        return presorted.bound_s([presorted.filler(self._loaded(one)) for one in fleet.engines])

    def _loaded(self, engine: PlannedEngine) -> LoadedEngine:
        speculates = engine.role is Role.TAIL or not self.settings.roles
        return LoadedEngine(self.profile(engine), speculation=self._speculation if speculates else None)
