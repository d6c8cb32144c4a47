"""The API of the fleet: its engines, the scheduler's events, and the work at hand."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engines.validation_errors import in_words, numbers
from gateway.api.parts import NEED_ADMIN, part
from gateway.demand import Demand
from gateway.engine_settings import EngineSettings
from gateway.fleet.fleet import Fleet
from gateway.fleet.server import Member, Server
from gateway.http.refusals import bad_request
from gateway.kv.moves import KvMoves
from gateway.state.driver import Driver
from gateway.state.eventlog import EventLog
from gateway.turns.token_apis import token_apis
from gateway.turns.turn import Turn
from gateway.turns.turns import TURN_ROUTES
from scheduling.types import EngineLeaving


class NewEngine(BaseModel):
    """An engine to add to the fleet."""

    model_config = ConfigDict(extra="forbid")
    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    url: Annotated[str, Field(max_length=2048)]
    kind: str | None = None
    slots: Annotated[int | None, Field(ge=1, le=65_536)] = None
    kv_capacity_tokens: Annotated[int | None, Field(ge=1, le=2**53)] = None
    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    profile: str | None = None
    kv_transfer: str | None = None
    kv_tier: str | None = None


class Engines:
    """What the routes of the fleet read and do.

    Args:
        heartbeat_s: of an event stream that is silent.
        takes_tokens: turns are served at token level if an engine can.
    """

    def __init__(
        self,
        fleet: Fleet,
        driver: Driver,
        event_log: EventLog,
        kv: KvMoves,
        heartbeat_s: float,
        takes_tokens: bool,
    ) -> None:
        self.fleet = fleet
        self.event_log = event_log
        self.heartbeat_s = heartbeat_s
        self.clock = driver.clock
        self._driver = driver
        self._kv = kv
        self._takes_tokens = takes_tokens

    def view(self, member: Member) -> dict[str, Any]:
        """One engine, as the API shows it."""
        server = member.server
        known = self._driver.scheduler.engines.get(member.engine_id)
        seen = member.observation
        by_tokens, passed = token_apis(server.dialect, TURN_ROUTES, self._takes_tokens)
        return {
            "id": member.engine_id,
            "object": "engine",
            "url": server.settings.url,
            "kind": server.kind,
            "state": server.state.value,
            "is_cordoned": server.is_cordoned or bool(server.held),
            "cordon_reason": server.held or None,
            "weight_version": server.weight_version or None,
            "models": [model.model_id for model in server.models],
            "data_parallel_rank": member.rank,
            "tp": server.settings.tp,
            "profile": server.settings.profile,
            "slots": known.slots if known else server.slots,
            "kv_capacity_tokens": known.spec.kv_capacity_tokens if known else None,
            "kv_claimed_tokens": known.kv_held if known else 0,
            "kv_used_share": seen.kv_used_share if seen else None,
            "num_trajectories": len(known.claims) if known else 0,
            "finish_s": known.finish_s if known else None,
            "transit_s": known.transit.leg_s if known else None,
            "num_running": seen.num_running if seen else None,
            "num_waiting": seen.num_waiting if seen else None,
            "moves_kv": server.moves_kv,
            "kv_tier": server.kv_tier or None,
            "kv_offered_tokens": member.kv_offered_tokens,
            "token_legs": server.token_routes is not None,
            "token_legs_note": (server.dialect.tokens_note if server.dialect else "") or None,
            "token_apis": by_tokens,
            "passed_apis": passed,
            "num_legs": member.num_legs,
            "num_faults": server.num_faults,
            "last_fault": server.last_fault or None,
        }

    def begin_drain(self, engine_id: str) -> None:
        """Cordon an engine's server, and have its turns continue from their tokens elsewhere, once other engines serve
        their models.
        """
        server = self.fleet.cordon(engine_id, True)
        server.is_draining = True
        self._send_on(server)
        self._begin_moves(server)

    async def keep_draining(self) -> None:
        """Send the turns of engines that drain on when other engines come; until cancelled."""
        while True:
            await self.fleet.next_to_come()
            for server in self.fleet.servers():
                if server.is_draining and server.num_legs:
                    self._send_on(server)

    async def evacuate(self, engine_id: str, timeout_s: float) -> int:
        """Cordon an engine's server, and bring the KV of its trajectories in a tool call to where they continue.

        Returns: how many moves are still under way at the timeout.
        """
        server = self.fleet.cordon(engine_id, True)
        self._begin_moves(server)
        return sum(await asyncio.gather(*(self._kv.settled(member.engine_id, timeout_s) for member in server.members)))

    def _send_on(self, server: Server) -> None:
        """Pause those of a server's turns whose models other servers serve, so that they continue there.

        One that is loading weights counts: turns wait for the end of the load, not the drain for the end of a turn.
        One without token routes, or too small for a turn's context, does not: it would refuse the turn.
        """
        rooms = {model.model_id: self._room_for(model.model_id) for model in server.models}
        engine_ids = {member.engine_id for member in server.members}
        for turn in self._driver.live_turns():
            if turn.engine_id in engine_ids and self._context_tokens(turn) < rooms.get(turn.ask.model, 0):
                turn.pause()

    def _room_for(self, model: str) -> float:
        """Tokens of the longest context with which a turn can continue from its tokens; 0 if it cannot anywhere."""
        known = self._driver.scheduler.engines
        able = [member.engine_id for member in self.fleet.serving(model) if member.server.token_routes is not None]
        return max([known[engine_id].room for engine_id in able if engine_id in known], default=0)

    def _context_tokens(self, turn: Turn) -> int:
        """Tokens of a turn's prompt and output so far; an estimate until its prompt is rendered."""
        if turn.choices:
            return max(len(one.chain.prompt_ids) + len(one.chain.output_ids) for one in turn.choices)
        trajectory = self._driver.scheduler.trajectories.get(turn.ask.trajectory_id)
        known = trajectory.turns.get(turn.turn_id) if trajectory is not None else None
        return known.context_tokens if known is not None else 0

    def _begin_moves(self, server: Server) -> None:
        for member in server.members:
            self._driver.post(EngineLeaving(self._driver.clock(), member.engine_id))


