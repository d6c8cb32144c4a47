"""The engines as this process sees them: which exist, what each serves, and what was decided about each.

Each server is looked at every second (`watch.py`); its circuit decides whether its engines may be used (`circuits.py`).
What is done to one of a server's engines (to cordon, to drain, to remove, to give weights) is done to all: they are one
process.
"""

import asyncio
import contextlib
from collections.abc import Callable
from math import inf

from engines.http import CONNECTION_FAULTS, HttpLimits
from engines.probe import Model
from engines.profiles import load_profile
from gateway.clock import Clock
from gateway.config import Settings
from gateway.engine_settings import EngineSettings
from gateway.fleet.circuits import Circuits
from gateway.fleet.known_processes import KnownProcesses
from gateway.fleet.server import EngineState, Member, Server
from gateway.fleet.watch import Watch
from gateway.turnlog import LOGGER
from gateway.weights.record import WeightRecord
from scheduling.types import Event, ModelGone


class UnknownEngine(Exception):
    """No engine has this id."""


class Fleet:
    """All engines of this gateway.

    Args:
        post: tells the scheduler.
        known: which processes were seen, so that homes survive a restart of the gateway.
        weights: those that an engine must have to get turns.

    Attributes:
        is_starting: engines are yet to be seen, and no model is known.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        post: Callable[[Event], None],
        known: KnownProcesses,
        weights: WeightRecord,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._post = post
        self._weights = weights
        self._servers: list[Server] = []
        self._members: list[Member] = []
        self._models: dict[str, Model] = {}
        self._known = known
        self._circuits = Circuits(settings, clock, post)
        self._watch = Watch(settings, clock, self._circuits, self._known, weights, self._models_seen, self._gather)
        self._start: asyncio.Task[None] | None = None
        self.is_starting = True

    async def start(self) -> None:
        """Begin to look at the configured engines, and wait briefly until each has been seen. If none is configured,
        this process is yet to be told of its engines: requests wait for them in `started`.
        """
        for engine in self._settings.engines:
            self.add(engine)
        self._start = asyncio.create_task(self._see_all(), name="start of the fleet")
        if self._settings.engines:
            await self._start

    async def started(self) -> None:
        """Wait until the engines have been seen, or for `start_timeout_s` since the start."""
        if self.is_starting and self._start is not None:
            await asyncio.wait((self._start,))

    async def stop(self) -> None:
        """Stop looking and close all connections."""
        if self._start is not None:
            self._start.cancel()
        for server in self._servers:
            await self._close(server)

    def add(self, engine: EngineSettings) -> Server:
        """Add a server to the fleet. Raises ProfileError for an unknown profile, ValueError for a known URL."""
        if any(server.address == engine.address for server in self._servers):
            raise ValueError(f"{engine.url} is in the fleet already.")
        seen = self._known.at(engine.url)
        limits = HttpLimits(self._settings.connect_timeout_s, max_connections=self._settings.max_connections_per_engine)
        server = Server(
            settings=engine,
            limits=limits,
            profile=load_profile(engine.profile) if engine.profile else None,
            run_id=self._weights.run_id,
            generation=seen.get("generation", 1),
            started_at=seen.get("started_at"),
            is_cordoned=seen.get("is_cordoned", False),
            is_in_doubt=seen.get("is_in_doubt", False),
        )
        self._servers.append(server)
        self._gather()
        server.task = asyncio.create_task(self._watch.over(server), name=f"watch {engine.url}")
        return server

    async def remove(self, engine_id: str) -> None:
        """Remove an engine's server from the fleet; its turns continue elsewhere."""
        server = self.get(engine_id).server
        self._servers.remove(server)
        self._gather()
        self._gather_models()
        self._known.left(server)
        self._circuits.send_away(server)
        await self._close(server)

    def cordon(self, engine_id: str, is_cordoned: bool) -> Server:
        """Stop giving an engine's server turns, or give it turns again."""
        server = self.get(engine_id).server
        server.is_cordoned = is_cordoned
        server.is_draining = server.is_draining and is_cordoned
        server.recheck.set()  # a lost one is looked at only every few seconds
        self._known.note(server)
        self._circuits.report(server)
        self._circuits.changed()
        self._circuits.came()
        return server

    async def next_to_come(self) -> None:
        """Wait until an engine may have begun to take turns."""
        await self._circuits.next_to_come()

    async def drained(self, engine_id: str, timeout_s: float) -> bool:
        """Cordon an engine's server and wait until none of its turns runs; False at the timeout, or if it gets turns
        again meanwhile.
        """
        server = self.cordon(engine_id, True)
        try:
            async with asyncio.timeout(timeout_s):
                while server.num_legs and server.is_cordoned:
                    await self._circuits.next_change()
        except TimeoutError:
            return False
        return server.is_cordoned

    def get(self, engine_id: str) -> Member:
        """The engine with this id. Raises UnknownEngine."""
        for member in self._members:
            if member.engine_id == engine_id:
                return member
        raise UnknownEngine(f"No engine {engine_id[:256]!r}")

    def kv_tier(self, engine_id: str) -> str | None:
        """The KV tier that an engine shares; "" for none, and for one that left; None as long as it has not told."""
        with contextlib.suppress(UnknownEngine):
            server = self.get(engine_id).server
            return None if server.asks_setup else server.kv_tier
        return ""

    def members(self) -> list[Member]:
        """All engines, in the order in which their servers were added."""
        return list(self._members)

    def servers(self) -> list[Server]:
        """All servers, in the order in which they were added."""
        return list(self._servers)

    def serving(self, model: str | None) -> list[Member]:
        """Engines that may be used and, if given, serve this model."""
        return [
            member
            for member in self._members
            if member.server.state is EngineState.READY
            and not (member.server.is_cordoned or member.server.held)
            and (model is None or any(model == known.model_id for known in member.server.models))
        ]

    def models(self) -> dict[str, Model]:
        """Every model that an engine of the fleet serves, or served when it was last seen; with the longest context
        that any of them takes. Empty while the fleet is starting.
        """
        return self._models

    def has_common_model(self) -> bool:
        """Whether the servers seen serve a model in common (also if it has adapters), so that none need be named."""
        served = [{model.model_id for model in server.models} for server in self._servers if server.models]
        return not served or bool(set.intersection(*served))

    def num_unseen(self) -> int:
        """How many servers this process has not seen yet, so that nobody knows what they serve."""
        return sum(server.dialect is None for server in self._servers)

    # --- weights --------------------------------------------------------------------------------------------

    def begin_update(self, server: Server) -> None:
        """The server begins to get weights: until the end it gets no new turns and no looks."""
        server.is_updating = server.is_in_doubt = True
        self._known.note(server)
        self._circuits.report(server)

    def end_update(self, server: Server, held: str, is_in_doubt: bool) -> None:
        """The server has the weights, or is held for a reason; if they are in doubt, its turns continue elsewhere."""
        server.is_updating, server.held = False, held
        for member in server.members:
            member.worked_at = self._clock()
        if server not in self._servers:  # it was removed meanwhile
            return
        server.is_in_doubt = is_in_doubt
        self._known.note(server)
        if held:
            fields = {"engine": server.server_id, "reason": held}
            LOGGER.warning("engine is held", extra={"fields": fields})
        if is_in_doubt:
            self._circuits.send_away(server)
        self._circuits.report(server)
        self._circuits.came()
        server.recheck.set()

    # --- legs -----------------------------------------------------------------------------------------------

    def leg_began(self, member: Member) -> None:
        """A leg runs on this engine."""
        member.num_legs += 1

    def leg_ended(self, member: Member, fault: Exception | None, has_answered: bool) -> None:
        """A leg ended: with an answer (an error counts), with a fault, or because nobody waits for it any more."""
        member.num_legs -= 1
        if not member.num_legs:
            self._circuits.changed()
        if isinstance(fault, CONNECTION_FAULTS):
            self._circuits.count_fault(member.server, fault)
            member.server.recheck.set()
        elif has_answered:
            member.server.num_faults = 0
            member.worked_at = self._clock()

    async def _see_all(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.start_timeout_s):
                while self._is_one_to_come():
                    await self._circuits.next_change()
        self._known.only({server.settings.url for server in self._servers})
        self.is_starting = False
        self._gather_models()

    def _is_one_to_come(self) -> bool:
        """Whether an engine is yet to be seen; or to be told of, if it was there before a restart, or if none is."""
        if any(server.state is EngineState.STARTING for server in self._servers):
            return True
        urls = {server.settings.url for server in self._servers}
        return not self._settings.engines and not (urls and self._known.present() <= urls)

    def _gather(self) -> None:
        self._members = [member for server in self._servers for member in server.members]

    def _models_seen(self) -> None:
        before = set(self._models)
        self._gather_models()
        # A removed engine does not count: a controller removes the old engines before it adds those that replace them.
        for model_id in sorted(before - self._models.keys()):
            self._post(ModelGone(self._clock(), model_id))

    def _gather_models(self) -> None:
        if self.is_starting:  # the first turns would all go to the first engine, away from their KV
            return
        models = [model for server in self._servers for model in server.models]
        models.sort(key=lambda model: model.max_context_tokens or inf)
        self._models = {model.model_id: model for model in models}  # the last of each id: the one with the most room

    async def _close(self, server: Server) -> None:
        if server.task is not None:
            server.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await server.task
        server.close()
