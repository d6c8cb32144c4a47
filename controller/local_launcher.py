"""Launches servers as processes of this machine, each pinned to its devices.

Everything known of a server is in its own folder below the run folder, so any controller finds it:

    <run folder>/<fleet id>/<server id>/server.json    what was requested: spec, port, command, environment
                                        process.json   its guard's pid, start time and boot (local_guard.py)
                                        exit.json      how it ended
                                        stop           its end was requested: it is never started again
                                        lock           held by its guard, so that there is one
                                        log, log.1     its output; the second is older

A server runs while anything is left in its guard's session. A pid counts only together with its start time and
the machine's boot.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from glob import glob
from pathlib import Path
from typing import Any

from controller import local_guard
from controller.launcher import LaunchFailed, Server, ServerSpec, ServerState, check_free, loaded_spec
from controller.local_processes import Look, Sessions
from engines.children import free_port

NUM_LAST_LINES = 30  # enough to show a Python traceback's end
_TAIL_BYTES = 16 * 1024
_POLL_S = 0.02
# Limit of stopped servers whose logs are kept; older ones go when another server is launched.
MAX_STOPPED_KEPT = 50


class LocalLauncher:
    """Processes of this machine.

    Args:
        run_dir: where servers are recorded; one per machine, because it also keeps devices apart.
        devices: the inventory, such as `("0", "1", "2", "3")` for GPUs, or any names for CPU slots.
        pin_variable: environment variable that gets a server's devices. None: there is nothing to pin, as with CPU
            slots.
        max_log_bytes: limit of a server's log; a full one is started again, and the old one is kept until the next
            time.
        confirm_timeout_s: how long killed processes may take to end: freeing pinned host memory takes a while.
        sessions: finds the processes that are left.
    """

    def __init__(
        self,
        run_dir: Path,
        devices: Sequence[str],
        pin_variable: str | None = "CUDA_VISIBLE_DEVICES",
        max_log_bytes: int = 16 * 2**20,
        confirm_timeout_s: float = 120.0,
        sessions: Sessions | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._devices = tuple(devices)
        self._pin_variable = pin_variable
        self._max_log_bytes = max_log_bytes
        self._confirm_timeout_s = confirm_timeout_s
        self._sessions = sessions or Sessions()

    def inventory(self) -> tuple[str, ...]:
        """All devices."""
        return self._devices

    async def launch(self, spec: ServerSpec) -> Server:
        """Start a server, or return the one of this id that is or was there.

        Raises:
            LaunchFailed: a device is unknown, or another server, of any fleet, holds it and does not sleep.
            OSError: this machine cannot start it now (a full disk, too many processes); safe to repeat.
        """
        return await asyncio.to_thread(self._launch, spec)

    async def find(self, fleet_id: str) -> list[Server]:
        """All servers of a fleet whose folders are kept, oldest first."""
        return await asyncio.to_thread(self._servers, fleet_id)

    async def stop(self, server_id: str, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to all its processes; returns when none is left.

        Raises:
            TimeoutError: some do not end although they were killed, as in a driver that hangs; safe to repeat.
            OSError: the folder takes no more files; safe to repeat.
        """
        for folder in self._folders("*"):
            if folder.name == server_id:
                await self._stop(folder, grace_s)

    async def _stop(self, folder: Path, grace_s: float) -> None:
        (folder / "stop").touch()
        deadline = time.monotonic() + grace_s
        was_asked = False
        while (left := await asyncio.to_thread(_left, folder, self._sessions.look())) is not None:
            guard, pids = left
            if guard not in pids or time.monotonic() >= deadline:
                for pid in pids:
                    _signal(pid, signal.SIGKILL)
            elif not was_asked:
                _signal(guard, signal.SIGTERM)
                was_asked = True
            if time.monotonic() >= deadline + self._confirm_timeout_s:
                named = ", ".join(map(str, pids)) or "its guard"
                raise TimeoutError(f"{folder.name}: process {named} does not end, although it was killed")
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(_remove_leavings, folder)

    def _launch(self, spec: ServerSpec) -> Server:
        folder = self._run_dir / spec.fleet_id / spec.server_id
        with self._locked():
            if not folder.exists():
                servers = self._servers("*")
                if unknown := set(spec.devices) - set(self._devices):
                    raise LaunchFailed(f"no such device here: {', '.join(sorted(unknown))}; there are {self._devices}")
                check_free(spec, servers)
                self._write(folder, spec, {server.url for server in servers})
                self._prune(spec.fleet_id)
        # Outside the lock, and again if an earlier launch broke off here: the guard knows whether it is too late.
        guard = [sys.executable, "-I", "-S", str(Path(local_guard.__file__)), str(folder)]
        ended = subprocess.run(guard, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise OSError(f"its guard did not begin: {said or 'it was killed'}")
        return _server(folder, self._sessions.look())

    def _write(self, folder: Path, spec: ServerSpec, taken_urls: set[str | None]) -> None:
        port = free_port()
        while _url(port) in taken_urls:  # assigned to a server that does not listen yet
            port = free_port()
        pinned = {self._pin_variable: ",".join(spec.devices)} if self._pin_variable else {}
        draft = folder.with_name(f".{folder.name}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        local_guard.write_json(
            draft / "server.json",
            {
                "spec": asdict(spec),
                "port": port,
                "launched_at": time.time(),
                "command": [part.replace("{port}", str(port)).replace("{host}", "127.0.0.1") for part in spec.command],
                "environment": {**pinned, **_filled(spec.environment)},
                "max_log_bytes": self._max_log_bytes,
            },
        )
        draft.rename(folder)

    def _prune(self, fleet_id: str) -> None:
        look, folders = self._sessions.look(), self._folders(fleet_id)
        stopped = [
            folder
            for folder in folders
            if (folder / "stop").exists() and not _lives(_read(folder / "process.json"), look)
        ]
        for folder in stopped[:-MAX_STOPPED_KEPT]:
            hidden = folder.with_name(f".{folder.name}")  # atomically: no reader sees half of it
            folder.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def _servers(self, fleet_id: str) -> list[Server]:
        """All servers, oldest first; of every fleet for `*`."""
        servers = []
        look = self._sessions.look()
        for folder in self._folders(fleet_id):
            with contextlib.suppress(FileNotFoundError):
                server = _server(folder, look)
                (folder / "server.json").stat()  # if missing, it was removed while it was read
                servers.append(server)
        return servers

    def _folders(self, fleet_id: str) -> list[Path]:
        """Folders of servers, oldest first; of every fleet for `*`."""
        written = []
        for path in self._run_dir.glob(f"{fleet_id}/[!.]*/server.json"):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                written.append((path.stat().st_mtime_ns, path.parent))
        return [folder for _, folder in sorted(written)]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One launch at a time, so that none takes devices that another one is about to take."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        with (self._run_dir / "launching").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _filled(environment: Mapping[str, str]) -> dict[str, str]:
    places = {"{host}": "127.0.0.1", "{kv_port}": str(free_port())}
    return {name: places.get(value, value) for name, value in environment.items()}


def _server(folder: Path, look: Look) -> Server:
    written = _loaded(folder / "server.json")
    spec = loaded_spec(written["spec"])
    process = _read(folder / "process.json")  # once: a guard that begins may write it at any moment
    if _lives(process, look):
        state, cause = ServerState.RUNNING, ""
    elif process:
        state, cause = ServerState.EXITED, _exit_cause(folder, process)
    elif (folder / "stop").exists():
        state, cause = ServerState.EXITED, "stopped before it began"
    else:
        state, cause = ServerState.STARTING, ""
    return Server(spec, state, _url(written["port"]), cause, _last_lines(folder / "log"))


def _exit_cause(folder: Path, process: Mapping[str, Any]) -> str:
    ended = _read(folder / "exit.json")
    if (folder / "stop").exists():
        return "stopped"
    if ended:
        return str(ended["cause"])
    if process["boot"] != local_guard.boot_id():
        return "the machine was restarted"
    return "killed with its guard"


def _remove_leavings(folder: Path) -> None:
    for pattern in _loaded(folder / "server.json")["spec"].get("leaves", ()):
        for path in glob(pattern):
            Path(path).unlink(missing_ok=True)


def _is_guarded(folder: Path) -> bool:
    """Whether a guard lives or is about to. Call only if `stop` exists: a guard that meets this lock gives up."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lives(process: Mapping[str, Any], look: Look) -> bool:
    """Whether a server's guard or anything in its session is alive."""
    if not process or process["boot"] != local_guard.boot_id():
        return False
    if local_guard.started(process["pid"]) == process["started"]:
        return True
    return bool(look.processes(process["pid"], process["started"]))


def _left(folder: Path, look: Look) -> tuple[int | None, list[int]] | None:
    """The guard, and all living processes of a server that is being stopped; None if nothing is left or will come."""
    is_guarded = _is_guarded(folder)
    process = _read(folder / "process.json")
    if not process or process["boot"] != local_guard.boot_id():
        return (None, []) if is_guarded else None
    pids = look.processes(process["pid"], process["started"])
    return (process["pid"], pids) if pids or is_guarded else None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _read(path: Path) -> dict[str, Any]:
    """The content of a record; empty if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return _loaded(path)
    return {}


def _loaded(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is damaged; remove its folder if nothing of that server runs") from None
    return value


def _last_lines(log: Path) -> tuple[str, ...]:
    tail = _tail(log)
    if len(tail) < _TAIL_BYTES:  # it may have been rotated a moment ago
        tail = _tail(log.with_name("log.1")) + tail
    return tuple(tail.decode(errors="replace").splitlines()[-NUM_LAST_LINES:])


def _tail(log: Path) -> bytes:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read()
    except FileNotFoundError:
        return b""


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
