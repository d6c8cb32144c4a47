"""The next steps from the observed fleet to the wanted fleet: pure, and decided each time from what is observed.

    leaving server:   Drain -> (its turns end) -> MoveKv -> Stop -> Remove       or, of a spare, Sleep -> Remove
    coming server:    Launch -> MakeReady -> Register                            or, of a spare, Wake -> Register

There is no position in a plan that could be lost. Every step follows from what the launcher and the gateway show now,
and is safe to repeat. A controller that was killed at any point continues from the fleet's present state. Rules:

- A server is stopped, or put to sleep, only when the gateway has no turn on it. It is launched, or woken, only on
  devices that no other server holds. While asleep it holds none; while it falls asleep or wakes it holds them.
- A spare is kept asleep beside the wanted servers. A spare that is not there yet is launched, and put to sleep, before
  others get its devices; but no wanted server that is there gives way for it.
- Servers that share devices leave together, and only while `min_engines` others serve. If that is 0, turns may wait in
  the gateway meanwhile. Those that make no room for coming servers leave only once all wanted ones have served, unless
  an operator wants their devices.
- A gateway that does not know a registered server was restarted: it is told of the server again, even of one that is to
  leave, which serves until it is drained.
- The gateway forgets a stopped engine only when another one serves: until then it knows the model, so turns wait
  instead of being refused.
- A server that is wanted again while it drains is reopened.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class DesiredServer:
    """A server that should be there. Another one on its devices, or its replacement after it ended, has another id."""

    server_id: str
    tp: int
    devices: tuple[str, ...]


class SleepState(StrEnum):
    """`between`: it was told to fall asleep or to wake and has not confirmed it, so it may be either."""

    AWAKE = "awake"
    BETWEEN = "between"
    ASLEEP = "asleep"


@dataclass(frozen=True, slots=True)
class ObservedServer:
    """A server as launcher, gateway and journal show it.

    Args:
        devices: where it runs; see `held`.
        is_alive: launched, and not known to have ended.
        sleep_state: of a server that is alive; a sleeping one is alive.
        is_begun: the launcher has seen it begin; if not, an earlier launch may have broken off.
        is_ready: it answered, and is warm.
        is_registered: the gateway was told of it.
        is_member: the gateway knows it.
        is_starting: the gateway has not observed it yet.
        is_cordoned: the gateway gives it no turns, for whatever reason.
        cordon_reason: why the gateway itself holds it back, such as its weights; "" if it does not.
        is_serving: the gateway may give it turns now.
        has_served: it served at some time since it was launched or woke.
        num_turns: turns that run on it, by the gateway's count.
        was_drained: this controller's journal records that it cordoned the server; an operator's cordon is not undone.
        was_moved: the KV of trajectories that live there was offered to others.
        was_stopped: its remains at the launcher were removed.
    """

    server_id: str
    tp: int
    devices: tuple[str, ...]
    is_alive: bool = True
    is_begun: bool = True
    is_ready: bool = False
    is_registered: bool = False
    is_member: bool = False
    is_starting: bool = False
    is_cordoned: bool = False
    cordon_reason: str = ""
    is_serving: bool = False
    has_served: bool = False
    num_turns: int = 0
    was_drained: bool = False
    was_moved: bool = False
    was_stopped: bool = False
    sleep_state: SleepState = SleepState.AWAKE

    @property
    def held(self) -> tuple[str, ...]:
        """Devices that no other server may use now: none if it has ended or sleeps."""
        return self.devices if self.is_alive and self.sleep_state is not SleepState.ASLEEP else ()


@dataclass(frozen=True, slots=True)
class Launch:
    """Start it; continues a launch that broke off."""

    wanted: DesiredServer

    @property
    def server_id(self) -> str:
        return self.wanted.server_id


@dataclass(frozen=True, slots=True)
class _Known:
    """A step of an existing server."""

    server_id: str


class Drain(_Known):
    """Make the gateway give it no more turns."""


class MoveKv(_Known):
    """Let the trajectories that live there take their KV along."""


class Stop(_Known):
    """End its processes, or remove what is left of an ended server."""


class Sleep(_Known):
    """Make it release its devices' memory and keep its processes."""


class Wake(_Known):
    """Make it take its devices' memory again."""


class MakeReady(_Known):
    """Wait until it answers, and warm it up."""


class Register(_Known):
    """Tell the gateway of it."""


class Remove(_Known):
    """Make the gateway forget it."""


class Reopen(_Known):
    """It stays after all: make the gateway give it turns again."""


Step = Drain | MoveKv | Stop | Sleep | Wake | Launch | MakeReady | Register | Remove | Reopen


def next_steps(
    wanted: Sequence[DesiredServer],
    seen: Sequence[ObservedServer],
    *,
    spares: Sequence[DesiredServer] = (),
    min_engines: int = 0,
    max_starting: int = 8,
    held_back: Set[str] = frozenset(),
    resting: Set[str] = frozenset(),
) -> list[Step]:
    """All steps that may be taken now, at most one per server; none: the fleet is as wanted, or waits.

    Args:
        spares: servers that should be there, asleep; none of them is in `wanted`.
        min_engines: servers that must go on serving while others are replaced.
        max_starting: servers that may start at once; they share disks and cores.
        held_back: ids of servers that must not be launched yet.
        resting: devices that an operator took out of use.
    """
    wanted_ids = {one.server_id for one in wanted}
    spare_ids = {one.server_id for one in spares}
    may_drain = _may_drain(wanted, seen, min_engines, resting)
    may_remove = not wanted or any(one.is_serving for one in seen)
    held = Counter(device for one in seen for device in one.held)
    ordered = [*spares, *wanted]
    steps: list[Step | None] = []
    for one in seen:
        if one.server_id in wanted_ids:
            steps.append(_staying_step(one, ordered, held))
        else:
            is_spare, may_leave = one.server_id in spare_ids, one.server_id in may_drain
            steps.append(_leaving_step(one, ordered, is_spare, may_leave, may_remove))
    steps += _launches(wanted, spares, seen, held_back, max_starting)
    return [step for step in steps if step is not None]