_Here = Annotated[Engines, part(Engines)]


def add_fleet(app: FastAPI) -> None:
    """Add the routes."""
    _add_views(app)
    _add_members(app)
    _add_cordons(app)
    _add_departures(app)
    _add_events(app)
    _add_demand(app)


def _add_views(app: FastAPI) -> None:
    @app.get("/v1/engines", tags=["fleet"])
    async def all_engines(engines: _Here) -> dict[str, Any]:
        """The fleet: state, load and KV of each engine."""
        return {"object": "list", "data": [engines.view(member) for member in engines.fleet.members()]}

    @app.get("/v1/engines/{engine_id}", tags=["fleet"])
    async def one_engine(engines: _Here, engine_id: str) -> dict[str, Any]:
        """One engine."""
        return engines.view(engines.fleet.get(engine_id))


def _add_members(app: FastAPI) -> None:
    @app.post("/v1/engines", tags=["fleet"], status_code=201, dependencies=NEED_ADMIN)
    async def add(engines: _Here, engine: NewEngine) -> dict[str, Any]:
        """Add an engine to the fleet. Needs the admin key."""
        try:
            parsed = EngineSettings.parse(engine.url)
            given = engine.model_dump(exclude={"url"}, exclude_none=True)
            server = engines.fleet.add(EngineSettings(**{**parsed.model_dump(), **given}))
        except ValidationError as error:
            first = error.errors()[0]
            name, said = str(first["loc"][0]), in_words(first)
            raise bad_request(said if first["type"] == "value_error" else f"{name}: {said}.", name) from None
        except ValueError as error:
            raise bad_request(str(error), "url") from None
        return engines.view(server.members[0])

    @app.delete("/v1/engines/{engine_id}", tags=["fleet"], dependencies=NEED_ADMIN)
    async def remove(engines: _Here, engine_id: str) -> dict[str, Any]:
        """Remove an engine from the fleet; turns that run there continue elsewhere. Needs the admin key."""
        await engines.fleet.remove(engine_id)
        return {"id": engine_id, "removed": True}


