"""The embedded store's pieces: an SQLite file of their own, written by a thread.

They are separate from the records because they are a hundred times larger: a check of the whole file at the start, and
a checkpoint beside running puts, would take seconds. The thread lets SQLite checkpoint the WAL by itself; the event
loop only queues. The file grows to the most that was kept at once and never shrinks; its space is reused.
"""

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from store.port import StoreAway, StoreCorrupt, StoreError
from store.settings import StoreSettings
from store.sqlite_file import check_writable, explained

FORMAT = 1

# The index holds everything that the start needs, so pieces need not be read.
SCHEMA = """
    CREATE TABLE IF NOT EXISTS piece (
        number INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, name TEXT NOT NULL,
        num_bytes INTEGER NOT NULL, value BLOB NOT NULL
    );
    CREATE INDEX IF NOT EXISTS piece_of ON piece (trajectory_id, name, num_bytes);
"""
PUT = """
    INSERT INTO piece (trajectory_id, name, num_bytes, value) SELECT ?1, ?2, ?3, ?4
    WHERE NOT EXISTS (SELECT 1 FROM piece WHERE trajectory_id = ?1 AND name = ?2)
"""
DROP = "DELETE FROM piece WHERE trajectory_id = ? AND substr(name, 1, length(?)) = ?"
GET = "SELECT name, value FROM piece WHERE trajectory_id = ? AND substr(name, 1, length(?)) = ? ORDER BY number"
SIZES = "SELECT trajectory_id, sum(num_bytes) FROM piece GROUP BY trajectory_id"

STEP_BYTES = 100
"""The cost of a queued step beyond its value."""

_Result = TypeVar("_Result")


class _Step(NamedTuple):
    statement: str
    values: tuple[Any, ...]
    num_bytes: int
    put_at: float
    """On the monotonic clock."""


