"""Placement by class of length: C-MLFQ over engines of different tensor-parallel sizes (Libra, arXiv 2606.03077).

Engines of one TP size are a bucket; small sizes are for short trajectories. A trajectory starts in the shortest bucket.
It moves up at a tool return when the mean and the P90 of its remaining output fall in the same higher bucket. The
prediction gives both; Libra's comes from a tree of tool outcomes (predictor/prefix_tree.py).
"""

from collections.abc import Container, Iterable, Sequence

from scheduling.order import TurnFacts
from scheduling.placement import EngineFacts, least_estimated_finish, lower_the_latest

# The largest remaining output, in tokens, that each TP size is meant for: Libra's configuration for 48 GPUs (TP 1, 2
# and 4; `cmlfq_scheduler.py`). The largest size of a fleet takes everything longer.
BUCKET_TOKENS = {1: 4_000.0, 2: 12_000.0, 4: 30_000.0}


def start_short(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """The engine with the fewest turns in the shortest bucket; a returning trajectory starts in its own bucket.

    A trajectory's own bucket is the one that mean and P90 agree on. A bucket without a free slot spills over to the
    next larger ones, and last to those below.
    """
    sizes = _sizes(engines)
    floor = (_agreed_size(turn, sizes) if turn.num_turns else None) or sizes[0]
    return _least_connections(engines, floor)


def move_up(
    turn: TurnFacts, home: EngineFacts, candidates: Iterable[EngineFacts], fleet: Sequence[EngineFacts]
) -> EngineFacts | None:
    """To the bucket that the mean and the P90 of the remaining output agree on, if it is above the home's."""
    floor = _agreed_size(turn, _sizes(fleet))
    if floor is None or floor <= home.tp:
        return None
    above = [engine for engine in candidates if engine.tp > home.tp]
    return _least_connections(above, floor) if above else None


def least_finish_above_floor(turn: TurnFacts, engines: Sequence[EngineFacts]) -> EngineFacts:
    """The earliest estimated finish, but in no bucket below the one that mean and P90 agree on if another has room."""
    floor = _agreed_size(turn, _sizes(engines))
    above = [engine for engine in engines if floor is not None and engine.tp >= floor]
    return least_estimated_finish(turn, above or engines)


def lower_the_latest_above_floor(
    turn: TurnFacts, home: EngineFacts, candidates: Container[EngineFacts], fleet: Sequence[EngineFacts]
) -> EngineFacts | None:
    """A move that pays, but never to a bucket below the one that mean and P90 agree on."""
    floor = _agreed_size(turn, _sizes(fleet)) or 0
    return lower_the_latest(turn, home, _AtLeast(candidates, floor), fleet)


class _AtLeast:
    """Candidates of a TP size or a larger one."""

    def __init__(self, candidates: Container[EngineFacts], tp: int) -> None:
        self._candidates = candidates
        self._tp = tp

    def __contains__(self, engine: object, /) -> bool:
        return engine in self._candidates and isinstance(engine, EngineFacts) and engine.tp >= self._tp


def _sizes(engines: Iterable[EngineFacts]) -> list[int]:
    return sorted({engine.tp for engine in engines})


def _agreed_size(turn: TurnFacts, sizes: Sequence[int]) -> int | None:
    """The TP size whose bucket holds both the mean and the P90 of the remaining output; None if they disagree."""
    size = _size_for(turn.remaining_tokens(), sizes)
    p90_tokens = turn.prediction.p90_tokens - turn.attained_tokens
    return size if size == _size_for(p90_tokens, sizes) else None


def _size_for(remaining_tokens: float, sizes: Sequence[int]) -> int:
    fitting = (size for size in sizes if remaining_tokens <= BUCKET_TOKENS.get(size, float("inf")))
    return next(fitting, sizes[-1])


def _least_connections(engines: Sequence[EngineFacts], floor: int) -> EngineFacts:
    """The engine with the fewest turns in the lowest bucket from `floor` up that has a free slot."""

    def key(engine: EngineFacts) -> tuple[bool, bool, int, int]:
        is_below = engine.tp < floor
        return (
            engine.num_turns >= engine.profile.slots,
            is_below,
            -engine.tp if is_below else engine.tp,
            engine.num_turns,
        )

    return min(engines, key=key)
