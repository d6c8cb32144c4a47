"""A simulated engine server: an ASGI app that speaks vLLM's or SGLang's dialect, and the ways to run it."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn

from engines.listener import bound
from engines.quiet_server import QuietServer
from engines.simulated.data_parallel import data_parallel_routes
from engines.simulated.exchange import AnswerSpoiled, ApiError, Exchange, Receive, Send
from engines.simulated.faults import FaultBox
from engines.simulated.kv_transfer import FETCH
from engines.simulated.routes import Routes
from engines.simulated.service import EngineService
from engines.simulated.settings import SimulatedEngineSettings
from engines.simulated.sglang_dialect import SglangDialect
from engines.simulated.sglang_routes import sglang_routes
from engines.simulated.vllm_dialect import VllmDialect
from engines.simulated.vllm_routes import vllm_routes

logger = logging.getLogger(__name__)

App = Callable[[Any, Receive, Send], Awaitable[None]]


def build_app(settings: SimulatedEngineSettings) -> App:
    """The ASGI app of one simulated server, with the routes of its dialect and `/simulate/faults`."""
    services = [EngineService(settings, rank) for rank in range(settings.data_parallel_size)]
    dialects, tables = zip(*map(_dialect_and_routes, services), strict=True)
    dialect = dialects[0]
    routes = tables[0] if len(tables) == 1 else data_parallel_routes(tables, settings.dialect)
    faults = FaultBox(settings.faults, settings.seed)
    routes.update(faults.routes())
    paths = {path for _, path in routes}
    kv = services[0].kv

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            handler = routes.get((exchange.method, exchange.path))
            if handler is None and kv is not None and exchange.path.startswith(FETCH):
                handler = kv.fetch
            if handler is None:
                await _answer_unknown_route(exchange, paths)
                return
            if settings.api_key is not None and dialect.is_guarded(exchange.path):
                _check_key(exchange, settings.api_key)
            await faults.meet(exchange)
            await handler(exchange)
        except AnswerSpoiled:
            return
        except ApiError as error:
            await exchange.respond(dialect.error_body(error, exchange.path), error.status)
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            if exchange.has_started:
                raise
            failure = ApiError(500, "Internal server error", "InternalServerError")
            await exchange.respond(dialect.error_body(failure, exchange.path), 500)

    return app


def _dialect_and_routes(service: EngineService) -> tuple[VllmDialect | SglangDialect, Routes]:
    match service.settings.dialect:
        case "vllm":
            vllm = VllmDialect(service)
            return vllm, vllm_routes(service, vllm)
        case "sglang":
            sglang = SglangDialect(service)
            return sglang, sglang_routes(service, sglang)


@contextlib.asynccontextmanager
async def serve_engine(settings: SimulatedEngineSettings, port: int = 0) -> AsyncIterator[str]:
    """Runs a simulated engine in this process; yields its base URL without `/v1`. Port 0: any free one.

    Leaving the context kills the engine: everything under way breaks off.
    """
    sock = bound("127.0.0.1", port)
    server = QuietServer(_config(settings))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started:  # uvicorn has no event for it
            if task.done():
                task.result()
            await asyncio.sleep(0.002)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task
        # A dead engine answers nothing: connections in use break, as when a process dies.
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        if tasks := list(server.server_state.tasks):
            _, asleep = await asyncio.wait(tasks, timeout=0.1)
            for sleeper in asleep:  # in a slow fault, or waiting for the end of a pause
                sleeper.cancel()
        sock.close()


def run(settings: SimulatedEngineSettings, address: socket.socket) -> None:
    """Runs a simulated engine at a `bound` address until it is interrupted."""
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(_config(settings)).run(sockets=[address])


def _config(settings: SimulatedEngineSettings) -> uvicorn.Config:
    return uvicorn.Config(build_app(settings), **_options(settings))


def _options(settings: SimulatedEngineSettings) -> dict[str, Any]:
    return {
        "log_level": "warning",
        "access_log": False,
        "lifespan": "off",
        "ws": "none",
        "http": "httptools",
        "timeout_keep_alive": settings.keep_alive_s,
        "server_header": False,
        "proxy_headers": False,
        "timeout_graceful_shutdown": 1,  # vLLM's default is to abort at once
    }


async def _answer_unknown_route(exchange: Exchange, paths: set[str]) -> None:
    """Answer in the web framework's own form, regardless of the API."""
    if exchange.path in paths:
        await exchange.respond_json({"detail": "Method Not Allowed"}, 405)
    else:
        await exchange.respond_json({"detail": "Not Found"}, 404)


def _check_key(exchange: Exchange, api_key: str) -> None:
    if exchange.header(b"authorization") != f"Bearer {api_key}":
        raise ApiError(401, "Unauthorized", "Unauthorized")
