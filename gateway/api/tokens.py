"""The API for trainers: a trajectory's tokens, a rollout's tokens as a file, and rewards."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gateway.api.given import storable
from gateway.api.parts import part
from gateway.api.trajectories import entries_of, entry_of, recorded
from gateway.config import Settings
from gateway.http.refusals import not_acceptable, store_fault
from gateway.passes import Passes
from gateway.state import ledger as ledgers
from gateway.state.ledger import Ledger
from gateway.tokens.book import TokenBook
from gateway.tokens.branches import tree
from gateway.tokens.export import jsonl, parquet
from gateway.tokens.parquet import ParquetFile
from scheduling.scheduler import Scheduler
from scheduling.types import TrajectoryState
from store.port import Store, StoreError

JSONL, PARQUET = "application/jsonl", "application/vnd.apache.parquet"

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Reward(BaseModel):
    """What a trajectory was worth."""

    model_config = ConfigDict(extra="forbid")

    reward: _Number
    components: Annotated[dict[str, _Number], AfterValidator(storable)] = {}
    metadata: Annotated[dict[str, Any], AfterValidator(storable)] = {}


class Tokens:
    """What the routes read and do."""

    def __init__(
        self,
        settings: Settings,
        scheduler: Scheduler,
        ledger: Ledger,
        store: Store,
        book: TokenBook,
        passes: Passes,
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._ledger = ledger
        self._store = store
        self._book = book
        self._passes = passes

    async def tree(self, trajectory_id: str) -> bytes:
        """All turns of a trajectory, as JSON. Raises Refused (404, 503)."""
        entry = entry_of(trajectory_id, self._ledger)
        try:
            turns = await self._book.turns(trajectory_id)
        except StoreError as error:
            raise store_fault(error) from error
        return orjson.dumps(tree(entry, turns), option=orjson.OPT_SERIALIZE_NUMPY)

    async def reward(self, trajectory_id: str, reward: Reward) -> dict[str, Any]:
        """Keep a reward, of which the last one counts, and show its trajectory once the record has it. Raises Refused
        (404, 503).
        """
        entry = entry_of(trajectory_id, self._ledger)
        self._ledger.rewarded(trajectory_id, reward.model_dump())
        shown = ledgers.as_json(entry)
        await recorded(self._store, self._settings.settle_timeout_s)
        return shown

    async def export(self, rollout_id: str, state: TrajectoryState | None, as_parquet: bool) -> AsyncIterator[bytes]:
        """A rollout's trajectories in the order of their ids, as a file in parts. Raises Refused (404, 406)."""
        entries = await entries_of(rollout_id, self._ledger, self._passes)
        chosen = [entry for entry in entries if state is None or entry.record.state is state]
        chosen.sort(key=lambda entry: entry.record.trajectory_id)
        if not as_parquet:
            return jsonl(chosen, self._book)
        try:
            return parquet(ParquetFile(), chosen, self._book)
        except ImportError:
            raise not_acceptable(
                "The gateway needs pyarrow to write Parquet: pip install pyarrow. JSONL works without it."
            ) from None

    def num_forgotten(self, rollout_id: str) -> int:
        """How many of a rollout's trajectories no export has any more."""
        return self._scheduler.num_forgotten(rollout_id)


_Here = Annotated[Tokens, part(Tokens)]


def add_tokens(app: FastAPI) -> None:
    """Add the routes; must precede those of trajectories, whose paths would swallow these."""

    @app.get("/v1/trajectories/{trajectory_id:path}/tokens", tags=["training"])
    async def trajectory_tokens(tokens: _Here, trajectory_id: str) -> Response:
        """All turns of a trajectory at token level: ids, log-probabilities, loss mask, weight versions, branches."""
        return Response(await tokens.tree(trajectory_id), media_type="application/json")

    @app.post("/v1/trajectories/{trajectory_id:path}/reward", tags=["training"])
    async def reward(tokens: _Here, trajectory_id: str, reward: Reward) -> dict[str, Any]:
        """Report what a trajectory was worth; the last reward counts."""
        return await tokens.reward(trajectory_id, reward)

    @app.post(
        "/v1/rollouts/{rollout_id:path}/export",
        tags=["training"],
        response_class=StreamingResponse,
        responses={
            200: {"description": "One record for each branch", "content": {JSONL: {}, PARQUET: {}}},
            406: {"description": "No such form of file here"},
        },
    )
    async def export(
        tokens: _Here,
        rollout_id: str,
        accept: Annotated[str, Header()] = "",
        form: Annotated[Literal["jsonl", "parquet"] | None, Query(alias="format")] = None,
        state: TrajectoryState | None = None,
    ) -> StreamingResponse:
        """The tokens of a rollout's trajectories, one record for each branch, as JSON lines or Parquet.

        `x-heddle-num-forgotten` tells how many trajectories of the rollout were forgotten, and are not in it.
        """
        as_parquet = form == "parquet" if form else "parquet" in accept
        parts = await tokens.export(rollout_id, state, as_parquet)
        try:  # while the status can still report that the store is away
            first = await anext(parts, b"")
        except StoreError as error:
            raise store_fault(error) from error
        told = {"x-heddle-num-forgotten": str(tokens.num_forgotten(rollout_id))}
        return StreamingResponse(_with(first, parts), headers=told, media_type=PARQUET if as_parquet else JSONL)


async def _with(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for following in parts:
        yield following
