"""What will happen if all goes well: to explain a change before it is made, and to refuse an impossible one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

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
    is_reached,
    next_steps,
)


def itinerary(
    wanted: Sequence[DesiredServer],
    seen: Sequence[ObservedServer],
    *,
    spares: Sequence[DesiredServer] = (),
    min_engines: int = 0,
    max_starting: int = 8,
) -> list[list[Step]]:
    """All rounds of steps until the fleet is as wanted, if each one goes well and every turn ends.

    If `min_engines` forbids the change, the last round leaves something undone: see `is_reached`.
    """
    return _played(wanted, seen, spares, min_engines, max_starting)[0]


def is_reachable(
    wanted: Sequence[DesiredServer],
    seen: Sequence[ObservedServer],
    *,
    spares: Sequence[DesiredServer] = (),
    min_engines: int = 0,
    max_starting: int = 8,
) -> bool:
    """Whether the change is possible with at least `min_engines` serving all the time.

    A server that hangs, or that an operator cordoned, stays as it is, and one that ended is replaced: no reason to
    refuse what else is wanted.
    """
    idle = {one.server_id for one in seen if not one.is_serving and (one.is_member or not one.is_alive)}
    now = [replace(one, has_served=one.has_served or one.server_id in idle) for one in seen]
    now = _played(wanted, now, spares, min_engines, max_starting)[1]
    return is_reached(wanted, [replace(one, is_serving=True) if one.server_id in idle else one for one in now])


def _played(
    wanted: Sequence[DesiredServer],
    seen: Sequence[ObservedServer],
    spares: Sequence[DesiredServer],
    min_engines: int,
    max_starting: int,
) -> tuple[list[list[Step]], list[ObservedServer]]:
    """The rounds of steps, and what is seen after them."""
    rounds, now = [], _drained(seen)
    while steps := next_steps(wanted, now, spares=spares, min_engines=min_engines, max_starting=max_starting):
        rounds.append(steps)
        for step in steps:
            now = after(step, now)
        now = _drained(now)
    return rounds, now


def _drained(seen: Sequence[ObservedServer]) -> list[ObservedServer]:
    """The servers once all turns on cordoned ones have ended."""
    return [replace(one, num_turns=0) if one.is_cordoned and one.num_turns else one for one in seen]


def after(step: Step, seen: Sequence[ObservedServer]) -> list[ObservedServer]:
    """What will be seen after a step went well."""
    if isinstance(step, Launch):
        others = [one for one in seen if one.server_id != step.server_id]
        return [*others, ObservedServer(step.server_id, step.wanted.tp, step.wanted.devices)]
    return [_stepped(step, one) if one.server_id == step.server_id else one for one in seen]


def _stepped(
    step: Drain | MoveKv | Stop | Sleep | Wake | MakeReady | Register | Remove | Reopen, one: ObservedServer
) -> ObservedServer:
    match step:
        case Drain():
            return replace(one, is_cordoned=True, is_serving=False, was_drained=True)
        case MoveKv():
            return replace(one, was_moved=True)
        case Stop():
            return replace(one, is_alive=False, is_ready=False, is_serving=False, num_turns=0, was_stopped=True)
        case Sleep():
            return replace(one, sleep_state=SleepState.ASLEEP, is_ready=False)
        case Wake():
            return replace(one, sleep_state=SleepState.AWAKE)
        case MakeReady():
            return replace(one, is_ready=True)
        case Register():
            return replace(one, is_registered=True, is_member=True, is_serving=True)
        case Remove():
            return replace(one, is_registered=False, is_member=False, is_cordoned=False)
        case Reopen():
            return replace(one, is_cordoned=False, is_serving=True, was_drained=False, was_moved=False)
        case _:
            assert_never(step)
