"""The API beside the hot routes, all in FastAPI: health, metrics and models here, the rest in the modules beside it."""

from functools import cache
from typing import Annotated, Any

import orjson
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from engines.validation_errors import in_words, meant, names_at
from gateway import metrics as metrics_page
from gateway.api.dashboard import PAGE_PATHS, add_dashboard
from gateway.api.fleet import add_fleet
from gateway.api.openapi import declare_hot_routes
from gateway.api.parts import NEED_ADMIN, part
from gateway.api.tokens import add_tokens
from gateway.api.trajectories import add_trajectories
from gateway.api.weights import add_weights
from gateway.config import Settings
from gateway.fleet.fleet import Fleet, UnknownEngine
from gateway.fleet.server import EngineState
from gateway.http.access import Access
from gateway.http.errors import api_error, error_body
from gateway.http.refusals import (
    Refused,
    bad_request,
    internal_error,
    method_not_allowed,
    not_found,
    unreadable,
)
from gateway.metrics import Metrics
from gateway.passthrough import PASSTHROUGH_ROUTES
from gateway.state.driver import Driver
from gateway.tokens.book import TokenBook
from gateway.turns.request_reader import lacks_model
from gateway.turns.turns import TURN_ROUTES
from gateway.version import VERSION
from store.port import Store

# Tags of the routes that an agent key may use. The others show or change what a policy in training must not.
_OF_AGENTS = frozenset({"openai", "health"})
# Tags of the routes that refuse parameters other than their own.
_STRICT = frozenset({"trajectories", "training", "fleet"})
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, text in (
        (400, "Bad request"),
        (401, "No key, or a wrong one"),
        (403, "Needs a client key, or the admin key"),
        (404, "Not found"),
        (408, "The body stopped arriving"),
        (409, "Conflict"),
        (413, "The body is too large"),
        (415, "The body is compressed"),
        (431, "The headers are too large"),
        (500, "The gateway failed"),
    )
}


class Health:
    """The gateway's health."""

    def __init__(
        self, settings: Settings, driver: Driver, fleet: Fleet, store: Store, metrics: Metrics, book: TokenBook
    ) -> None:
        self.fleet = fleet
        self.metrics = metrics
        self._settings = settings
        self._driver = driver
        self._store = store
        self._book = book

    @property
    def is_fenced(self) -> bool:
        """Whether another gateway has taken over, so that this one takes no more requests."""
        return self._store.is_fenced

    def view(self) -> dict[str, Any]:
        """Health as the API shows it; available even while the store is away."""
        store = self._store.health()
        engines = self.fleet.members()
        return {
            "status": "fenced" if self.is_fenced else "ok" if store.ok else "degraded",
            "version": VERSION,
            "policy": self._settings.policy,
            "store": {
                "ok": store.ok,
                "detail": store.detail,
                "num_pending": store.num_pending,
                "lag_s": store.lag_s,
                "num_dropped": store.num_dropped,
                "num_losses": store.num_losses,
            },
            "tokens": self._book.view(),
            "engines": {state.value: sum(member.server.state is state for member in engines) for state in EngineState},
            "waiting_turns": self._driver.scheduler.num_waiting,
        }


_Here = Annotated[Health, part(Health)]


@cache
def build_api() -> FastAPI:
    """The FastAPI application, one for all gateways of the process; see `with_parts`."""
    app = FastAPI(
        title="Heddle",
        version=VERSION,
        description="An OpenAI-compatible gateway for agentic RL rollouts.",
        redoc_url=None,
        redirect_slashes=False,  # the path has lost its identity, and a proxy may have another host
        default_response_class=_Json,
        responses=_ERRORS,
        dependencies=[Depends(_no_agent), Depends(_no_other_parameters)],
    )
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _defect)
    app.add_exception_handler(UnknownEngine, _unknown_engine)
    _add_health(app)
    _add_models(app)
    add_tokens(app)  # before the trajectories, whose paths would swallow its own
    add_trajectories(app)
    add_fleet(app)
    add_weights(app)
    add_dashboard(app)
    declare_hot_routes(app)
    return app


def _add_health(app: FastAPI) -> None:
    fenced: dict[int | str, Any] = {503: {"description": "Another gateway has taken over the store"}}
    not_ready: dict[int | str, Any] = {503: {"description": "No engine is ready, or another gateway has taken over"}}

    @app.get("/healthz", tags=["health"], response_model=dict[str, Any], responses=fenced)
    async def healthz(health: _Here) -> Response:
        """How store and engines are: 200 while the process lives, unless another gateway has taken over its store."""
        return _Json(health.view(), status_code=503 if health.is_fenced else 200)

    @app.get("/readyz", tags=["health"], responses=not_ready)
    async def readyz(health: _Here) -> Response:
        """200 while at least one engine can take turns."""
        ready = bool(health.fleet.serving(None)) and not health.is_fenced
        return _Json({"ready": ready}, status_code=200 if ready else 503)

    @app.get("/health", tags=["health"], responses=not_ready)
    async def engine_health(health: _Here) -> Response:
        """Like `/readyz`: the route that clients of engines poll before they begin."""
        return await readyz(health)

    @app.get("/metrics", tags=["health"], response_class=Response)
    async def metrics(health: _Here) -> Response:
        """The metrics page for Prometheus."""
        return Response(health.metrics.page(), media_type=metrics_page.CONTENT_TYPE)


