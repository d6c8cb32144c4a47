"""The controller's own HTTP API: the state of the fleet, what a plan would do, and operators' requests."""

import hmac
import time
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from controller.desired import Refused
from controller.journal import JournalAway
from controller.loop import Controller
from controller.report import alarms, proposal_json, status, steps_in_words
from engines.validation_errors import in_words

Tp = Annotated[int, Field(ge=1, le=1024)]


class Scale(BaseModel):
    """A fleet by the TP sizes of its engines (an empty one only with `empty`), or `plans`: let plans decide again."""

    model_config = ConfigDict(extra="forbid")

    tps: list[Tp] | None = Field(None, max_length=4096)
    plans: bool = False
    empty: bool = False


class DrainOne(BaseModel):
    """A server to drain and stop."""

    model_config = ConfigDict(extra="forbid")

    server: str


def build_api(controller: Controller, admin_key: SecretStr | None) -> FastAPI:
    """The application. Without an admin key it is read-only."""
    app = FastAPI(title="Heddle fleet controller", version=version("heddle"), redoc_url=None)

    @app.exception_handler(_No)
    async def denied(_: Any, no: _No) -> Response:
        return JSONResponse({"error": {"message": no.message}}, no.status)

    @app.exception_handler(Refused)
    async def refused(_: Any, refusal: Refused) -> Response:
        return JSONResponse({"error": {"message": str(refusal)}}, 409)

    @app.exception_handler(JournalAway)
    async def unwritten(_: Any, fault: JournalAway) -> Response:
        return JSONResponse({"error": {"message": f"Nothing was changed: {fault}."}}, 503)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        message = _mistake(error.errors()[0], request.headers.get("content-type", ""))
        return JSONResponse({"error": {"message": message}}, 400)

    def need_admin(authorization: Annotated[str, Header()] = "") -> None:
        if admin_key is None:
            raise _No(403, "This needs the admin key, and the controller was started without one (HEDDLE_ADMIN_KEY).")
        given = authorization.removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), admin_key.get_secret_value().encode()):
            raise _No(401, "This needs the admin key.")

    admin = [Depends(need_admin)]

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """Whether the process is alive, and its alarms."""
        found = alarms(controller, time.time())
        return {"status": "alarm" if found else "ok", "alarms": found}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(_metrics(controller), media_type="text/plain; version=0.0.4")

    @app.get("/v1/fleet")
    async def fleet() -> dict[str, Any]:
        """The state of the fleet."""
        return status(controller, time.time())

    @app.get("/v1/plan")
    async def plan(tps: Annotated[list[Tp] | None, Query()] = None, empty: bool = False) -> dict[str, Any]:
        """The last plan, and each step to it; with `tps`, or `empty`, each step that `scale` to it would take."""
        proposal = controller.proposal
        planned = None if isinstance(proposal, str) else list(proposal.tps)
        sizes = [] if empty else tps if tps is not None else planned
        is_scaled = empty or tps is not None
        rounds = [] if sizes is None else controller.desired.steps_to(sizes, controller.observed(), is_scaled)
        lines = steps_in_words(rounds, controller.journal.state, controller.seen)
        return {"proposal": proposal_json(proposal), "tps": sizes, "steps": lines}

    @app.post("/v1/scale", dependencies=admin)
    async def scale(asked: Scale) -> dict[str, Any]:
        """Set a fleet of these sizes, until another one is requested; or let plans decide. Needs the admin key."""
        desired = controller.desired
        if (asked.tps is None) != asked.plans:
            raise _No(400, "Give either 'tps' or 'plans'.")
        if asked.tps == [] and not asked.empty:
            raise _No(400, "This ends every engine of the fleet. To confirm, set 'empty' as well (--empty).")
        seen = controller.observed()
        controller.ask(desired.let_plans_decide(seen) if asked.tps is None else desired.scaled(asked.tps, seen))
        return status(controller, time.time())

    @app.post("/v1/drain", dependencies=admin)
    async def drain(asked: DrainOne) -> dict[str, Any]:
        """Drain and stop a server; its devices stay unused until the fleet is scaled. Needs the admin key."""
        controller.ask(controller.desired.drained(asked.server, controller.observed()))
        return status(controller, time.time())

    return app


class _No(Exception):
    """An error response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def _mistake(first: Any, content_type: str) -> str:
    if first["type"] == "json_invalid":
        return f"The body is not valid JSON: {first['ctx']['error']}: char {first['loc'][-1]}."
    if first["loc"] == ("body",) and "json" not in content_type:
        return "The body must be JSON, sent with 'content-type: application/json'."
    if first["loc"] == ("body",) and first["type"] == "missing":
        return "The request has no body; it must be a JSON object."
    where = ".".join(map(str, first["loc"][1:]))
    said = in_words(first, table="a JSON object")
    return f"{where}: {said}" if where else said


def _metrics(controller: Controller) -> str:
    told = status(controller, time.time())
    states: dict[str, int] = {}
    for server in told["servers"]:
        states[server["state"]] = states.get(server["state"], 0) + 1
    lines = _head("heddle_fleet_servers", "Servers of the fleet in each state.")
    lines += [f'heddle_fleet_servers{{state="{state}"}} {count}' for state, count in sorted(states.items())]
    lines += _head("heddle_fleet_reached", "1 while the fleet is the one that is wanted, else 0.")
    lines += [f"heddle_fleet_reached {int(told['is_reached'])}"]
    lines += _head("heddle_fleet_alarm", "1 for each alarm that is raised; docs/controller.md explains them.")
    lines += [f'heddle_fleet_alarm{{alarm="{alarm}"}} 1' for alarm in sorted(told["alarms"])]
    lines += _head("heddle_fleet_phase_seconds", "Median duration of recent steps of this kind, by TP size.")
    lines += [
        f'heddle_fleet_phase_seconds{{phase="{one["phase"]}",tp="{one["tp"]}"}} {one["median"]}'
        for one in told["phase_seconds"]
    ]
    return "\n".join(lines) + "\n"


def _head(name: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
