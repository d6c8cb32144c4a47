"""The API of trajectories and rollouts: declare, show, page, finish, abort."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import nsmallest
from itertools import chain
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Query, Request, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from engines.validation_errors import numbers
from gateway.api.given import Id, storable
from gateway.api.parts import part
from gateway.clock import Clock
from gateway.config import Settings
from gateway.http.refusals import (
    Refused,
    bad_request,
    conflict,
    fenced,
    method_not_allowed,
    unknown_rollout,
    unknown_trajectory,
)
from gateway.passes import Passes
from gateway.state import ledger as ledgers
from gateway.state.driver import Driver
from gateway.state.ledger import Entry, Ledger
from gateway.tokens.book import wants_tokens
from gateway.turns.ids import new_trajectory_id
from gateway.turns.turn import Turn
from predictor.progress import Predictor, Progress
from scheduling.types import Prediction, TrajectoryClosed, TrajectoryDeclared, TrajectoryState
from store.port import Store

MAX_PAGE = 1000
# Trajectories for which turns wait: some 2 ms to find or to write them, or to abort them while their turns run.
_NUM_FOUND, _NUM_WRITTEN, _NUM_ABORTED = 5_000, 250, 20


class Declaration(BaseModel):
    """What a client declares about a trajectory before its first turn."""

    model_config = ConfigDict(extra="forbid")
    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    id: Id | None = None
    group_id: Annotated[str, Field(max_length=256)] = ""
    rollout_id: Id | None = None
    expected_output_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    metadata: Annotated[dict[str, Any], AfterValidator(storable)] = {}


class Trajectories:
    """What the routes of trajectories and rollouts read and do."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        driver: Driver,
        ledger: Ledger,
        store: Store,
        predictor: Predictor,
        passes: Passes,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._driver = driver
        self._ledger = ledger
        self._store = store
        self._predictor = predictor
        self._passes = passes

    async def declare(self, declaration: Declaration, keeps_tokens: bool = True) -> dict[str, Any]:
        """Declare a trajectory, and show it. Raises Refused: 409 if its id is already known; 503."""
        trajectory_id = declaration.id or new_trajectory_id()
        if self._ledger.get(trajectory_id) is not None:
            raise conflict(f"The trajectory {trajectory_id!r} exists already.")
        expected = declaration.expected_output_tokens
        if expected:
            prediction = Prediction(float(expected), float(expected))
        else:
            prediction = self._predictor.predict(Progress(trajectory_id))
            # Its first turn begins it: only that one tells its prompt, which a group keeps from its first member.
            self._predictor.dropped(trajectory_id)
        self._driver.post(
            TrajectoryDeclared(self._clock(), trajectory_id, prediction, declaration.group_id, declaration.rollout_id)
        )
        declared = {"expected_output_tokens": expected, "metadata": declaration.metadata}
        self._ledger.declare(trajectory_id, declared if keeps_tokens else declared | {"tokens": "none"})
        return await self._recorded(trajectory_id)

    def view(self, trajectory_id: str) -> dict[str, Any]:
        """A trajectory with its turns. Raises Refused (404)."""
        entry = entry_of(trajectory_id, self._ledger)
        return {**ledgers.as_json(entry), "turns": list(entry.turns), "live_turns": self._live_turns(trajectory_id)}

    async def close(self, trajectory_id: str, abort: bool) -> dict[str, Any]:
        """Finish a trajectory, or abort it with its turns, and show it. Repeating it changes nothing.

        Raises:
            Refused: 404, 503.
        """
        entry_of(trajectory_id, self._ledger)
        self._driver.post(TrajectoryClosed(self._clock(), trajectory_id, abort))
        return await self._recorded(trajectory_id)

    async def page(self, rollout_id: str | None, state: str | None, after: str | None, limit: int) -> bytes:
        """One page of trajectories in the order of their ids, after a given id; as JSON."""

        def matches(entry: Entry) -> bool:
            record = entry.record
            return (rollout_id is None or record.rollout_id == rollout_id) and (state is None or record.state == state)

        found: list[Entry] = []
        written: list[bytes] = []

        def find(entries: Sequence[Entry]) -> None:
            nonlocal found
            before = found[limit].record.trajectory_id if len(found) > limit else None
            matching = (
                entry
                for entry in entries
                if (before is None or entry.record.trajectory_id < before)
                and (after is None or entry.record.trajectory_id > after)
                and matches(entry)
            )
            found = nsmallest(limit + 1, chain(found, matching), key=lambda entry: entry.record.trajectory_id)

        def write(entries: Sequence[Entry]) -> None:
            # One that was found may have ended meanwhile.
            written.extend(orjson.dumps(ledgers.as_json(entry)) for entry in entries if matches(entry))

        await self._passes.over(self._ledger, _NUM_FOUND, find)
        shown = found[:limit]
        await self._passes.over(shown, _NUM_WRITTEN, write)
        page = {
            "object": "list",
            "data": orjson.Fragment(b"[" + b",".join(written) + b"]"),
            "has_more": len(found) > limit,
            "last_id": shown[-1].record.trajectory_id if shown else None,
        }
        return orjson.dumps(page)

    def _live_turns(self, trajectory_id: str) -> list[dict[str, Any]]:
        """The turns of a trajectory that wait or run."""
        now = self._clock()

        def waited_s(turn: Turn) -> float:
            if turn.engine_id:
                return (turn.first_dispatch_at or now) - turn.arrived_at
            return now - turn.waits_since

        return [
            {
                "turn_id": turn.turn_id,
                "api": turn.ask.api,
                "state": "running" if turn.engine_id else "waiting",
                "legs": turn.leg,
                "arrived_at": turn.arrived_at,
                "waited_s": waited_s(turn),
                "chunks": turn.num_chunks,
            }
            for turn in self._driver.live_turns()
            if turn.ask.trajectory_id == trajectory_id
        ]

    async def rollout(self, rollout_id: str) -> dict[str, Any]:
        """A rollout as the sum of its trajectories. Raises Refused (404)."""
        records = [entry.record for entry in await entries_of(rollout_id, self._ledger, self._passes)]
        states = Counter(record.state for record in records)
        began_at = min(record.created_at for record in records)
        return {
            "id": rollout_id,
            "object": "rollout",
            "num_trajectories": {state.value: states[state] for state in TrajectoryState},
            "num_forgotten": self._driver.scheduler.num_forgotten(rollout_id),
            "num_turns": sum(record.num_turns for record in records),
            "output_tokens": sum(record.output_tokens for record in records),
            "began_at": began_at,
            "elapsed_s": max(record.last_at for record in records) - began_at,
        }

    async def abort_rollout(self, rollout_id: str) -> int:
        """Abort all active trajectories of a rollout, in slices between which turns are served; returns how many.

        Raises:
            Refused: 404, 503.
        """
        num_aborted = 0
        for number, known in enumerate(await entries_of(rollout_id, self._ledger, self._passes), 1):
            entry = self._ledger.get(known.record.trajectory_id)
            if entry is not None and entry.record.state is TrajectoryState.ACTIVE:  # it may have ended meanwhile
                self._driver.post(TrajectoryClosed(self._clock(), entry.record.trajectory_id, abort=True))
                num_aborted += 1
            if number % _NUM_ABORTED == 0:
                await asyncio.sleep(0)
        await recorded(self._store, self._settings.settle_timeout_s)
        return num_aborted

    async def _recorded(self, trajectory_id: str) -> dict[str, Any]:
        """A trajectory as it is now, once the record has that: what a client was told outlives this process."""
        shown = ledgers.as_json(entry_of(trajectory_id, self._ledger))
        await recorded(self._store, self._settings.settle_timeout_s)
        return shown


