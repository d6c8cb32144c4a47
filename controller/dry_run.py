"""What the controller would do now, without doing anything: for `heddle controller --dry-run`."""

from collections.abc import Sequence
from dataclasses import replace

from controller.demand import demand_of
from controller.desired import DesiredFleet, Refused
from controller.fleet_file import FleetFile
from controller.gateway_client import GatewayClient
from controller.itinerary import itinerary
from controller.journal import check_owner, read_state
from controller.launcher import Launcher
from controller.observed import observed_servers
from controller.planning import Proposal
from controller.report import steps_in_words
from controller.steps import ObservedServer, Step, is_reached
from scheduling.fleets import in_words, largest_first


class LauncherAway(Exception):
    """The launcher's cluster cannot be reached; the message is the launcher's."""


async def told(fleet: FleetFile, launcher: Launcher) -> list[str]:
    """Lines for a person: the state of the fleet, the plan and its reason, and each step to it.

    Raises:
        LauncherAway, GatewayAway, GatewayRefused, DemandAway: see there.
        ValueError: the journal is damaged, or another fleet's.
    """
    state = read_state(fleet.state_dir / "journal.jsonl")
    check_owner(state, fleet.fleet, fleet.state_dir)
    key = fleet.admin_key.get_secret_value() if fleet.admin_key else None
    gateway = GatewayClient(fleet.gateway, key)
    demand = demand_of(fleet.demand, gateway)
    try:
        try:
            servers, devices = await launcher.find(fleet.fleet), launcher.inventory()
        except ConnectionError as fault:
            raise LauncherAway(str(fault)) from fault
        seen = observed_servers(servers, await gateway.engines(), state)
        work = await demand.work(state.history.ended_at)
    finally:
        await demand.aclose()
        gateway.close()
    sizes = largest_first(one.tp for one in seen if one.is_serving)
    lines = [f"Fleet {fleet.fleet}: {in_words(sizes) or 'nothing'} serves."]
    limits = fleet.limits
    desired = DesiredFleet(fleet, lambda: devices, lambda: state)
    if state.changed_at is None:
        lines.append("It has no journal. Running engines are adopted; if there are none, the first fleet is launched.")
        try:
            rounds = [] if any(one.is_alive for one in seen) else desired.steps_to(desired.first_tps(), seen)
        except Refused as refused:
            return [*lines, f"It is not possible: {refused}."]
    elif not is_reached(desired.at_hand(seen), seen):
        wanted = in_words(largest_first(one.tp for one in state.wanted))
        lines.append(f"It is changing to {wanted or 'nothing'} ({state.why}).")
        rounds = itinerary(
            state.wanted,
            seen,
            spares=state.spares,
            min_engines=desired.min_engines(state.wanted),
            max_starting=limits.max_starting,
        )
    else:
        if command := desired.command_to_start():
            lines.append(f"No engines are wanted ({state.why}): `{command}` starts some.")
        proposal = desired.proposed(work, seen)
        if (history := desired.after_rollout(work)) is not None:
            state = replace(state, history=history)  # as the controller would record it; `desired` reads it
            proposal = desired.proposed_next(seen)
        more, rounds = _planned(fleet, desired, proposal, state.is_manual, seen)
        lines += more
    lines += steps_in_words(rounds, state, seen) or ["Nothing to do."]
    return [*lines, "Nothing was changed."]


def _planned(
    fleet: FleetFile, desired: DesiredFleet, proposal: Proposal | str, is_manual: bool, seen: Sequence[ObservedServer]
) -> tuple[list[str], list[list[Step]]]:
    if isinstance(proposal, str):
        return [f"No plan: {proposal}."], []
    lines = [f"Plan: {in_words(proposal.tps)}. {proposal.why}."]
    if proposal.relaunch_s:
        lines.append(f"Gain: {proposal.gain_s:.0f} s, after a relaunch of {proposal.relaunch_s:.0f} s.")
    if not proposal.is_worth_it:
        return [*lines, "It would not be carried out."], []
    if is_manual or not fleet.planning.is_automatic:
        why = "an operator's fleet stays" if is_manual else "planning.is_automatic is off"
        lines.append(f"It would only be shown: {why}.")
    try:
        return lines, desired.steps_to(proposal.tps, seen)
    except Refused as refused:
        return [*lines, f"It cannot be carried out: {refused}."], []