def _add_models(app: FastAPI) -> None:
    def card(fleet: Fleet, model_id: str) -> dict[str, Any]:
        limit = fleet.models()[model_id].max_context_tokens
        return {"id": model_id, "object": "model", "created": 0, "owned_by": "heddle", "max_model_len": limit}

    @app.get("/v1/models", tags=["openai"])
    async def models(health: _Here) -> dict[str, Any]:
        """The models that the fleet serves."""
        return {"object": "list", "data": [card(health.fleet, model_id) for model_id in sorted(health.fleet.models())]}

    @app.get("/v1/models/{model_id:path}", tags=["openai"])
    async def model(health: _Here, model_id: str) -> dict[str, Any]:
        """One model."""
        if model_id not in health.fleet.models():
            raise lacks_model(health.fleet, model_id)
        return card(health.fleet, model_id)


class _Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, default=str)


def _refused_response(refused: Refused) -> Response:
    headers = {name.decode(): value.decode() for name, value in refused.headers()}
    return Response(error_body("other", refused.error), refused.error.status, headers, "application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _refused_response(error)


async def _unknown_engine(_: Request, error: Exception) -> Response:
    return _refused_response(not_found(f"{error}; GET /v1/engines lists them."))


async def _defect(_: Request, error: Exception) -> Response:
    return _refused_response(internal_error())


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = {method for route in request.app.routes for method in _methods(route, request)}
        if "GET" in allowed and request.method != "HEAD":  # HEAD arrives here only if GET is not served (front.py)
            allowed.add("HEAD")
        return _refused_response(method_not_allowed(request.method, request.url.path[:200], ", ".join(sorted(allowed))))
    if error.status_code == 404:
        said = f"Unknown route: {request.method} {request.url.path[:200]}.{_meant(request)}"
        return _refused_response(not_found(said, "unknown_route"))
    if error.status_code == 400 and error.__cause__ is not None:  # FastAPI cannot decode the body
        return _refused_response(unreadable(request.scope["headers"], str(error.__cause__)))
    response = _refused_response(Refused(api_error(error.status_code, error.detail)))
    response.headers.update(error.headers or {})
    return response


def _methods(route: Any, request: Request) -> set[str]:
    """The methods that a route serves for this request's path; empty if its path differs."""
    return set() if route.matches(request.scope)[0] is Match.NONE else getattr(route, "methods", None) or set()


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: Any = error.errors()[0]
    if first["type"] == "json_invalid":
        why = f"{first['ctx']['error']}: char {first['loc'][-1]}"
        return _refused_response(unreadable(request.scope["headers"], why))
    if first["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
        return _refused_response(bad_request("The body must be JSON, sent with 'content-type: application/json'."))
    if first["loc"] == ("body",) and first["type"] == "missing":
        return _refused_response(bad_request("The request has no body; it must be a JSON object."))
    where = ".".join(map(str, first["loc"][1:]))
    said = in_words(first, _fields_beside(request, first["loc"]), "a JSON object")
    if not where and first["type"] != "value_error":
        said = f"The request body {said}"
    said = said if said.endswith("?") else f"{said}."
    return _refused_response(bad_request(f"{where}: {said}" if where else said, where or None))


def _fields_beside(request: Request, place: tuple[int | str, ...]) -> list[str]:
    """The names that there are where the one at this place is unknown."""
    given = request.scope["route"].dependant.body_params
    model = given[0].field_info.annotation if len(given) == 1 else None
    return names_at(model, place[1:]) if isinstance(model, type) and issubclass(model, BaseModel) else []


async def _no_agent(request: Request, access: Annotated[Access, part(Access)]) -> None:
    """Raises Refused (403) for an agent key, unless the route is for agents, or says itself that it needs more."""
    route = request.scope["route"]
    if _OF_AGENTS.isdisjoint(route.tags) and route.path not in PAGE_PATHS and NEED_ADMIN[0] not in route.dependencies:
        access.beyond_turns(request.scope["headers"])


async def _no_other_parameters(request: Request) -> None:
    """Raises Refused (400) for a parameter that the route does not have, or that is given more than once: a slip, or
    all values but the last, would otherwise be passed over.

    Scrapers, load balancers and SDKs send some of their own to the other routes, and clients of other gateways to
    theirs (/finish_session).
    """
    route = request.scope["route"]
    if _STRICT.isdisjoint(route.tags) or not route.path.startswith("/v1/"):
        return
    known = [parameter.alias for parameter in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            hint = meant(name, known) or ("; known: " + ", ".join(known) if known else "")
            raise bad_request(f"{name[:100]}: unknown{hint}{'' if hint.endswith('?') else '.'}", name[:100])
        if len(request.query_params.getlist(name)) > 1:
            raise bad_request(f"{name}: given more than once.", name)


def _meant(request: Request) -> str:
    """Of a path that has one /v1 too few, or too many: the route that there is."""
    path = request.url.path
    for other in (f"/v1{path}", path.removeprefix("/v1")):
        if other != path and (other in TURN_ROUTES or other in PASSTHROUGH_ROUTES or other == "/v1/models"):
            count = "few" if len(other) > len(path) else "many"
            return f" Did you mean {other}? Then the client's base URL has one /v1 too {count}."
    return ""
