"""Processes of one run: each is pinned to its core, ready before it is used, ended after it, and its cost measured.

CPU time is the kernel's own account of a process and its descendants, to the nanosecond.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# The server under test has a core to itself; client, backends and stores share the other.
SERVER_CORE, CLIENT_CORE = "0", str(min(1, (os.cpu_count() or 1) - 1))
START_TIMEOUT_S = 30.0  # vllm-router checks its workers once a second, and gives up after some minutes
_END_TIMEOUT_S = 5.0  # nobody needs the open streams of a measurement; after this it is killed
_CPUCLOCK_SCHED = 2  # linux/posix-timers.h: the kind of a process's clock that clock_getcpuclockid() gives


class NotStarted(Exception):
    """A server did not start, or ended at once; the message names it, and its last output."""


@contextmanager
def running(command: list[str], core: str, log: Path, environment: dict[str, str] | None = None) -> Iterator[int]:
    """A process in its own session on this core, while the block lasts; yields its id."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", core, *command],
            stdout=output,
            stderr=output,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )
    try:
        yield process.pid
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    # Its children too: they are in its session, and in no other.
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_END_TIMEOUT_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def wait_until(
    condition: Callable[[], bool], what: str, pid: int, log: Path, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Raises NotStarted if it does not come true in time, or the process ends before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline or not is_alive(pid):
            words = log.read_text(errors="replace").split("\n") if log.is_file() else []
            said = " / ".join(line.strip() for line in words if line.strip())[-200:]
            raise NotStarted(f"{what} did not start: {said or 'it said nothing'}")
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether it runs: neither gone nor ended and not yet waited for."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


# --- what it costs ------------------------------------------------------------------------------------------


def cpu_us(pid: int) -> float:
    """Microseconds of CPU time that a process and its living descendants have used."""
    return sum(map(own_cpu_us, family(pid)))


def own_cpu_us(pid: int) -> float:
    """Microseconds of CPU time that a process has used, without its descendants; 0 once it has ended."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED) / 1e3
    except OSError:
        return 0.0


def memory_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants, without what the kernel holds for their sockets."""
    total = 0
    for member in family(pid):
        try:
            total += int(Path(f"/proc/{member}/statm").read_text().split()[1])
        except OSError:
            continue
    return total * resource.getpagesize()


def family(pid: int) -> set[int]:
    """A process and its descendants."""
    parents = {int(entry): _stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    members = {pid}
    while children := {child for child, stat in parents.items() if stat and int(stat[1]) in members} - members:
        members |= children
    return members


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def raise_file_limit(wanted: int) -> int:
    """Let this process and its children open this many files, if permitted; returns how many they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limits in ((max(soft, wanted), max(hard, wanted)), (hard, hard)):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        except (ValueError, OSError):
            continue  # only root may raise the hard limit
        return limits[0]
    return soft


# --- ports --------------------------------------------------------------------------------------------------


def free_ports(number: int) -> list[int]:
    """Loopback ports at which nothing listens, below those that the system assigns to connections and servers."""
    ports: set[int] = set()
    while len(ports) < number:
        port = random.randrange(10_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)


def answers(port: int, model: bytes = b"bench") -> bool:
    """Whether this model is listed: a router listens before it knows its workers."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return _says(connection, model)
    except OSError:
        return False


def _says(connection: socket.socket, word: bytes) -> bool:
    answer = b""
    while piece := connection.recv(65_536):
        answer += piece
        if word in answer:
            return answer.split(b" ", 2)[1] == b"200"
    return False
