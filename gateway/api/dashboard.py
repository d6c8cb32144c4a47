"""The dashboard's page, and the overview that it shows."""

from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse

from gateway.api.parts import part
from gateway.dashboard.overview import Overview

# Nothing but its own files, and nothing from elsewhere. It asks for nothing but this gateway's API.
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
}
_FILES = {
    "/dashboard": ("page.html", "text/html"),
    "/dashboard/page.css": ("page.css", "text/css"),
    "/dashboard/page.js": ("page.js", "text/javascript"),
}
# The page has no figures, so it needs no key: it asks for one if the gateway does.
PAGE_PATHS = frozenset({"/", *_FILES})


def add_dashboard(app: FastAPI) -> None:
    """Add the routes."""

    @app.get("/v1/overview", tags=["fleet"])
    async def overview(overview: Annotated[Overview, part(Overview)]) -> dict[str, Any]:
        """The work at hand: turns, trajectories and rollouts, the trajectories with the most work left, and the load of
        the last hour. Made anew at most once a second.
        """
        return await overview.look()

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        """Who opens the gateway in a browser gets the dashboard."""
        return RedirectResponse("dashboard")

    for path, (name, kind) in _FILES.items():
        _add_file(app, path, name, kind)


def _add_file(app: FastAPI, path: str, name: str, kind: str) -> None:
    content = files("gateway.dashboard").joinpath(name).read_bytes()

    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)
