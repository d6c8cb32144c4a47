"""A connection whose response outlives this process: its bytes go onto a tape, and a keeper holds both, too.

The keeper holds the socket's descriptor and the tape's for the next process. Closing a socket here would therefore end
nothing, and an engine would continue for nobody: it is shut down instead.
"""

import array
import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Awaitable, Callable
from typing import Any

from engines.http.connection import Connection
from engines.http.response import Response
from engines.http.tape import Tape

Keep = Callable[[socket.socket, int], Awaitable[Tape | None]]
"""Puts a socket, to which this many bytes will be sent and none were yet, into keeping; returns the tape for the
response, None if it cannot.
"""

# Bytes read at once if there is no tape (any more).
_SCRATCH_BYTES = 64 * 1024
# `tcpi_bytes_acked` in `struct tcp_info` (linux/tcp.h, since 4.1).
_BYTES_ACKED = struct.Struct("120xQ")


class KeptConnection(asyncio.BufferedProtocol):
    """Reads a connection into a tape, and passes on what came.

    Args:
        connection: whose bytes these are.
        tape: None until there is one, and again when it is full.
        found: the tape, if it belongs to a request that another process sent; what it has is read by `read_found`.

    Attributes:
        socket: a descriptor of its own of the connection; None if this process may have no more.
        response: of that request.
        on_full: called once when the tape is full: the response can no longer be read back.
    """

    def __init__(self, connection: Connection, found: Tape | None = None) -> None:
        self.connection = connection
        self.tape = found
        self.socket: socket.socket | None = None
        self.response: Response | None = None
        self.on_full: Callable[[], None] | None = None
        self._unread = found
        self._scratch = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        with contextlib.suppress(OSError):  # its opener looks: an error raised here would reach nobody
            self.socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self.connection.connection_made(transport)

    def read_found(self) -> None:
        """Read what a found tape has; once, before anything else that comes.

        Not in `connection_made`: a whole answer ends the connection, and uvloop closes one that ends there without
        telling the socket's object, which later closed the same number again, and with it whatever had it by then.
        """
        tape, self._unread = self._unread, None
        if tape is not None:
            self.response = self.connection.expect()
            if so_far := tape.so_far():
                self.connection.data_received(so_far)

    def give_up(self) -> None:
        """End the connection, whoever else has its descriptor."""
        if self.socket is not None:
            shut_down(self.socket)

    def get_buffer(self, sizehint: int) -> Any:
        if self.tape is not None:
            if len(room := self.tape.room()):
                return room
            self.tape = None
            if self.on_full is not None:
                self.on_full()
        self._scratch = self._scratch or bytearray(_SCRATCH_BYTES)
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self.read_found()
        if self.tape is not None:
            self.connection.data_received(self.tape.taken(nbytes))
        else:
            self.connection.data_received(bytes(self._scratch[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.read_found()
        self.give_up()
        self.connection.connection_lost(exc)


def shut_down(connection: socket.socket) -> None:
    """End a connection, even if another process has its descriptor."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it had already ended
    finally:
        connection.close()


def bytes_sent(connection: socket.socket) -> int:
    """How many bytes were written to it since it was opened, plus one: the difference of two counts is exact, also
    between two processes. Raises OSError if the system does not report it.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _BYTES_ACKED.size:
        raise OSError("the system does not count bytes")
    unacknowledged = array.array("i", [0])
    fcntl.ioctl(connection, termios.TIOCOUTQ, unacknowledged)
    return int(_BYTES_ACKED.unpack_from(info)[0]) + unacknowledged[0]
