"""Which servers are kept asleep beside the fleet, so that its next shape is woken and not launched. Pure.

For each TP size that may sleep there is at most one server on each aligned block of devices, awake or asleep. A server
that leaves the fleet falls asleep; one that is wanted again wakes. With `is_ahead`, servers that never served are also
started when their devices are free anyway: before the first fleet.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from controller.layout import Floor
from controller.steps import DesiredServer


@dataclass(frozen=True, slots=True)
class SpareRule:
    """Which servers may sleep.

    Args:
        tps: sizes; empty: every server that leaves is stopped.
        is_ahead: start one on each block of these sizes before it is wanted.
    """

    tps: frozenset[int] = frozenset()
    is_ahead: bool = False


def spares_beside(
    wanted: Sequence[DesiredServer],
    there: Iterable[DesiredServer],
    floor: Floor,
    rule: SpareRule,
    new_id: Callable[[], str],
) -> list[DesiredServer]:
    """The servers to keep asleep beside the wanted ones; none beside an empty fleet.

    Args:
        there: servers that are alive or about to be, spares before others: of two on the same devices one stays.
    """
    if not wanted:
        return []
    blocks = {one.devices for one in wanted}
    spares = []
    for one in there:
        if one.tp in rule.tps and one.devices not in blocks and not floor.resting & set(one.devices):
            spares.append(one)
            blocks.add(one.devices)
    if rule.is_ahead:
        missing = (block for tp in sorted(rule.tps) for block in floor.blocks(tp) if block not in blocks)
        spares += [DesiredServer(new_id(), len(block), block) for block in missing]
    return spares
