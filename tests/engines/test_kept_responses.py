"""A response that outlives the process that requested it: first the bytes that process read, then those of the
socket."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from engines.http import ConnectionBroken, HttpClient
from engines.http.kept import bytes_sent
from engines.http.tape import Tape, found_tape, new_tape

from .raw_server import Handler, Peer, RawServer, raw_server

TIMEOUT_S = 60.0
BODY = b"".join(b"data: %d\n\n" % number for number in range(2000))
CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:9000], BODY[9000:]))
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS + b"0\r\n\r\n"
)
# Sends a request, reads this many bytes into the tape and exits as if killed: nothing is closed or shut down.
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
    """A tape into which data was read in pieces of about these sizes, its descriptor, and how much it took."""
    tape, descriptor = new_tape(b"whose", limit_bytes)
    taken = 0
    while taken < len(data) and (room := tape.room()):
        num_bytes = min(len(room), len(data) - taken, sizes[taken % len(sizes)])
        room[:num_bytes] = data[taken : taken + num_bytes]
        assert tape.taken(num_bytes) == data[taken : taken + num_bytes]
        taken += num_bytes
    return tape, descriptor, taken


@given(st.binary().map(lambda data: data.replace(b"\0", b"0")), st.lists(st.integers(1, 40_000), min_size=1))
def test_a_tape_is_read_back_wherever_its_writer_stopped(data: bytes, sizes: list[int]) -> None:
    """All bytes read into it, its header, and where to continue; also bytes that were read but not yet noted."""
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
    assert tape.so_far() == data[:taken], "the end of the first tape is where it was"


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100])
def test_memory_that_is_not_a_tape_is_refused(content: bytes) -> None:
    """It may be another program's."""
    descriptor = os.memfd_create("other")
    os.write(descriptor, content)
    with pytest.raises(ValueError, match="no tape"):
        found_tape(descriptor)
    os.close(descriptor)


@asynccontextmanager
async def orphaned_request(
    handler: Handler, num_bytes: int, folder: Path
) -> AsyncIterator[tuple[RawServer, list[int]]]:
    """A server, and the descriptors left by a process that read this much of its answer and exited."""
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.bind(str(folder / "keeper"))
        keeper.listen()
        async with raw_server(handler) as server:
            command = (sys.executable, "-c", ASKER, server.url, str(folder / "keeper"), str(num_bytes))
            process = await asyncio.create_subprocess_exec(*command)
            assert await process.wait() == 0
            connection_to_asker, _ = keeper.accept()
            with connection_to_asker:
                _, descriptors, _, _ = socket.recv_fds(connection_to_asker, 100, 2)
            yield server, descriptors


