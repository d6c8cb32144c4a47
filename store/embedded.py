"""The embedded store: one SQLite file in WAL mode, owned by one process (sqlite_file.py). Pieces have a file of their
own (piece_file.py).

What it promises: a settled put is in the kernel's page cache. A put settles at the end of the event loop's iteration,
or once the pieces that were put before for its trajectory are written, so the record tells of no turn whose tokens a
kill has taken. It survives SIGKILL of the process. A power cut or a kernel crash may lose the last moments, but never
the file's consistency (`synchronous=NORMAL`: the WAL is synced before it is copied into the database).

Why puts are cheap on the event loop: the puts of one iteration are one transaction, written at its end with one call
per statement, which appends a few pages to the WAL. Rows are in order of arrival, so most puts touch only the last
pages; which rows belong to which trajectory is kept in memory.
"""

import asyncio
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import orjson

from store.piece_file import PieceFile
from store.port import Json, StoredTrajectory, StoreError, StoreHealth, encoded
from store.settings import StoreSettings
from store.sqlite_file import BUSY_TIMEOUT_S, FORMAT, PAGE_BYTES, Checkpoints, connected, explained, locked

PUT_RECORD = """
    INSERT INTO record VALUES (?, ?, ?, ?) ON CONFLICT (number)
    DO UPDATE SET value = excluded.value, answer = coalesce(excluded.answer, answer)
"""
FORGET_RECORD = "DELETE FROM record WHERE number = ?"
PUT_TURN = "INSERT INTO turn VALUES (?, ?, ?)"
FORGET_TURN = "DELETE FROM turn WHERE number = ?"
FORGET_STRAYS = "DELETE FROM turn WHERE record NOT IN (SELECT number FROM record)"
PUT_STATE = "INSERT OR REPLACE INTO state VALUES (?, ?)"
IN_THIS_ORDER = (PUT_RECORD, PUT_TURN, PUT_STATE, FORGET_TURN, FORGET_RECORD)
"""The order within one transaction: numbers are not reused, so nothing forgotten is put after it."""

HEAL_SHARE = 0.05
"""Most of the event loop's time that attempts to heal may take: each writes everything, and may fail at its end."""


@dataclass(slots=True)
class _Rows:
    """Where a trajectory is in the file: the numbers of its record and of its turns, oldest first."""

    record: int
    turns: deque[int] = field(default_factory=deque)


@dataclass(slots=True)
class _Behind:
    """Puts of a trajectory that wait until its pieces, of which there are so many, are written."""

    num_pieces: int = 0
    puts: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)