async def recorded(store: Store, timeout_s: float) -> None:
    """Wait until the record has what was put: for a moment only, since a store that is away gets it later. Raises
    Refused (503) if it never will.
    """
    await store.settle(timeout_s)
    if store.is_fenced:
        raise fenced()


def entry_of(trajectory_id: str, ledger: Ledger) -> Entry:
    """The entry of a trajectory. Raises Refused (404)."""
    entry = ledger.get(trajectory_id)
    if entry is None:
        raise unknown_trajectory(trajectory_id)
    return entry


async def entries_of(rollout_id: str, ledger: Ledger, passes: Passes) -> list[Entry]:
    """The trajectories of a rollout, in no order. Raises Refused (404) if there are none."""
    found: list[Entry] = []
    await passes.over(
        ledger, _NUM_FOUND, lambda entries: found.extend(one for one in entries if one.record.rollout_id == rollout_id)
    )
    if not found:
        raise unknown_rollout(rollout_id)
    return found


_Here = Annotated[Trajectories, part(Trajectories)]
# The routes of a trajectory that only take POST.
_POSTED = ("/finish", "/reward")


def add_trajectories(app: FastAPI) -> None:
    """Add the routes."""

    @app.post("/v1/trajectories", tags=["trajectories"], status_code=201)
    async def declare(
        trajectories: _Here, declaration: Declaration, request: Request, response: Response
    ) -> dict[str, Any]:
        """Declare a trajectory before its first turn: its group, its rollout, and its expected output.

        With `Prefer: tokens=none` none of its tokens are kept.
        """
        keeps_tokens = wants_tokens(request.scope["headers"])
        if not keeps_tokens:
            response.headers["preference-applied"] = "tokens=none"
        return await trajectories.declare(declaration, keeps_tokens)

    @app.get("/v1/trajectories", tags=["trajectories"], response_model=dict[str, Any])
    async def page(
        trajectories: _Here,
        rollout: str | None = None,
        state: TrajectoryState | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    ) -> Response:
        """Trajectories by rollout and state, paged: ask again with `after` set to `last_id`."""
        return Response(await trajectories.page(rollout, state, after, limit), media_type="application/json")

    @app.get("/v1/trajectories/{trajectory_id:path}", tags=["trajectories"])
    async def trajectory(trajectories: _Here, trajectory_id: str, request: Request) -> dict[str, Any]:
        """One trajectory with its turns: times, tokens, engine, priority, and why."""
        with _wrong_method(request, trajectory_id, *_POSTED):
            return trajectories.view(trajectory_id)

    @app.post("/v1/trajectories/{trajectory_id:path}/finish", tags=["trajectories"])
    async def finish(trajectories: _Here, trajectory_id: str) -> dict[str, Any]:
        """Finish a trajectory that ended well; it gives up its KV claim."""
        return await trajectories.close(trajectory_id, abort=False)

    @app.delete("/v1/trajectories/{trajectory_id:path}", tags=["trajectories"])
    async def abort(trajectories: _Here, trajectory_id: str, request: Request) -> dict[str, Any]:
        """Abort a trajectory: running turns are stopped, later ones refused."""
        with _wrong_method(request, trajectory_id, *_POSTED):
            return await trajectories.close(trajectory_id, abort=True)

    @app.post("/finish_session", tags=["trajectories"])
    async def finish_session(trajectories: _Here, session_id: str) -> dict[str, Any]:
        """Like `finish`, in the form that vllm-router's clients use."""
        return await trajectories.close(session_id, abort=False)

    @app.post("/programs/release", tags=["trajectories"])
    async def release_program(trajectories: _Here, body: dict[str, Any]) -> dict[str, Any]:
        """Like `finish`, in the form that ThunderAgent's clients use: `{"program_id": ...}`."""
        program_id = body.get("program_id")
        if isinstance(program_id, int) and not isinstance(program_id, bool):
            program_id = str(program_id)  # as the requests of its turns are read
        if not isinstance(program_id, str):
            raise bad_request("'program_id' must be a string or an integer.", "program_id")
        return await trajectories.close(program_id, abort=False)

    @app.get("/v1/rollouts/{rollout_id:path}", tags=["trajectories"])
    async def rollout(trajectories: _Here, rollout_id: str, request: Request) -> dict[str, Any]:
        """A rollout: its trajectories by state, its tokens, its time."""
        with _wrong_method(request, rollout_id, "/export"):
            return await trajectories.rollout(rollout_id)

    @app.delete("/v1/rollouts/{rollout_id:path}", tags=["trajectories"])
    async def abort_rollout(trajectories: _Here, rollout_id: str, request: Request) -> dict[str, Any]:
        """Abort every active trajectory of a rollout."""
        with _wrong_method(request, rollout_id, "/export"):
            return {"id": rollout_id, "num_aborted": await trajectories.abort_rollout(rollout_id)}


@contextmanager
def _wrong_method(request: Request, given_id: str, *posted: str) -> Iterator[None]:
    """Turns the 404 of an id into a 405 if it ends as the path of a route that only takes POST. Ids may contain
    slashes, so that one of that name may also be known.
    """
    try:
        yield
    except Refused as refused:
        if refused.error.status == 404 and given_id.endswith(posted):
            raise method_not_allowed(request.method, request.url.path[:200], "POST") from None
        raise
