"""Which devices each engine of a planned fleet gets: as many engines as possible stay where they are.

Engines get aligned blocks, as a buddy allocator gives them: TP 4 begins at device 0, 4, 8, ... of its node, where
neighbours are best connected. An engine that is there already stays if the plan has one of its size for its node, and
if the others still fit beside it. New ones get devices that nobody holds, where there are enough.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from controller.steps import Wanted
from scheduling.fleets import largest_first, on_nodes
from scheduling.reshaping import renumbered
from scheduling.scaling import FleetPlan, PlannedEngine, Role


class DoesNotFit(ValueError):
    """The engines do not fit onto the devices. The message says what is wanted of how many."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The devices that may be used, node by node.

    Args:
        devices: all of the inventory, in its order. Where names begin with a node's and a slash, those are the nodes.
        devices_per_node: of a node, where names do not say.
        resting: those that are not to be used now.
    """

    devices: tuple[str, ...]
    devices_per_node: int
    resting: frozenset[str] = frozenset()

    def nodes(self) -> list[tuple[str, ...]]:
        """Devices of each node, in the inventory's order; nodes may be of unequal size."""
        if any("/" in device for device in self.devices):
            return [tuple(group) for _, group in groupby(self.devices, key=lambda device: device.rpartition("/")[0])]
        size = self.devices_per_node
        return [self.devices[start : start + size] for start in range(0, len(self.devices), size)]

    def blocks(self, tp: int) -> list[tuple[str, ...]]:
        """Aligned blocks of so many devices, on no node's edge and without one that rests."""
        blocks = [node[start : start + tp] for node in self.nodes() for start in range(0, len(node) - tp + 1, tp)]
        return [block for block in blocks if not self.resting & set(block)]


def lay_out(
    tps: Iterable[int],
    current: Sequence[Wanted],
    floor: Floor,
    new_id: Callable[[], str],
    asleep: Sequence[Wanted] = (),
) -> list[Wanted]:
    """The servers of a fleet: those of `current` that stay, of `asleep` that wake, and new ones with ids of `new_id`.

    Args:
        tps: sizes of the engines, each a power of two.
        current: what is wanted now, then what still runs besides; of two on the same device one can stay at most.
        asleep: what holds no device, and may come in place of a new one.

    Raises:
        DoesNotFit: too many devices, or no aligned block is left.
    """
    sizes = largest_first(tps)
    nodes = floor.nodes()
    shapes = _shapes(sizes, current, nodes, floor)
    laid: list[Wanted] = []
    for node, shape in zip(nodes, shapes, strict=True):
        there, sleeping = ([one for one in each if set(one.devices) <= set(node)] for each in (current, asleep))
        laid += _node(shape, there, sleeping, node, floor.resting, new_id)
    return laid


def _shapes(
    sizes: tuple[int, ...], current: Sequence[Wanted], nodes: Sequence[tuple[str, ...]], floor: Floor
) -> list[list[int]]:
    """The sizes of each node's engines."""
    if len(nodes) == 1:
        return [list(sizes)]
    usable = [sum(device not in floor.resting for device in node) for node in nodes]
    if all(size == floor.devices_per_node for size in usable[:-1]) and usable[-1] <= floor.devices_per_node:
        engines = tuple(PlannedEngine(tp, node, Role.BULK) for tp, node in on_nodes(sizes, floor.devices_per_node))
        node_of = {device: number for number, node in enumerate(nodes) for device in node}
        present = tuple(PlannedEngine(one.tp, node_of[one.devices[0]], Role.BULK) for one in current)
        plan = renumbered(FleetPlan(engines, 0.0, "", ""), FleetPlan(present, 0.0, "", ""))
        placed = [(one.tp, one.node) for one in plan.engines]
        if max((node for _, node in placed), default=0) < len(nodes):
            return [[tp for tp, on in placed if on == node] for node in range(len(nodes))]
    return _filled(sizes, usable)


def _filled(sizes: tuple[int, ...], usable: list[int]) -> list[list[int]]:
    """Largest first, each onto the first node with room."""
    shapes: list[list[int]] = [[] for _ in usable]
    for tp in sizes:
        node = next((node for node, shape in enumerate(shapes) if sum(shape) + tp <= usable[node]), None)
        if node is None:
            raise DoesNotFit(f"engines of TP {list(sizes)} do not fit onto nodes of {usable} devices")
        shapes[node].append(tp)
    return shapes


def _node(
    shape: list[int],
    there: Sequence[Wanted],
    asleep: Sequence[Wanted],
    node: tuple[str, ...],
    resting: frozenset[str],
    new_id: Callable[[], str],
) -> list[Wanted]:
    """The servers of one node. Keeps the largest first, and gives up one after the other until the rest fits."""
    kept: list[Wanted] = []
    left = Counter(shape)
    taken = set(resting)
    for one in sorted([*there, *asleep], key=lambda one: -one.tp):
        if left[one.tp] and not taken & set(one.devices):
            left[one.tp] -= 1
            taken |= set(one.devices)
            kept.append(one)
    while True:
        missing = list((Counter(shape) - Counter(one.tp for one in kept)).elements())
        taken = set(resting).union(*(one.devices for one in kept))
        # On free devices a server starts while the others still serve, and can fetch their KV.
        held = taken.union(*(one.devices for one in there))
        blocks = _blocks(missing, node, held) or _blocks(missing, node, taken)
        if blocks is not None:
            return kept + [Wanted(new_id(), len(block), block) for block in blocks]
        if not kept:
            raise DoesNotFit(f"engines of TP {shape} do not fit onto {len(set(node) - resting)} devices of a node")
        kept.pop()


def _blocks(sizes: Sequence[int], node: tuple[str, ...], taken: Iterable[str]) -> list[tuple[str, ...]] | None:
    taken = set(taken)
    blocks = []
    for tp in sorted(sizes, reverse=True):
        starts = range(0, len(node) - tp + 1, tp)
        block = next((node[start : start + tp] for start in starts if not taken & set(node[start : start + tp])), None)
        if block is None:
            return None
        taken |= set(block)
        blocks.append(block)
    return blocks
