"""Serves pages of other origins, such as a dashboard in a browser, which may read answers only if this allows it.

Browsers send `Origin`. Requests with it reach the gateway over ASGI, through Starlette's middleware, which answers
preflights and marks answers, including those of turns. All other requests, such as those of agents, take the usual
path.
"""

from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from gateway.front import Front
from gateway.http.client import Receive, Send
from gateway.http.exchange import Exchange

_METHODS = ("GET", "POST", "DELETE")
_SHOWN = (
    "x-request-id",
    "x-trajectory-id",
    "x-heddle-engine",
    "x-heddle-queued-ms",
    "x-heddle-num-forgotten",
    "retry-after",
    "x-should-retry",
)


class CrossOrigin:
    """A front that pages of some origins may use.

    Args:
        origins: each a scheme, a host and optionally a port; `*` for all.
    """

    def __init__(self, front: Front, origins: Sequence[str]) -> None:
        self._front = front
        self._marked = CORSMiddleware(
            self._by_asgi, allow_origins=origins, allow_methods=_METHODS, allow_headers=["*"], expose_headers=_SHOWN
        )

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await (self._marked if _has_origin(scope) else self._front)(scope, receive, send)

    def take(self, exchange: Exchange) -> bool:
        """As the front's; it writes below ASGI, where answers are not marked, so requests with an origin are left to
        ASGI.
        """
        return not _has_origin(exchange.scope) and self._front.take(exchange)

    async def _by_asgi(self, scope: Any, receive: Any, send: Any) -> None:
        await self._front({**scope, "extensions": {}}, receive, send)


def _has_origin(scope: Any) -> bool:
    return any(name == b"origin" for name, _ in scope.get("headers", ()))
