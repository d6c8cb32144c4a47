"""Which fleet is wanted, and by whom: the first fleet, plans, and operators. Decisions as records; nothing is
performed.

An operator's fleet stays until plans are allowed to decide again. A server that is drained by hand is not replaced, and
its devices stay unused until the fleet is scaled.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

from controller import rollouts
from controller.demand import Work
from controller.fleet_file import FleetFile, FleetFileError
from controller.itinerary import is_reachable, itinerary
from controller.journal import Json, State
from controller.layout import DoesNotFit, Floor, lay_out
from controller.planning import Proposal, is_chosen, propose, propose_next
from controller.records import new_ids, spares_record, wanted_record
from controller.rollouts import History
from controller.spares import SpareRule, spares_beside
from controller.steps import DesiredServer, ObservedServer, Step
from scheduling.fleets import largest_first
from scheduling.reshaping import ReshapeRule


class Refused(Exception):
    """The request cannot be fulfilled; the message states why."""


class NoDevices(Refused):
    """What is wanted does not fit onto the devices that there are now; nodes may join."""


class DesiredFleet:
    """Decides what is wanted.

    Args:
        devices: returns the launcher's inventory as it was last observed.
        state: returns the journal's present state.
    """

    def __init__(self, fleet: FleetFile, devices: Callable[[], Sequence[str]], state: Callable[[], State]) -> None:
        self._fleet = fleet
        self._devices = devices
        self._state = state
        self._profiles = fleet.profiles()  # once, as all that is in the file and in those it names

    def first(self) -> list[Json]:
        """The first fleet. Raises NoDevices while it does not fit onto those that there are, and FleetFileError if it
        never will.
        """
        tps = self.first_tps()
        try:
            return self._wanted(tps, [], frozenset(), "the first fleet")
        except Refused as refused:
            if self._fleet.launcher == "local":  # no device will join
                raise FleetFileError(f"the first fleet is not possible: {refused}") from None
            raise NoDevices(f"the first fleet is not possible yet: {refused}") from None

    def first_tps(self) -> tuple[int, ...]:
        """Sizes of the first fleet: those of the file, else the least TP size on every device. Raises NoDevices."""
        least, num_devices = min(self._fleet.tp_sizes), len(self._devices())
        if num_devices < least:
            raise NoDevices(f"the launcher has {num_devices} devices now, and the smallest engine needs {least}")
        return self._fleet.first if self._fleet.first is not None else (least,) * (num_devices // least)

    def command_to_start(self) -> str | None:
        """The command that starts the first fleet; None if engines are wanted, or nothing was decided yet."""
        state = self._state()
        if state.wanted or state.changed_at is None:
            return None
        try:
            counts = Counter(largest_first(self.first_tps()))
        except NoDevices:
            counts = Counter()
        if not counts:
            return "heddle fleet scale COUNTxTP"
        return " ".join(["heddle fleet scale", *(f"{count}xTP{tp}" for tp, count in counts.items())])

    def adopted(self, alive: Sequence[ObservedServer], asleep: Set[str]) -> list[Json]:
        """What runs already although no journal records it. Of several on the same devices, those that serve go first,
        then the gateway's.

        Args:
            asleep: ids of servers that report that they sleep.
        """
        wanted: list[DesiredServer] = []
        spares: list[DesiredServer] = []
        for one in sorted(alive, key=lambda one: (not one.is_serving, not one.is_member)):
            server = DesiredServer(one.server_id, one.tp, one.devices)
            if one.server_id in asleep:
                spares.append(server)
            elif not any(set(one.devices) & set(other.devices) for other in wanted):
                wanted.append(server)
        return [wanted_record(wanted, 0, time.time(), "adopted what runs", spares=spares)]

    def at_hand(self, seen: Sequence[ObservedServer]) -> list[DesiredServer]:
        """The wanted servers, without those that wait for devices that left the inventory, such as a lost node's."""
        alive, devices = {one.server_id for one in seen if one.is_alive}, set(self._devices())
        wanted = self._state().wanted
        return [one for one in wanted if one.server_id in alive or devices.issuperset(one.devices)]

    def proposed(self, work: Work, seen: Sequence[ObservedServer]) -> Proposal | str:
        """The fleet for this work, or the reason why there is none."""
        planning, state = self._fleet.planning, self._state_at_hand(seen)
        rule = ReshapeRule(planning.min_gain_share, min_correlation=planning.min_correlation)
        floor = self._floor(state.resting)
        max_starting = self._fleet.limits.max_starting
        return propose(work, state, self._profiles, floor, rule, planning.min_trajectories, max_starting)

    def after_rollout(self, work: Work) -> History | None:
        """The history for which the next rollout is planned: with the rollout that this work reports as ended, unless
        it is smaller than is planned for; else, while nothing is at work, as it is, until a fleet is chosen for it: its
        plan may have had to wait. None: the work at hand is planned for, if there is any."""
        state, last = self._state(), work.last_rollout
        if last is not None and len(last.trajectories) >= self._fleet.planning.min_trajectories:
            return rollouts.after(state.history, last.trajectories, last.ended_at)
        is_open = state.history.alike and not work.remaining and not is_chosen(state)
        return state.history if is_open else None

    def proposed_next(self, seen: Sequence[ObservedServer]) -> Proposal | str:
        """The fleet for the next rollout, or the reason why there is none; at least one must have ended."""
        state = self._state_at_hand(seen)
        return propose_next(state, self._profiles, self._floor(state.resting), self._fleet.limits.max_starting)

    def planned(self, proposal: Proposal, seen: Sequence[ObservedServer]) -> list[Json]:
        """A plan's fleet, with its assumed relaunch time. Raises Refused."""
        counted = {"counted_s": proposal.relaunch_s}
        return self._wanted(proposal.tps, seen, self._state().resting, proposal.why, **counted)

    def scaled(self, tps: Sequence[int], seen: Sequence[ObservedServer]) -> list[Json]:
        """An operator's fleet: every device and every size may be used again, and all may sleep. Raises Refused."""
        more = {"is_manual": True, "blocked_tps": [], "sleepless": "", "not_before": {}, "num_tries": {}}
        return self._wanted(tps, seen, frozenset(), "scaled by hand", **more)

    def let_plans_decide(self, seen: Sequence[ObservedServer]) -> list[Json]:
        """The same fleet until a plan pays; instead of none, the first fleet: without engines there is no work to plan
        for. What rests, or was given up, waits for an operator's fleet, though. Raises Refused."""
        state = self._state()
        if not (state.wanted or state.resting or state.blocked_tps):
            return self._wanted(self.first_tps(), seen, state.resting, "the first fleet", is_manual=False)
        return [wanted_record(state.wanted, state.serial, time.time(), "plans decide", is_manual=False)]

    def drained(self, server_id: str, seen: Sequence[ObservedServer]) -> list[Json]:
        """The fleet without this server, whose devices rest; a spare is simply dropped. Raises Refused."""
        state = self._state()
        spares = [one for one in state.spares if one.server_id != server_id]
        if len(spares) < len(state.spares):
            return [spares_record(spares)]
        leaving = next((one for one in state.wanted if one.server_id == server_id), None)
        if leaving is None:
            raise Refused(f"this fleet has no server {server_id}; `heddle fleet show` lists them")
        wanted = [one for one in state.wanted if one is not leaving]
        resting = state.resting | set(leaving.devices)
        spares = [one for one in spares if not resting & set(one.devices)]
        self._check(wanted, spares, seen, self._fleet.limits.min_engines)
        why = f"{server_id} was drained by hand"
        more = {"spares": spares, "resting": resting, "is_manual": True}
        return [wanted_record(wanted, state.serial, time.time(), why, **more)]

    def steps_to(self, tps: Sequence[int], seen: Sequence[ObservedServer], is_scaled: bool = False) -> list[list[Step]]:
        """All rounds of steps to a fleet of these sizes. Raises Refused.

        Args:
            is_scaled: it would be an operator's fleet, see `scaled`; else a plan's.
        """
        state = self._state()
        resting, sleepless = (frozenset[str](), "") if is_scaled else (state.resting, state.sleepless)
        wanted, spares, _ = self._laid_out(tps, seen, resting, sleepless)
        least = self.min_engines(wanted)
        self._check(wanted, spares, seen, least)
        max_starting = self._fleet.limits.max_starting
        return itinerary(wanted, seen, spares=spares, min_engines=least, max_starting=max_starting)

    def min_engines(self, wanted: Sequence[DesiredServer]) -> int:
        """How many engines must serve on the way to these; none if a fleet is ended."""
        return self._fleet.limits.min_engines if wanted else 0

    def _wanted(
        self, tps: Sequence[int], seen: Sequence[ObservedServer], resting: frozenset[str], why: str, **more: Any
    ) -> list[Json]:
        sleepless = more.get("sleepless", self._state().sleepless)
        wanted, spares, serial = self._laid_out(tps, seen, resting, sleepless)
        self._check(wanted, spares, seen, self.min_engines(wanted))
        return [wanted_record(wanted, serial, time.time(), why, spares=spares, resting=resting, **more)]

    def _laid_out(
        self, tps: Sequence[int], seen: Sequence[ObservedServer], resting: frozenset[str], sleepless: str
    ) -> tuple[list[DesiredServer], list[DesiredServer], int]:
        """The servers, the spares beside them, and the last serial number used for their ids.

        A draining or sleeping server may be among the servers.
        """
        state, floor = self._state(), self._floor(resting)
        if unknown := set(tps) - set(self._fleet.tp_sizes):
            raise Refused(f"TP {min(unknown)} is not among tp_sizes {list(self._fleet.tp_sizes)}")
        new_id, serial = new_ids(self._fleet.fleet, state)
        alive = {one.server_id: one for one in seen if one.is_alive}
        asleep = [one for one in state.spares if one.server_id in alive and not alive[one.server_id].held]
        awake = [*state.wanted, *_leaving(state, seen)]
        try:
            wanted = lay_out(tps, awake, floor, new_id, asleep)
        except DoesNotFit as error:
            raise Refused(str(error)) from None
        there = [one for one in (*state.spares, *awake) if one.server_id in alive]
        rule = SpareRule() if sleepless else self._fleet.spare_rule
        if state.changed_at is not None:  # a change would wait for servers that it does not need
            rule = replace(rule, is_ahead=False)
        spares = spares_beside(wanted, there, floor, rule, new_id)
        return wanted, spares, serial()

    def _check(
        self,
        wanted: Sequence[DesiredServer],
        spares: Sequence[DesiredServer],
        seen: Sequence[ObservedServer],
        min_engines: int,
    ) -> None:
        max_starting = self._fleet.limits.max_starting
        if not is_reachable(wanted, seen, spares=spares, min_engines=min_engines, max_starting=max_starting):
            raise Refused(f"fewer than {min_engines} engines (limits.min_engines) would serve on the way")

    def _state_at_hand(self, seen: Sequence[ObservedServer]) -> State:
        return replace(self._state(), wanted=tuple(self.at_hand(seen)))

    def _floor(self, resting: frozenset[str]) -> Floor:
        devices = tuple(self._devices())
        return Floor(devices, min(self._fleet.gpus_per_node, len(devices) or 1), resting, self._fleet.spans_nodes)


def _leaving(state: State, seen: Sequence[ObservedServer]) -> list[DesiredServer]:
    """Servers that are not wanted, but hold devices, and whose stop has not begun."""
    wanted_ids = {one.server_id for one in state.wanted}
    return [
        DesiredServer(one.server_id, one.tp, one.devices)
        for one in seen
        if one.held and one.server_id not in wanted_ids and state.begun.get(one.server_id) != "Stop"
    ]
