"""Where each live turn is: the queue that it waits in, or the engine that runs it; and who gathers room for it."""

from collections.abc import Iterable
from heapq import merge
from operator import attrgetter

from scheduling.engine import Engine
from scheduling.state import RUNNING, Queue, Turn

_key = attrgetter("key")


class Queues:
    """The live turns of one fleet, each in one place.

    Args:
        num_waiting: turns that wait: in a queue, or just on their way from one to another.
        homeless: by their model, waiting turns that no engine's own queue has.
        engine_of: where a turn runs, be that engine lost meanwhile, or whose own queue it waits in.
        awaited_by: the engine that gathers room for a waiting turn.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.homeless: dict[str, Queue] = {}
        self.engine_of: dict[Turn, Engine] = {}
        self.awaited_by: dict[Turn, Engine] = {}

    def homeless_for(self, engine: Engine) -> Iterable[Turn]:
        """Turns of the models that an engine serves which wait in no engine's queue, first key first."""
        queues = [queue for model in engine.spec.models if (queue := self.homeless.get(model))]
        return queues[0] if len(queues) == 1 else merge(*queues, key=_key)

    def wait_homeless(self, turn: Turn) -> None:
        """A turn waits in its model's queue."""
        self.homeless.setdefault(turn.model, Queue()).push(turn)

    def wait_at(self, turn: Turn, engine: Engine) -> None:
        """A turn waits in an engine's own queue."""
        self.engine_of[turn] = engine
        engine.hold(turn)

    def run(self, turn: Turn, engine: Engine) -> None:
        """A leg of a turn begins on an engine."""
        self.engine_of[turn] = engine
        engine.run(turn)

    def withdraw(self, turn: Turn) -> Engine | None:
        """Take a turn away from where it waits or runs. Returns the engine that gathered room for it."""
        if turn.state is RUNNING:
            self.engine_of.pop(turn).stop(turn)
            return None
        self.num_waiting -= 1
        return self.leave(turn)

    def leave(self, turn: Turn) -> Engine | None:
        """Take a waiting turn out of its queue, for another one. Returns the engine that gathered room for it."""
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
        """An engine gathers room for a turn, which no other one does; for None no more."""
        if engine.reserved_for is not None:
            del self.awaited_by[engine.reserved_for]
        engine.reserved_for = turn
        if turn is not None:
            self.awaited_by[turn] = engine

    def drop_empty(self) -> None:
        """Forget the queues that nobody waits in: clients name models, and there is no end to names."""
        self.homeless = {model: queue for model, queue in self.homeless.items() if queue}
