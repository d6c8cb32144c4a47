"""One controller acts, others wait: a lock on a file beside the journal, which the system releases when its holder
dies.

The file must be on a disk that all controllers of the fleet share and that supports flock (local disks, NFS 4). There
is no timeout, so nothing has to be fenced: a controller that hangs keeps its lease, and only its end frees it for
another.
"""

import asyncio
import fcntl
import os
from pathlib import Path
from typing import IO

_POLL_S = 0.2


class Lease:
    """The right to change one fleet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def try_take(self) -> bool:
        """Take it if it is free. Returns whether it was."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._file = file
        return True

    async def take(self) -> None:
        """Wait until this process holds it."""
        while not self.try_take():  # noqa: ASYNC110 (flock has no event for it, but a thread that waits)
            await asyncio.sleep(_POLL_S)

    def holder(self) -> str:
        """Process id of the holder, for people; "" if unknown."""
        try:
            return self._path.read_text().strip()
        except OSError:
            return ""

    def give_back(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
