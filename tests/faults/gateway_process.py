"""A gateway in a process of its own, which tests kill and restart at the same address."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import orjson

from engines.children import free_port
from gateway.tokens.partials import PREFIX
from loadtest.bench.processes import cpu_us
from store import StoreSettings, open_store

START_TIMEOUT_S = 120.0  # A busy machine takes ten times the usual 2 s, and more.
PATIENT = {"HEDDLE_SETTLE_TIMEOUT_S": "60"}
"""What a gateway answered must survive its kill. By default it waits 50 ms for its store, which on a busy machine may
take longer."""


class GatewayProcess:
    """`heddle serve` with these options, on a port that stays the same.

    Args:
        python: the interpreter that runs it.

    Attributes:
        start_s: seconds from the last start until it answered.
        start_cpu_s: its processor time until then, which other processes do not affect.
    """

    def __init__(self, *options: str, python: str = sys.executable, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_s = self.start_cpu_s = 0.0
        self._options = options
        self._python = python
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def begin(self) -> None:
        """Start it without waiting for anything."""
        self._process = await asyncio.create_subprocess_exec(
            self._python,
            *("-m", "heddle", "serve", "--port", str(self.port), "--log-level", "warning", *self._options),
            env={**os.environ, **PATIENT, **self._environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def start(self) -> None:
        """Start it and return when it is healthy. If it exits instead, its output is the error."""
        began_at = time.perf_counter()
        await self.begin()
        assert self._process is not None
        async with httpx.AsyncClient() as client, asyncio.timeout(START_TIMEOUT_S):
            while True:
                assert self._process.returncode is None, await self.output()
                with contextlib.suppress(httpx.TransportError):
                    await client.get(self.url + "/healthz")
                    break
                await asyncio.sleep(0.02)  # asking more often can take as much CPU time as the start itself
        self.start_s, self.start_cpu_s = time.perf_counter() - began_at, cpu_us(self._process.pid) / 1e6

    async def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def terminate(self) -> int:
        """Send SIGTERM; returns the exit status."""
        self.tell(signal.SIGTERM)
        return await self.ended()

    def tell(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def output(self) -> str:
        """All its output; it must have ended."""
        assert self._process is not None and self._process.stdout is not None
        return (await self._process.stdout.read()).decode()


@asynccontextmanager
async def gateway_process(
    *options: str, python: str = sys.executable, **environment: str
) -> AsyncIterator[GatewayProcess]:
    """A started gateway, killed on exit."""
    process = GatewayProcess(*options, python=python, **environment)
    await process.start()
    try:
        yield process
    finally:
        await process.kill()


async def refused_start(*options: str, **environment: str) -> tuple[int, str]:
    """Exit status and standard error of a gateway that refuses to start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "heddle", "serve", *options),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def tokens_written(store_url: str) -> int:
    """The tokens of unfinished turns that a dead gateway left in its store."""
    store = open_store(store_url, StoreSettings())
    await store.open()
    num = 0
    for trajectory_id in await store.piece_sizes():
        for part in (await store.get_pieces(trajectory_id, PREFIX)).values():
            num += sum(len(ids) for _, ids, *_ in orjson.loads(part))
    await store.close()
    return num
