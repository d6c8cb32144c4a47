"""What to do next to make the fleet that is seen the fleet that is wanted: pure, and decided anew from what is seen.

    leaving server:   Drain -> (its turns end) -> MoveKv -> Stop -> Remove
    coming server:    Launch -> MakeReady -> Register

There is no position in a plan to be lost: every step follows from what the launcher and the gateway show now, is safe
to repeat, and a controller that was killed anywhere goes on where the fleet is. Rules:

- A server is stopped only when the gateway has no turn on it, and launched only on devices that no living one holds.
- Servers that share devices leave together, and only while `min_engines` others serve. Where none is asked for, turns
  wait in the gateway meanwhile.
- The gateway forgets a stopped engine only when another serves: until then it knows the model, so turns wait, and are
  not refused.
- A server that came to be wanted again while it drained is opened again.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import assert_never


@dataclass(frozen=True, slots=True)
class Wanted:
    """A server that should be there. Another on its devices, or the same again after it ended, has another id."""

    server_id: str
    tp: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A server as launcher, gateway and journal show it.

    Args:
        devices: what it holds while it is alive.
        is_alive: launched, and not known to have ended.
        is_begun: the launcher has seen it begin; if not, an earlier launch may have broken off.
        is_ready: it answered, and is warm.
        is_member: the gateway knows it.
        is_cordoned: the gateway gives it no turns, whoever wanted that.
        is_serving: the gateway may give it turns now.
        num_turns: running on it, by the gateway's count.
        was_drained: this controller's journal says that it was cordoned by it; an operator's cordon is not undone.
        was_moved: the KV of those who live there was offered to others.
        was_stopped: what is left of it at the launcher was cleared away.
    """

    server_id: str
    tp: int
    devices: tuple[str, ...]
    is_alive: bool = True
    is_begun: bool = True
    is_ready: bool = False
    is_member: bool = False
    is_cordoned: bool = False
    is_serving: bool = False
    num_turns: int = 0
    was_drained: bool = False
    was_moved: bool = False
    was_stopped: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the gateway give it no more turns."""

    server_id: str


@dataclass(frozen=True, slots=True)
class MoveKv:
    """Let the trajectories that live there take their KV along."""

    server_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End its processes, or clear away what has ended."""

    server_id: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Start it; goes on with a launch that broke off."""

    wanted: Wanted

    @property
    def server_id(self) -> str:
        return self.wanted.server_id


@dataclass(frozen=True, slots=True)
class MakeReady:
    """Wait until it answers, and warm it up."""

    server_id: str


@dataclass(frozen=True, slots=True)
class Register:
    """Tell the gateway of it."""

    server_id: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Have the gateway forget it."""

    server_id: str


@dataclass(frozen=True, slots=True)
class Reopen:
    """It stays after all: have the gateway give it turns again."""

    server_id: str


Step = Drain | MoveKv | Stop | Launch | MakeReady | Register | Remove | Reopen


def next_steps(
    wanted: Sequence[Wanted],
    seen: Sequence[Seen],
    *,
    min_engines: int = 0,
    max_starting: int = 8,
    held_back: Set[str] = frozenset(),
) -> list[Step]:
    """All steps that may be taken now, one for each server at most; none: the fleet is as wanted, or waits.

    Args:
        min_engines: that must go on serving while others are replaced.
        max_starting: servers that may start at once; they share disks and cores.
        held_back: ids of servers that must not be launched yet.
    """
    wanted_ids = {one.server_id for one in wanted}
    staying = [one for one in seen if one.server_id in wanted_ids]
    leaving = [one for one in seen if one.server_id not in wanted_ids]
    may_drain = _may_drain(wanted, seen, min_engines)
    may_remove = not wanted or any(one.is_serving for one in seen)
    steps: list[Step | None] = []
    steps += [_staying_step(one, wanted) for one in staying]
    steps += [_leaving_step(one, one.server_id in may_drain, may_remove) for one in leaving]
    steps += _launches([one for one in wanted if one.server_id not in held_back], seen, max_starting)
    return [step for step in steps if step is not None]


def _staying_step(one: Seen, wanted: Sequence[Wanted]) -> Step | None:
    if not one.is_alive:
        return None  # who decides what is wanted must replace it
    if not one.is_begun:
        return Launch(next(other for other in wanted if other.server_id == one.server_id))
    if not one.is_ready:
        return MakeReady(one.server_id)
    if not one.is_member:
        return Register(one.server_id)
    if one.is_cordoned and one.was_drained:
        return Reopen(one.server_id)
    return None


