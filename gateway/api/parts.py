"""What the routes read and do, which belongs to one gateway and comes with each request.

The routes themselves are built once for the process, when their modules are imported: FastAPI takes 0.1 s for them.
"""

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.access import Access


def part(kind: type) -> Any:
    """The gateway's part of this class, for the annotation of a route's parameter."""

    async def of_this_gateway(request: Request) -> Any:
        return request.state.parts[kind]

    return Depends(of_this_gateway)


def with_parts(app: ASGIApp, parts: Iterable[object]) -> ASGIApp:
    """The application of the gateway that has these parts."""
    known = {type(one): one for one in parts}

    async def of_this_gateway(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {"parts": known}}, receive, send)

    return of_this_gateway


async def _need_admin(request: Request, access: Annotated[Access, part(Access)]) -> None:
    access.admin(request.scope["headers"])


NEED_ADMIN = [Depends(_need_admin)]
