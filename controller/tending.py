"""What becomes of servers that are wanted and have ended: tried again, later and later, then given up. Pure.

A server that never served counts a try more; one that served and died begins to count anew. After the last try its TP
size is blocked, and the fleet that served last is wanted again; if that is the same fleet, it goes on without this
server. Only an operator's `scale` lifts the block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from controller.journal import Failure, Json, State, wanted_record
from controller.steps import Wanted


@dataclass(frozen=True, slots=True)
class RetryRule:
    """How often and when a server is started again.

    Args:
        max_tries: starts of a server in all.
        back_off_s: before the second start; doubles with each further one.
        max_back_off_s: at most that.
    """

    max_tries: int = 3
    back_off_s: float = 5.0
    max_back_off_s: float = 300.0

    def pause_s(self, num_tries: int) -> float:
        """Before the start that follows so many failed ones."""
        return min(self.max_back_off_s, self.back_off_s * 2.0 ** (num_tries - 1))


@dataclass(frozen=True, slots=True)
class Ended:
    """A server that is wanted and has ended, and what is known of it."""

    server_id: str
    cause: str
    last_lines: tuple[str, ...] = ()


def tend(
    state: State,
    ended: Sequence[Ended],
    alive: Mapping[str, Wanted],
    now: float,
    rule: RetryRule,
    new_id: Callable[[], str],
    serial: Callable[[], int],
) -> list[Json]:
    """Records that say what to do about servers that ended; none where none did.

    Args:
        alive: servers that are alive, by id.
        new_id, serial: as `journal.new_ids` gives them.
    """
    records: list[Json] = []
    wanted = list(state.wanted)
    tries, not_before = dict(state.num_tries), dict(state.not_before)
    given_up: list[Wanted] = []
    for one in ended:
        place = next(place for place, other in enumerate(wanted) if other.server_id == one.server_id)
        lost = wanted[place]
        failure = Failure(one.server_id, lost.tp, now, one.cause, one.last_lines)
        records.append({"kind": "failed", "failure": asdict(failure)})
        num_tries = 1 if one.server_id in state.urls else tries.pop(one.server_id, 0) + 1
        not_before.pop(one.server_id, None)
        if num_tries >= rule.max_tries:
            given_up.append(wanted.pop(place))
            continue
        wanted[place] = replace(lost, server_id=new_id())
        tries[wanted[place].server_id] = num_tries
        not_before[wanted[place].server_id] = now + rule.pause_s(num_tries)
    if not records:
        return []
    why = f"{', '.join(one.server_id for one in ended)} ended"
    for lost in given_up:
        records.append({"kind": "blocked", "tp": lost.tp})
        why = f"{lost.server_id} (TP {lost.tp}) was given up after {rule.max_tries} tries"
    if given_up and _sizes(state.proven) != _sizes(state.wanted):
        wanted = [one if one.server_id in alive else replace(one, server_id=new_id()) for one in state.proven]
        why += "; back to the fleet before"
    more = {"num_tries": tries, "not_before": not_before}
    records.append(wanted_record(wanted, serial(), now, why, **more))
    return records


def held_back(state: State, now: float) -> set[str]:
    """Servers whose pause is not over."""
    return {server_id for server_id, at in state.not_before.items() if at > now}


def _sizes(wanted: Sequence[Wanted]) -> list[tuple[str, ...]]:
    return sorted(one.devices for one in wanted)
