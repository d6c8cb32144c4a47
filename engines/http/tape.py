"""All bytes of one response, in memory that outlives the process that reads them.

The socket is read straight into it, so at no moment is a byte neither in the socket nor here. How much was read is not
recorded, because the process may die before it could do so: HTTP and JSON contain no NUL, and the memory after the read
bytes is empty.

A missing page is allocated while the kernel copies into it, and a process that is being killed gets none: bytes could
then be both here and in the socket. So pages are touched before they are read into.
"""

import mmap
import os
import struct

_PAGE_BYTES = mmap.PAGESIZE
# Read at once: some fifty events. More would allocate memory that most legs never fill.
_ROOM_BYTES = 4 * _PAGE_BYTES
_LENGTH = struct.Struct("<Q")


class Tape:
    """What was read of a response so far, after a header that identifies it.

    Args:
        descriptor: of its memory; it remains the caller's.
        start: where the response begins.
        end: where the read bytes end.
    """

    def __init__(self, descriptor: int, size: int, start: int, end: int) -> None:
        self._memory = mmap.mmap(descriptor, size)
        self._view = memoryview(self._memory)
        self._start = start
        self._end = end
        self._touched = end // _PAGE_BYTES * _PAGE_BYTES

    def so_far(self) -> bytes:
        """Everything that was read."""
        return bytes(self._view[self._start : self._end])

    def room(self) -> memoryview:
        """Where to read to next; empty if it is full."""
        room = self._view[self._end : self._end + _ROOM_BYTES]
        until = self._end + len(room)
        while self._touched < until:
            self._memory[self._touched] = self._memory[self._touched]
            self._touched += _PAGE_BYTES
        return room

    def taken(self, num_bytes: int) -> bytes:
        """The bytes just read there."""
        start, self._end = self._end, self._end + num_bytes
        return bytes(self._view[start : self._end])


def new_tape(header: bytes, limit_bytes: int) -> tuple[Tape, int]:
    """An empty tape for a response of up to this many bytes, and the descriptor of its memory. Raises OSError."""
    descriptor = os.memfd_create("tape")
    try:
        start = _LENGTH.size + len(header)
        os.ftruncate(descriptor, start + limit_bytes)
        os.pwrite(descriptor, _LENGTH.pack(len(header)) + header, 0)
        return Tape(descriptor, start + limit_bytes, start, start), descriptor
    except OSError:
        os.close(descriptor)
        raise


def found_tape(descriptor: int) -> tuple[Tape, bytes]:
    """A tape that another process wrote, and its header. Raises OSError; ValueError if it is not a tape."""
    size = os.fstat(descriptor).st_size
    length = os.pread(descriptor, _LENGTH.size, 0)
    if len(length) < _LENGTH.size or (start := _LENGTH.size + _LENGTH.unpack(length)[0]) > size:
        raise ValueError("no tape")
    header = os.pread(descriptor, start - _LENGTH.size, _LENGTH.size)
    # Unwritten memory is a hole, which need not be scanned.
    filled = os.lseek(descriptor, start - 1, os.SEEK_HOLE) - start
    read = _pread_all(descriptor, filled, start).rstrip(b"\0")
    return Tape(descriptor, size, start, start + len(read)), header


def _pread_all(descriptor: int, size: int, offset: int) -> bytes:
    pieces = []
    while size > 0 and (piece := os.pread(descriptor, size, offset)):
        pieces.append(piece)
        size, offset = size - len(piece), offset + len(piece)
    return b"".join(pieces)