@pytest.mark.parametrize("num_bytes", [0, 1, 40, 90, 97, 110, 8000, len(ANSWER) - 3, len(ANSWER)])
async def test_the_next_process_reads_the_whole_answer(tmp_path: Path, num_bytes: int) -> None:
    """Wherever the first one stopped: in the head, in a chunk, at the very end."""
    is_gone = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER[:num_bytes])
        await is_gone.wait()
        await peer.send(ANSWER[num_bytes:])
        await peer.until_client_leaves()

    async with orphaned_request(handler, num_bytes, tmp_path) as (server, descriptors):
        is_gone.set()
        http = HttpClient(server.url)
        tape, header = found_tape(descriptors[1])
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(False)
        response = await http.take_up(connection, tape, TIMEOUT_S, lambda: None)
        assert header == b"mine" and response.status == 200
        assert await response.body(2**20, TIMEOUT_S) == BODY
        assert found_tape(descriptors[1])[0].so_far() == ANSWER, "the process after it could read it, too"
        http.close()
        await asyncio.wait_for(server.peers[0].ended.wait(), TIMEOUT_S)
    os.close(descriptors[1])


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 8000, len(ANSWER)])
def test_a_found_connection_is_closed_once(num_bytes: int, is_left: bool) -> None:
    """With the gateway's own event loop: also if the tape has the whole answer, and if nobody waits any more.

    The socket's object closed its number again when it was collected: a client's connection, or the store's file.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        request = socket.create_connection(server.getsockname())
        response, _ = server.accept()
    tape, descriptor = new_tape(b"", 2**20)
    os.close(descriptor)
    taken = 0
    while taken < num_bytes:
        room = tape.room()
        part = ANSWER[taken : min(taken + len(room), num_bytes)]
        room[: len(part)] = part
        taken += len(tape.taken(len(part)))

    async def main() -> None:
        http = HttpClient("http://127.0.0.1:1")
        request.setblocking(False)
        response.settimeout(TIMEOUT_S)
        response.sendall(ANSWER[num_bytes:])
        asking = asyncio.create_task(http.take_up(request, tape, TIMEOUT_S, lambda: None))
        if is_left:
            await asyncio.sleep(0)  # it is opening the connection
            asking.cancel()
            await asyncio.wait((asking,))
            assert asking.cancelled()
        else:
            assert await (await asking).body(2**20, TIMEOUT_S) == BODY
        http.close()
        assert not await asyncio.get_running_loop().run_in_executor(None, response.recv, 1)  # it is closed

    with response, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    is_known_closed = request.fileno() == -1
    request.detach()
    assert is_known_closed


async def test_the_answer_of_a_dead_server_ends_with_an_error(tmp_path: Path) -> None:
    """What it had sent is still read."""
    received = bytearray()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER[:9000])

    async with orphaned_request(handler, 5000, tmp_path) as (server, descriptors):
        http = HttpClient(server.url)
        tape, _ = found_tape(descriptors[1])
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(False)
        response = await http.take_up(connection, tape, TIMEOUT_S, lambda: None)
        with pytest.raises(ConnectionBroken):
            while True:
                received += await response.piece(TIMEOUT_S)
        assert BODY.startswith(received) and len(received) > 8000
        http.close()
    os.close(descriptors[1])


async def test_closing_a_response_ends_the_connection_despite_copies() -> None:
    """Another process may hold the socket. The close tells the engine to stop."""

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER[:9000])
        await peer.until_client_leaves()

    copies: list[int] = []

    async def keep(connection: socket.socket, num_bytes: int) -> Tape:
        tape, descriptor = new_tape(b"", 2**20)
        copies.extend([os.dup(connection.fileno()), descriptor])
        return tape

    async with raw_server(handler) as server:
        http = HttpClient(server.url)
        response = await http.post_kept("/x", b"ask", b"", TIMEOUT_S, keep, lambda: None)
        assert await response.piece(TIMEOUT_S)
        response.close()
        await asyncio.wait_for(server.peers[0].ended.wait(), TIMEOUT_S)
        http.close()
    for descriptor in copies:
        os.close(descriptor)


async def test_an_answer_continues_when_its_tape_is_full() -> None:
    """The callback is called once."""
    full: list[bool] = []

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER)
        await peer.until_client_leaves()

    async def keep(connection: socket.socket, num_bytes: int) -> Tape:
        tape, descriptor = new_tape(b"", 5000)
        os.close(descriptor)
        return tape

    async with raw_server(handler) as server:
        http = HttpClient(server.url)
        response = await http.post_kept("/x", b"ask", b"", TIMEOUT_S, keep, lambda: full.append(True))
        assert await response.body(2**20, TIMEOUT_S) == BODY
        http.close()
    assert full == [True]


async def test_bytes_sent_counts_every_byte_written() -> None:
    """Whether the other side has read them or not, so that half a request can be told from a whole one."""
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
        assert bytes_sent(connection) - before == num_sent, "also when the other side is gone"


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_connection_that_closes_while_it_is_put_into_keeping(is_reset: bool) -> None:
    """The turn is told at once. It waited for its timeout, by default four hours, and the engine looked hung."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_reset:
            writer.transport.abort()
        else:
            writer.close()

    async def keep(connection: socket.socket, num_bytes: int) -> None:
        while client._pool._all:  # noqa: ASYNC110 - until the news has come
            await asyncio.sleep(0)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(ConnectionBroken):
        await client.post_kept("/x", b"{}", b"", 60.0, keep, lambda: None)
    client.close()
    server.close()
