"""A simulated engine that records every request, and answers from scripts where a test needs other answers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvicorn

from engines.quiet_server import QuietServer
from engines.simulated.server import build_app
from engines.simulated.settings import SimulatedEngineSettings

# What the gateway requests on its own, to watch its engines.
_WATCHING = frozenset({"/v1/models", "/metrics", "/v1/loads", "/server_info", "/weight_info", "/model_info"})
Play = Callable[["Asked", Callable[[bytes], Awaitable[None]]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it arrived: the path undecoded, header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass(frozen=True, slots=True)
class Script:
    """An answer in place of the simulated one. `play` writes pieces of the body at its own pace."""

    play: Play
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"text/event-stream; charset=utf-8"),)


@dataclass
class RecordedEngine:
    """The engine's address, the requests it got, and its scripts by path."""

    url: str = ""
    seen: list[Asked] = field(default_factory=list)
    scripts: dict[str, Script] = field(default_factory=dict)

    @property
    def turns(self) -> list[Asked]:
        """The POST requests, one for each leg, without those that only render or parse tokens."""
        return [asked for asked in self.seen if asked.method == "POST" and not asked.path.endswith("render")]


def fixed(status: int, body: bytes, content_type: bytes = b"application/json") -> Script:
    """A script that always answers the same, at once."""

    async def play(_: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        await write(body)

    return Script(play, status, ((b"content-type", content_type),))


@asynccontextmanager
async def recorded_engine(settings: SimulatedEngineSettings) -> AsyncIterator[RecordedEngine]:
    """Run such an engine in this process."""
    engine = RecordedEngine()
    simulated = build_app(settings)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, messages = b"", []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            body += messages[-1].get("body", b"")
        raw_path = scope["raw_path"].decode("latin-1")
        asked = Asked(scope["method"], raw_path, {k.decode(): v.decode("latin-1") for k, v in scope["headers"]}, body)
        is_probe = (raw_path.endswith("render") and body == b"{}") or b'"background":true' in body
        if not is_probe and (asked.method != "GET" or raw_path.partition("?")[0] not in _WATCHING):
            engine.seen.append(asked)
        script = engine.scripts.get(scope["path"])
        if script is not None:
            await _play(script, asked, send)
            return

        async def replayed() -> Any:
            return messages.pop(0) if messages else await receive()

        # The simulated engine uses the transport behind `send`, so it gets uvicorn's own `send`.
        await simulated(scope, replayed, send)

    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none", http="httptools")
        server = QuietServer(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
                await asyncio.sleep(0.002)
            engine.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield engine
        finally:
            server.should_exit = server.force_exit = True
            await task


async def _play(script: Script, asked: Asked, send: Any) -> None:
    await send({"type": "http.response.start", "status": script.status, "headers": list(script.headers)})

    async def write(piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    await script.play(asked, write)
    await send({"type": "http.response.body", "body": b""})
