"""Server processes that belong to this one, none of which outlives its purpose.

Each runs in its own process group under a small guard process. The guard kills the whole group when the server ends (a
dead engine core would leave its worker behind), and when this process ends for any reason (the guard then reads
end-of-file from a pipe that only this process holds).
"""

import asyncio
import os
import random
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.2
PROGRESS_S = 5.0
_STOP_TIMEOUT_S = 15.0
NUM_LOG_LINES = 30  # enough to show the end of a Python traceback

Progress = Callable[[str], None]
"""Called with a line for a person to read."""

_GUARD = """
import os, signal, subprocess, sys, threading

def end_when_parent_does():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)

server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: server.terminate())
threading.Thread(target=end_when_parent_does, daemon=True).start()
server.wait()
os.killpg(0, signal.SIGKILL)
"""


class LaunchError(RuntimeError):
    """A server did not start. The message ends with the last lines of its log. Not safe to repeat unchanged."""


@dataclass(frozen=True, slots=True)
class Child:
    """A server process. `pid` is that of its process group's leader."""

    pid: int
    process: asyncio.subprocess.Process
    log_path: Path

    def send_signal(self, number: signal.Signals) -> None:
        """Signal every process of the server: SIGKILL simulates a lost machine, SIGSTOP one that hangs until
        SIGCONT.
        """
        os.killpg(self.pid, number)

    async def until_ready(
        self, name: str, urls: Sequence[str], timeout_s: float, on_progress: Progress = lambda _: None
    ) -> None:
        """Wait until all these URLs answer. Raises LaunchError if the server ends first or takes too long."""
        began_at = told_at = time.monotonic()
        while not await asyncio.to_thread(_answer, urls):
            now = time.monotonic()
            if self.process.returncode is not None:
                raise LaunchError(f"{name} ended while starting. {self.end_of_log()}")
            if now - began_at > timeout_s:
                raise LaunchError(f"{name}: not ready in {timeout_s:g} s. {self.end_of_log()}")
            if now - told_at >= PROGRESS_S:
                told_at = now
                on_progress(f"{name}: starting for {now - began_at:.0f} s")
            await asyncio.sleep(POLL_S)
        on_progress(f"{name}: ready after {time.monotonic() - began_at:.0f} s")

    def end_of_log(self) -> str:
        """The last lines of its log."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "\n".join([f"{self.log_path} ends with:", *lines])


@asynccontextmanager
async def child(
    command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """A server that is started here and stopped at the end: SIGTERM, then SIGKILL for whatever is left of its group.

    Args:
        environment: all of it; None passes on this process's.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _GUARD, *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    try:
        yield Child(process.pid, process, log_path)
    finally:
        await _stop(process)


# The system's: two processes whose `random` is seeded alike, as Hypothesis does, would draw the same ports.
_DICE = random.SystemRandom()


def free_port() -> int:
    """A free port that no other process is likely to be given before a server listens there.

    The system assigns ports from 32768 on to connections, and to servers that take any port.
    """
    while True:
        port = _DICE.randrange(10_000, 32_768)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


async def _stop(process: asyncio.subprocess.Process) -> None:
    try:
        with suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _answer(urls: Sequence[str]) -> bool:
    try:
        for url in urls:
            with urllib.request.urlopen(url, timeout=5.0):
                pass
    except OSError:
        return False
    return True
