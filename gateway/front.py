"""The gateway's ASGI application: the hot routes go straight to `turns`, all others to FastAPI.

FastAPI costs 140 us a request and about as much again per 64-chunk stream, and a turn needs nothing of it. The hot
routes are declared there only for its documentation.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

from gateway.api.dashboard import PAGE_PATHS
from gateway.config import Settings
from gateway.http.access import Access
from gateway.http.client import Client, ClientLeft, Receive, Send
from gateway.http.exchange import Exchange, client_of
from gateway.http.outlet import Outlet
from gateway.http.refusals import (
    Refused,
    bad_request,
    fenced,
    headers_too_large,
    internal_error,
    method_not_allowed,
    shutting_down,
)
from gateway.messages.identity import IdentityError, strip_identity_path
from gateway.metrics import Metrics
from gateway.passthrough import PASSTHROUGH_ROUTES, Passthrough
from gateway.turnlog import TurnLog
from gateway.turns.ids import new_id
from gateway.turns.turns import TURN_ROUTES, Turns
from store import Store, StoreError

App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]
# Health and metrics are for load balancers and scrapers, which have no keys; docs and pages contain no secrets.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/metrics", "/docs", "/openapi.json"}) | PAGE_PATHS

_ENDLESS_PATH = "/v1/events"
_READS = ("GET", "HEAD")


class Front:
    """Checks who asks, and sends each request to the part that serves it.

    Args:
        store: once another gateway has taken it over, only reads are served.
        end_watches: ends the answers that have no end of their own, before a shutdown.
    """

    def __init__(
        self,
        settings: Settings,
        access: Access,
        turns: Turns,
        passthrough: Passthrough,
        api: App,
        metrics: Metrics,
        log: TurnLog,
        store: Store,
        end_watches: Callable[[], None],
    ) -> None:
        self._settings = settings
        # Copied once: reading a setting costs more than comparing it.
        self._max_header_bytes, self._max_body_bytes = settings.max_header_bytes, settings.max_body_bytes
        self._access = access
        self._turns = turns
        self._passthrough = passthrough
        self._api = api
        self._metrics = metrics
        self._log = log
        self._store = store
        self._end_watches = end_watches
        self._watching: set[Client] = set()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._api(scope, receive, send)
            return
        client = client_of(scope, receive, send)
        path = scope["path"]
        try:
            if path.startswith(("/t/", "/sessions/")):
                path = unquote(strip_identity_path(scope["raw_path"].decode("latin-1"))[1])
        except IdentityError as error:
            behind_id = unquote("/" + scope["raw_path"].decode("latin-1").split("/", 3)[3])
            await self._refuse(client, behind_id, bad_request(str(error), code="bad_identity"))
            return
        try:
            await self._serve(scope, client, path, receive, send)
        except ClientLeft:
            return
        except Refused as refused:
            await self._refuse(client, path, refused)
        except asyncio.CancelledError:
            # Uvicorn's, when its shutdown timeout ends; turns that run tell their clients themselves.
            if not isinstance(client, Exchange) or client.response_started:
                raise
            await self._refuse(client, path, shutting_down())

    def end_watches(self) -> None:
        """End the answers that have no end of their own. The connection of a client that takes no more is cut, because
        the shutdown would wait for it as for a turn.
        """
        self._end_watches()
        for client in self._watching:
            if isinstance(client, Exchange) and client.is_full:
                client.cut()

    async def _serve(self, scope: dict[str, Any], client: Client, path: str, receive: Receive, send: Send) -> None:
        """Answer one request. Raises Refused, or ClientLeft."""
        if self._is_head_too_large(scope):
            raise headers_too_large(self._settings.max_header_bytes)
        key = "" if path in OPEN_PATHS else self._access.client(scope["headers"])
        if self._store.is_fenced and scope["method"] not in _READS:
            # This closes the connection; with some of the request unread, that would reset it, and lose the answer.
            await client.read(self._max_body_bytes, self._settings.body_timeout_s)
            raise fenced()
        if path in TURN_ROUTES or path in PASSTHROUGH_ROUTES:
            if scope["method"] != "POST":
                raise method_not_allowed(scope["method"], path, "POST")
            if path in TURN_ROUTES:
                await self._turns.serve(client, path, key)
            else:
                await self._pass(client, path)
            return
        receive = await self._read(client, receive)
        request_id = new_id()
        # FastAPI's routes do not accept HEAD; uvicorn omits the body of its answer.
        method = "GET" if scope["method"] == "HEAD" and path != _ENDLESS_PATH else scope["method"]
        shown = {**scope, "method": method, "path": path, "raw_path": path.encode()}
        if path == _ENDLESS_PATH:
            self._watching.add(client)
        try:
            await self._api(shown, receive, _with_id(send, request_id))
        except StoreError as error:  # in the middle of an export, whose connection breaks
            self._log.broken_off(request_id, str(error))
        except Exception:  # its client has been told
            self._log.defect(request_id)
        finally:
            self._watching.discard(client)

    def take(self, exchange: Exchange) -> bool:
        """Serve a turn request that is complete, without a task; False, with nothing done, for any other."""
        scope = exchange.scope
        path: str = scope["path"]
        if scope["method"] != "POST" or self._store.is_fenced:
            return False
        try:
            if path not in TURN_ROUTES:
                path = unquote(strip_identity_path(scope["raw_path"].decode("latin-1"))[1])
                if path not in TURN_ROUTES:
                    return False
            key = self._access.client(scope["headers"])
        except (IdentityError, Refused):
            return False
        if self._is_head_too_large(scope):
            return False
        body = exchange.body_at_once(self._max_body_bytes)
        if body is None:
            return False
        rest = self._turns.begin(exchange, path, key, body, exchange)
        if rest is not None:
            exchange.spawn(rest)
        return True

    def _is_head_too_large(self, scope: Mapping[str, Any]) -> bool:
        num_bytes = 0
        for name, value in scope["headers"]:
            num_bytes += len(name) + len(value) + 4
        return num_bytes > self._max_header_bytes

    async def _read(self, client: Client, receive: Receive) -> Receive:
        """Read the body within the limits, which FastAPI does not enforce, and hand it to FastAPI. Raises Refused, or
        ClientLeft.
        """
        body = await client.read(self._settings.max_body_bytes, self._settings.body_timeout_s)
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def read_or_receive() -> Any:
            return unread.pop() if unread else await receive()

        return read_or_receive

    async def _pass(self, client: Client, path: str) -> None:
        request_id = new_id()
        outlet = Outlet(client, PASSTHROUGH_ROUTES[path], request_id)
        try:
            await self._passthrough.serve(client, outlet, path)
        except Refused as refused:
            outlet.refuse(refused)
        except ClientLeft:
            return
        except Exception:
            self._log.defect(request_id)
            outlet.refuse(internal_error())
        await client.drain()

    async def _refuse(self, client: Client, path: str, refused: Refused) -> None:
        if path in TURN_ROUTES:
            self._metrics.refused.labels(str(refused.error.status)).inc()
        api = TURN_ROUTES.get(path) or PASSTHROUGH_ROUTES.get(path) or "other"
        Outlet(client, api, new_id()).refuse(refused)
        await client.drain()


def _with_id(send: Send, request_id: str) -> Send:
    async def send_with_id(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
        await send(message)

    return send_with_id
