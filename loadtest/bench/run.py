"""What the gateway costs per request and adds per turn, beside its rivals, in one run on pinned cores.

    python -m loadtest.bench.run [--repeats 5] [--seconds 3] [--only gateway,nginx] [--write docs/results.md]

One server after the other on core 0, client and backend on core 1, and so again for each repeat, so that a noisy
machine troubles all alike. Processor time is the kernel's account of the server's whole process tree. `--write` puts
the table between the marks in that file. `deploy/get-bench-peers.sh` gets the rivals; one that is absent is left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from loadtest.bench.peers import PEERS, Peer

SERVER_CORE, CLIENT_CORE = "0", "1"
STREAM_INTERVAL_MS = 5.0
CONNECTIONS = 32
WARM_UP_S = 0.5
START_TIMEOUT_S = 30.0
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat of one server. Microseconds of processor time per answer, answers per second, microseconds."""

    cpu_us: float
    stream_cpu_us: float
    answers_per_s: float
    p50_us: float
    p99_us: float
    loaded_p50_us: float
    loaded_p99_us: float


def measure(peer: Peer, seconds: float, seed: int, directory: Path) -> Sample:
    """Start a server before its backends, load it in each way, and stop it."""
    with backend(2, 0.0) as ports, server(peer, ports, directory) as (pid, port):
        _load(port, WARM_UP_S, seed)
        before_us = cpu_us(pid)
        loaded = _load(port, seconds, seed)
        spent_us = cpu_us(pid) - before_us
        alone = _load(port, seconds, seed, connections=1)
    with backend(2, STREAM_INTERVAL_MS) as ports, server(peer, ports, directory) as (pid, port):
        _load(port, WARM_UP_S, seed, stream=True)
        before_us = cpu_us(pid)
        streamed = _load(port, seconds, seed, stream=True)
        stream_spent_us = cpu_us(pid) - before_us
    return Sample(
        cpu_us=spent_us / loaded["num_answers"],
        stream_cpu_us=stream_spent_us / streamed["num_answers"],
        answers_per_s=loaded["num_answers"] / loaded["seconds"],
        p50_us=alone["p50_us"],
        p99_us=alone["p99_us"],
        loaded_p50_us=loaded["p50_us"],
        loaded_p99_us=loaded["p99_us"],
    )


def _load(
    port: int, seconds: float, seed: int, connections: int = CONNECTIONS, stream: bool = False
) -> dict[str, float]:
    command = [sys.executable, "-m", "loadtest.bench.load", "--port", str(port), "--seconds", str(seconds)]
    command += ["--connections", str(connections), "--seed", str(seed), *(["--stream"] if stream else [])]
    done = subprocess.run(_pinned(CLIENT_CORE, command), stdout=subprocess.PIPE, timeout=seconds + 60, check=True)
    result: dict[str, float] = orjson.loads(done.stdout)
    return result


# --- processes ----------------------------------------------------------------------------------------------


@contextmanager
def backend(num_ports: int, interval_ms: float) -> Iterator[list[int]]:
    """A backend process that listens at so many ports."""
    ports = [_free_port() for _ in range(num_ports)]
    command = [sys.executable, "-m", "loadtest.bench.backend", "--interval-ms", str(interval_ms)]
    for port in ports:
        command += ["--port", str(port)]
    with _running(_pinned(CLIENT_CORE, command), {}, Path(os.devnull)):
        for port in ports:
            _wait_until(lambda port=port: _listens(port), "the backend")  # type: ignore[misc]
        yield ports


@contextmanager
def server(peer: Peer, ports: list[int], directory: Path) -> Iterator[tuple[int, int]]:
    """A server under test before backends at these ports; its process and its port. `direct` is a backend itself."""
    if peer.command is None:
        yield os.getpid(), ports[0]
        return
    port = _free_port()
    home = Path(tempfile.mkdtemp(dir=directory))
    command = peer.command(port, _free_port(), ports, home)
    with _running(_pinned(SERVER_CORE, command), peer.environment, home / "log") as pid:
        _wait_until(lambda: _answers(port), peer.name)
        yield pid, port
    shutil.rmtree(home)


@contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[int]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | environment, start_new_session=True
        )
        try:
            yield process.pid
        finally:
            # Its children too: they are of its session, and of no other.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _pinned(core: str, command: list[str]) -> list[str]:
    return ["taskset", "-c", core, *command]


def cpu_us(pid: int) -> float:
    """Microseconds of processor time that a process and its descendants have used, to a hundredth of a second."""
    stats = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stats[int(entry)] = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
    family = {pid}
    while children := {child for child, stat in stats.items() if int(stat[1]) in family} - family:
        family |= children
    ticks = sum(int(stats[member][11]) + int(stats[member][12]) for member in family if member in stats)
    return ticks * 1e6 / _TICKS_PER_S


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _answers(port: int) -> bool:
    """Whether it serves models: a router listens before it knows its workers."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return connection.recv(12).endswith(b" 200") and b"bench" in _rest(connection)
    except OSError:
        return False


def _rest(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(65_536):
        pieces.append(piece)
    return b"".join(pieces)


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"bench: {what} does not start")
        time.sleep(0.05)


# --- the table ----------------------------------------------------------------------------------------------


def table(samples: dict[str, list[Sample]], about: str) -> str:
    """Markdown: medians, each with the spread of its repeats, and ratios to the gateway of the same repeat."""
    head = [
        "| server | CPU us per answer | x | CPU us per 64-chunk stream | x | answers/s, c=32 | P50 / P99 us, c=32 "
        "| added P50 us, c=1 | added P99 us, c=1 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [_row(name, samples) for name in samples]
    return "\n".join([*head, *rows, "", about])


def _row(name: str, samples: dict[str, list[Sample]]) -> str:
    own, direct, gateway = samples[name], samples.get("direct"), samples.get("gateway")

    def cost(of: Callable[[Sample], float]) -> str:
        if name == "direct":
            return "- | -"
        ratio = "-" if gateway is None else f"{_median([of(a) / of(b) for a, b in zip(own, gateway, strict=True)]):.2f}"
        return f"{_spread([of(sample) for sample in own])} | {ratio}"

    def added(of: Callable[[Sample], float]) -> str:
        if name == "direct" or direct is None:
            return f"itself {_spread([of(sample) for sample in own])}"
        return _spread([of(a) - of(b) for a, b in zip(own, direct, strict=True)])

    return (
        f"| {name} | {cost(lambda sample: sample.cpu_us)} | {cost(lambda sample: sample.stream_cpu_us)} "
        f"| {_median([sample.answers_per_s for sample in own]):,.0f} "
        f"| {_median([sample.loaded_p50_us for sample in own]):,.0f} "
        f"/ {_median([sample.loaded_p99_us for sample in own]):,.0f} "
        f"| {added(lambda sample: sample.p50_us)} | {added(lambda sample: sample.p99_us)} |"
    )


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _spread(values: list[float]) -> str:
    return f"{_median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _about(arguments: argparse.Namespace) -> str:
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return (
        f"Commit {git.stdout.strip() or 'unknown'}, seed {arguments.seed}, {arguments.repeats} repeats of "
        f"{arguments.seconds:g} s, {os.cpu_count()} cores of {processor}, Python {platform.python_version()}"
        f"{_build()}; "
        f"medians, in brackets the smallest and the largest. x: cost beside the gateway's in the same repeat."
    )


def _build() -> str:
    is_optimised = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    return "" if is_optimised else " (built without profile-guided optimisation)"


def write(path: Path, text: str) -> None:
    """Put the text between the marks of a file."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"bench: {path} has no {BEGIN} ... {END}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="names of servers, with commas between them")
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else [peer.name for peer in PEERS]
    samples: dict[str, list[Sample]] = {}
    with tempfile.TemporaryDirectory(prefix="heddle-bench-") as directory:
        for repeat in range(arguments.repeats):
            for peer in PEERS:
                if peer.name not in wanted or not peer.is_there():
                    continue
                sample = measure(peer, arguments.seconds, arguments.seed, Path(directory))
                samples.setdefault(peer.name, []).append(sample)
                print(f"{repeat + 1}/{arguments.repeats} {peer.name}: {sample}", file=sys.stderr, flush=True)
    text = table(samples, _about(arguments))
    print(text)
    if arguments.write:
        write(arguments.write, text)


if __name__ == "__main__":
    main()