def _staying_step(one: ObservedServer, ordered: Sequence[DesiredServer], held: Counter[str]) -> Step | None:
    if not one.is_alive:
        return None  # restarts.py must replace it in `wanted`
    if one.sleep_state is not SleepState.AWAKE:
        is_free = all(held[device] == (device in one.held) for device in one.devices)
        return Wake(one.server_id) if is_free else None
    if not one.is_ready:
        return _starting_step(one, ordered)
    if not one.is_member:
        return Register(one.server_id)
    if one.is_cordoned and one.was_drained:
        return Reopen(one.server_id)
    return None


def _leaving_step(
    one: ObservedServer, ordered: Sequence[DesiredServer], is_spare: bool, may_drain: bool, may_remove: bool
) -> Step | None:
    is_awake = one.is_alive and one.sleep_state is SleepState.AWAKE
    if is_awake and one.is_registered and not (one.is_member or one.was_drained):
        return Register(one.server_id)
    if is_awake and one.is_member:
        if not (one.is_cordoned and one.was_drained):  # another's cordon may be lifted at any time
            return Drain(one.server_id) if may_drain else None
        if one.num_turns:
            return None
        if not one.was_moved:
            return MoveKv(one.server_id)
    if is_spare and one.is_alive:
        if one.sleep_state is SleepState.AWAKE and not one.is_ready:
            return _starting_step(one, ordered)
        if one.sleep_state is not SleepState.ASLEEP:
            return Sleep(one.server_id)
    elif one.is_alive or not one.was_stopped:
        return Stop(one.server_id)
    if one.is_member:
        return Remove(one.server_id) if may_remove else None
    return None


def _starting_step(one: ObservedServer, ordered: Sequence[DesiredServer]) -> Step:
    if not one.is_begun:
        return Launch(next(other for other in ordered if other.server_id == one.server_id))
    return MakeReady(one.server_id)


def _launches(
    wanted: Sequence[DesiredServer],
    spares: Sequence[DesiredServer],
    seen: Sequence[ObservedServer],
    held_back: Set[str],
    max_starting: int,
) -> list[Step]:
    """Spares first. Devices that spares wait for are kept for them, unless a wanted server is already there."""
    known = {one.server_id for one in seen}
    wanted_ids = {one.server_id for one in wanted}
    kept = {device for one in seen if one.server_id in wanted_ids and one.is_alive for device in one.devices}
    held = kept.union(*(one.held for one in seen))
    room = max_starting - sum(
        bool(one.held) and one.sleep_state is SleepState.AWAKE and not one.is_ready for one in seen
    )
    launches: list[Step] = []
    for one in (*spares, *wanted):
        if one.server_id in known or one.server_id in held_back:
            continue
        if not held & set(one.devices) and len(launches) < room:
            launches.append(Launch(one))
        if one.server_id in wanted_ids or not kept & set(one.devices):
            held |= set(one.devices)
    return launches


def _may_drain(
    wanted: Sequence[DesiredServer], seen: Sequence[ObservedServer], min_engines: int, resting: Set[str]
) -> set[str]:
    """Ids of servers whose whole group may leave now."""
    num_serving = sum(one.is_serving for one in seen)
    wanted_ids = {one.server_id for one in wanted}
    holder_ids = {one.server_id for one in seen if one.held}
    leaving = [one for one in seen if one.held and one.server_id not in wanted_ids]
    coming = [one for one in wanted if one.server_id not in holder_ids]
    # One that served and hangs now, or that an operator cordoned, is not waited for: it may never serve again.
    have_come = {one.server_id for one in seen if one.is_serving or one.has_served}
    are_all_there = all(one.server_id in have_come for one in wanted)
    may: set[str] = set()
    for devices in _groups([*(one.devices for one in leaving), *(one.devices for one in coming)]):
        group = [one for one in leaving if devices & set(one.devices)]
        num_leaving = sum(one.is_serving or one.is_starting for one in group)
        is_due = are_all_there or devices <= resting or any(devices & set(one.devices) for one in coming)
        if (is_due and max(num_serving - num_leaving, 0) >= min_engines) or not num_leaving:
            num_serving -= num_leaving
            may |= {one.server_id for one in group}
    return may


def _groups(holdings: Iterable[Iterable[str]]) -> list[set[str]]:
    """Sets of devices, merged if they share one."""
    groups: list[set[str]] = []
    for devices in map(set, holdings):
        touching = [group for group in groups if group & devices]
        groups = [group for group in groups if not group & devices]
        groups.append(devices.union(*touching))
    return groups


def is_reached(wanted: Sequence[DesiredServer], seen: Sequence[ObservedServer]) -> bool:
    """Whether every wanted server serves, and no other one holds a device."""
    wanted_ids = {one.server_id for one in wanted}
    serving = {one.server_id for one in seen if one.is_serving}
    return wanted_ids <= serving and not any(one.held and one.server_id not in wanted_ids for one in seen)
