"""The SQLite file of the embedded store: locked, opened, and checkpointed.

It is in WAL mode, so writing to it appends to the WAL. A thread with its own connection copies the WAL into the
database, so no put waits for a sync.
"""

import fcntl
import os
import sqlite3
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

from store.port import StoreCorrupt, StoreError, StoreInUse

FORMAT = 2

SCHEMA = """
    CREATE TABLE record (number INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, value BLOB NOT NULL, answer BLOB);
    CREATE TABLE turn (number INTEGER PRIMARY KEY, record INTEGER NOT NULL, value BLOB NOT NULL);
    CREATE TABLE state (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""

PAGE_BYTES = 4_096

CHECKPOINT_EVERY = 1_000
"""Pages between checkpoints, which is also SQLite's default: the WAL stays at some 8 MB. Most puts are one page or two
and count as one; learned state can be megabytes."""

MAX_PAGES_BEHIND = 4_000
"""If the disk has not finished a checkpoint after this many pages, puts wait for it; only tens of thousands of puts a
second get there."""

MAX_WAL_PAGES = 8_000
"""Checkpoints beside running puts never empty the WAL; at 32 MB it is emptied, for which a put may wait once. Another
program that reads the file keeps it from being emptied, but no put waits for that program."""

BUSY_TIMEOUT_S = 2.0
"""How long a put may wait while the rest of the WAL is copied, and that copy for a put; it takes some 10 ms, a slow
disk's sync several times that. Another program that keeps the file locked for longer is waited for only once."""


class Checkpoints:
    """Checkpoints of one file, in a thread.

    Attributes:
        num_pages: written since the last checkpoint began; whoever writes counts them here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._running: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-checkpoint")
        self.num_pages = 0

    def begin_if_due(self) -> None:
        """Call this outside a transaction: a checkpoint that empties the WAL waits for running writes."""
        if self.num_pages < CHECKPOINT_EVERY:
            return
        if self._running and not self._running.done():
            if self.num_pages < MAX_PAGES_BEHIND:
                return
            self._running.result()
        self.num_pages = 0
        self._running = self._thread.submit(_checkpoint, self._path)

    def close(self) -> None:
        """Wait until the last one has ended."""
        self._thread.shutdown(wait=True)


def locked(path: Path) -> IO[str]:
    """A lock on the file, until this is closed. Raises StoreInUse, or OSError.

    The lock is the kernel's, so it ends with the process, however the process dies; the number in its file is for
    people.
    """
    lock_file = open(f"{path}.lock", "a+")  # noqa: SIM115
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_file.seek(0)
        owner = lock_file.read().strip()
        lock_file.close()
        raise StoreInUse(f"store {path} is in use by process {owner}; stop it or choose another file") from None
    lock_file.truncate(0)
    lock_file.write(str(os.getpid()))
    lock_file.flush()
    return lock_file


def check_writable(path: Path) -> None:
    """Raises StoreError, which names the file that may not be written, before SQLite creates files beside a read-only
    one: they would be read-only, too, and stay."""
    for one in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        if one.exists() and not os.access(one, os.W_OK):
            raise StoreError(f"store {path} cannot be used: {one} is read-only")


def connected(path: Path) -> sqlite3.Connection:
    """A connection to a file that is sound and of this format; an empty file gets its tables. Raises StoreError."""
    check_writable(path)
    try:
        database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        [version] = database.execute("PRAGMA user_version").fetchone()
        [num_tables] = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        is_new = version == 0 and num_tables == 0
        # Another program's database must stay as it is: WAL mode is kept in the file.
        if is_new or version == FORMAT:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA wal_autocheckpoint = 0")
            # The predictor's state is up to 4 MB. With the usual cache, of 2 MB, such a put is written and read again
            # in the middle of its transaction, and takes twice the processor time.
            database.execute("PRAGMA cache_size = -16000")
        if is_new:
            database.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
            return database
        [verdict] = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as fault:
        raise explained(path, fault) from fault
    if version != FORMAT:
        raise StoreCorrupt(
            f"store {path} has format {version}, this program reads {FORMAT}: "
            "start the version that wrote it, or choose another file"
        )
    if verdict != "ok":
        raise StoreCorrupt(f"store {path} is damaged ({verdict}); move it away to start empty")
    return database


def explained(path: Path, fault: Exception) -> StoreError:
    """What a fault of SQLite, or a value that is no JSON, means for the file."""
    if isinstance(fault, sqlite3.OperationalError):
        return StoreError(f"store {path} cannot be used: {fault}")
    return StoreCorrupt(f"store {path} is damaged ({fault}); move it away to start empty")


def _checkpoint(path: Path) -> None:
    """Copy the WAL into the database beside running puts; wait for none of them unless the WAL is large.

    A put that finds all of the WAL copied, and nobody who reads from it, begins the WAL anew. SQLite's own way to empty
    it (`RESTART`) would keep puts waiting for those who read.
    """
    with suppress(sqlite3.Error), closing(_beside(path)) as database:  # a full disk: the puts report it
        [_, num_pages, _] = database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if num_pages > MAX_WAL_PAGES:
            with closing(_beside(path)) as keeps_puts_out:
                keeps_puts_out.execute("BEGIN IMMEDIATE")
                database.execute("PRAGMA wal_checkpoint(PASSIVE)")


def _beside(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
