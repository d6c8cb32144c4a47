"""Which devices each engine of a planned fleet gets; as many engines as possible stay where they are.

Engines get aligned blocks, as in a buddy allocator: TP 4 begins at device 0, 4, 8, ... of its node, where neighbours
are best connected. An existing engine stays if one of its size is wanted and no larger one needs its devices. New
engines get the blocks for which the fewest engines have to end: those that are still wanted count first, then the
others.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain, groupby

from controller.steps import DesiredServer
from scheduling.fleets import TPs, in_words, largest_first

Block = tuple[str, ...]


class DoesNotFit(ValueError):
    """The engines do not fit onto the devices. The message gives the sizes and the number of devices."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The devices that may be used, node by node.

    Args:
        devices: the whole inventory, in its order. If names start with a node's name and a slash, these are the nodes.
        devices_per_node: size of each node, if names do not name nodes.
        resting: devices that must not be used now.
        spans_nodes: an engine that is larger than every node may have several whole ones.
    """

    devices: tuple[str, ...]
    devices_per_node: int
    resting: frozenset[str] = frozenset()
    spans_nodes: bool = False

    def nodes(self) -> list[Block]:
        """Devices of each node, in the inventory's order; nodes may be of unequal size."""
        if any("/" in device for device in self.devices):
            return [tuple(group) for _, group in groupby(self.devices, key=lambda device: device.rpartition("/")[0])]
        size = self.devices_per_node
        return [self.devices[start : start + size] for start in range(0, len(self.devices), size)]

    def blocks(self, tp: int) -> list[Block]:
        """Aligned blocks of `tp` devices without resting ones, each within one node or, see `spans_nodes`, of whole
        nodes of equal size."""
        nodes = self.nodes()
        if self.spans_nodes and tp > max(map(len, nodes), default=0):
            nodes = _joined(nodes, tp)
        blocks = [node[start : start + tp] for node in nodes for start in range(0, len(node) - tp + 1, tp)]
        return [block for block in blocks if not self.resting & set(block)]


def _joined(nodes: Iterable[Block], tp: int) -> list[Block]:
    """Nodes of equal size that follow each other as one, where `tp` devices are whole nodes."""
    return [tuple(chain(*alike)) for size, alike in groupby(nodes, key=len) if tp % size == 0]


def lay_out(
    tps: Iterable[int],
    current: Sequence[DesiredServer],
    floor: Floor,
    new_id: Callable[[], str],
    asleep: Sequence[DesiredServer] = (),
) -> list[DesiredServer]:
    """The servers of a fleet: those of `current` that stay, those of `asleep` that wake, and new ones with ids of
    `new_id`.

    Args:
        tps: sizes of the engines, each a power of two.
        current: what is wanted now, then what else still runs; of two on the same device at most one can stay.
        asleep: servers that hold no device, and may take the place of a new one.

    Raises:
        DoesNotFit: too many devices, or no aligned block is left.

    Cost: 4,096 engines on as many devices take 0.1 s.
    """
    wanted = Counter(tps)
    there = [one for one in current if set(one.devices) <= set(floor.devices)]
    try:
        return _laid_out(wanted, there, asleep, floor, new_id)
    except DoesNotFit:
        # Engines that began under another inventory may lie across two blocks.
        aligned = {block for tp in wanted for block in floor.blocks(tp)}
        return _laid_out(wanted, [one for one in there if one.devices in aligned], asleep, floor, new_id)


def fitting(tps: Iterable[int], floor: Floor, more: Iterable[int] = ()) -> TPs:
    """As many of these engines as fit onto the floor, whatever is there now; larger ones before smaller ones.

    Args:
        more: sizes of which as many follow as fit beside them.
    """
    fleet: list[int] = []
    taken = set(floor.resting)
    for tp, count in (*sorted(Counter(tps).items(), reverse=True), *((tp, None) for tp in largest_first(more))):
        blocks = [block for block in floor.blocks(tp) if not taken & set(block)][:count]
        taken.update(*blocks)
        fleet += [tp] * len(blocks)
    return largest_first(fleet)


def _laid_out(
    wanted: Counter[int],
    there: Sequence[DesiredServer],
    asleep: Sequence[DesiredServer],
    floor: Floor,
    new_id: Callable[[], str],
) -> list[DesiredServer]:
    """Largest first: whichever block one takes, the number left for smaller ones is the same."""
    laid: list[DesiredServer] = []
    taken = set(floor.resting)
    sleeper_on = {one.devices: one for one in asleep}
    for tp in sorted(wanted, reverse=True):
        num_new = wanted[tp]
        for one in there:
            if num_new and one.tp == tp and not taken & set(one.devices):
                laid.append(one)
                taken |= set(one.devices)
                num_new -= 1
        free = [block for block in floor.blocks(tp) if not taken & set(block)]
        if len(free) < num_new:
            sizes, num_usable = in_words(largest_first(wanted.elements())), len(set(floor.devices) - floor.resting)
            raise DoesNotFit(f"{sizes} do not fit onto {num_usable} devices")
        left = [one for one in there if one.tp != tp and not taken & set(one.devices)]
        for block in _cheapest(free, num_new, wanted, left, sleeper_on):
            laid.append(sleeper_on.get(block) or DesiredServer(new_id(), tp, block))
            taken |= set(block)
    return laid


def _cheapest(
    blocks: Iterable[Block],
    number: int,
    wanted: Mapping[int, int],
    there: Iterable[DesiredServer],
    sleeps: Container[Block],
) -> Iterator[Block]:
    """`number` blocks for engines of one size, given the servers that are there and may stay.

    A block's price is, in this order: the devices of smaller engines that then cannot stay; the size of the largest of
    these, in whose place another may have to end; whether an engine must be started; how many end for it; and how many
    of its halves, their halves and so on are free, where smaller ones could go. If none ends, the new engine starts
    while they serve, and can fetch their KV.
    """
    on: dict[str, set[DesiredServer]] = defaultdict(set)
    spare = Counter({tp: -count for tp, count in wanted.items()})
    for one in there:
        spare[one.tp] += 1
        for device in one.devices:
            on[device].add(one)

    def price(block: Block) -> tuple[int, int, bool, int, int]:
        ending = set().union(*(on[device] for device in block))
        lost = largest = 0
        for tp, count in Counter(one.tp for one in ending if one.tp < len(block)).items():
            if count > max(spare[tp], 0):
                lost += tp * (count - max(spare[tp], 0))
                largest = max(largest, tp)
        return lost, largest, block not in sleeps, len(ending), num_free(block)

    def num_free(block: Block) -> int:
        half = len(block) // 2
        within = num_free(block[:half]) + num_free(block[half:]) if half else 0
        return within + (not any(on[device] for device in block))

    heap = [(price(block), place, block) for place, block in enumerate(blocks)]
    heapify(heap)
    while number:
        known, place, block = heappop(heap)
        if (now := price(block)) > known:  # blocks chosen before used up the spare engines
            heappush(heap, (now, place, block))
            continue
        for one in set().union(*(on[device] for device in block)):
            spare[one.tp] -= 1
            for device in one.devices:
                on[device].discard(one)
        number -= 1
        yield block
