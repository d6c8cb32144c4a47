"""The engines of a simulated rollout: how they start, die, come back, and give way to a reshaped fleet."""

from collections.abc import Callable, Sequence

from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining
from scheduling.scaling import PlannedEngine, Role
from scheduling.slot_search import FIRST_SLOTS
from scheduling.types import EngineLoad, EngineLost, EngineReported, EngineSpec, Event
from simulator.agenda import Agenda
from simulator.conditions import Conditions
from simulator.fault_draws import FaultDraws
from simulator.host import Host
from simulator.reshape import Reshaper

MODEL = "simulated"
LOOKS_EVERY_S = 1.0
"""As the gateway's `observe_interval_s`."""


class Hosts:
    """Owns the engines, including those that are gone.

    Args:
        family: profiles of which a reshaped fleet may be made.
        by_priority: engines sort their queues by priority.
        handle: passes an event to the scheduler.
        pause_legs: stops what runs on an engine that a controller retires, keeping its tokens.
        remaining: the predicted remaining work of each trajectory.
    """

    def __init__(
        self,
        conditions: Conditions,
        fault_draws: FaultDraws,
        family: Sequence[EngineProfile],
        agenda: Agenda,
        *,
        by_priority: bool,
        handle: Callable[[Event], None],
        pause_legs: Callable[[Host], None],
        remaining: Callable[[], list[Remaining]],
    ) -> None:
        self.hosts: dict[str, Host] = {}
        self.num_relaunches = 0
        self._conditions = conditions
        self._fault_draws = fault_draws
        self._family = family
        self._agenda = agenda
        self._by_priority = by_priority
        self._handle = handle
        self._pause_legs = pause_legs
        self._remaining = remaining
        self._profiles: dict[str, EngineProfile] = {}
        self._places: dict[str, PlannedEngine] = {}
        self._num_launching = 0

    def open(self, fleet: Sequence[EngineProfile], *, may_change: bool) -> float:
        """Start the first engines and schedule deaths and reshapes. Returns when all engines will have started.

        Args:
            may_change: the fleet is reshaped if the conditions include it.
        """
        nodes = [0] * len(fleet)
        if self._conditions.reshape is not None and may_change:
            gpus, speculation = sum(profile.tp for profile in fleet), self._conditions.features.speculation
            reshaper = Reshaper(self._conditions.reshape, self._family, gpus, speculation)
            nodes = reshaper.nodes_of(fleet)
            first_s = self._conditions.reshape.first_s
            self._note_reshape(reshaper, reshaper.settings.every_s if first_s is None else first_s)
        starts_s = [self._fault_draws.start_s() for _ in fleet]
        for number, (profile, node, start_s) in enumerate(zip(fleet, nodes, starts_s, strict=True)):
            self._launch(f"e{number:03d}", profile, PlannedEngine(profile.tp, node, Role.BULK), start_s)
        self._note_death()
        return max(starts_s)

    def _launch(self, engine_id: str, profile: EngineProfile, place: PlannedEngine, after_s: float) -> None:
        self._profiles[engine_id] = profile
        self._places[engine_id] = place
        self._num_launching += 1
        if after_s:
            self._agenda.note(self._agenda.now + after_s, self._start, engine_id)
        else:
            self._start(engine_id)

    def _start(self, engine_id: str) -> None:
        self._num_launching -= 1
        profile, now = self._profiles[engine_id], self._agenda.now
        features = self._conditions.features_of(self._places[engine_id].role)
        host = Host(engine_id, profile, features, now, by_priority=self._by_priority)
        self.hosts[engine_id] = host
        self._handle(EngineReported(now, self._spec(host)))
        if profile.request_ms or not self._conditions.tells_slots:  # else a look tells nothing new
            self._agenda.note(now + LOOKS_EVERY_S, self._look, engine_id)

    def _look(self, engine_id: str) -> None:
        """The engine tells what it has, as a gateway asks it every second."""
        host = self.hosts[engine_id]
        if host.ended_at is None:
            counts, now = host.engine.counts(), self._agenda.now
            self._handle(EngineReported(now, self._spec(host), EngineLoad(counts.num_running, counts.num_waiting)))
            self._agenda.note(now + LOOKS_EVERY_S, self._look, engine_id)

    def _spec(self, host: Host) -> EngineSpec:
        profile, conditions = host.profile, self._conditions
        return EngineSpec(
            host.engine_id,
            frozenset({MODEL}),
            profile.slots if conditions.tells_slots else FIRST_SLOTS,
            profile.kv_capacity_tokens,
            profile.tp,
            profile if conditions.tells_profiles else None,
            slots_are_assumed=not conditions.tells_slots,
        )

    def _alive(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.ended_at is None]

    # --- death ----------------------------------------------------------------------------------------------

    def _note_death(self) -> None:
        death_s = self._fault_draws.next_death_s()
        if death_s is not None:
            self._agenda.note(self._agenda.now + death_s, self._die)

    def _die(self, _: str) -> None:
        self._note_death()
        alive = [host.engine_id for host in self._alive()]
        if not alive:
            return
        host = self.hosts[self._fault_draws.one_of(alive)]
        self.num_relaunches += 1
        again = f"{host.engine_id.partition('.')[0]}.{self.num_relaunches}"
        self._launch(again, host.profile, self._places[host.engine_id], self._conditions.faults.relaunch_s)
        self._lose(host)

    def _lose(self, host: Host) -> None:
        host.end(self._agenda.now)
        self._handle(EngineLost(self._agenda.now, host.engine_id))

    # --- a fleet that is reshaped ---------------------------------------------------------------------------

    def _note_reshape(self, reshaper: Reshaper, after_s: float) -> None:
        self._agenda.note(self._agenda.now + after_s, lambda _: self._reshape(reshaper))

    def _reshape(self, reshaper: Reshaper) -> None:
        self._note_reshape(reshaper, reshaper.settings.every_s)
        remaining = self._remaining()
        if self._num_launching or not remaining:
            return
        alive = self._alive()
        change = reshaper.change(remaining, [self._places[host.engine_id] for host in alive])
        if change is None:
            return
        for host in alive:
            if self._places[host.engine_id].node in change.nodes:
                self._retire(host)
        for place in change.launches:
            self.num_relaunches += 1
            engine_id, profile = f"r{self.num_relaunches:03d}", reshaper.profile(place)
            self._launch(engine_id, profile, place, reshaper.settings.relaunch_s)

    def _retire(self, host: Host) -> None:
        """Stop an engine as a controller does: it accepts nothing new, what runs there is paused, then it is gone."""
        self._handle(EngineReported(self._agenda.now, self._spec(host), accepting=False))
        self._pause_legs(host)
        self._lose(host)
