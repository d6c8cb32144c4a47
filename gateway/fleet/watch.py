"""Looks at each server every second, and reports the state of its engines.

A server that comes back as another process gets a new id, because the KV of the old one is gone. It gets no turn
before it has the fleet's weights.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from engines.dialect import Asleep, Dialect, Observation, ObservationError
from engines.http import (
    FAULTS,
    AnswerTooLarge,
    BadResponse,
    ConnectionBroken,
    NoMoreConnections,
    NothingListens,
    ResponseTimeout,
)
from engines.kv_connectors import KvWays, kv_ways
from engines.probe import Model, UnknownKind, discover, models_of, tells_tokens
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.circuits import Circuits, Hangs
from gateway.fleet.known_processes import KnownProcesses
from gateway.fleet.server import EngineState, Member, Server
from gateway.turnlog import LOGGER
from gateway.weights.record import WeightRecord
from gateway.weights.steps import join

_MAX_RECHECK_S = 5.0


class Watch:
    """Looks at servers, each in a task of its own.

    Args:
        weights: those that an engine must have to get turns.
        on_models: called when a server has reported its models.
        on_ranks: called when the number of its data-parallel ranks has changed.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        circuits: Circuits,
        known: KnownProcesses,
        weights: WeightRecord,
        on_models: Callable[[], None],
        on_ranks: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._circuits = circuits
        self._known = known
        self._weights = weights
        self._on_models = on_models
        self._on_ranks = on_ranks

    async def over(self, server: Server) -> None:
        """Look at one server until cancelled."""
        pause_s = self._settings.observe_interval_s
        while True:
            try:
                if not server.is_updating:
                    await self._look(server)
                pause_s = self._settings.observe_interval_s
            except Exception as fault:
                if not isinstance(fault, (ObservationError, *FAULTS)):
                    LOGGER.exception("defect", extra={"fields": {"engine": server.server_id}})
                if isinstance(fault, (Asleep, NothingListens)):
                    self._circuits.open(server, fault)
                    server.has_slept = server.has_slept or isinstance(fault, Asleep)
                elif not isinstance(fault, NoMoreConnections):  # which is not the engine's fault
                    self._circuits.count_fault(server, fault)
                pause_s = min(pause_s * 1.5, _MAX_RECHECK_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await server.recheck.wait()
            server.recheck.clear()

    async def _look(self, server: Server) -> None:
        timeout_s, models = self._settings.observe_timeout_s, server.models
        if server.dialect is None or server.state is EngineState.LOST:
            await self._discover(server)
        assert server.dialect is not None
        if self._clock() - server.models_at >= self._settings.models_interval_s:
            self._told(server, _with_known_name(server, await models_of(server.http, timeout_s)))
        if server.asks_tokens:
            server.asks_tokens = not await tells_tokens(server.dialect, server.http, timeout_s)
        if server.asks_setup:
            server.asks_setup = not await self._tells_setup(server, server.dialect)
        observations = await server.dialect.observe(server.http, timeout_s)
        for member, observation in zip(server.members, observations, strict=False):
            self._check_progress(member, observation)
        started_at = observations[0].started_at
        is_same = started_at == server.started_at and (started_at is not None or server.state is not EngineState.LOST)
        is_new_process = not is_same or server.has_slept  # one that wakes has no KV, so it counts as another
        if is_new_process and server.state is EngineState.READY:  # what is known here belongs to the previous process
            self._circuits.open(server, ObservationError("another process answers"))
            await self._look(server)
            return
        was_seen = server.members[0].observation is not None or server.started_at is not None
        if was_seen and is_new_process:
            self._circuits.open(server, ObservationError("another process answers"))
            # An engine that does not tell when it started may have been out of sight only for a moment.
            server.become_another(keeps_weights=is_same or started_at is None)
        server.started_at, server.has_slept = started_at, False
        if server.state is not EngineState.READY:
            await join(server, self._weights, self._known, self._settings)
        self._match_ranks(server, len(observations))
        for member, observation in zip(server.members, observations, strict=True):
            member.observation = observation
        if self._circuits.close(server):
            LOGGER.info("engine is ready", extra={"fields": {"engine": server.server_id}})
            self._known.note(server)
            self._circuits.changed()
            self._circuits.came()
        self._circuits.report(server, is_look=True)
        if server.models != models:
            self._circuits.came()  # Turns of a new one may wait for it.

    def _match_ranks(self, server: Server, number: int) -> None:
        """Each data-parallel rank is an engine; a server without ranks is one by itself.

        Raises:
            ObservationError: it tells of fewer than a moment ago. If that lasts, it is lost, and begins anew.
        """
        before = len(server.members)
        if number == before:
            return
        if number < before and server.state is EngineState.READY:
            raise ObservationError(f"it tells of {number} of its {before} ranks")
        for member in server.resize(number):
            member.http.close()
        self._on_ranks()

    async def _discover(self, server: Server) -> None:
        """Ask a new process what it is."""
        timeout_s = self._settings.observe_timeout_s
        try:
            found = await discover(server.http, server.settings.kind, timeout_s)
        except UnknownKind as fault:
            raise ObservationError(f"{fault}; name its kind") from None
        server.dialect, server.asks_tokens = found.dialect, self._settings.has_token_legs
        server.asks_setup = True
        self._told(server, self._named(server, found.models))

    def _told(self, server: Server, models: tuple[Model, ...]) -> None:
        before, server.models = server.models, models
        server.models_at = self._clock()
        if server.models != before:
            self._on_models()

    async def _tells_setup(self, server: Server, dialect: Dialect) -> bool:
        """Learn an engine's slots and KV ways: as configured, else as it reports them.

        Returns: whether it answered. vLLM's first answer may come late, because it collects its environment (0.32).
        Raises: EngineUnreachable, NoMoreConnections.
        """
        said, timeout_s = server.settings, self._settings.observe_timeout_s
        told, slots, has_answered = KvWays(), said.slots, True
        try:
            if dialect.kind == "vllm" and (said.kv_transfer is None or said.kv_tier is None):
                told = await kv_ways(server.http, timeout_s)
            if slots is None:
                slots = await dialect.slots(server.http, timeout_s)
        except (ConnectionBroken, BadResponse, ResponseTimeout, AnswerTooLarge):
            has_answered = False
        server.slots = slots
        server.moves_kv = told.fetches if said.kv_transfer is None else said.kv_transfer == "nixl"
        server.kv_tier = told.tier if said.kv_tier is None else said.kv_tier
        return has_answered

    def _named(self, server: Server, models: tuple[Model, ...]) -> tuple[Model, ...]:
        """The models under the names by which clients know them. SGLang's own may be a weights path; vLLM's may be one,
        too, but does not change.
        """
        assert server.dialect is not None
        if server.dialect.kind == "vllm" or not any(self._weights.is_path(model.model_id) for model in models):
            return models
        known = self._known.at(server.settings.url).get("models", [])
        return server.models or tuple(Model(*model) for model in known) or models

    def _check_progress(self, member: Member, observation: Observation) -> None:
        """Raises ObservationError if turns run on an engine without progress for too long."""
        before = member.observation
        now = self._clock()
        is_busy = bool(observation.num_running or member.num_legs > member.num_held_up)
        was_busy, member.is_busy = member.is_busy, is_busy
        if before is None or not (is_busy and was_busy) or observation.work_counter != before.work_counter:
            member.worked_at = now
        elif now - member.worked_at > self._settings.stall_timeout_s:
            fault = Hangs("it hangs: turns run, and no token came")
            self._circuits.open(member.server, fault)
            raise fault


def _with_known_name(server: Server, models: tuple[Model, ...]) -> tuple[Model, ...]:
    """The models of a process that told them before. SGLang's name of its own one, which is its first and part of its
    adapters' names, becomes a path when it is given weights, by whomever: clients know it by its earlier name.
    """
    assert server.dialect is not None
    if server.dialect.kind == "vllm" or not (models and server.models):
        return models
    own, known = models[0].model_id, server.models[0].model_id
    return tuple(
        replace(model, model_id=known + model.model_id[len(own) :])
        if f"{model.model_id}:".startswith(f"{own}:")
        else model
        for model in models
    )
