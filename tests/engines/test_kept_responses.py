"""A response that outlives the process that asked for it: the bytes it had read, then those of the socket."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.http import ConnectionBroken, HttpClient
from engines.http.kept import bytes_sent
from engines.http.tape import Tape, found_tape, new_tape

from .raw_server import Peer, Play, RawServer, raw_server

TIMEOUT_S = 60.0
BODY = b"".join(b"data: %d\n\n" % number for number in range(2000))
CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:9000], BODY[9000:]))
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS + b"0\r\n\r\n"
)
# Asks, reads so many bytes into the tape, and is gone as if it had been killed: nothing is closed or shut down.
ASKER = """
import asyncio, os, socket, sys
from engines.http import HttpClient
from engines.http.tape import new_tape
url, keeper, num_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])

async def main():
    tapes = []
    async def keep(connection, length):
        tape, descriptor = new_tape(b"mine", 2**20)
        with socket.socket(socket.AF_UNIX) as to:
            to.connect(keeper)
            socket.send_fds(to, [b"kept"], [connection.fileno(), descriptor])
        tapes.append(tape)
        return tape
    asking = asyncio.create_task(HttpClient(url).post_kept("/x", b"ask", b"", 60, keep, lambda: None))
    while not tapes or len(tapes[0].so_far()) < num_bytes:
        await asyncio.sleep(0.001)
    os._exit(0)

asyncio.run(main())
"""


def tape_with(data: bytes, limit_bytes: int, sizes: list[int]) -> tuple[Tape, int, int]:
    """One into which data was read in pieces of about these sizes; its descriptor, and how much it took."""
    tape, descriptor = new_tape(b"whose", limit_bytes)
    taken = 0
    while taken < len(data) and (room := tape.room()):
        num_bytes = min(len(room), len(data) - taken, sizes[taken % len(sizes)])
        room[:num_bytes] = data[taken : taken + num_bytes]
        assert tape.taken(num_bytes) == data[taken : taken + num_bytes]
        taken += num_bytes
    return tape, descriptor, taken


@given(st.binary().map(lambda data: data.replace(b"\0", b"0")), st.lists(st.integers(1, 40_000), min_size=1))
def test_a_tape_is_read_back_wherever_it_was_cut(data: bytes, sizes: list[int]) -> None:
    """All that was read into it, its header, and where to go on; also what was read and not yet noted."""
    data *= 300
    tape, descriptor, taken = tape_with(data, 50_000, sizes)
    unnoted = data[:10]
    room = tape.room()
    unnoted = unnoted[: len(room)]
    room[: len(unnoted)] = unnoted
    found, header = found_tape(descriptor)
    os.close(descriptor)
    assert taken == min(len(data), 50_000)
    assert header == b"whose"
    assert found.so_far() == data[:taken] + unnoted
    rest = found.room()
    assert len(rest) == min(50_000 - taken - len(unnoted), 4 * 4096)
    rest[:1] = b"x"[: len(rest)]
    found.taken(len(rest[:1]))
    assert tape.so_far() == data[:taken], "the other one's own end is where it was"


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100])
def test_what_is_no_tape_is_refused(content: bytes) -> None:
    """As another program's memory may be."""
    descriptor = os.memfd_create("other")
    os.write(descriptor, content)
    with pytest.raises(ValueError, match="no tape"):
        found_tape(descriptor)
    os.close(descriptor)


@asynccontextmanager
async def asked_and_gone(play: Play, num_bytes: int, folder: Path) -> AsyncIterator[tuple[RawServer, list[int]]]:
    """A server, and what a process kept that had read so much of its answer, and is no more."""
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.bind(str(folder / "keeper"))
        keeper.listen()
        async with raw_server(play) as server:
            command = (sys.executable, "-c", ASKER, server.url, str(folder / "keeper"), str(num_bytes))
            process = await asyncio.create_subprocess_exec(*command)
            assert await process.wait() == 0
            giver, _ = keeper.accept()
            with giver:
                _, descriptors, _, _ = socket.recv_fds(giver, 100, 2)
            yield server, descriptors


