"""One server in front of two backends, and clients that load it: the setup of each measurement."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from loadtest.bench.peers import Peer
from loadtest.bench.processes import (
    CLIENT_CORE,
    SERVER_CORE,
    NotStarted,
    answers,
    cpu_us,
    free_ports,
    memory_bytes,
    own_cpu_us,
    running,
    wait_until,
)

# Beyond the time of a measurement: a server in trouble answers 2,000 connections one after the other.
_CLIENT_TIMEOUT_S = 60.0


class Failed(Exception):
    """A measurement could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs: its process (None for the backends themselves) and its port."""

    pid: int | None
    port: int

    def cpu_us(self) -> float:
        """CPU time that it has used."""
        return 0.0 if self.pid is None else cpu_us(self.pid)

    def own_cpu_us(self) -> float:
        """CPU time that its first process has used, without the processes started by it."""
        return 0.0 if self.pid is None else own_cpu_us(self.pid)

    def memory_bytes(self) -> int:
        """Memory that it has now."""
        return 0 if self.pid is None else memory_bytes(self.pid)


@dataclass(frozen=True, slots=True)
class Rig:
    """What all measurements of one server share.

    Args:
        seconds: of one measurement.
        directory: for the files of the processes.
        redis: a redis-server, if there is one.
        max_files: that one process may open.
        scale: of the numbers of streams and trajectories; 1 except in tests of this module.
    """

    peer: Peer
    seconds: float
    seed: int
    directory: Path
    redis: Path | None
    max_files: int
    scale: float = 1.0

    def scaled(self, number: int) -> int:
        """This many streams or trajectories, multiplied by the rig's scale."""
        return max(1, round(number * self.scale))

    @contextmanager
    def serving(self, *backend_options: str) -> Iterator[Served]:
        """The server in front of two such backends. Raises NotStarted."""
        home = Path(tempfile.mkdtemp(dir=self.directory))
        port, other_port, redis_port, *backends = free_ports(5)
        command = [sys.executable, "-m", "loadtest.bench.backend", *backend_options]
        command += [word for number in backends for word in ("--port", str(number))]
        with ExitStack() as stack:
            log = home / "backend.log"
            pid = stack.enter_context(running(command, CLIENT_CORE, log))
            for number in backends:
                wait_until(lambda number=number: answers(number), "the backend", pid, log)  # type: ignore[misc]
            if self.peer.command is None:
                yield Served(None, backends[0])
            else:
                environment = dict(self.peer.environment)
                if self.peer.needs_redis:
                    url = stack.enter_context(self._redis_server(redis_port, home))
                    environment = {name: value.replace("{redis}", url) for name, value in environment.items()}
                server = self.peer.command(port, other_port, backends, home)
                log = home / "server.log"
                pid = stack.enter_context(running(server, SERVER_CORE, log, environment))
                wait_until(lambda: answers(port, self.peer.model), self.peer.name, pid, log)
                yield Served(pid, port)
        shutil.rmtree(home)

    @contextmanager
    def _redis_server(self, port: int, home: Path) -> Iterator[str]:
        if self.redis is None:
            raise NotStarted("there is no redis-server here")
        command = [str(self.redis), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home)]
        log = home / "redis.log"
        # On the clients' core: it is not part of the gateway's process tree, nor of its cost.
        with running([*command, "--appendonly", "yes"], CLIENT_CORE, log) as pid:
            wait_until(lambda: b"Ready to accept" in log.read_bytes(), "redis-server", pid, log)
            yield f"redis://127.0.0.1:{port}/0"

    def load(self, served: Served, seconds: float | None = None, **options: int | bool) -> dict[str, float]:
        """Agents that ask for this long; options of `loadtest.bench.load`. Raises Failed."""
        seconds = self.seconds if seconds is None else seconds
        command = [sys.executable, "-m", "loadtest.bench.load", "--port", str(served.port)]
        command += ["--seconds", str(seconds), "--seed", str(self.seed), *self._words(options)]
        try:
            done = subprocess.run(
                ["taskset", "-c", CLIENT_CORE, *command],
                capture_output=True,
                timeout=seconds + _CLIENT_TIMEOUT_S,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"no answer in {_CLIENT_TIMEOUT_S:g} s") from None
        except subprocess.CalledProcessError as error:
            raise Failed(_last_line(error.stderr)) from None
        result: dict[str, float] = orjson.loads(done.stdout)
        return result

    def cpu_per_answer(self, served: Served, **options: int | bool) -> tuple[float, dict[str, float]]:
        """Microseconds of the server's CPU time for each answer, and the client's results."""
        before_us = served.cpu_us()
        result = self.load(served, **options)
        return (served.cpu_us() - before_us) / result["num_answers"], result

    @contextmanager
    def holding(self, served: Served, num_streams: int) -> Iterator[subprocess.Popen[bytes]]:
        """Open this many streams, and keep them while the block lasts. Raises Failed."""
        command = [sys.executable, "-m", "loadtest.bench.open_streams", "--port", str(served.port)]
        command += ["--streams", str(num_streams), "--seed", str(self.seed), *self._words({})]
        with subprocess.Popen(
            ["taskset", "-c", CLIENT_CORE, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as client:
            _told(client)
            try:
                yield client
            finally:
                client.kill()

    def listen(self, client: subprocess.Popen[bytes]) -> dict[str, float]:
        """What the client that holds streams sees of their chunks. Raises Failed."""
        assert client.stdin is not None
        client.stdin.write(f"{self.seconds}\n".encode())
        client.stdin.flush()
        return _told(client)

    def _words(self, options: dict[str, int | bool]) -> list[str]:
        words = [*([] if self.peer.has_tools else ["--no-tools"]), *([] if self.peer.has_ids else ["--no-ids"])]
        for name, value in options.items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return words


def _told(client: subprocess.Popen[bytes]) -> dict[str, float]:
    assert client.stdout is not None and client.stderr is not None
    line = client.stdout.readline()
    if not line:
        raise Failed(_last_line(client.stderr.read()))
    result: dict[str, float] = orjson.loads(line)
    return result


def _last_line(output: bytes) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "the client said nothing"