def _add_cordons(app: FastAPI) -> None:
    @app.post("/v1/engines/{engine_id}/cordon", tags=["fleet"], dependencies=NEED_ADMIN)
    async def cordon(engines: _Here, engine_id: str) -> dict[str, Any]:
        """Stop giving an engine turns. Needs the admin key."""
        engines.fleet.cordon(engine_id, True)
        return engines.view(engines.fleet.get(engine_id))

    @app.post("/v1/engines/{engine_id}/uncordon", tags=["fleet"], dependencies=NEED_ADMIN)
    async def uncordon(engines: _Here, engine_id: str) -> dict[str, Any]:
        """Give an engine turns again. Needs the admin key."""
        engines.fleet.cordon(engine_id, False)
        return engines.view(engines.fleet.get(engine_id))


def _add_departures(app: FastAPI) -> None:
    @app.post("/v1/engines/{engine_id}/drain", tags=["fleet"], dependencies=NEED_ADMIN)
    async def drain(
        engines: _Here, engine_id: str, timeout_s: Annotated[float, Query(ge=0, le=86_400)] = 600.0
    ) -> dict[str, Any]:
        """Cordon an engine and wait until none of its turns runs. Turns that can continue elsewhere do so once another
        engine serves them, also after the timeout, and the KV of its residents is brought along. Needs the admin key.
        """
        until = engines.clock() + timeout_s
        engines.begin_drain(engine_id)
        drained = await engines.fleet.drained(engine_id, timeout_s)
        num_left = await engines.evacuate(engine_id, max(until - engines.clock(), 0.0)) if drained else None
        view = engines.view(engines.fleet.get(engine_id))
        return {**view, "is_drained": drained, "is_evacuated": num_left == 0}

    @app.post("/v1/engines/{engine_id}/evacuate", tags=["fleet"], dependencies=NEED_ADMIN)
    async def evacuate(
        engines: _Here, engine_id: str, timeout_s: Annotated[float, Query(ge=0, le=86_400)] = 60.0
    ) -> dict[str, Any]:
        """Cordon an engine and bring the KV of trajectories in a tool call to the engines where they continue.
        Trajectories whose turns run are left alone: drain the engine first. Needs the admin key.
        """
        num_left = await engines.evacuate(engine_id, timeout_s)
        return {**engines.view(engines.fleet.get(engine_id)), "is_evacuated": not num_left}


def _add_events(app: FastAPI) -> None:
    @app.get("/v1/events", tags=["fleet"], response_class=StreamingResponse)
    async def events(engines: _Here) -> StreamingResponse:
        """Everything the scheduler is told and decides, as it happens (SSE)."""

        async def stream() -> AsyncIterator[bytes]:
            yield b": watching\n\n"
            async for batch in engines.event_log.watch(engines.heartbeat_s):
                lines = batch.splitlines()
                yield b"".join(b"data: " + line + b"\n\n" for line in lines) if lines else b": nothing yet\n\n"

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


def _add_demand(app: FastAPI) -> None:
    @app.get("/v1/demand", tags=["fleet"], dependencies=NEED_ADMIN, response_model=dict[str, Any])
    async def demand(demand: Annotated[Demand, part(Demand)], since: float = 0.0) -> Response:
        """What the trajectories at hand still need, and what the last rollout came to if it ended after `since`
        (seconds since the epoch), for the fleet's controller. Needs the admin key.
        """
        return Response(orjson.dumps(await demand.look(since)), media_type="application/json")