class PieceFile:
    """Pieces in one SQLite file, which is protected by the lock of the store it belongs to."""

    def __init__(self, path: Path, settings: StoreSettings) -> None:
        self._path = path
        self._settings = settings
        self._known: set[str] = set()
        self._steps: deque[_Step] = deque()
        self._num_bytes = 0
        self._writing_since = 0.0  # when the oldest step was put that the thread writes now; 0 if it writes none
        self._num_steps = self._num_written = 0
        self._wanted: asyncio.Event
        self._waiting: deque[tuple[int, asyncio.Future[bool]]] = deque()
        self._when_written: deque[tuple[int, Callable[[], None]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-pieces")
        self._database: sqlite3.Connection
        self._writer: asyncio.Task[None]
        self.fault = ""
        self.num_dropped = 0

    async def open(self) -> None:
        """Raises StoreCorrupt, StoreError."""
        self._wanted = asyncio.Event()
        try:
            self._database = await self._in_thread(lambda: _connect(self._path))
            self._known = set(await self.sizes())
        except StoreError:
            self._thread.shutdown()
            raise
        self._writer = asyncio.create_task(self._write_forever(), name="store-pieces")

    def __len__(self) -> int:
        return len(self._steps)

    def oldest_at(self) -> float:
        """When the oldest step was put that is not written, on the monotonic clock; 0 if there is none."""
        return self._writing_since or (self._steps[0].put_at if self._steps else 0.0)

    def put(self, trajectory_id: str, name: str, data: bytes) -> None:
        self._known.add(trajectory_id)
        self._queue(_Step(PUT, (trajectory_id, name, len(data), data), len(data) + STEP_BYTES, time.monotonic()))

    def drop(self, trajectory_id: str, prefix: str) -> None:
        if trajectory_id in self._known:
            self._queue(_Step(DROP, (trajectory_id, prefix, prefix), STEP_BYTES, time.monotonic()))
        if not prefix:
            self._known.discard(trajectory_id)

    async def get(self, trajectory_id: str, prefix: str) -> dict[str, bytes]:
        """Raises StoreAway, StoreError."""
        return await self._read(GET, trajectory_id, prefix, prefix) if trajectory_id in self._known else {}

    async def sizes(self) -> dict[str, int]:
        """Bytes of each trajectory's pieces. Raises StoreAway, StoreError."""
        return await self._read(SIZES)

    async def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until everything put so far is written. False after `timeout_s`, or at once while nothing can be
        written."""
        if self._num_written < self._num_steps and not self.fault:
            loop = asyncio.get_running_loop()
            written = loop.create_future()
            self._waiting.append((self._num_steps, written))
            # asyncio's own ways to wait with a timeout cost 20 us more.
            timer = None if timeout_s is None else loop.call_later(timeout_s, _give_up, written)
            try:
                if not await written:
                    return False
            finally:
                if timer is not None:
                    timer.cancel()
        return not self.fault

    def when_written(self, call: Callable[[], None]) -> None:
        """Call `call` once everything put so far is written, or at the latest when nothing can be written."""
        if self._num_written < self._num_steps and not self.fault:
            self._when_written.append((self._num_steps, call))
        else:
            call()

    async def close(self) -> None:
        if not await self.settle() and self._steps:
            with suppress(sqlite3.Error):  # the last attempt: whatever the disk does not take now is lost
                await asyncio.get_running_loop().run_in_executor(self._thread, self._write, list(self._steps))
        self._writer.cancel()
        with suppress(asyncio.CancelledError):
            await self._writer
        await self._in_thread(self._database.close)
        self._thread.shutdown()
        self._tell(all_of_them=True)

    def _queue(self, step: _Step) -> None:
        self._steps.append(step)
        self._num_steps += 1
        self._num_bytes += step.num_bytes
        while self._num_bytes > self._settings.max_pending_bytes and len(self._steps) > 1:
            self._num_bytes -= self._steps.popleft().num_bytes
            self._num_written += 1
            self.num_dropped += 1
        self._wanted.set()

    async def _write_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            batch = self._take()
            if not batch:
                self._wanted.clear()
                continue
            self._writing_since = batch[0].put_at
            try:
                await loop.run_in_executor(self._thread, self._write, batch)
            except sqlite3.Error as fault:
                self.fault = f"embedded store {self._path} takes no writes: {fault}"
                self._writing_since = 0.0
                self._steps.extendleft(reversed(batch))
                self._num_bytes += sum(step.num_bytes for step in batch)
                self._tell(all_of_them=True)
                await asyncio.sleep(self._settings.backoff_max_s)
                continue
            self.fault, self._writing_since = "", 0.0
            self._num_written += len(batch)
            self._tell()
            await asyncio.sleep(self._settings.piece_pause_s)

    def _take(self) -> list[_Step]:
        batch: list[_Step] = []
        num_bytes = 0
        while self._steps and num_bytes < self._settings.batch_bytes:
            batch.append(self._steps.popleft())
            num_bytes += batch[-1].num_bytes
        self._num_bytes -= num_bytes
        return batch

    def _write(self, batch: list[_Step]) -> None:
        """In the thread: one transaction, which leaves nothing behind if it fails."""
        try:
            self._database.execute("BEGIN")
            for step in batch:
                self._database.execute(step.statement, step.values)
            self._database.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise

    def _tell(self, all_of_them: bool = False) -> None:
        while self._when_written and (all_of_them or self._when_written[0][0] <= self._num_written):
            _, call = self._when_written.popleft()
            call()
        while self._waiting and (all_of_them or self._waiting[0][0] <= self._num_written):
            _, written = self._waiting.popleft()
            if not written.done():  # its caller still waits
                written.set_result(True)

    async def _read(self, statement: str, *values: str) -> dict[str, Any]:
        """Two columns, once everything put so far is written."""
        if not await self.settle():
            raise StoreAway(self.fault)
        return await self._in_thread(lambda: dict(self._database.execute(statement, values)))

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as fault:
            raise explained(self._path, fault) from fault


def _give_up(written: asyncio.Future[bool]) -> None:
    if not written.done():
        written.set_result(False)


def _connect(path: Path) -> sqlite3.Connection:
    check_writable(path)
    database = sqlite3.connect(path, isolation_level=None)
    [version] = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, FORMAT):
        raise StoreCorrupt(
            f"store {path} has format {version}, this program reads {FORMAT}: "
            "start the version that wrote it, or choose another file"
        )
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.executescript(f"{SCHEMA} PRAGMA user_version = {FORMAT};")
    return database
