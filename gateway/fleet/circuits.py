"""Which engines may be used; the scheduler is told of each change.

The circuit of an engine opens

- at once, if nothing listens at its address or another process does;
- after several connection faults in a row, of turns or of looks;
- if turns run on it and its token counter stands still (it hangs), whether or not it counts those turns;

and never because a generation is long: a turn that runs out of time is not a connection fault. It closes at the first
good look (`watch.py`).
"""

import asyncio
from collections.abc import Callable

from engines.dialect import Asleep, Observation, ObservationError
from engines.http import EngineUnreachable, NothingListens, ResponseTimeout
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.server import EngineState, Member, Server
from gateway.turnlog import LOGGER
from scheduling.slot_search import FIRST_SLOTS
from scheduling.types import EngineLoad, EngineLost, EngineReported, EngineSpec, Event


class Hangs(ObservationError):
    """Turns run on the engine, but it makes no progress."""


class Circuits:
    """Opens and closes circuits.

    Args:
        post: tells the scheduler.
    """

    def __init__(self, settings: Settings, clock: Clock, post: Callable[[Event], None]) -> None:
        self._settings = settings
        self._clock = clock
        self._post = post
        self._changed = asyncio.Event()
        self._has_come = asyncio.Event()

    def close(self, server: Server) -> bool:
        """A look was good: the engine may be used. Returns whether it could not be used before."""
        was_open = server.state is not EngineState.READY
        server.state, server.num_faults = EngineState.READY, 0
        return was_open

    def count_fault(self, server: Server, fault: Exception) -> None:
        """A connection fault, of a turn or of a look."""
        server.num_faults += 1
        server.last_fault = str(fault)
        if server.num_faults >= self._settings.faults_to_open:
            self.open(server, fault)

    def open(self, server: Server, fault: Exception) -> None:
        """The engine is lost."""
        server.last_fault = str(fault)
        server.may_be_alive = _leaves_alive(fault)
        if server.state is not EngineState.LOST:
            LOGGER.warning("engine is lost", extra={"fields": {"engine": server.server_id, "fault": str(fault)}})
        if server.state is EngineState.READY:
            self.send_away(server)
        server.state = EngineState.LOST
        self.changed()

    def send_away(self, server: Server) -> None:
        """Have a server's turns continue elsewhere."""
        for member in server.members:
            self._post(EngineLost(self._clock(), member.engine_id))

    def report(self, server: Server, *, is_look: bool = False) -> None:
        """Report the state of a server's engines to the scheduler, if they may be used.

        Args:
            is_look: they were observed just now.
        """
        if server.state is EngineState.READY:
            for member in server.members:
                if member.observation is not None:
                    self._report(server, member, member.observation, is_look)

    def _report(self, server: Server, member: Member, seen: Observation, is_look: bool) -> None:
        slots = server.slots or seen.slots or self._settings.default_slots
        capacity = server.settings.kv_capacity_tokens or seen.kv_capacity_tokens or 0
        spec = EngineSpec(
            engine_id=member.engine_id,
            models=frozenset(model.model_id for model in server.models),
            slots=slots or FIRST_SLOTS,
            kv_capacity_tokens=max(capacity - member.kv_offered_tokens, 1) if capacity else 0,
            tp=server.settings.tp,
            profile=server.profile,
            # KV that it offers to others comes back.
            max_context_tokens=min(filter(None, (capacity, server.context_tokens)), default=0),
            slots_are_assumed=slots is None,
            server_id=server.server_id if member.rank is not None else "",
        )
        used_tokens = int(seen.kv_used_share * capacity)
        load = EngineLoad(seen.num_running, seen.num_waiting, used_tokens) if is_look else None
        self._post(EngineReported(self._clock(), spec, load, accepting=server.takes_turns))

    def changed(self) -> None:
        """Wake everything that waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def next_change(self) -> None:
        """Wait until an engine is lost, becomes ready, or has no more turns."""
        await self._changed.wait()

    def came(self) -> None:
        """An engine may have begun to take turns: wake everything that waits for one."""
        self._has_come.set()
        self._has_come = asyncio.Event()

    async def next_to_come(self) -> None:
        """Wait until an engine may have begun to take turns."""
        await self._has_come.wait()


def _leaves_alive(fault: Exception) -> bool:
    is_unreachable = isinstance(fault, EngineUnreachable) and not isinstance(fault, NothingListens)
    return is_unreachable or isinstance(fault, ResponseTimeout | Asleep | Hangs)
