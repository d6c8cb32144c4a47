"""The fleets that a GPU budget allows: how GPUs are divided into engines of given TP sizes, node by node."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement

# TP sizes of engines; those of a whole fleet are sorted, largest first.
TPs = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """GPUs to divide into engines.

    Args:
        gpus: the total; if it is no multiple of `gpus_per_node`, the last node has the remainder.
        mixed_nodes: a node may hold engines of several TP sizes.
    """

    gpus: int
    gpus_per_node: int = 8
    mixed_nodes: bool = False

    def choices(self, sizes: TPs) -> list[list[TPs]]:
        """For each node, the ways to divide it; a single empty way if no size fits."""
        num_full, rest = divmod(self.gpus, self.gpus_per_node)
        return [self._shapes(sizes, self.gpus_per_node)] * num_full + [self._shapes(sizes, rest)] * bool(rest)

    def fleets(self, sizes: TPs) -> Iterator[TPs]:
        """Every possible fleet."""
        if self.mixed_nodes:
            return _cuts(sizes, self.gpus)
        num_full, rest = divmod(self.gpus, self.gpus_per_node)
        full_nodes = combinations_with_replacement(self._shapes(sizes, self.gpus_per_node), num_full)
        return (largest_first(sum(nodes, last)) for nodes in full_nodes for last in self._shapes(sizes, rest))

    def uniform_fleets(self, sizes: TPs) -> Iterator[TPs]:
        """The fleets of a single TP size."""
        num_full, rest = divmod(self.gpus, self.gpus_per_node)
        return ((tp,) * (num_full * (self.gpus_per_node // tp) + rest // tp) for tp in sizes)

    def parts_after(self, gpus: int, sizes: TPs) -> list[tuple[int, TPs]]:
        """The parts that may follow once `gpus` GPUs are divided: the GPUs of each part, and its engines."""
        if self.mixed_nodes:
            parts: list[tuple[int, TPs]] = [(tp, (tp,)) for tp in sizes]
        else:
            parts = [(self.gpus_per_node, shape) for shape in self._shapes(sizes, self.gpus_per_node)]
            rest = self.gpus % self.gpus_per_node
            if rest and gpus % self.gpus_per_node == 0:
                parts += [(rest, shape) for shape in self._shapes(sizes, rest)]
        return [part for part in parts if gpus + part[0] <= self.gpus]

    def _shapes(self, sizes: TPs, gpus: int) -> list[TPs]:
        if self.mixed_nodes:
            return list(_cuts(sizes, gpus))
        return [(tp,) * (gpus // tp) for tp in sizes if tp <= gpus] or [()]


def on_nodes(fleet: TPs, gpus_per_node: int) -> list[tuple[int, int]]:
    """Each engine's TP size and node. Engines that fill a node with engines of their own size share it; sizes are
    powers of two."""
    whole: list[int] = []
    left: list[int] = []
    for tp, count in sorted(Counter(fleet).items(), reverse=True):
        num_left = count % (gpus_per_node // tp)
        whole += [tp] * (count - num_left)
        left += [tp] * num_left
    in_order = whole + left
    first_gpus = accumulate(in_order, initial=0)
    placed = [(tp, gpu // gpus_per_node) for tp, gpu in zip(in_order, first_gpus, strict=False)]
    return sorted(placed, key=lambda engine: -engine[0])


def largest_first(tps: Iterable[int]) -> TPs:
    return tuple(sorted(tps, reverse=True))


def in_words(fleet: TPs) -> str:
    return " + ".join(f"{count} x TP {tp}" for tp, count in sorted(Counter(fleet).items(), reverse=True))


def _cuts(sizes: TPs, gpus: int) -> Iterator[TPs]:
    """Every way to divide `gpus` GPUs into engines so that no further one fits; `sizes` descend."""
    if not sizes:
        yield ()
        return
    tp, smaller = sizes[0], sizes[1:]
    for count in range(gpus // tp, -1 if smaller else gpus // tp - 1, -1):
        for rest in _cuts(smaller, gpus - count * tp):
            yield (tp,) * count + rest
