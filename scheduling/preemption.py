"""Preemption: which running turn gives its slot to a waiting one that is much more urgent.

It pays if a long trajectory would otherwise wait behind short ones. The margin and a leg's least time keep equally
urgent turns from taking slots from each other, which would cost a step or two of the whole engine each time.
"""

from collections.abc import Iterable
from operator import attrgetter

from scheduling.engine import Engine
from scheduling.limits import Limits
from scheduling.state import Turn

# A leg stops within a step or two. One that still runs later cannot be stopped without losing what it made.
STOP_S = 5.0

_key = attrgetter("key")


def victim_for(turn: Turn, engines: Iterable[Engine], at: float, limits: Limits) -> Turn | None:
    """The least urgent turn that runs on one of these engines, if it must give way to a waiting one.

    An engine where a turn is already being stopped is left alone, because its slot becomes free. A turn that did not
    stop when it was asked to runs to its end.
    """
    began_until = at - limits.preempt_after_s
    running = [
        running
        for engine in engines
        if not any(_is_stopping(other, at) for other in engine.running.values())
        for running in engine.running.values()
        if running.began_at <= began_until and running.stop_asked_at is None
    ]
    victim = max(running, key=_key, default=None)
    return victim if victim is not None and _yields(victim, turn, limits) else None


def _is_stopping(turn: Turn, at: float) -> bool:
    return turn.stop_asked_at is not None and at < turn.stop_asked_at + STOP_S


def _yields(victim: Turn, turn: Turn, limits: Limits) -> bool:
    """By the clients' priorities; at equal ones, by a clear margin."""
    (victim_hint, victim_order, _), (hint, order, _) = victim.key, turn.key
    return hint < victim_hint or (hint == victim_hint and order + limits.preempt_margin_tokens < victim_order)
