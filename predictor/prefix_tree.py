"""Predicts what a trajectory has left from the chain of its tool outcomes (C-MLFQ's prefix trees).

One tree covers all trajectories, and each prompt has its own. A node is a chain of outcomes; it holds the logs of the
output that trajectories still made after it. Rules:
- A node counts as many visits as it had; the rest of its weight is its parent's. A chain never seen is treated as its
  parent.
- A prompt's node starts from the global tree's estimate for the same chain, shifted by the prompt's known difference so
  far. Libra drops the global tree once a prompt has one finished sibling; here both count. The worth of one sibling is
  learned: the variance between siblings against the variance of all.
- A distribution is centred on the blend above. Its shape is the latest sample of the deepest well-visited global node,
  narrowed as siblings become known.
- Old visits fade (half-life) and lose their place in the sample; the longest unused node goes first. One limit holds
  for all trees together.

Source: C-MLFQ of Libra (arXiv 2606.03077).
"""

import math
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import orjson

from predictor.chain_nodes import Node, restored, rows_of
from predictor.progress import Progress
from scheduling.types import Prediction

_P90_OF_NORMAL = 1.2815515655446004
_KIND = "prefix-tree-1"


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """Assumptions until data replace them, limits, and parts that can be left out to see what they give.

    Args:
        typical_tokens, spread: median and log standard deviation of total output before any trajectory has ended.
        prior_weight: finished trajectories that these assumptions count as.
        within_share: share of the variance that is between siblings, until learned; 0.35 at a correlation of 0.65.
        node_weight: visits that a node's parent counts as.
        memory: visits over which a global node's mean is an exponential average.
        prompt_memory: the same for a prompt's node: two groups of 16.
        half_life: ended trajectories after which a visit counts half; so a prompt's last epoch still counts.
        sample: latest visits that a global node keeps for its shape.
        max_depth: outcomes of a chain that are used; all later turns share the last node.
        max_nodes: limit for all trees together; about 0.5 KB each.
        max_live: trajectories whose path is remembered until they end.
        use_outcomes: if False, a chain is just the number of turns.
    """

    typical_tokens: float = 2_000.0
    spread: float = 0.97
    prior_weight: float = 8.0
    within_share: float = 0.35
    node_weight: float = 8.0
    memory: float = 500.0
    prompt_memory: float = 32.0
    half_life: float = 20_000.0
    sample: int = 64
    max_depth: int = 24
    max_nodes: int = 50_000
    max_live: int = 50_000
    use_outcomes: bool = True


@dataclass(slots=True)
class _Path:
    """The path of a live trajectory, in its prompt's tree: at each turn, the length of its chain and the output it had
    made.
    """

    key: str
    chain: tuple[str, ...]
    visits: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Place:
    """The log of the output left, the sibling evidence behind it, and the sample that gives its shape."""

    log_left: float
    siblings: float
    sample: Sequence[float]


