"""A launcher and a gateway in a few lines, for tests of the pure steps: they do what a step asks, and detect harm."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from hypothesis import strategies as st

from controller.steps import (
    DesiredServer,
    Drain,
    Launch,
    MakeReady,
    MoveKv,
    ObservedServer,
    Register,
    Remove,
    Reopen,
    Sleep,
    SleepState,
    Step,
    Stop,
    Wake,
    next_steps,
)


@dataclass
class World:
    """Servers as they are, whatever a controller believes.

    Args:
        turns: running on each server, by its id.
        asleep: ids of servers that really sleep; `seen` shows what the journal knows of that.
    """

    servers: dict[str, ObservedServer] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    asleep: set[str] = field(default_factory=set)
    numbers: "count[int]" = field(default_factory=count)

    def seen(self) -> list[ObservedServer]:
        return [replace(one, num_turns=self.turns.get(one.server_id, 0)) for one in self.servers.values()]

    def new_id(self) -> str:
        return f"server-{next(self.numbers)}"

    def serving(self) -> set[str]:
        return {one.server_id for one in self.servers.values() if one.is_serving}

    def able_to_serve(self) -> set[str]:
        """Servers that serve, or would if a restarted gateway knew them."""
        return {
            one.server_id
            for one in self.servers.values()
            if one.is_serving or (one.is_alive and one.is_registered and not one.is_member and not one.was_drained)
        }

    def perform(self, step: Step) -> None:
        """Perform the step, or fail if it does harm. Performing it again changes nothing."""
        if isinstance(step, Launch):
            self._launch(step.wanted)
            return
        one = self.servers[step.server_id]
        match step:
            case Drain():
                one = replace(one, is_cordoned=True, is_serving=False, was_drained=True)
            case MoveKv():
                assert not self.turns.get(one.server_id)
                one = replace(one, was_moved=True)
            case Stop():
                assert not self.turns.get(one.server_id), "a server is stopped while turns run on it"
                assert not one.is_serving, "a server is stopped that the gateway may give turns"
                self.asleep.discard(one.server_id)
                one = replace(one, is_alive=False, is_ready=False, is_serving=False, was_stopped=True)
            case Sleep():
                assert not self.turns.get(one.server_id), "a server falls asleep while turns run on it"
                assert not one.is_serving, "a server falls asleep that the gateway may give turns"
                assert one.is_alive
                self.asleep.add(one.server_id)
                one = replace(one, sleep_state=SleepState.ASLEEP, is_ready=False, has_served=False)
            case Wake():
                assert one.is_alive
                self.asleep.discard(one.server_id)
                one = replace(one, sleep_state=SleepState.AWAKE)
                self._check_alone(one.server_id, one.devices)
            case MakeReady():
                assert one.is_alive and one.server_id not in self.asleep, "a server that sleeps is asked for tokens"
                assert one.is_begun, "a launch that broke off was not continued"
                one = replace(one, is_ready=True)
            case Register():
                assert one.is_ready, "the gateway is told of a server that does not answer"
                assert one.server_id not in self.asleep, "the gateway is told of a server that sleeps"
                one = replace(one, is_registered=True, is_member=True, is_serving=not one.is_cordoned)
                one = replace(one, has_served=one.has_served or one.is_serving)
            case Remove():
                assert not one.held, "the gateway is told to forget a server that works"
                one = replace(one, is_registered=False, is_member=False, is_cordoned=False)
                one = replace(one, was_drained=False, was_moved=False)
            case Reopen():
                assert one.is_alive and one.server_id not in self.asleep, "a server that sleeps gets turns"
                one = replace(one, is_cordoned=False, is_serving=True, was_drained=False, was_moved=False)
        self.servers[one.server_id] = one

    def _launch(self, wanted: DesiredServer) -> None:
        there = self.servers.get(wanted.server_id)
        if there is not None:
            self.servers[wanted.server_id] = replace(there, is_begun=True)
            return
        self._check_alone(wanted.server_id, wanted.devices)
        self.servers[wanted.server_id] = ObservedServer(wanted.server_id, wanted.tp, wanted.devices)

    def _check_alone(self, server_id: str, devices: tuple[str, ...]) -> None:
        for other in self.servers.values():
            is_awake = other.is_alive and other.server_id not in self.asleep
            is_other = other.server_id != server_id
            assert not (is_other and is_awake and set(other.devices) & set(devices)), "a device is held twice"

    def breaks_off(self, step: Sleep | Wake, is_done: bool) -> None:
        """The controller is killed before it knows whether the server did it."""
        if is_done:
            self.perform(step)
        one = self.servers[step.server_id]
        self.servers[step.server_id] = replace(one, sleep_state=SleepState.BETWEEN, is_ready=False)

    def launch_breaks_off(self, step: Launch) -> None:
        """The controller is killed on the way: the launcher has the server, which may never begin by itself."""
        if step.server_id not in self.servers:
            self._launch(step.wanted)
            self.servers[step.server_id] = replace(self.servers[step.server_id], is_begun=False)

    def something_happens(self, data: st.DataObject) -> str | None:
        """Turns end, the gateway restarts, a server dies, an operator cordons one or lifts a cordon, or nothing
        happens. Gives the id of a server that died."""
        match data.draw(st.integers(0, 5)):
            case 0:
                self.turns_end()
            case 1:
                self.gateway_restarts()
            case 2 if self.servers:
                victim = data.draw(st.sampled_from(sorted(self.servers)))
                self.dies(victim)
                return victim
            case 3 if members := sorted(one.server_id for one in self.servers.values() if one.is_member):
                chosen = self.servers[data.draw(st.sampled_from(members))]
                self.cordon(chosen.server_id, not chosen.is_cordoned)
        return None

    def cordon(self, server_id: str, is_cordoned: bool) -> None:
        """An operator's act; the gateway gives turns to servers that answer and are not cordoned."""
        one = self.servers[server_id]
        is_serving = one.is_ready and not is_cordoned
        has_served = one.has_served or is_serving
        self.servers[server_id] = replace(one, is_cordoned=is_cordoned, is_serving=is_serving, has_served=has_served)

    def replaced(self, wanted: Sequence[DesiredServer], gone: str | None) -> list[DesiredServer]:
        """The same servers, with a new one in place of one that is gone."""
        return [replace(one, server_id=self.new_id()) if one.server_id == gone else one for one in wanted]

    def lift_cordons(self) -> None:
        """Lift the cordons of operators."""
        for one in self.servers.values():
            if one.is_cordoned and not one.was_drained:
                self.cordon(one.server_id, False)

    def settle(
        self,
        wanted: Sequence[DesiredServer],
        spares: Sequence[DesiredServer] = (),
        max_starting: int = 8,
        min_engines: int = 0,
    ) -> None:
        """Take steps until none is left."""
        for _ in range(200):
            self.turns_end()
            seen = self.seen()
            steps = next_steps(wanted, seen, spares=spares, min_engines=min_engines, max_starting=max_starting)
            if not steps:
                return
            for step in steps:
                self.perform(step)
        raise AssertionError("the steps never end")

    def turns_end(self) -> None:
        """Every turn ends on servers that get no more."""
        for one in self.servers.values():
            if not one.is_serving:
                self.turns[one.server_id] = 0

    def dies(self, server_id: str) -> None:
        """Its processes end by themselves, and its turns end with them."""
        one = self.servers[server_id]
        self.turns[server_id] = 0
        self.asleep.discard(server_id)
        self.servers[server_id] = replace(one, is_alive=False, is_ready=False, is_serving=False)

    def gateway_restarts(self) -> None:
        """The gateway has forgotten the engines that it was told of, and its turns ended with it."""
        self.turns.clear()
        for one in self.servers.values():
            self.servers[one.server_id] = replace(one, is_member=False, is_serving=False, is_cordoned=False)
