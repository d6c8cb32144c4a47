"""The observed fleet: launcher, gateway and journal combined, server by server. Pure."""

from collections.abc import Collection, Iterable, Sequence

from controller.gateway_client import Member
from controller.journal import State
from controller.launcher import Server, ServerState
from controller.steps import Launch, ObservedServer, SleepState


def observed_servers(
    servers: Sequence[Server],
    members: Sequence[Member],
    state: State,
    ready: Collection[str] = (),
    launched: Collection[str] = (),
    launching: Iterable[Launch] = (),
) -> list[ObservedServer]:
    """Every server that the launcher has or is launching, or that the gateway has from this controller.

    Args:
        ready: ids of servers that this process saw answer.
        launched: ids of servers whose launch this process completed; a launch by an earlier process may have broken
            off.
        launching: launches under way, which the launcher may not show yet.
    """
    by_url = {member.url: member for member in members}
    seen = {server.spec.server_id: _seen(server, by_url, state, ready, launched) for server in servers}
    for launch in launching:
        one = launch.wanted
        seen.setdefault(one.server_id, ObservedServer(one.server_id, one.tp, one.devices))
    shown_urls = {server.url for server in servers}
    for server_id, url in state.urls.items():
        if server_id not in seen and url in by_url and url not in shown_urls:
            # Its launcher has forgotten it, so it holds no device.
            seen[server_id] = ObservedServer(server_id, 0, (), is_alive=False, is_member=True, was_stopped=True)
    return list(seen.values())


def unlisted_servers(servers: Sequence[Server], members: Sequence[Member], state: State) -> dict[str, bool]:
    """Registered servers that the launcher does not list, by id, and whether the gateway still reaches them.

    One that it reaches may run, whatever the launcher lists. An address that a listed server has is that server's.
    """
    listed = {server.spec.server_id for server in servers}
    reached = {member.url for member in members if member.is_ready} - {server.url for server in servers}
    return {server_id: url in reached for server_id, url in state.urls.items() if server_id not in listed}


def registered_urls(servers: Sequence[Server], members: Sequence[Member], state: State) -> dict[str, str]:
    """Addresses by id of running servers that the gateway has, although no journal records it."""
    known = {member.url for member in members}
    running = [one for one in servers if one.state is not ServerState.EXITED and one.spec.server_id not in state.urls]
    return {one.spec.server_id: one.url for one in running if one.url is not None and one.url in known}


def _seen(
    server: Server, by_url: dict[str, Member], state: State, ready: Collection[str], launched: Collection[str]
) -> ObservedServer:
    server_id = server.spec.server_id
    # Only a registered server counts as a member: another server may have had this address before.
    member = by_url.get(server.url or "") if server_id in state.urls else None
    is_alive = server.state is not ServerState.EXITED
    sleep_state = SleepState(state.rest.get(server_id, SleepState.AWAKE))
    return ObservedServer(
        server_id=server_id,
        tp=server.spec.tp,
        devices=server.spec.devices,
        is_alive=is_alive,
        is_begun=server.state is not ServerState.STARTING or server_id in launched,
        # It is registered when it is ready; after a restart the gateway is told again at once.
        is_ready=is_alive and sleep_state is SleepState.AWAKE and (server_id in ready or server_id in state.urls),
        is_registered=server_id in state.urls,
        is_member=member is not None,
        is_starting=is_alive and member is not None and member.is_starting,
        is_cordoned=member is not None and member.is_cordoned,
        cordon_reason=member.cordon_reason if member else "",
        is_serving=is_alive and member is not None and member.is_ready and not member.is_cordoned,
        has_served=server_id in state.served_at,
        num_turns=member.num_turns if member else 0,
        was_drained=server_id in state.drained,
        was_moved=server_id in state.moved,
        was_stopped=server_id in state.stopped,
        sleep_state=sleep_state,
    )
