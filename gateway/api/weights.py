"""The API of weight updates."""

import re
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engines.sleep import AS_STARTED
from engines.weights import STARTED_WITH, NewWeights, UpdateMode
from gateway.api.given import storable
from gateway.api.parts import NEED_ADMIN, part
from gateway.http.errors import api_error
from gateway.weights.updates import Update, WeightUpdates

_VERSION = r"^[\x21-\x7e]+$"


def _sendable(version: str) -> str:
    if not re.search(_VERSION, version):
        raise ValueError(f"must be printable ASCII without spaces, not {version[:100]!r}")
    if version in (STARTED_WITH, AS_STARTED):
        raise ValueError(f"must not be {version!r}, as engines call the weights that they were started with")
    return version


class Order(BaseModel):
    """New weights for the fleet."""

    model_config = ConfigDict(extra="forbid")

    version: Annotated[
        str, Field(min_length=1, max_length=256, json_schema_extra={"pattern": _VERSION}), AfterValidator(_sendable)
    ]
    path: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    transfer: Annotated[dict[str, Any], AfterValidator(storable)] | None = None
    transfer_of: Annotated[
        dict[str, dict[str, Any]], AfterValidator(storable), Field(description="Merged into `transfer`, by engine id.")
    ] = {}
    engines: Annotated[list[str] | None, Field(min_length=1, max_length=10_000)] = None
    mode: UpdateMode = UpdateMode.KEEP
    wait: Annotated[
        bool, Field(description="Answer when the update has ended; false: answer at once, and `GET` shows how it goes.")
    ] = True

    @model_validator(mode="after")
    def _has_one_source(self) -> "Order":
        if (self.path is None) == (self.transfer is None):
            raise ValueError("Give either 'path' or 'transfer'")
        if self.transfer_of and self.transfer is None:
            raise ValueError("'transfer_of' needs 'transfer'")
        return self


_Here = Annotated[WeightUpdates, part(WeightUpdates)]


def add_weights(app: FastAPI) -> None:
    """Add the routes."""

    @app.post(
        "/v1/weights",
        tags=["fleet"],
        dependencies=NEED_ADMIN,
        responses={202: {"description": "It runs"}, 502: {"description": "No engine took the weights"}},
    )
    async def update(weights: _Here, order: Order) -> JSONResponse:
        """Give the fleet new weights while turns run; safe to repeat. Needs the admin key.

        200: done, or some engines failed and are held. 202: it runs. 409: another update runs. 502: no engine took
        them.
        """
        given = NewWeights(order.version, order.mode, order.path, order.transfer)
        await weights.fleet_known()
        begun = weights.begin(given, order.engines, order.transfer_of)
        if order.wait:
            await weights.finished(begun)
        return _answered(begun)

    @app.get("/v1/weights", tags=["fleet"])
    async def current(weights: _Here) -> dict[str, Any]:
        """The current version, each engine's version, and how the last update went or goes."""
        return weights.view()


def _answered(update: Update) -> JSONResponse:
    match update.status():
        case "running":
            return JSONResponse(update.view(), 202)
        case "failed":
            reasons = [one.error for one in update.engines.values() if one.error] or ["none of the engines is there"]
            error = api_error(502, f"No engine took weights {update.weights.version!r}: {reasons[0]}", "weights_failed")
            return JSONResponse({"error": error.openai(), **update.view()}, 502)
    return JSONResponse(update.view())