class TreePredictor:
    """Learns from each ended trajectory; predicts at every turn. A `Predictor`."""

    def __init__(self, settings: TreeSettings | None = None) -> None:
        self._settings = settings or TreeSettings()
        self._live: OrderedDict[str, _Path] = OrderedDict()
        self._top = Node("", None)  # Its children are the trees: the global one under "", the others by prompt.
        self._recent: OrderedDict[Node, None] = OrderedDict()  # Least recent first, children before parents.
        self._ended = 0
        # Variances of log totals: all together, and between siblings.
        self._total = self._settings.spread**2
        self._within = self._total * self._settings.within_share
        self._variance_weight = 20.0

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def reads_outcomes(self) -> bool:
        return self._settings.use_outcomes

    def predict(self, progress: Progress) -> Prediction:
        """Total output: the output made plus what the trees predict is left. Cost: 50 us at 20 turns, on a
        busy core."""
        chain = self._chain(progress)
        path = self._noted(progress, chain)
        place = self._place(path.key, chain)
        left, p90_left = self._law(place)
        left = max(left, 1.0)
        return Prediction(progress.output_tokens + left, progress.output_tokens + max(p90_left, left))

    def ended(self, progress: Progress) -> None:
        """Learn how much was left at each turn of this trajectory."""
        path = self._live.pop(progress.trajectory_id, None)
        total = progress.output_tokens
        if total <= 0:
            return
        chain, visits = (path.chain, list(path.visits.values())) if path else ((), [(0, 0)])
        seen = [(depth, math.log(max(total - made, 1))) for depth, made in visits]
        self._ended += 1
        key = path.key if path else _key(progress)
        self._learn_variances(key, math.log(total))
        self._learn("", chain, seen, self._settings.memory, draws=True)
        if key:
            self._learn(key, chain, seen, self._settings.prompt_memory, draws=False)
        while len(self._recent) > self._settings.max_nodes:
            self._forget_oldest()

    def dropped(self, trajectory_id: str) -> None:
        """Forget its path; learn nothing."""
        self._live.pop(trajectory_id, None)

    def dump(self) -> bytes:
        """The trees, parents first. Cost: 7 us a node, on a busy core."""
        learned = [self._ended, self._total, self._within, self._variance_weight]
        return orjson.dumps({"kind": _KIND, "learned": learned, "nodes": rows_of(list(reversed(self._recent)))})

    def restore(self, dumped: bytes, running: Container[str] = ()) -> None:
        """Restore a dump; live trajectories stay as they are."""
        try:
            state = orjson.loads(dumped)
            if state["kind"] != _KIND:
                raise ValueError(f"not a dump of a prefix tree: {state['kind']!r}")
            ended, *rest = state["learned"]
            total, within, weight = map(float, rest)
            num_ended = int(ended)
            top = Node("", None)
            nodes = list(restored(top, state["nodes"]))
        except (KeyError, TypeError, IndexError, OverflowError, orjson.JSONDecodeError) as error:
            raise ValueError(f"not a dump of a prefix tree: {error!r}") from error
        self._top = top
        self._recent = OrderedDict.fromkeys(reversed(nodes))
        self._ended, self._total, self._within, self._variance_weight = num_ended, total, within, weight
        while len(self._recent) > self._settings.max_nodes:
            self._forget_oldest()

    # --- predicting -----------------------------------------------------------------------------------------

    def _chain(self, progress: Progress) -> tuple[str, ...]:
        """Outcomes; if they are not read, only the number of turns."""
        settings = self._settings
        if settings.use_outcomes and progress.outcomes:
            return progress.outcomes[: settings.max_depth]
        return ("",) * min(progress.num_turns, settings.max_depth)

    def _noted(self, progress: Progress, chain: tuple[str, ...]) -> _Path:
        path = self._live.get(progress.trajectory_id)
        if path is None:
            path = self._live[progress.trajectory_id] = _Path(_key(progress), chain, {})
            if len(self._live) > self._settings.max_live:
                self._live.popitem(last=False)
        path.chain = chain
        # Turns beyond the deepest node would only crowd out other trajectories' visits.
        if len(path.visits) < 4 * self._settings.max_depth or progress.num_turns in path.visits:
            path.visits[progress.num_turns] = (len(chain), progress.output_tokens)
        return path

    def _place(self, key: str, chain: tuple[str, ...]) -> _Place:
        """Walk down both trees at once: the global log-mean, and how much this prompt differs."""
        settings = self._settings
        everywhere, here = self._top.child(""), self._top.child(key) if key else None
        general, weight = math.log(settings.typical_tokens), settings.prior_weight
        differs, prompt_weight = 0.0, self._prompt_weight()
        siblings = self._weight(here) if here else 0.0
        sample: Sequence[float] = ()
        for label in (None, *chain):
            if label is not None:
                everywhere = everywhere.child(label) if everywhere else None
                here = here.child(label) if here else None
            if everywhere is None:
                break
            num = self._weight(everywhere)
            general = (num * everywhere.mean + weight * general) / (num + weight)
            if everywhere.sample is not None and len(everywhere.sample) >= settings.sample // 2:
                sample = everywhere.sample
            if here is not None:
                num = self._weight(here)
                differs = (num * (here.mean - general) + prompt_weight * differs) / (num + prompt_weight)
            weight = settings.node_weight
        return _Place(general + differs, siblings, sample)

    def _law(self, place: _Place) -> tuple[float, float]:
        """Mean and 90th percentile of the output left."""
        prompt_weight = self._prompt_weight()
        # For a prompt without siblings, all the variance; for one with many, the part between siblings.
        spread_share = math.sqrt((1 + 1 / (place.siblings + prompt_weight)) / (1 + 1 / prompt_weight))
        if not place.sample:
            spread = self._settings.spread * spread_share
            return math.exp(place.log_left + spread**2 / 2), math.exp(place.log_left + _P90_OF_NORMAL * spread)
        values = sorted(place.sample)
        middle = fmean(values)
        mean = fmean([math.exp(spread_share * (value - middle)) for value in values])
        rank = 0.9 * (len(values) - 1)
        low = values[int(rank)]
        p90 = low + (rank % 1) * (values[min(int(rank) + 1, len(values) - 1)] - low)
        scale = math.exp(place.log_left)
        return scale * mean, scale * math.exp(spread_share * (p90 - middle))

    def _prompt_weight(self) -> float:
        """How many siblings the global tree counts as; bounded, because siblings tell neither everything nor
        nothing."""
        between = min(max(self._total - self._within, 0.02 * self._within), 20 * self._within)
        return self._within / between

    def _weight(self, node: Node) -> float:
        """Visits, faded to the present."""
        return node.weight * self._fade(node)

    def _fade(self, node: Node) -> float:
        return float(0.5 ** ((self._ended - node.at) / self._settings.half_life))

    # --- learning -------------------------------------------------------------------------------------------

    def _learn(
        self, key: str, chain: tuple[str, ...], visits: Iterable[tuple[int, float]], memory: float, draws: bool
    ) -> None:
        path = self._grown(key, chain)
        for depth, log_left in visits:
            # A chain that became shorter (a compacted history) has no deeper nodes.
            node = path[min(depth, len(path) - 1)]
            node.add(log_left, self._fade(node), memory)
            node.at = self._ended
            if draws:
                node.draw(log_left, self._settings.sample)
        for node in reversed(path):
            self._recent[node] = None
            self._recent.move_to_end(node)

    def _grown(self, key: str, chain: tuple[str, ...]) -> list[Node]:
        """The nodes of a chain from its tree's root, created if absent."""
        path = []
        node = self._top
        for label in (key, *chain):
            node = node.child(label) or node.new_child(label)
            path.append(node)
        return path

    def _learn_variances(self, key: str, log_total: float) -> None:
        """Learn what siblings are worth: how far a total is from its siblings' mean, against how far it is from all."""
        root, here = self._top.child(""), self._top.child(key) if key else None
        if root is None or here is None or (num := self._weight(here)) < 0.5:
            return
        self._variance_weight = min(self._variance_weight + 1, self._settings.memory)
        # The mean of `num` siblings itself has part of the variance between them.
        within = (log_total - here.mean) ** 2 * num / (num + 1)
        self._within = max(self._within + (within - self._within) / self._variance_weight, 1e-4)
        self._total += ((log_total - root.mean) ** 2 - self._total) / self._variance_weight

    def _forget_oldest(self) -> None:
        node, _ = self._recent.popitem(last=False)
        if node.parent is not None and node.parent.children is not None:
            del node.parent.children[node.label]
            node.parent.children = node.parent.children or None


def _key(progress: Progress) -> str:
    """Names the tree of a trajectory's prompt, at its first turn: later ones need not tell the prompt again."""
    return progress.prompt_id or progress.group_id
