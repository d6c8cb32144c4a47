"""Which processes of a server are left on this machine: those of its guard's session.

Finding them takes a scan of all of /proc, so one scan serves all servers of a list. Callers that wait for a scan at the
same time, such as 64 servers that stop at once, share the next one.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from controller import local_guard

Table = Mapping[int, tuple[tuple[int, int], ...]]


class Sessions:
    """The living processes of every session. Threads may share one instance.

    Args:
        read: scans /proc.
    """

    def __init__(self, read: Callable[[], Table] | None = None) -> None:
        self._read = read or read_processes
        self._lock = threading.Lock()
        self._began_at = float("-inf")
        self._table: Table = {}

    def look(self) -> "Look":
        """A view of the processes from now on."""
        return Look(self)

    def table(self) -> Table:
        """Process ids and when each one began, by session, as of one moment after this call."""
        asked_at = time.monotonic()
        with self._lock:
            if self._began_at < asked_at:
                self._began_at = time.monotonic()
                self._table = self._read()
            return self._table


class Look:
    """One scan, made when it is first needed."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._table: Table | None = None

    def processes(self, session: int, since: int) -> list[int]:
        """Ids of a session's living processes.

        Args:
            session: its number, which was the process id of its first process.
            since: when that process began, in ticks since boot.
        """
        # A session's number is free for others only when nothing is left in it; then its leader is another process.
        if local_guard.started(session) not in (None, since):
            return []
        if self._table is None:
            self._table = self._sessions.table()
        return [pid for pid, started in self._table.get(session, ()) if started >= since]


def read_processes() -> Table:
    """All processes of this machine, by session. Cost: some 50 us each."""
    table: dict[int, tuple[tuple[int, int], ...]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(path.name)
            session = os.getsid(pid)
            if (started := local_guard.started(pid)) is not None:
                table[session] = (*table.get(session, ()), (pid, started))
    return table
