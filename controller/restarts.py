"""What happens to wanted servers that have ended: they are tried again after growing pauses, then given up. Pure.

Each failed start counts as a try, and so does a server that served for less than `min_serving_s`; for one that served
for longer, the count starts again. After the last try its TP size is blocked, and the last fleet that served is wanted
again, without the servers that were given up in it since. If that is the same fleet, or none ever served, the fleet
goes on without this server; once nothing is left of it, the fleet that served before it comes back. Only an operator's
`scale` lifts the block. A spare that ended is dropped: the next change does without it.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from controller.journal import Failure, Json, State, shape_of
from controller.launcher import Server, ServerState
from controller.records import spares_record, wanted_record
from controller.steps import DesiredServer

Of = TypeVar("Of")

_MAX_DOUBLINGS = 1_000  # a float ends at the 1,024th


@dataclass(frozen=True, slots=True)
class RetryRule:
    """How often and when a server is started again.

    Args:
        max_tries: starts of a server in total.
        back_off_s: pause before the second start; doubles with each further one.
        max_back_off_s: limit of the pause.
        min_serving_s: once a server has served for this long, its earlier tries no longer count.
    """

    max_tries: int = 3
    back_off_s: float = 5.0
    max_back_off_s: float = 300.0
    min_serving_s: float = 600.0

    def pause_s(self, num_tries: int) -> float:
        """The pause after `num_tries` failed starts."""
        return min(self.max_back_off_s, self.back_off_s * 2.0 ** min(max(num_tries - 1, 0), _MAX_DOUBLINGS))


@dataclass(frozen=True, slots=True)
class Ended:
    """A wanted server or a spare that has ended, and what is known of it."""

    server_id: str
    cause: str
    last_lines: tuple[str, ...] = ()


def find_ended(state: State, servers: Sequence[Server], failed: Mapping[str, str]) -> list[Ended]:
    """The expected servers that have ended, or failed otherwise.

    Args:
        failed: causes by server id; such a server may be alive.
    """
    expected = {one.server_id for one in (*state.wanted, *state.spares)}
    ended = {
        server.spec.server_id: Ended(server.spec.server_id, server.exit_cause, server.last_lines)
        for server in servers
        if server.state is ServerState.EXITED
    }
    lines = {server.spec.server_id: server.last_lines for server in servers}
    for server_id, cause in failed.items():
        ended.setdefault(server_id, Ended(server_id, cause, lines.get(server_id, ())))
    return [one for one in ended.values() if one.server_id in expected]


def tend(
    state: State,
    ended: Sequence[Ended],
    alive_ids: Set[str],
    now: float,
    rule: RetryRule,
    new_id: Callable[[], str],
    serial: Callable[[], int],
) -> list[Json]:
    """Records of what to do about servers that ended; none if none did.

    Args:
        new_id, serial: as `records.new_ids` gives them.
    """
    records: list[Json] = []
    wanted = list(state.wanted)
    tries, not_before = dict(state.num_tries), dict(state.not_before)
    given_up: list[DesiredServer] = []
    spares = {one.server_id: one for one in state.spares}
    for one in ended:
        place = next((place for place, other in enumerate(wanted) if other.server_id == one.server_id), None)
        lost = spares.pop(one.server_id) if place is None else wanted[place]
        failure = Failure(one.server_id, lost.tp, now, one.cause, one.last_lines)
        records.append({"kind": "failed", "failure": asdict(failure)})
        if place is None:
            continue
        has_worked = now - state.served_at.get(one.server_id, now) >= rule.min_serving_s
        num_tries = 0 if has_worked else tries.get(one.server_id, 0) + 1
        tries.pop(one.server_id, None)
        not_before.pop(one.server_id, None)
        if num_tries >= rule.max_tries:
            given_up.append(wanted.pop(place))
            continue
        wanted[place] = replace(lost, server_id=new_id())
        tries[wanted[place].server_id] = num_tries
        not_before[wanted[place].server_id] = now + rule.pause_s(num_tries)
    if len(spares) < len(state.spares):
        records.append(spares_record(spares.values()))
    if wanted == list(state.wanted):
        return records
    why = f"{', '.join(one.server_id for one in ended)} ended"
    for lost in given_up:
        records.append({"kind": "blocked", "tp": lost.tp, "devices": lost.devices})
        why = f"{lost.server_id} (TP {lost.tp}) was given up after {rule.max_tries} tries"
    if given_up and (before := _before(state, wanted, given_up)):
        stopping_ids = {server_id for server_id, step in state.begun.items() if step == "Stop"}
        kept_ids = (alive_ids - stopping_ids) | {one.server_id for one in wanted}
        wanted = [one if one.server_id in kept_ids else replace(one, server_id=new_id()) for one in before]
        why += "; back to the fleet before"
    wanted_ids = {one.server_id for one in wanted}
    more = {"num_tries": _only(tries, wanted_ids), "not_before": _only(not_before, wanted_ids)}
    records.append(wanted_record(wanted, serial(), now, why, **more))
    return records


def held_back(state: State, now: float, rule: RetryRule) -> set[str]:
    """Servers whose pause is not over. One that would last longer than any pause was noted by a clock that has been set
    back since, and is over.
    """
    return {server_id for server_id, at in state.not_before.items() if now < at <= now + rule.max_back_off_s}


def _before(state: State, wanted: Sequence[DesiredServer], given_up: Sequence[DesiredServer]) -> list[DesiredServer]:
    """The last fleet that served, as far as its devices may be used; none if it is the wanted one."""
    broken = {lost.devices for lost in given_up}

    def usable(fleet: Sequence[DesiredServer]) -> list[DesiredServer]:
        return [one for one in fleet if one.devices not in broken and not state.resting & set(one.devices)]

    before = usable(state.proven)
    if not before and not wanted:  # it served, but not for long: out of memory under load, say
        before = usable(state.earlier)
    if shape_of(before) == shape_of(wanted):
        return []
    wanted_on = {one.devices: one for one in wanted}  # replacements of servers that ended since are among them
    return [wanted_on.get(one.devices, one) for one in before]


def _only(of: Mapping[str, Of], server_ids: Set[str]) -> dict[str, Of]:
    return {server_id: value for server_id, value in of.items() if server_id in server_ids}
