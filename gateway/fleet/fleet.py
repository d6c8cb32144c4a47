"""The engines as this process sees them: who is there, how they are, and when one must not be used.

Each engine has one task that looks at it every second and tells the scheduler. Its circuit opens

- at once, when nothing listens at its address or another process does;
- after some connection faults in a row, of turns or of looks;
- when turns run in it and its token counter stands still (it hangs), whether or not it counts those turns;

and never because a generation is long: a turn that runs out of time is no fault of the connection. It closes at the
first good look. An engine that comes back as another process gets a new id, for the KV of the old one is gone. It gets
no turn before it has the fleet's weights.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import orjson

from engines.dialect import Observation, ObservationError
from engines.http import CONNECTION_FAULTS, FAULTS, EngineUnreachable, HttpClient, HttpLimits, NoMoreConnections
from engines.kv import can_move
from engines.probe import Model, discover, tells_tokens
from engines.profiles import load_profile
from gateway.clock import Clock
from gateway.config import EngineSettings, Settings
from gateway.fleet.member import EngineState, Member
from gateway.fleet.weight_record import WeightRecord
from gateway.fleet.weight_steps import join
from gateway.turnlog import LOGGER
from scheduling.types import EngineLoad, EngineLost, EngineReported, EngineSpec, Event
from store.port import Store, StoreError

_STATE_NAME = "fleet"
_MAX_RECHECK_S = 5.0


class UnknownEngine(Exception):
    """No engine has this id."""


class Fleet:
    """All engines of this gateway.

    Args:
        post: tells the scheduler.
        store: keeps which processes were seen, so that homes hold over a restart of the gateway.
        weights: which ones an engine must have to get turns.
    """

    def __init__(
        self, settings: Settings, clock: Clock, post: Callable[[Event], None], store: Store, weights: WeightRecord
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._post = post
        self._store = store
        self._weights = weights
        self._members: list[Member] = []
        self._models: dict[str, Model] = {}
        self._seen: dict[str, dict[str, Any]] = {}
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Begin to look at the configured engines, and wait a moment until each was seen."""
        with contextlib.suppress(StoreError):
            await self._weights.restore()
            self._seen = orjson.loads(await self._store.get_state(_STATE_NAME) or b"{}")
        for engine in self._settings.engines:
            self.add(engine)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.start_timeout_s):
                while any(member.state is EngineState.STARTING for member in self._members):
                    await self._next_change()

    async def stop(self) -> None:
        """Look no more and close all connections."""
        for member in self._members:
            await self._close(member)

    def add(self, engine: EngineSettings) -> Member:
        """Take an engine into the fleet. Raises ProfileError for an unknown profile, ValueError for a known URL."""
        if any(member.settings.url == engine.url for member in self._members):
            raise ValueError(f"{engine.url} is in the fleet already")
        headers = (("authorization", f"Bearer {engine.api_key.get_secret_value()}"),) if engine.api_key else ()
        seen = self._seen.get(engine.url, {})
        limits = HttpLimits(self._settings.connect_timeout_s, max_connections=self._settings.max_connections_per_engine)
        member = Member(
            settings=engine,
            http=HttpClient(engine.url, limits, headers),
            profile=load_profile(engine.profile) if engine.profile else None,
            address=_address(engine.url),
            generation=seen.get("generation", 1),
            started_at=seen.get("started_at"),
            is_cordoned=seen.get("is_cordoned", False),
            is_in_doubt=seen.get("is_in_doubt", False),
        )
        self._members.append(member)
        member.task = asyncio.create_task(self._watch(member), name=f"watch {engine.url}")
        return member

    async def remove(self, engine_id: str) -> None:
        """Take an engine out of the fleet; its turns go on elsewhere."""
        member = self.get(engine_id)
        self._members.remove(member)
        self._gather_models()
        # Another process may come to this address; it must not get this one's id.
        self._seen[member.settings.url] = {"generation": member.generation + 1, "started_at": None}
        self.remember()
        self._post(EngineLost(self._clock(), engine_id))
        await self._close(member)

    def cordon(self, engine_id: str, is_cordoned: bool) -> Member:
        """Give an engine no more turns, or again."""
        member = self.get(engine_id)
        member.is_cordoned = is_cordoned
        self._note(member)
        self._report(member)
        return member

    async def drained(self, engine_id: str, timeout_s: float) -> bool:
        """Cordon an engine and wait until none of its turns runs; False at the timeout."""
        member = self.cordon(engine_id, True)
        try:
            async with asyncio.timeout(timeout_s):
                while member.num_legs:
                    await self._next_change()
        except TimeoutError:
            return False
        return True

    def get(self, engine_id: str) -> Member:
        """The engine with this id. Raises UnknownEngine."""
        for member in self._members:
            if member.engine_id == engine_id:
                return member
        raise UnknownEngine(f"no engine {engine_id!r}")

    # --- weights --------------------------------------------------------------------------------------------

    def begin_update(self, member: Member) -> None:
        """It gets weights from now on: no more turns, and no looks."""
        member.is_updating = member.is_in_doubt = True
        self._note(member)
        self._report(member)

    def end_update(self, member: Member, held: str = "", keeps_turns: bool = True) -> None:
        """It has them, or is held for a reason; without `keeps_turns`, what runs there goes on elsewhere."""
        member.is_updating, member.held, member.worked_at = False, held, self._clock()
        if member not in self._members:  # it was removed meanwhile
            return
        member.is_in_doubt = not keeps_turns
        self._note(member)
        if held:
            fields = {"engine": member.engine_id, "reason": held}
            LOGGER.warning("engine is held", extra={"fields": fields})
        if not keeps_turns:
            self._post(EngineLost(self._clock(), member.engine_id))
        self._report(member)
        member.recheck.set()

    def members(self) -> list[Member]:
        """All engines, in the order they were added."""
        return list(self._members)

    def serving(self, model: str | None) -> list[Member]:
        """Engines that may be used and, if given, serve this model."""
        return [
            member
            for member in self._members
            if member.state is EngineState.READY
            and not (member.is_cordoned or member.held)
            and (model is None or any(model == known.model_id for known in member.models))
        ]

    def models(self) -> dict[str, Model]:
        """Every model that an engine of the fleet serves or served when it was last seen."""
        return self._models

    # --- legs -----------------------------------------------------------------------------------------------

    def leg_began(self, member: Member) -> None:
        """A leg runs on this engine."""
        member.num_legs += 1

    def leg_ended(self, member: Member, fault: Exception | None, has_answered: bool) -> None:
        """It ended: by an answer, be it an error, or by a fault, or because nobody wants it any more."""
        member.num_legs -= 1
        if not member.num_legs:
            self._change()
        if isinstance(fault, CONNECTION_FAULTS):
            self._count_fault(member, fault)
            member.recheck.set()
        elif has_answered:
            member.num_faults = 0
            member.worked_at = self._clock()

    # --- looking --------------------------------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        pause_s = self._settings.observe_interval_s
        while True:
            try:
                if not member.is_updating:
                    await self._look(member)
                pause_s = self._settings.observe_interval_s
            except Exception as fault:
                if not isinstance(fault, (ObservationError, *FAULTS)):
                    LOGGER.exception("defect", extra={"fields": {"engine": member.engine_id}})
                if isinstance(fault, EngineUnreachable):
                    self._lose(member, fault)
                elif not isinstance(fault, NoMoreConnections):  # which is no fault of the engine
                    self._count_fault(member, fault)
                pause_s = min(pause_s * 1.5, _MAX_RECHECK_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await member.recheck.wait()
            member.recheck.clear()

    async def _look(self, member: Member) -> None:
        timeout_s = self._settings.observe_timeout_s
        if member.dialect is None or member.state is EngineState.LOST:
            found = await discover(member.http, member.settings.kind, timeout_s)
            member.dialect, member.models = found.dialect, self._named(member, found.models)
            member.asks_tokens = self._settings.token_legs == "auto"
            self._gather_models()
            member.moves_kv = await self._moves_kv(member)
            member.slots = member.settings.slots or await member.dialect.slots(member.http, timeout_s)
        if member.asks_tokens:
            member.asks_tokens = not await tells_tokens(member.dialect, member.http, timeout_s)
        observation = await member.dialect.observe(member.http, timeout_s)
        self._check_progress(member, observation)
        started_at = observation.started_at
        is_new_process = started_at != member.started_at or (started_at is None and member.state is EngineState.LOST)
        was_seen = member.observation is not None or member.started_at is not None
        if was_seen and is_new_process:
            self._lose(member, ObservationError("another process answers"))
            member.generation += 1
            member.is_in_doubt = False
        changed = member.state is not EngineState.READY
        if changed:
            await join(member, self._weights, self._settings)
        member.started_at, member.observation = started_at, observation
        member.state, member.num_faults = EngineState.READY, 0
        if changed:
            LOGGER.info("engine is ready", extra={"fields": {"engine": member.engine_id}})
            self._note(member)
            self._change()
        self._report(member)

    async def _moves_kv(self, member: Member) -> bool:
        if member.settings.kv_transfer is not None:
            return member.settings.kv_transfer == "nixl"
        is_vllm = member.dialect is not None and member.dialect.kind == "vllm"
        return is_vllm and await can_move(member.http, self._settings.observe_timeout_s)

    def _named(self, member: Member, models: tuple[Model, ...]) -> tuple[Model, ...]:
        """The models by the names under which clients know them."""
        if not any(self._weights.is_path(model.model_id) for model in models):
            return models
        known = self._seen.get(member.settings.url, {}).get("models", [])
        return member.models or tuple(Model(*model) for model in known) or models

    def _check_progress(self, member: Member, observation: Observation) -> None:
        """Raises ObservationError when turns run and nothing has come of it for too long."""
        before = member.observation
        now = self._clock()
        is_busy = bool(observation.num_running or member.num_legs)
        was_busy, member.is_busy = member.is_busy, is_busy
        if before is None or not (is_busy and was_busy) or observation.work_counter != before.work_counter:
            member.worked_at = now
        elif now - member.worked_at > self._settings.stall_timeout_s:
            self._lose(member, ObservationError("it hangs: turns run, and no token came"))
            raise ObservationError("it hangs")

    def _gather_models(self) -> None:
        self._models = {model.model_id: model for member in self._members for model in member.models}

    def _count_fault(self, member: Member, fault: Exception) -> None:
        member.num_faults += 1
        member.last_fault = str(fault)
        if member.num_faults >= self._settings.faults_to_open:
            self._lose(member, fault)

    def _lose(self, member: Member, fault: Exception) -> None:
        member.last_fault = str(fault)
        if member.state is not EngineState.LOST:
            LOGGER.warning("engine is lost", extra={"fields": {"engine": member.engine_id, "fault": str(fault)}})
        if member.state is EngineState.READY:
            self._post(EngineLost(self._clock(), member.engine_id))
        member.state = EngineState.LOST
        self._change()

    def _report(self, member: Member) -> None:
        seen = member.observation
        if member.state is not EngineState.READY or seen is None:
            return
        capacity = member.settings.kv_capacity_tokens or seen.kv_capacity_tokens or 0
        spec = EngineSpec(
            engine_id=member.engine_id,
            models=frozenset(model.model_id for model in member.models),
            slots=member.slots or seen.slots or self._settings.default_slots,
            kv_capacity_tokens=max(capacity - member.kv_offered_tokens, 1) if capacity else 0,
            tp=member.settings.tp,
            profile=member.profile,
        )
        load = EngineLoad(seen.num_running, seen.num_waiting, int(seen.kv_used_share * capacity))
        self._post(EngineReported(self._clock(), spec, load, accepting=member.takes_turns))

    def _note(self, member: Member) -> None:
        self._seen[member.settings.url] = {
            "generation": member.generation,
            "started_at": member.started_at,
            "is_cordoned": member.is_cordoned,
            "is_in_doubt": member.is_in_doubt,
            "models": [(model.model_id, model.max_context_tokens) for model in member.models],
        }
        self.remember()

    def remember(self) -> None:
        """Write down which processes were seen; also after the store lost it."""
        self._store.put_state(_STATE_NAME, orjson.dumps(self._seen))

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self) -> None:
        await self._changed.wait()

    async def _close(self, member: Member) -> None:
        if member.task is not None:
            member.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await member.task
        member.http.close()


def _address(url: str) -> str:
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] + parts.path.replace("/", "-")
