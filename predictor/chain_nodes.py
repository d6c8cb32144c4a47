"""The nodes of prefix trees, and how they are stored."""

from array import array
from collections.abc import Iterator, Sequence


class Node:
    """One chain of outcomes: the logs of the output that was left after it."""

    __slots__ = ("at", "children", "label", "mean", "parent", "sample", "seen", "weight")

    def __init__(self, label: str, parent: "Node | None") -> None:
        self.label = label
        self.parent = parent
        self.children: dict[str, Node] | None = None
        self.weight = 0.0
        self.mean = 0.0
        self.at = 0
        self.seen = 0
        self.sample: array[float] | None = None

    def child(self, label: str) -> "Node | None":
        return self.children.get(label) if self.children else None

    def new_child(self, label: str) -> "Node":
        child = Node(label, self)
        if self.children is None:
            self.children = {}
        self.children[label] = child
        return child

    def add(self, log_left: float, fade: float, memory: float) -> None:
        self.weight = min(self.weight * fade + 1.0, memory)
        self.mean += (log_left - self.mean) / self.weight

    def draw(self, value: float, size: int) -> None:
        """Add a value to the sample; a full sample loses its oldest value."""
        if self.sample is None:
            self.sample = array("f")
        if len(self.sample) < size:
            self.sample.append(value)
        else:
            self.sample[self.seen % size] = value
        self.seen += 1


def rows_of(nodes: Sequence[Node]) -> list[list[object]]:
    """Nodes as JSON values, in the order given; parents must come before their children."""
    numbers = {node: number for number, node in enumerate(nodes)}
    return [
        [
            numbers.get(node.parent, -1) if node.parent else -1,
            *(node.label, node.weight, node.mean, node.at, node.seen),
            node.sample.tolist() if node.sample else [],
        ]
        for node in nodes
    ]


def restored(top: Node, rows: list[list[object]]) -> Iterator[Node]:
    """The nodes of a dump, attached to `top`. Raises IndexError, TypeError, ValueError."""
    nodes: list[Node] = []
    for parent_number, label, weight, mean, at, seen, sample in rows:
        if not isinstance(parent_number, int) or not isinstance(label, str) or not isinstance(sample, list):
            raise ValueError("a node that is none")
        if parent_number >= len(nodes):
            raise ValueError("a node before its parent")
        node = (nodes[parent_number] if parent_number >= 0 else top).new_child(label)
        node.weight, node.mean = float(weight), float(mean)  # type: ignore[arg-type]
        node.at, node.seen = int(at), int(seen)  # type: ignore[call-overload]
        node.sample = array("f", sample) if sample else None
        nodes.append(node)
        yield node
