"""The process above one local server: runs it, records how it ended, and outlives the controller that launched it.

It runs as a script (`python local_guard.py FOLDER`) with only the standard library, so it starts in 30 ms. It detaches
into its own session, which contains all processes of the server. Rules:

- It holds the folder's `lock` for as long as it lives, so a second guard of the same server ends at once.
- If the folder contains `stop`, no server is started any more.
- The server's log is bounded: when it is full, it replaces `log.1`, and the log starts again empty.
- The server dies with the guard. When the server ends, the guard kills the rest of the session, itself last.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
_LOG_LOOK_S = 5.0  # Between checks of the log's size: an engine that writes all it can has written 1 GB by then.


def main(folder: Path) -> None:
    """Detach, and return when `process.json` is written; the rest happens in the background.

    Raises SystemExit if the guard ended before; it has said why on standard error, unless it was killed.
    """
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another guard runs this server
    if (folder / "stop").exists() or (folder / "exit.json").exists():
        return
    written, told = os.pipe()
    if os.fork():
        os.close(told)
        if not os.read(written, 1):
            sys.exit(1)
        return
    os.close(written)
    os.setsid()
    write_json(folder / "process.json", {"pid": os.getpid(), "started": started(os.getpid()), "boot": boot_id()})
    os.write(told, b".")
    os.close(told)
    cause = _run(folder, json.loads((folder / "server.json").read_text()))
    try:
        write_json(folder / "exit.json", {"cause": cause})
    finally:  # also if the disk is full: workers that are left would hold the devices
        os.killpg(0, signal.SIGKILL)


def _run(folder: Path, server: dict[str, object]) -> str:
    """Run the server until it ends. Returns how it ended, in words."""
    with (folder / "log").open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    try:
        process = subprocess.Popen(
            server["command"],  # type: ignore[call-overload]
            stdin=subprocess.DEVNULL,
            env={**_inherited(), **server["environment"]},  # type: ignore[dict-item]
            preexec_fn=_die_with_parent,
        )
    except (OSError, ValueError) as error:
        return f"it could not be started: {error}"
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    threading.Thread(target=_keep_log_bounded, args=(folder / "log", server["max_log_bytes"]), daemon=True).start()
    status = process.wait()
    return f"killed by {_signal_name(-status)}" if status < 0 else f"exit status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _inherited() -> dict[str, str]:
    """The launcher's environment without Heddle's settings: an engine needs no admin key."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HEDDLE_")}


def _keep_log_bounded(log: Path, max_bytes: int) -> None:
    """Runs for as long as this process lives."""
    while True:
        with contextlib.suppress(OSError):  # the disk is full; there may be room at the next look
            rotate(sys.stdout.fileno(), log, max_bytes)
        time.sleep(_LOG_LOOK_S)


def rotate(descriptor: int, log: Path, max_bytes: int) -> None:
    """Start a log again if it is full. Its writers continue with it, because it is open for appending; whatever they
    write during the change is lost. It may have another name by now, or none: logrotate, a person."""
    if os.fstat(descriptor).st_size > max_bytes:
        older = log.with_name("log.1")
        older.unlink(missing_ok=True)  # it may be this very file
        shutil.copyfile(f"/proc/self/fd/{descriptor}", older)
        os.ftruncate(descriptor, 0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def write_json(path: Path, value: object) -> None:
    """Write a file so that it is there as a whole or not at all, also after a power cut."""
    draft = path.with_suffix(".draft")
    with draft.open("w") as file:
        file.write(json.dumps(value))
        file.flush()
        os.fsync(file.fileno())  # else it may be there, and empty
    draft.rename(path)


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or it has ended."""
    try:
        # In bytes: a process may have any name, and Linux cuts a long one in the middle of a letter.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def boot_id() -> str:
    """Identifies the machine's current boot: process ids mean nothing in another one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
