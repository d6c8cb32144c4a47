"""Looks at each engine every second, and reports its state.

An engine that comes back as another process gets a new id, because the KV of the old one is gone. It gets no turn
before it has the fleet's weights.
"""

import asyncio
import contextlib
from collections.abc import Callable

from engines.dialect import Asleep, Observation, ObservationError
from engines.http import FAULTS, NoMoreConnections, NothingListens
from engines.kv_connectors import KvWays, kv_ways
from engines.probe import Model, discover, models_of, tells_tokens
from gateway.clock import Clock
from gateway.config import Settings
from gateway.fleet.circuits import Circuits, Hangs
from gateway.fleet.known_processes import KnownProcesses
from gateway.fleet.member import EngineState, Member
from gateway.turnlog import LOGGER
from gateway.weights.record import WeightRecord
from gateway.weights.steps import join

_MAX_RECHECK_S = 5.0


class Watch:
    """Looks at engines, each in a task of its own.

    Args:
        weights: those that an engine must have to get turns.
        on_models: called when an engine has reported its models.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        circuits: Circuits,
        known: KnownProcesses,
        weights: WeightRecord,
        on_models: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._circuits = circuits
        self._known = known
        self._weights = weights
        self._on_models = on_models

    async def over(self, member: Member) -> None:
        """Look at one engine until cancelled."""
        pause_s = self._settings.observe_interval_s
        while True:
            try:
                if not member.is_updating:
                    await self._look(member)
                pause_s = self._settings.observe_interval_s
            except Exception as fault:
                if not isinstance(fault, (ObservationError, *FAULTS)):
                    LOGGER.exception("defect", extra={"fields": {"engine": member.engine_id}})
                if isinstance(fault, (Asleep, NothingListens)):
                    self._circuits.open(member, fault)
                    member.has_slept = member.has_slept or isinstance(fault, Asleep)
                elif not isinstance(fault, NoMoreConnections):  # which is not the engine's fault
                    self._circuits.count_fault(member, fault)
                pause_s = min(pause_s * 1.5, _MAX_RECHECK_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await member.recheck.wait()
            member.recheck.clear()

    async def _look(self, member: Member) -> None:
        timeout_s = self._settings.observe_timeout_s
        if member.dialect is None or member.state is EngineState.LOST:
            await self._discover(member)
        assert member.dialect is not None
        # SGLang's name of its model becomes a path when it is given weights, by whomever.
        if member.dialect.kind == "vllm" and self._clock() - member.models_at >= self._settings.models_interval_s:
            self._told(member, await models_of(member.http, timeout_s))
        if member.asks_tokens:
            member.asks_tokens = not await tells_tokens(member.dialect, member.http, timeout_s)
        observation = await member.dialect.observe(member.http, timeout_s)
        self._check_progress(member, observation)
        started_at = observation.started_at
        is_same = started_at == member.started_at and (started_at is not None or member.state is not EngineState.LOST)
        is_new_process = not is_same or member.has_slept  # one that wakes has no KV, so it counts as another
        if is_new_process and member.state is EngineState.READY:  # what is known here belongs to the previous process
            self._circuits.open(member, ObservationError("another process answers"))
            await self._look(member)
            return
        was_seen = member.observation is not None or member.started_at is not None
        if was_seen and is_new_process:
            self._circuits.open(member, ObservationError("another process answers"))
            # An engine that does not tell when it started may have been out of sight only for a moment.
            member.become_another(keeps_weights=is_same or started_at is None)
        member.started_at, member.has_slept = started_at, False
        if member.state is not EngineState.READY:
            await join(member, self._weights, self._known, self._settings)
        member.observation = observation
        if self._circuits.close(member):
            LOGGER.info("engine is ready", extra={"fields": {"engine": member.engine_id}})
            self._known.note(member)
            self._circuits.changed()
            self._circuits.came()
        self._circuits.report(member, is_look=True)

    async def _discover(self, member: Member) -> None:
        """Ask a new process what it is."""
        timeout_s = self._settings.observe_timeout_s
        found = await discover(member.http, member.settings.kind, timeout_s)
        member.dialect, member.asks_tokens = found.dialect, self._settings.token_legs == "auto"
        self._told(member, found.models)
        ways = await self._kv_ways(member)
        member.moves_kv, member.kv_tier = ways.fetches, ways.tier
        member.slots = member.settings.slots or await found.dialect.slots(member.http, timeout_s)

    def _told(self, member: Member, models: tuple[Model, ...]) -> None:
        before, member.models = member.models, self._named(member, models)
        member.models_at = self._clock()
        if member.models != before:
            self._on_models()

    async def _kv_ways(self, member: Member) -> KvWays:
        """What was configured for an engine, else what it reports."""
        said, told = member.settings, KvWays()
        is_vllm = member.dialect is not None and member.dialect.kind == "vllm"
        if is_vllm and (said.kv_transfer is None or said.kv_tier is None):
            told = await kv_ways(member.http, self._settings.observe_timeout_s)
        fetches = told.fetches if said.kv_transfer is None else said.kv_transfer == "nixl"
        return KvWays(fetches, told.tier if said.kv_tier is None else said.kv_tier)

    def _named(self, member: Member, models: tuple[Model, ...]) -> tuple[Model, ...]:
        """The models under the names by which clients know them."""
        if not any(self._weights.is_path(model.model_id) for model in models):
            return models
        known = self._known.at(member.settings.url).get("models", [])
        return member.models or tuple(Model(*model) for model in known) or models

    def _check_progress(self, member: Member, observation: Observation) -> None:
        """Raises ObservationError if turns run without progress for too long."""
        before = member.observation
        now = self._clock()
        is_busy = bool(observation.num_running or member.num_legs > member.num_held_up)
        was_busy, member.is_busy = member.is_busy, is_busy
        if before is None or not (is_busy and was_busy) or observation.work_counter != before.work_counter:
            member.worked_at = now
        elif now - member.worked_at > self._settings.stall_timeout_s:
            fault = Hangs("it hangs: turns run, and no token came")
            self._circuits.open(member, fault)
            raise fault