def _leaving_step(one: Seen, may_drain: bool, may_remove: bool) -> Step | None:
    if one.is_alive and one.is_member:
        if not (one.is_cordoned and one.was_drained):  # another's cordon may be lifted at any time
            return Drain(one.server_id) if may_drain else None
        if one.num_turns:
            return None
        if not one.was_moved:
            return MoveKv(one.server_id)
    if one.is_alive or not one.was_stopped:
        return Stop(one.server_id)
    if one.is_member:
        return Remove(one.server_id) if may_remove else None
    return None


def _launches(wanted: Sequence[Wanted], seen: Sequence[Seen], max_starting: int) -> list[Step]:
    held = {device for one in seen if one.is_alive for device in one.devices}
    known = {one.server_id for one in seen}
    room = max_starting - sum(one.is_alive and not one.is_ready for one in seen)
    launches: list[Step] = []
    for one in wanted:
        if one.server_id not in known and not held & set(one.devices) and len(launches) < room:
            launches.append(Launch(one))
            held |= set(one.devices)
    return launches


def _may_drain(wanted: Sequence[Wanted], seen: Sequence[Seen], min_engines: int) -> set[str]:
    """Ids of servers whose whole group may leave now."""
    num_serving = sum(one.is_serving for one in seen)
    wanted_ids = {one.server_id for one in wanted}
    alive_ids = {one.server_id for one in seen if one.is_alive}
    leaving = [one for one in seen if one.is_alive and one.server_id not in wanted_ids]
    coming = [one for one in wanted if one.server_id not in alive_ids]
    may: set[str] = set()
    for devices in _groups([*(one.devices for one in leaving), *(one.devices for one in coming)]):
        group = [one for one in leaving if devices & set(one.devices)]
        num_leaving = sum(one.is_serving for one in group)
        if num_serving - num_leaving >= min_engines or not num_leaving:
            num_serving -= num_leaving
            may |= {one.server_id for one in group}
    return may


def _groups(holdings: Iterable[Iterable[str]]) -> list[set[str]]:
    """Sets of devices, merged where they share one."""
    groups: list[set[str]] = []
    for devices in map(set, holdings):
        touching = [group for group in groups if group & devices]
        groups = [group for group in groups if not group & devices]
        groups.append(devices.union(*touching))
    return groups


def after(step: Step, seen: Sequence[Seen]) -> list[Seen]:
    """What will be seen when a step went well: for explaining a plan before it is carried out, and for tests."""
    if isinstance(step, Launch):
        others = [one for one in seen if one.server_id != step.server_id]
        return [*others, Seen(step.server_id, step.wanted.tp, step.wanted.devices)]
    return [_stepped(step, one) if one.server_id == step.server_id else one for one in seen]


def _stepped(step: Drain | MoveKv | Stop | MakeReady | Register | Remove | Reopen, one: Seen) -> Seen:
    match step:
        case Drain():
            return replace(one, is_cordoned=True, is_serving=False, was_drained=True)
        case MoveKv():
            return replace(one, was_moved=True)
        case Stop():
            return replace(one, is_alive=False, is_ready=False, is_serving=False, num_turns=0, was_stopped=True)
        case MakeReady():
            return replace(one, is_ready=True)
        case Register():
            return replace(one, is_member=True, is_serving=True)
        case Remove():
            return replace(one, is_member=False, is_cordoned=False)
        case Reopen():
            return replace(one, is_cordoned=False, is_serving=True, was_drained=False, was_moved=False)
        case _:
            assert_never(step)


def itinerary(
    wanted: Sequence[Wanted], seen: Sequence[Seen], *, min_engines: int = 0, max_starting: int = 8
) -> list[list[Step]]:
    """All rounds of steps until the fleet is as wanted, if each goes well and every turn ends.

    Where `min_engines` forbids the change, the last round leaves something undone: see `is_reached`.
    """
    rounds = []
    now = list(seen)
    while steps := next_steps(wanted, now, min_engines=min_engines, max_starting=max_starting):
        rounds.append(steps)
        for step in steps:
            now = after(step, now)
        now = [replace(one, num_turns=0) if one.is_cordoned else one for one in now]
    return rounds


def is_reached(wanted: Sequence[Wanted], seen: Sequence[Seen]) -> bool:
    """Every wanted server serves, and no other is alive."""
    wanted_ids = {one.server_id for one in wanted}
    serving = {one.server_id for one in seen if one.is_serving}
    return wanted_ids <= serving and not any(one.is_alive and one.server_id not in wanted_ids for one in seen)


def is_reachable(
    wanted: Sequence[Wanted], seen: Sequence[Seen], *, min_engines: int = 0, max_starting: int = 8
) -> bool:
    """Whether the change can be made without fewer than `min_engines` serving on the way."""
    now = list(seen)
    for steps in itinerary(wanted, seen, min_engines=min_engines, max_starting=max_starting):
        for step in steps:
            now = after(step, now)
    return is_reached(wanted, now)
