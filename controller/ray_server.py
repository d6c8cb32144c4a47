"""The actor above one server on its Ray node: it owns the server's processes and records how they end.

It is sent to the node by value, so a node needs Ray and the engine, but not Heddle: nothing of Heddle is imported here.
Rules:

- What is known of a server is in the key-value store of Ray's head (`Records`), so it outlives every process.
- A process does not outlive its keeper: a guard kills the process group when the keeper's end of a pipe closes.
- When the process ends, for whatever reason, the keeper records why. Then it releases its GPUs, which also ends the
  keeper.
- If "stop" is recorded, no process is started any more.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import ray
from ray.experimental import internal_kv
from ray.util.placement_group import get_current_placement_group, remove_placement_group

NAMESPACE = "heddle"
NUM_LAST_LINES = 30  # enough to show a Python traceback's end
MAX_LOGS_KEPT = 50  # per node; older ones go when another server starts
_TAIL_BYTES = 16 * 1024
_POLL_S = 0.02
_KILLED_TIMEOUT_S = 10.0  # A process whose GPU memory is being freed takes seconds to die.

# Not the keeper's child: when an actor is killed, Ray kills its children, and nothing would kill the rest. Prints its
# process group, and at the end how the server ended.
_GUARD = """
import os, signal, subprocess, sys, threading

def end_with_keeper():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)

if os.fork():
    os._exit(0)
os.setsid()
try:
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=2)
except OSError as error:
    sys.exit(print(f"0\\nit could not be started: {error}"))
signal.signal(signal.SIGTERM, lambda *_: server.terminate())
threading.Thread(target=end_with_keeper, daemon=True).start()
print(os.getpid(), flush=True)
status = server.wait()
print(f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}", flush=True)
os.killpg(0, signal.SIGKILL)
"""


@dataclass(frozen=True, slots=True)
class Records:
    """The records of one server. Kinds: "server" (requested), "process" (started), "launched" (on each node), "stop"
    (requested), "exit".
    """

    fleet_id: str
    server_id: str

    def read(self, kind: str) -> dict[str, Any] | None:
        """The record, if there is one."""
        written = internal_kv._internal_kv_get(self._key(kind), namespace=NAMESPACE)
        return None if written is None else json.loads(written)

    def write_once(self, kind: str, **value: Any) -> bool:
        """Write unless it exists. Returns whether this call wrote it."""
        return not internal_kv._internal_kv_put(self._key(kind), json.dumps(value), False, namespace=NAMESPACE)

    def erase(self) -> None:
        """Forget the server."""
        for kind in ("process", "launched", "exit", "stop", "server"):
            internal_kv._internal_kv_del(self._key(kind), namespace=NAMESPACE)

    def _key(self, kind: str) -> str:
        return f"{kind}/{quote(self.fleet_id, safe='')}/{quote(self.server_id, safe='')}"


def all_records(fleet_id: str | None = None) -> list[Records]:
    """The records of each server of a fleet; None: of every fleet."""
    prefix = "server/" if fleet_id is None else f"server/{quote(fleet_id, safe='')}/"
    keys = internal_kv._internal_kv_list(prefix, namespace=NAMESPACE)
    return [Records(*map(unquote, key.decode().split("/")[1:])) for key in keys]


@dataclass(frozen=True, slots=True)
class Part:
    """One node's part of a server: all of it, unless the server spans nodes.

    Args:
        head: address of rank 0 for the other ranks, "host:port"; "" for rank 0, which chooses it.
    """

    rank: int = 0
    num_nodes: int = 1
    head: str = ""


class Keeper:
    """The actor. Its placement group is its own: the keeper ends with it."""

    def __init__(
        self, records: Records, part: Part, command: Sequence[str], environment: Mapping[str, str], log_dir: str
    ) -> None:
        self._records = records
        self._part = part
        self._group = get_current_placement_group()
        self._log = Path(log_dir) / f"{records.server_id}.{part.rank}.log"
        host, port = ray.util.get_node_ip_address(), _free_port()
        self._head = part.head or f"{host}:{_free_port()}"
        self._url = f"http://{host}:{port}"
        self._guard: subprocess.Popen[str] | None = None
        self._pid = 0  # of the guard, which leads the server's process group
        self._ended = threading.Event()
        if records.read("stop") is None:
            places = {"{host}": host, "{kv_port}": str(_free_port())}
            filled = {name: places.get(value, value) for name, value in environment.items()}
            self._start([self._filled(argument, host, port) for argument in command], filled)
            if part.rank == 0:
                records.write_once("process", url=self._url, log=str(self._log), pid=self._pid)
        threading.Thread(target=self._until_it_ends, daemon=True).start()

    def head(self) -> str:
        """Where the ranks of the server meet, "host:port"."""
        return self._head

    def last_lines(self) -> tuple[str, ...]:
        """The end of its output."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
                return tuple(file.read().decode(errors="replace").splitlines()[-NUM_LAST_LINES:])
        except FileNotFoundError:
            return ()

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL. The call may end because the actor ends."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
            if not self._ended.wait(grace_s):
                _kill(self._pid)

    def _filled(self, argument: str, host: str, port: int) -> str:
        head_host, _, head_port = self._head.rpartition(":")
        places = {"host": host, "port": port, "head_host": head_host, "head_port": head_port}
        for name, value in {**places, "node_rank": self._part.rank, "num_nodes": self._part.num_nodes}.items():
            argument = argument.replace(f"{{{name}}}", str(value))
        return argument

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(self._log.parent.glob("*.log"), key=lambda path: path.stat().st_mtime)[:-MAX_LOGS_KEPT]:
            old.unlink(missing_ok=True)
        # Ray sets the threads of an actor without its own CPUs to one, which is not meant for engines.
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        pinned = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ray.get_gpu_ids()))}
        with self._log.open("wb") as log:
            self._guard = subprocess.Popen(
                (sys.executable, "-I", "-S", "-c", _GUARD, *command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**inherited, **pinned, **environment},
            )
        assert self._guard.stdout is not None
        self._pid = int(self._guard.stdout.readline() or 0)
        self._guard.wait()  # It leaves a detached process behind, which holds the pipes.

    def _until_it_ends(self) -> None:
        cause = "stopped before it began"
        if self._guard is not None and self._guard.stdout is not None:
            cause = self._guard.stdout.read().strip() or "killed with its guard"
            if self._pid:
                _kill(self._pid)
            cause = "stopped" if self._records.read("stop") else cause
        self._ended.set()
        where = f" (node {self._part.rank} of {self._part.num_nodes})" if self._part.num_nodes > 1 else ""
        self._records.write_once("exit", cause=cause + where, last_lines=self.last_lines(), at=time.time())
        remove_placement_group(self._group)


def _kill(group: int) -> None:
    """Kill a process group, and wait until nothing of it is left."""
    deadline = time.monotonic() + _KILLED_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, signal.SIGKILL)
            time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
