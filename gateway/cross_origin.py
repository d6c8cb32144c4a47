"""Pages of other origins: a dashboard in a browser, say, which may read answers only if these allow it.

Browsers say `Origin`. Such requests go to the gateway by way of ASGI, through Starlette's middleware, which answers
preflights and marks answers, those of turns too. All others, which is what agents send, go as they always go.
"""

from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from gateway.front import Front
from gateway.http.client import Receive, Send
from gateway.http.exchange import Exchange

_METHODS = ("GET", "POST", "DELETE")
_SHOWN = ("x-request-id", "x-trajectory-id", "x-heddle-engine", "x-heddle-queued-ms", "retry-after", "x-should-retry")


class CrossOrigin:
    """A front that pages of some origins may ask.

    Args:
        origins: each a scheme, a host and perhaps a port; `*` for all.
    """

    def __init__(self, front: Front, origins: Sequence[str]) -> None:
        self._front = front
        self._marked = CORSMiddleware(
            self._by_asgi, allow_origins=origins, allow_methods=_METHODS, allow_headers=["*"], expose_headers=_SHOWN
        )

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await (self._marked if _has_origin(scope) else self._front)(scope, receive, send)

    def take(self, exchange: Exchange) -> bool:
        """As the front's, which writes below ASGI, where no answer is marked."""
        return not _has_origin(exchange.scope) and self._front.take(exchange)

    async def _by_asgi(self, scope: Any, receive: Any, send: Any) -> None:
        await self._front({**scope, "extensions": {}}, receive, send)


def _has_origin(scope: Any) -> bool:
    return any(name == b"origin" for name, _ in scope.get("headers", ()))