class EmbeddedStore:
    """A Store in one SQLite file."""

    is_fenced = False  # another process is refused

    def __init__(self, path: Path, settings: StoreSettings) -> None:
        self._path = path = Path(os.path.realpath(path))  # a link to a file is locked as that file
        self._max_turns = settings.max_turns_kept
        self._pieces = PieceFile(path.with_name(path.name + "-pieces"), settings)
        self._rows: dict[str, _Rows] = {}
        self._last_record = self._last_turn = 0
        self._heal_every_s = settings.backoff_max_s
        self._heal_timer: asyncio.TimerHandle | None = None
        self._rewrite: Callable[[], None] | None = None
        self._fault, self._fault_at = "", 0.0  # 0 until something was refused that is still not in the file
        self._unwritten: set[str] = set()  # trajectories and states whose puts wait, or were refused
        self._num_dropped = self._num_losses = 0
        self._waiting: dict[str, list[tuple[Any, ...]]] = {statement: [] for statement in IN_THIS_ORDER}
        self._behind: dict[str, _Behind] = {}  # what waits for pieces, by trajectory
        self._has_waiting = False
        self._unsettled: list[asyncio.Future[None]] = []
        self._when_committed: list[Callable[[], None]] = []
        self._checkpoints = Checkpoints(path)
        self._database: sqlite3.Connection
        self._lock_file: IO[str]
        self._loop: asyncio.AbstractEventLoop

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_file = locked(self._path)
        except OSError as fault:
            raise StoreError(f"store {self._path} cannot be used: {fault}") from fault
        try:
            self._database = connected(self._path)
            self._read_rows()
            await self._pieces.open()
        except StoreError:
            self._lock_file.close()
            raise

    async def load(self) -> list[StoredTrajectory]:
        self._commit()
        loads = orjson.loads
        try:
            found = {
                number: StoredTrajectory(trajectory_id, loads(value), [], answer)
                for number, trajectory_id, value, answer in self._database.execute("SELECT * FROM record")
            }
            for record, value in self._database.execute("SELECT record, value FROM turn ORDER BY number"):
                found[record].turns.append(loads(value))
        except (sqlite3.Error, orjson.JSONDecodeError) as fault:
            raise explained(self._path, fault) from fault
        for trajectory in found.values():
            del trajectory.turns[: -self._max_turns]
        return list(found.values())

    def on_loss(self, rewrite: Callable[[], None]) -> None:
        self._rewrite = rewrite

    def put_trajectory(self, trajectory_id: str, record: Json, answer: bytes | None = None) -> None:
        value = _blob(encoded(record))
        rows = self._rows.get(trajectory_id) or self._new_rows(trajectory_id)
        if answer:
            self._checkpoints.num_pages += len(answer) // PAGE_BYTES
        self._write(PUT_RECORD, (rows.record, trajectory_id, value, answer and _blob(answer)), trajectory_id)

    def append_turn(self, trajectory_id: str, turn: Json) -> None:
        value = _blob(encoded(turn))
        rows = self._rows.get(trajectory_id)
        if rows is None:
            rows = self._new_rows(trajectory_id)
            self._write(PUT_RECORD, (rows.record, trajectory_id, b"{}", None), trajectory_id)
        while len(rows.turns) >= self._max_turns:
            self._write(FORGET_TURN, (rows.turns.popleft(),), trajectory_id)
        self._last_turn += 1
        self._write(PUT_TURN, (self._last_turn, rows.record, value), trajectory_id)
        rows.turns.append(self._last_turn)

    def forget_trajectory(self, trajectory_id: str) -> None:
        self._pieces.drop(trajectory_id, "")
        rows = self._rows.pop(trajectory_id, None)
        if rows is None:
            return
        self._write(FORGET_RECORD, (rows.record,), trajectory_id)
        for number in rows.turns:
            self._write(FORGET_TURN, (number,), trajectory_id)

    def put_piece(self, trajectory_id: str, name: str, data: bytes) -> None:
        self._pieces.put(trajectory_id, name, data)
        behind = self._behind.setdefault(trajectory_id, _Behind())
        behind.num_pieces += 1
        self._pieces.when_written(partial(self._piece_written, trajectory_id, behind))

    def drop_pieces(self, trajectory_id: str, prefix: str = "") -> None:
        self._pieces.drop(trajectory_id, prefix)

    async def get_pieces(self, trajectory_id: str, prefix: str = "") -> dict[str, bytes]:
        return await self._pieces.get(trajectory_id, prefix)

    async def piece_sizes(self) -> dict[str, int]:
        return await self._pieces.sizes()

    def put_state(self, name: str, value: bytes) -> None:
        self._checkpoints.num_pages += len(value) // PAGE_BYTES
        self._write(PUT_STATE, (name, value), f"state\n{name}")  # which is no trajectory's id

    async def get_state(self, name: str) -> bytes | None:
        self._commit()
        try:
            row = self._database.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        except sqlite3.Error as fault:
            raise explained(self._path, fault) from fault
        return bytes(row[0]) if row else None

    def when_settled(self, call: Callable[[], None]) -> bool:
        if self._behind or len(self._pieces):
            return False
        if self._has_waiting:
            self._when_committed.append(call)
        else:
            call()
        return True

    async def settle(self, timeout_s: float) -> bool:
        are_written = await self._pieces.settle(timeout_s)
        if self._has_waiting:
            committed = self._loop.create_future()
            self._unsettled.append(committed)
            await committed
        return are_written and not self._fault

    def health(self) -> StoreHealth:
        oldest_at = min((at for at in (self._fault_at, self._pieces.oldest_at()) if at), default=0.0)
        return StoreHealth(
            ok=not (self._fault or self._pieces.fault),
            detail=self._fault or self._pieces.fault or f"embedded: {self._path}",
            num_pending=len(self._unwritten) + len(self._pieces),
            lag_s=time.monotonic() - oldest_at if oldest_at else 0.0,
            num_dropped=self._num_dropped + self._pieces.num_dropped,
            num_losses=self._num_losses,
        )

    async def close(self) -> None:
        if self._heal_timer:
            self._heal_timer.cancel()
            self._wait_for_locks(BUSY_TIMEOUT_S)
            self._heal()  # the disk may have room again
        await self._pieces.close()
        self._commit()
        if self._heal_timer:
            self._heal_timer.cancel()
        self._checkpoints.close()
        self._database.close()
        self._lock_file.close()

    def _read_rows(self) -> None:
        by_number: dict[int, _Rows] = {}
        try:
            # A disk that was full for a moment may have taken a turn but not the record before it.
            self._database.execute(FORGET_STRAYS)
            for number, trajectory_id in self._database.execute("SELECT number, trajectory_id FROM record"):
                self._rows[trajectory_id] = by_number[number] = _Rows(number)
                self._last_record = max(self._last_record, number)
            for number, record in self._database.execute("SELECT number, record FROM turn ORDER BY number"):
                by_number[record].turns.append(number)
                self._last_turn = number
        except sqlite3.Error as fault:
            raise explained(self._path, fault) from fault

    def _new_rows(self, trajectory_id: str) -> _Rows:
        self._last_record += 1
        rows = self._rows[trajectory_id] = _Rows(self._last_record)
        return rows

    def _piece_written(self, trajectory_id: str, behind: _Behind) -> None:
        if self._behind.get(trajectory_id) is not behind:  # everything was put anew meanwhile
            return
        behind.num_pieces -= 1
        if not behind.num_pieces:
            del self._behind[trajectory_id]
            for statement, values in behind.puts:
                self._write(statement, values, trajectory_id)

    def _write(self, statement: str, values: tuple[Any, ...], name: str) -> None:
        """Write at the end of this iteration, or once the pieces that were put for this trajectory are written."""
        if self._behind and (behind := self._behind.get(name)) is not None:
            behind.puts.append((statement, values))
            return
        self._unwritten.add(name)
        self._waiting[statement].append(values)
        if not self._has_waiting:
            self._has_waiting = True
            self._loop.call_soon(self._commit)

    def _commit(self) -> None:
        """Write the puts of this iteration of the event loop; callers of `settle` wait for it."""
        if not self._has_waiting:
            return
        try:
            self._database.execute("BEGIN")
            self._write_waiting()
            self._database.execute("COMMIT")
            if not self._fault:
                self._unwritten.clear()
        except sqlite3.Error as fault:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            self._note_fault(fault)
        for committed in self._unsettled:
            if not committed.done():  # its caller still waits
                committed.set_result(None)
        self._unsettled.clear()
        calls, self._when_committed = self._when_committed, []
        for call in calls:
            call()
        self._checkpoints.begin_if_due()

    def _write_waiting(self) -> None:
        """Within a transaction. Afterwards nothing waits, whether or not it succeeded."""
        self._has_waiting = False
        waiting = [(statement, rows) for statement, rows in self._waiting.items() if rows]
        self._waiting = {statement: [] for statement in IN_THIS_ORDER}
        for statement, rows in waiting:
            self._database.executemany(statement, rows)
            self._checkpoints.num_pages += len(rows)

    def _note_fault(self, fault: sqlite3.Error, took_s: float = 0.0) -> None:
        # Serving continues without the record, which is rewritten once it takes writes again.
        self._fault = f"embedded store {self._path} takes no writes: {fault}"
        self._fault_at = self._fault_at or time.monotonic()
        self._num_dropped += 1
        self._wait_for_locks(0.0)  # each wait is one of the whole event loop
        if not self._heal_timer:
            self._heal_timer = self._loop.call_later(max(self._heal_every_s, took_s / HEAL_SHARE), self._heal)

    def _wait_for_locks(self, timeout_s: float) -> None:
        self._database.execute(f"PRAGMA busy_timeout = {timeout_s * 1000:.0f}")

    def _heal(self) -> None:
        """Replace all trajectories by what the owner puts now, in one transaction; if it fails, try again later."""
        self._commit()
        self._heal_timer, self._fault = None, ""
        rows, unwritten, began_at = self._rows, set(self._unwritten), time.monotonic()
        try:
            self._database.execute("BEGIN")
            self._database.execute(f"PRAGMA user_version = {FORMAT}")  # a write, even with nothing to rewrite
            if self._rewrite:
                self._database.execute("DELETE FROM record")
                self._database.execute("DELETE FROM turn")
                self._rows, self._behind = {}, {}
                self._rewrite()
            self._write_waiting()
            self._database.execute("COMMIT")
        except sqlite3.Error as fault:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            self._rows, self._unwritten = rows, unwritten  # the others are still in the file
            self._note_fault(fault, time.monotonic() - began_at)
        self._checkpoints.begin_if_due()
        if not self._fault:
            self._num_losses += 1
            self._fault_at = 0.0
            self._unwritten.clear()
            self._wait_for_locks(BUSY_TIMEOUT_S)


# sqlite3 takes these as they are. For each value that is bytes it looks for an adapter, finds none, and that costs
# more.
_blob = bytearray
