"""A gateway under `heddle keep`: tests kill it, and the keeper restarts it at the same address."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from engines.children import free_port
from tests.faults.gateway_process import PATIENT, START_TIMEOUT_S
from tests.support.gateway import eventually


class KeptGateway:
    """`heddle keep -- heddle serve` with these options.

    Args:
        starter: a program between the two, and its arguments.
    """

    def __init__(self, *options: str, starter: Sequence[str] = (), **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._options = options
        self._starter = starter
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start both, and return when the gateway is healthy."""
        serve = ("serve", "--port", str(self.port), "--log-level", "warning", *self._options)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "heddle", "keep", "--", *self._starter, sys.executable, "-m", "heddle", *serve),
            env={**os.environ, **PATIENT, **self._environment},
        )
        await eventually(self.is_healthy, START_TIMEOUT_S)

    async def is_healthy(self) -> bool:
        assert self._process is not None and self._process.returncode is None, "the keeper ended"
        async with httpx.AsyncClient(timeout=START_TIMEOUT_S) as client:
            try:
                return (await client.get(self.url + "/healthz")).status_code == 200
            except httpx.TransportError:
                return False

    @property
    def pid(self) -> int | None:
        """The gateway's process id; None between two gateways."""
        assert self._process is not None
        child = child_of(self._process.pid)
        return child_of(child) if child is not None and self._starter else child

    @property
    def num_tapes(self) -> int:
        """How many legs' tapes the keeper holds."""
        assert self._process is not None
        num = 0
        for link in Path(f"/proc/{self._process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                num += "memfd:tape" in os.readlink(link)
        return num

    async def kill(self) -> None:
        """SIGKILL the gateway, whether it serves or is only starting, and return when it is gone."""
        await eventually(lambda: self.pid is not None)
        killed = self.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: self.pid != killed)

    async def end(self, number: signal.Signals) -> int:
        """End the keeper with a signal; returns its exit status."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self._process.wait()


def child_of(pid: int) -> int | None:
    """The first child of a process; None if it has none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(children[0]) if children else None


@asynccontextmanager
async def kept_gateway(*options: str, starter: Sequence[str] = (), **environment: str) -> AsyncIterator[KeptGateway]:
    """A started keeper and gateway, ended on exit."""
    gateway = KeptGateway(*options, starter=starter, **environment)
    try:
        await gateway.start()
        yield gateway
        await eventually(gateway.is_healthy, START_TIMEOUT_S)
        assert await gateway.end(signal.SIGTERM) == 0
    finally:
        await gateway.end(signal.SIGKILL)
