"""Runs a command, restarts it when it dies, and passes it the descriptors that it had stored here (`descriptors.py`).

The command gets the same environment as systemd's services: NOTIFY_SOCKET is where to send descriptors, FDSTORE how
many it may store. LISTEN_FDS and LISTEN_FDNAMES describe those that are there from number 3 on (sd_listen_fds(3)).
LISTEN_PID names the process that they are for, here also if there are none: another one would not find them again.

1. A command that ends with status 0, or after this process was told to end, is not restarted.
2. The last messages of a dead command are taken before it is restarted.
3. As a container's first process, it also reaps orphans.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keeper.descriptors import Descriptors

_FIRST_DESCRIPTOR = 3
_PR_SET_PDEATHSIG = 1
_OWN_DESCRIPTORS = 32  # some ten, and what this process was started with
_NOT_FOUND = 127  # a shell's status for a command that cannot be run; one that never could is not tried again
_TOLD_TO_END = (signal.SIGTERM, signal.SIGINT)
_MAX_DOUBLINGS = 1_000  # a float ends at the 1,024th
_MAX_SELECT_S = 86_400.0  # epoll counts milliseconds in 32 bits


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """Limits.

    Args:
        max_descriptors: two for each leg of a turn and one for the listening socket; the largest rollout known has
            6,400 trajectories. At most half of what a process may have.
        first_pause_s, longest_pause_s: pause before a restart; it doubles with each failure in a row. Clients' retries
            bridge half a minute.
        max_failures: if more starts fail in a row, the keeper gives up, with the command's status. These take a minute
            and a half, in which a restarted store is back.
        steady_s: a command that ran this long did not fail to start.
    """

    max_descriptors: int = 16_384
    first_pause_s: float = 0.05
    longest_pause_s: float = 5.0
    max_failures: int = 24
    steady_s: float = 10.0

    def pause_s(self, num_failures: int) -> float:
        """The pause after this many failures in a row."""
        return min(self.first_pause_s * 2.0 ** min(num_failures - 1, _MAX_DOUBLINGS), self.longest_pause_s)


class Keeper:
    """Keeps one command running."""

    def __init__(self, command: Sequence[str], settings: KeeperSettings) -> None:
        self._command = command
        self._settings = settings
        self._told_to_end = 0
        self._pid = 0
        self._status: int | None = None

    def run(self) -> int:
        """Run it until it ends for good. Returns its status: 128 plus the signal's number if a signal ended it."""
        limit = min(self._settings.max_descriptors, _most_descriptors())
        with tempfile.TemporaryDirectory(prefix="keeper-") as folder:  # no other user may enter it
            kept = Descriptors(Path(folder, "notify"), limit)
            reader, writer = socket.socketpair()
            for end in (reader, writer):
                end.setblocking(False)
            before = [(number, signal.signal(number, _wake)) for number in (*_TOLD_TO_END, signal.SIGCHLD)]
            woken_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            selector = selectors.DefaultSelector()
            selector.register(kept, selectors.EVENT_READ)
            selector.register(reader, selectors.EVENT_READ)
            try:
                return self._run(kept, reader, selector)
            finally:
                signal.set_wakeup_fd(woken_before)
                for number, handler in before:
                    signal.signal(number, handler)
                selector.close()
                kept.close()
                reader.close()
                writer.close()

    def _run(self, kept: Descriptors, signals: socket.socket, selector: selectors.BaseSelector) -> int:
        settings, num_failures, num_starts = self._settings, 0, 1
        while True:
            began_at, self._status = time.monotonic(), None
            self._pid = _started(self._command, kept)
            _log("started", pid=self._pid, descriptors=len(kept))
            while self._status is None:
                selector.select()
                self._take(kept, signals)
            kept.receive()
            num_failures = 1 if time.monotonic() - began_at >= settings.steady_s else num_failures + 1
            _log("ended", pid=self._pid, status=self._status)
            self._pid = 0
            is_unknown = self._status == _NOT_FOUND and num_failures == num_starts
            num_starts += 1
            if self._told_to_end or self._status == 0 or is_unknown or num_failures > settings.max_failures:
                return self._status
            pause_until = time.monotonic() + settings.pause_s(num_failures)
            while (rest_s := pause_until - time.monotonic()) > 0 and not self._told_to_end:
                selector.select(min(rest_s, _MAX_SELECT_S))
                self._take(kept, signals)
            if self._told_to_end:
                return 128 + self._told_to_end

    def _take(self, kept: Descriptors, signals: socket.socket) -> None:
        """Take what has arrived: messages, signals, and ends of processes."""
        kept.receive()
        try:
            numbers = signals.recv(4096)
        except BlockingIOError:
            return
        for number in numbers:
            if number in _TOLD_TO_END:
                self._told_to_end = number
                if self._pid:
                    os.kill(self._pid, number)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code


def _started(command: Sequence[str], kept: Descriptors) -> int:
    """Start it with the kept descriptors. Returns its process id. A command that cannot be run ends with status 127, as
    in a shell."""
    parent = os.getpid()
    # A signal that reached the new process before it resets its handlers would be lost, so it is blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD_TO_END)
    pid = os.fork()  # by hand, because it must know its own id (LISTEN_PID), and there are no threads here
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TOLD_TO_END)
        return pid
    try:
        # A terminal's Ctrl+C goes to a whole process group, and is passed on as well. A gateway takes a second one for
        # the wish not to wait for its turns.
        os.setpgid(0, 0)
        for number in (*_TOLD_TO_END, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TOLD_TO_END)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            os.execvpe(command[0], list(command), _handed_on(kept))
    except OSError as error:
        _log("cannot be started", command=command[0], error=error.strerror)
    finally:
        os._exit(_NOT_FOUND)


def _handed_on(kept: Descriptors) -> dict[str, str]:
    """Give the kept descriptors to this process, which is about to run the command. Returns the environment that
    describes them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LISTEN_")}
    environment |= {"NOTIFY_SOCKET": str(kept.path), "FDSTORE": str(kept.limit), "LISTEN_PID": str(os.getpid())}
    if not len(kept):
        return environment
    # First move them away from the numbers that they are to get.
    free = _FIRST_DESCRIPTOR + len(kept)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, free) for _, descriptor in kept]
    for number, descriptor in enumerate(moved, _FIRST_DESCRIPTOR):
        os.dup2(descriptor, number)
    names = ":".join(name for name, _ in kept)
    return environment | {"LISTEN_FDS": str(len(kept)), "LISTEN_FDNAMES": names}


def _wake(number: int, frame: object) -> None:
    """The signal's number is already in the socket; nothing is left to do."""


def _log(message: str, **fields: object) -> None:
    line = {"at": round(time.time(), 3), "level": "info", "message": message, **fields, "from": "keeper"}
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(sys.stderr.fileno(), json.dumps(line).encode() + b"\n")


def _most_descriptors() -> int:
    """How many can be kept: to hand them on takes as many again. The usual soft limit of a process, 1,024, is raised to
    the hard limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else max(hard - _OWN_DESCRIPTORS, 0) // 2
