"""Runs the gateway on a socket until it is told to stop."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop

from engines.listener import bound
from engines.quiet_server import QuietServer
from gateway.app import gateway
from gateway.collector import Collector
from gateway.config import ConfigError, Settings
from gateway.cross_origin import CrossOrigin
from gateway.descriptors import DescriptorStore, descriptor_store
from gateway.http.protocol import bounded_protocol
from gateway.turnlog import LOGGER

# Longer than clients and proxies pool connections (nginx 60 s, openai-python 5 s): they close first, and no request is
# lost.
_KEEP_ALIVE_S = 75
_BACKLOG = 4096
# For all turns of the largest known rollout (6,400) at once.
_ENOUGH_DESCRIPTORS = 2 * 6_400
_LISTENER = "listener"  # its name in the descriptor store


@dataclass(frozen=True, slots=True)
class Listening:
    """A gateway that serves at `url`. Once it shuts down, `hurry` ends its patience with what still runs."""

    url: str
    hurry: Callable[[], None]


class _Server(QuietServer):
    """A server whose shutdown can be cut short."""

    def hurry(self) -> None:
        """End its shutdown now, as at the end of its timeout."""
        self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for task in self.server_state.tasks:  # which uvicorn leaves alone if it is forced
            task.cancel()


@asynccontextmanager
async def serving(settings: Settings, descriptors: DescriptorStore | None = None) -> AsyncIterator[Listening]:
    """A gateway that serves until this context is left.

    Args:
        descriptors: those that outlive this process; None if nothing keeps them.

    Raises:
        ConfigError: the address cannot be used.
        StoreError: the store cannot be used.
    """
    found = found_listener(settings.host, settings.port, descriptors) if descriptors is not None else None
    listener = found or bind(settings.host, settings.port)
    if descriptors is not None and found is None:
        descriptors.keep_now(_LISTENER, listener.fileno())
    async with gateway(settings, descriptors) as front:
        host, port = listener.getsockname()[:2]
        served = CrossOrigin(front, settings.cors_origins) if settings.cors_origins else front
        app: Any = served
        patience_s: Any = settings.shutdown_timeout_s  # only uvicorn's types demand whole seconds
        protocol: Any = bounded_protocol(
            settings.max_header_bytes, settings.body_timeout_s, settings.silence_timeout_s, served.take
        )
        config = uvicorn.Config(
            app,
            loop="none",
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=patience_s,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield Listening(f"http://{f'[{host}]' if ':' in host else host}:{port}", server.hurry)
        finally:
            front.end_watches()
            server.should_exit = True
            await task


def bind(host: str, port: int) -> socket.socket:
    """A socket where connections queue even before the gateway is ready. Raises ConfigError."""
    try:
        listener = bound(host, port, _BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def found_listener(host: str, port: int, descriptors: DescriptorStore) -> socket.socket | None:
    """The socket that an earlier process listened at, with the connections queued since; None if its address
    differs.
    """
    for descriptor in descriptors.found.pop(_LISTENER, ()):
        found = socket.socket(fileno=descriptor)
        try:
            wanted = {address[:2] for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[:2] in wanted:
                found.setblocking(False)
                return found
        except OSError:
            pass  # no such host, or not a socket: `bind` will report it
        found.close()
        descriptors.drop(_LISTENER)
    return None


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Running turns may end within `shutdown_timeout_s`, or until another SIGINT; an
    unfinished start ends at once.
    """

    async def until_stopped() -> None:
        loop, stop, start = asyncio.get_running_loop(), asyncio.Event(), asyncio.current_task()
        collector = Collector(settings.collect_interval_s)
        assert start is not None

        def stop_start() -> None:
            stop.set()
            start.cancel()  # it may wait long for its store

        _on_signals(loop, stop_start)
        gc.disable()  # what a start creates stays: collections would only scan it again and again
        descriptors = descriptor_store(os.environ)
        try:
            async with serving(settings, descriptors) as listening:
                _on_signals(loop, stop.set)
                collector.start()
                LOGGER.info("serving", extra={"fields": {"url": listening.url, "policy": settings.policy}})
                await stop.wait()
                loop.add_signal_handler(signal.SIGINT, listening.hurry)
                collector.stop()
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
        if descriptors is not None:
            descriptors.close()

    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_stopped())


def _on_signals(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, call)


def _raise_file_limit() -> None:
    """A running turn takes two descriptors: the usual soft limit of 1,024 ends at 500 turns. Raise it to the hard
    limit, and say if that is low: without descriptors, the system's own code closes connections and tells nobody.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _ENOUGH_DESCRIPTORS:
        LOGGER.warning("few file descriptors", extra={"fields": {"limit": limit, "wanted": _ENOUGH_DESCRIPTORS}})
