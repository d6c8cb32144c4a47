"""File descriptors kept by name for a process that may die: systemd's descriptor store, as sd_notify(3) describes it.

A message is lines of `KEY=value` on a datagram socket, with descriptors attached. `FDSTORE=1` keeps them under
`FDNAME`; `FDSTOREREMOVE=1` closes all of that name. Anything else in a message is for systemd.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

_MAX_MESSAGE_BYTES = 65_536
# The most that the kernel sends with one message (SCM_MAX_FD).
_MAX_AT_ONCE = 253
_UNNAMED = "stored"
# A variable of the environment may have 128 KiB (MAX_ARG_STRLEN): with longer LISTEN_FDNAMES, nothing can be started.
_MAX_NAMES_BYTES = 128 * 1024 - len("LISTEN_FDNAMES=")


class Descriptors:
    """The descriptors that are kept, and the socket on which they arrive.

    Args:
        path: where to create the socket.
        limit: above it, arriving descriptors are closed, as in systemd. So are those whose names have no room in the
            environment of the next process.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self._kept: list[tuple[str, int]] = []
        self._names_bytes = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Readable when a message has arrived."""
        return self._socket.fileno()

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(tuple(self._kept))

    def __len__(self) -> int:
        return len(self._kept)

    def receive(self) -> None:
        """Take all messages that have arrived, including the last ones of a dead process."""
        while True:
            try:
                said, found, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, _MAX_AT_ONCE)
            except BlockingIOError:
                return
            for descriptor in found:  # `recv_fds` ignores MSG_CMSG_CLOEXEC (3.11): the next process had second copies
                os.set_inheritable(descriptor, False)
            self._take(said, found)

    def close(self) -> None:
        """Close all descriptors and the socket."""
        for _, descriptor in self._kept:
            os.close(descriptor)
        self._kept = []
        self._socket.close()

    def _take(self, said: bytes, found: list[int]) -> None:
        fields = dict(line.partition("=")[::2] for line in said.decode("utf-8", "replace").splitlines())
        name = fields.get("FDNAME", _UNNAMED)
        name_bytes = len(name.encode()) + 1  # and a colon, or the end
        if fields.get("FDSTOREREMOVE") == "1":
            for kept, descriptor in self._kept:
                if kept == name:
                    os.close(descriptor)
                    self._names_bytes -= name_bytes
            self._kept = [(kept, descriptor) for kept, descriptor in self._kept if kept != name]
        names_bytes = self._names_bytes + len(found) * name_bytes
        has_room = len(self._kept) + len(found) <= self.limit and names_bytes <= _MAX_NAMES_BYTES
        if fields.get("FDSTORE") == "1" and ":" not in name and has_room:
            self._kept += [(name, descriptor) for descriptor in found]
            self._names_bytes = names_bytes
        else:
            for descriptor in found:
                os.close(descriptor)
