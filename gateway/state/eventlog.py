"""The log of events and decisions: a bounded JSONL file, and a feed for watchers.

A line is `{"at", "kind": "event" | "action", "type", ...fields}`. Before a process's first event, a line of kind
`start` in the file records how its scheduler was created, so that `heddle simulate replay` can recreate it. Watchers
that fall behind lose the oldest lines and are told how many. If the file cannot be written any more, for example
because the disk is full, it is given up with one line in the process's log: turns do not depend on it. Half a line,
which a killed process may leave at the end, is dropped by the next process. One process writes a file: two would mix
their lines, and move each other's away.
"""

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import AsyncIterator
from io import FileIO

import orjson

from gateway.turnlog import LOGGER
from scheduling.limits import Limits
from scheduling.logged import logged
from scheduling.types import Action, Event, TrajectoryRecord

MAX_LINES_BEHIND = 10_000
# Between two batches for a watcher. Each costs a wake-up and a write; with many turns, each event had one of its own.
_PAUSE_S = 0.1
_HEADS_OF_LINES = b'{"at":', b'{"kind":'
# Begins the file after a full one: its lines make sense only after those of the full one.
_CONTINUED = b'{"kind":"continued"}\n'


class _Watcher:
    def __init__(self) -> None:
        self.lines: deque[bytes] = deque(maxlen=MAX_LINES_BEHIND)
        self.num_lost = 0
        self.wake = asyncio.Event()


class EventLog:
    """Writes and hands out lines; does nothing while there is neither file nor watcher.

    Args:
        path: the JSONL file, or None. A full file becomes `path.1`, and a new one is begun.
        max_bytes: size at which it is full.

    Attributes:
        is_on: whether there is a file or a watcher.

    Raises:
        OSError: the file cannot be written, or another process writes it.
    """

    def __init__(self, path: str | None, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file = _opened(path) if path else None
        self._size = _without_half_a_line(path, self._file.tell()) if path and self._file else 0
        self._watchers: set[_Watcher] = set()
        self._has_ended = False
        self.is_on = self._file is not None

    def begin(
        self, at: float, policy: str, limits: Limits, records: list[TrajectoryRecord], can_preempt: bool = False
    ) -> None:
        """Record in the file how the scheduler is created: when, with which settings, and which trajectories it
        knows.
        """
        if self._file is not None:
            start = {"at": at, "kind": "start", "policy": policy, "limits": limits, "can_preempt": can_preempt}
            self._write(orjson.dumps(start | {"records": records}, option=orjson.OPT_APPEND_NEWLINE))

    def add(self, event: Event, actions: list[Action]) -> None:
        """Record an event and the actions that followed from it."""
        if not self.is_on:
            return
        lines = [_line(event.at, "event", event)]
        lines += [_line(event.at, "action", action) for action in actions]
        if self._file is not None:
            self._write(b"".join(lines))
        for watcher in self._watchers:
            watcher.num_lost += max(0, len(watcher.lines) + len(lines) - MAX_LINES_BEHIND)
            watcher.lines.extend(lines)
            watcher.wake.set()

    async def watch(self, silence_s: float) -> AsyncIterator[bytes]:
        """Lines as they come, in batches, until the process stops; b"" after `silence_s` without one."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        self.is_on = True
        try:
            while not self._has_ended:
                try:
                    async with asyncio.timeout(silence_s):
                        await watcher.wake.wait()
                except TimeoutError:
                    yield b""
                    continue
                watcher.wake.clear()
                batch = b"".join(watcher.lines)
                watcher.lines.clear()
                if watcher.num_lost:
                    batch = orjson.dumps({"kind": "lost", "num_lines": watcher.num_lost}) + b"\n" + batch
                    watcher.num_lost = 0
                yield batch
                await asyncio.sleep(_PAUSE_S)
        finally:
            self._watchers.discard(watcher)
            self.is_on = self._file is not None or bool(self._watchers)

    def end_watches(self) -> None:
        """Release all watchers; a shutdown would wait for them forever."""
        self._has_ended = True
        for watcher in self._watchers:
            watcher.wake.set()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes) -> None:
        assert self._file is not None and self._path is not None
        try:
            if self._size + len(data) > self._max_bytes and self._size:
                self._file.close()
                with contextlib.suppress(FileNotFoundError):  # somebody moved it away: logrotate, a person
                    os.replace(self._path, f"{self._path}.1")
                self._file = _opened(self._path)
                self._size, data = 0, _CONTINUED + data
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._give_up(error)
        else:
            self._size += len(data)

    def _give_up(self, error: OSError) -> None:
        assert self._file is not None and self._path is not None
        LOGGER.error("event log given up", extra={"fields": {"path": self._path, "error": str(error)}})
        with contextlib.suppress(OSError):
            # Half a line, which nobody could read. The file may be elsewhere by now, or shorter: logrotate, a person.
            if not self._file.closed and os.fstat(self._file.fileno()).st_size > self._size:
                self._file.truncate(self._size)
        self._file.close()
        self._file = None
        self.is_on = bool(self._watchers)


def _opened(path: str) -> FileIO:
    """The file, locked until it is closed. The lock is the kernel's, so it ends with the process. Raises OSError."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115 - it lives as long as the log
    if os.path.isfile(path):  # not a device, such as /dev/null, which is everybody's
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise OSError(errno.EBUSY, "another gateway writes it: stop that one, or choose another file") from None
        except OSError:
            pass  # a file system without locks
    return file


def _without_half_a_line(path: str, size: int) -> int:
    """Cut off the half of a line with which a log of this size ends, if it does. Returns the size then."""
    if not size:
        return 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        head = content[end : end + max(map(len, _HEADS_OF_LINES))]
    if not head or not any(known.startswith(head[: len(known)]) for known in _HEADS_OF_LINES):  # no half of ours
        return size
    os.truncate(path, end)
    return end


def _line(at: float, kind: str, said: Event | Action) -> bytes:
    return orjson.dumps(logged(at, kind, said), default=sorted, option=orjson.OPT_APPEND_NEWLINE)