@pytest.mark.parametrize("num_bytes", [0, 1, 40, 90, 97, 110, 8000, len(ANSWER) - 3, len(ANSWER)])
async def test_the_next_process_reads_it_all(tmp_path: Path, num_bytes: int) -> None:
    """Wherever the first one came to: in the head, in a chunk, at the very end."""
    is_gone = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER[:num_bytes])
        await is_gone.wait()
        await peer.send(ANSWER[num_bytes:])
        await peer.until_left()

    async with asked_and_gone(play, num_bytes, tmp_path) as (server, descriptors):
        is_gone.set()
        http = HttpClient(server.url)
        tape, header = found_tape(descriptors[1])
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(False)
        response = await http.take_up(connection, tape, TIMEOUT_S, lambda: None)
        assert header == b"mine" and response.status == 200
        assert await response.body(2**20, TIMEOUT_S) == BODY
        assert found_tape(descriptors[1])[0].so_far() == ANSWER, "and the one after it could, too"
        http.close()
        await asyncio.wait_for(server.peers[0].over.wait(), TIMEOUT_S)
    os.close(descriptors[1])


async def test_a_server_that_died_meanwhile_broke_its_answer(tmp_path: Path) -> None:
    """What it had sent is there."""
    heard = bytearray()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER[:9000])

    async with asked_and_gone(play, 5000, tmp_path) as (server, descriptors):
        http = HttpClient(server.url)
        tape, _ = found_tape(descriptors[1])
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(False)
        response = await http.take_up(connection, tape, TIMEOUT_S, lambda: None)
        with pytest.raises(ConnectionBroken):
            while True:
                heard += await response.piece(TIMEOUT_S)
        assert BODY.startswith(heard) and len(heard) > 8000
        http.close()
    os.close(descriptors[1])


async def test_closing_it_ends_it_whoever_else_has_its_socket() -> None:
    """An engine learns by this that it may stop."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER[:9000])
        await peer.until_left()

    copies: list[int] = []

    async def keep(connection: socket.socket, num_bytes: int) -> Tape:
        tape, descriptor = new_tape(b"", 2**20)
        copies.extend([os.dup(connection.fileno()), descriptor])
        return tape

    async with raw_server(play) as server:
        http = HttpClient(server.url)
        response = await http.post_kept("/x", b"ask", b"", TIMEOUT_S, keep, lambda: None)
        assert await response.piece(TIMEOUT_S)
        response.close()
        await asyncio.wait_for(server.peers[0].over.wait(), TIMEOUT_S)
        http.close()
    for descriptor in copies:
        os.close(descriptor)


async def test_a_full_tape_is_given_up_and_the_answer_goes_on() -> None:
    """Who keeps it is told once."""
    full: list[bool] = []

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER)
        await peer.until_left()

    async def keep(connection: socket.socket, num_bytes: int) -> Tape:
        tape, descriptor = new_tape(b"", 5000)
        os.close(descriptor)
        return tape

    async with raw_server(play) as server:
        http = HttpClient(server.url)
        response = await http.post_kept("/x", b"ask", b"", TIMEOUT_S, keep, lambda: full.append(True))
        assert await response.body(2**20, TIMEOUT_S) == BODY
        http.close()
    assert full == [True]


async def test_what_was_written_is_counted_to_the_byte() -> None:
    """Whether the other side has taken it or not, so that half a request is told from a whole one."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        peer, _ = server.accept()
        with peer:
            before = bytes_sent(connection)
            connection.sendall(b"x" * 1000)
            assert bytes_sent(connection) - before == 1000
            connection.setblocking(False)
            num_sent = 1000
            try:
                while True:
                    num_sent += connection.send(b"y" * 100_000)
            except BlockingIOError:
                pass
            assert bytes_sent(connection) - before == num_sent
        assert bytes_sent(connection) - before == num_sent, "and when the other side is gone"
