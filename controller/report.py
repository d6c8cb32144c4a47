"""The state of the fleet, as JSON and in words: for the controller's HTTP API and the commands `heddle fleet`."""

from collections.abc import Sequence, Set
from dataclasses import asdict
from statistics import median
from typing import Any

from controller.journal import State
from controller.loop import Controller
from controller.planning import Proposal
from controller.restarts import held_back
from controller.steps import DesiredServer, Launch, MakeReady, ObservedServer, SleepState, Step, Wake, is_reached

Json = dict[str, Any]


def status(controller: Controller, now: float) -> Json:
    """Everything about the fleet."""
    state, seen = controller.journal.state, controller.seen
    return {
        "fleet": controller.fleet.fleet,
        "is_reached": state.changed_at is not None and is_reached(state.wanted, seen),
        "is_manual": state.is_manual,
        "is_automatic": controller.fleet.planning.is_automatic,
        "why": state.why,
        "command_to_start": controller.desired.command_to_start(),
        "alarms": alarms(controller, now),
        "servers": _servers(controller, held_back(state, now, controller.fleet.retry_rule)),
        "resting_devices": sorted(state.resting),
        "phase_seconds": [
            {"phase": phase, "tp": tp, "median": median(times), "last": list(times)}
            for (phase, tp), times in sorted(state.phase_s.items())
        ],
        "failures": [asdict(failure) for failure in state.failures],
        "proposal": proposal_json(controller.proposal),
    }


def alarms(controller: Controller, now: float) -> dict[str, str]:
    """What a person should know, by name; each alarm is explained in docs/controller.md."""
    state = controller.journal.state
    found = dict(controller.alarms)
    if state.sleepless:
        found["cannot_sleep"] = f"servers are stopped instead of put to sleep: {state.sleepless}"
    if state.blocked_tps:
        causes = {failure.tp: failure.cause for failure in state.failures}  # the last one of each size
        found["size_given_up"] = "; ".join(f"TP {tp}: {causes.get(tp, '')}" for tp in sorted(state.blocked_tps))
    if waiting := held_back(state, now, controller.fleet.retry_rule):
        found["start_failed"] = f"{', '.join(sorted(waiting))} is started again after a pause; see failures"
    lost = [one.server_id for one in controller.seen if _is_lost(one, state)]
    if lost:
        found["engine_lost"] = f"{', '.join(lost)} runs, but the gateway cannot use it"
    wanted_ids = {one.server_id for one in state.wanted}
    held = [one for one in controller.seen if one.is_alive and one.cordon_reason and one.server_id in wanted_ids]
    if held:
        found["engine_held"] = "; ".join(f"{one.server_id} gets no turns: {one.cordon_reason}" for one in held)
    return found


def proposal_json(proposal: Proposal | str) -> Json:
    """A plan, or the reason why there is none."""
    if isinstance(proposal, str):
        return {"why": proposal}
    gain_s = proposal.gain_s if proposal.current_s < float("inf") else None
    current_s = proposal.current_s if gain_s is not None else None
    return {**asdict(proposal), "current_s": current_s, "gain_s": gain_s}


def steps_in_words(rounds: Sequence[Sequence[Step]], state: State, seen: Sequence[ObservedServer]) -> list[str]:
    """A line for each step: what, why, and how long it took recently."""
    tps = {one.server_id: one.tp for one in seen}
    woken = set()
    lines = []
    for number, steps in enumerate(rounds, 1):
        for step in steps:
            if isinstance(step, Launch):
                tps[step.server_id] = step.wanted.tp
            if isinstance(step, Wake):
                woken.add(step.server_id)
            lines.append(f"{number}. {_line(step, tps.get(step.server_id, 0), state, step.server_id in woken)}")
    return lines


_WHY = {
    "Drain": ("drain", "it gets no new turns; running ones end there", "drain"),
    "MoveKv": ("move KV", "nothing runs there any more; trajectories may take their KV along", None),
    "Stop": ("stop", "its turns have ended; its devices become free", "stop"),
    "Sleep": ("put to sleep", "its devices become free, and it may be needed again", "sleep"),
    "Wake": ("wake", "its devices are free", "wake"),
    "Launch": ("launch", "its devices are free", None),
    "MakeReady": ("make ready", "it must answer and be warm before it gets turns", "start"),
    "Register": ("register", "the gateway gives it turns", "register"),
    "Remove": ("remove", "it serves no more, so the gateway may forget it", None),
    "Reopen": ("reopen", "it stays after all", None),
}


def _line(step: Step, tp: int, state: State, is_woken: bool) -> str:
    name, why, phase = _WHY[type(step).__name__]
    if is_woken and isinstance(step, MakeReady):
        phase = None  # that is the time of a start, and it was woken
    where = f" on {','.join(step.wanted.devices)}" if isinstance(step, Launch) else ""
    size = f" (TP {tp}{where})" if tp else ""
    times = state.phase_s.get((phase, tp), ()) if phase else ()
    cost = f" [{median(times):.1f} s lately]" if times else ""
    return f"{name} {step.server_id}{size}: {why}{cost}"


def _servers(controller: Controller, backing_off: Set[str]) -> list[Json]:
    state, seen = controller.journal.state, controller.seen
    by_id = {server.spec.server_id: server for server in controller.servers}
    wanted = {one.server_id: one for one in state.wanted}
    shown = [one for one in seen if one.is_alive or one.is_member or one.server_id in wanted]
    listed = [
        {
            **_server(one, _state(one, one.server_id in wanted)),
            "is_wanted": one.server_id in wanted,
            "num_turns": one.num_turns,
            "url": by_id[one.server_id].url if one.server_id in by_id else None,
            "step": state.begun.get(one.server_id),
            "waits_for": by_id[one.server_id].waits_for if one.server_id in by_id else "",
        }
        for one in shown
    ]
    absent = wanted.keys() - {one.server_id for one in seen}
    free = set(controller.devices).difference(*(one.held for one in seen)) if controller.has_observed else None
    for server_id in sorted(absent):
        said = "backing off" if server_id in backing_off else _absent_state(wanted[server_id], free)
        none_yet = {"is_wanted": True, "num_turns": 0, "url": None, "step": None, "waits_for": ""}
        listed.append(_server(wanted[server_id], said) | none_yet)
    return listed


def _server(one: DesiredServer | ObservedServer, state: str) -> Json:
    return {"id": one.server_id, "tp": one.tp, "devices": list(one.devices), "state": state}


def _absent_state(one: DesiredServer, free: Set[str] | None) -> str:
    """What a server waits for; `free` is None before the fleet was observed."""
    if free is None:
        return "not seen yet"
    return "waiting to start" if free >= set(one.devices) else "waiting for its devices"


def _state(one: ObservedServer, is_wanted: bool) -> str:
    if not one.is_alive:
        return "ended"
    if one.sleep_state is not SleepState.AWAKE:
        return "asleep" if one.sleep_state is SleepState.ASLEEP else "waking" if is_wanted else "falling asleep"
    if one.is_serving:
        return "serving" if is_wanted else "leaving"
    if one.cordon_reason and is_wanted:
        return "held"
    if one.is_cordoned:
        return "draining" if one.num_turns else "drained"
    if one.is_member and not one.is_starting:
        return "lost"
    return "ready" if one.is_ready else "starting"


def _is_lost(one: ObservedServer, state: State) -> bool:
    is_usable = one.is_serving or one.is_cordoned or one.is_starting
    return one.is_alive and one.is_member and not is_usable and one.server_id in state.urls
