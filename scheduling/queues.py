"""Where each live turn is: the queue that it waits in or the engine that runs it, and the engine reserved for it."""

from collections.abc import Iterable
from heapq import merge
from operator import attrgetter

from scheduling.engine import Engine
from scheduling.state import RUNNING, Queue, Turn

_key = attrgetter("key")


class Queues:
    """The live turns of one fleet, each in one place.

    Args:
        num_waiting: turns that wait, in a queue or between two queues.
        homeless: by model, waiting turns that are in no engine's own queue.
        engine_of: the engine that runs a turn, even if it is lost by now, or whose own queue the turn waits in.
        awaited_by: the engine reserved for a waiting turn.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.homeless: dict[str, Queue] = {}
        self.engine_of: dict[Turn, Engine] = {}
        self.awaited_by: dict[Turn, Engine] = {}

    def homeless_for(self, engine: Engine) -> Iterable[Turn]:
        """Homeless turns of the models that an engine serves, first key first."""
        queues = [queue for model in engine.spec.models if (queue := self.homeless.get(model))]
        return queues[0] if len(queues) == 1 else merge(*queues, key=_key)

    def wait_homeless(self, turn: Turn) -> None:
        """Put a turn into its model's queue."""
        self.homeless.setdefault(turn.model, Queue()).push(turn)

    def wait_at(self, turn: Turn, engine: Engine) -> None:
        """Put a turn into an engine's own queue."""
        self.engine_of[turn] = engine
        engine.hold(turn)

    def run(self, turn: Turn, engine: Engine) -> None:
        """Begin a leg of a turn on an engine."""
        self.engine_of[turn] = engine
        engine.run(turn)

    def withdraw(self, turn: Turn) -> Engine | None:
        """Remove a turn from where it waits or runs. Returns the engine that was reserved for it."""
        if turn.state is RUNNING:
            self.engine_of.pop(turn).stop(turn)
            return None
        self.num_waiting -= 1
        return self.leave(turn)

    def leave(self, turn: Turn) -> Engine | None:
        """Remove a waiting turn from its queue, to put it into another one. Returns the engine that was reserved for
        it."""
        engine = self.engine_of.pop(turn, None)
        if engine is not None:
            engine.let_go(turn)
        elif turn.queue is not None:
            turn.queue.remove(turn)
        awaited = self.awaited_by.get(turn)
        if awaited is not None:
            self.reserve(awaited, None)
        return awaited

    def reserve(self, engine: Engine, turn: Turn | None) -> None:
        """Reserve an engine for a turn that has none reserved yet; None releases it."""
        if engine.reserved_for is not None:
            del self.awaited_by[engine.reserved_for]
        engine.reserved_for = turn
        if turn is not None:
            self.awaited_by[turn] = engine

    def drop_empty(self) -> None:
        """Drop empty queues: clients name models, so their number has no limit."""
        self.homeless = {model: queue for model, queue in self.homeless.items() if queue}
