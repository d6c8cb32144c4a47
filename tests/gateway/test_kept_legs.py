"""Which legs of an earlier process are taken up."""

import asyncio
import os
import socket
from collections.abc import Iterator

import orjson
import pytest

from engines.http.kept import bytes_sent
from engines.http.tape import new_tape
from gateway.turns.kept_legs import found_leg

REQUEST = b"x" * 1000


@pytest.fixture
def connections() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The gateway's end of a connection to an engine, and the engine's."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            yield ours, theirs


def kept(ours: socket.socket) -> list[int]:
    """What a gateway keeps of a leg, before it sends its request."""
    header = {
        "trajectory": "t", "digest": "d", "index": 0, "engine": "e", "version": "", "prompt": "p", "arrived_at": 1.0,
        "leg": 1, "made": [[5, 6], [], [["v", 0, 2]]], "stream_form": "vllm", "length": len(REQUEST),
        "sent_before": bytes_sent(ours),
    }  # fmt: skip
    _, tape = new_tape(orjson.dumps(header), 2**16)
    return [os.dup(ours.fileno()), tape]


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 1000])
def test_a_leg_whose_request_was_not_sent_whole_has_no_answer(
    connections: tuple[socket.socket, socket.socket], num_bytes: int
) -> None:
    """Its engine made nothing for it; what was made before it is known all the same, in whatever order they come."""
    ours, _ = connections
    descriptors = kept(ours)
    ours.sendall(REQUEST[:num_bytes])
    leg = found_leg("leg-1", descriptors[:: 1 if num_bytes else -1])
    assert leg is not None
    assert leg.is_asked is (num_bytes == 1000)
    assert leg.made[0] == [5, 6] and leg.made[2][0].end == 2


def test_what_is_no_leg_is_left(connections: tuple[socket.socket, socket.socket]) -> None:
    """A socket alone, or with memory that is no tape, as another program's would be."""
    ours, _ = connections
    memory = os.memfd_create("other")
    os.write(memory, b"nonsense" * 10)
    assert found_leg("leg-1", [os.dup(ours.fileno()), memory]) is None
    assert found_leg("leg-1", [os.dup(ours.fileno())]) is None


async def test_the_engine_of_a_leg_that_is_left_sees_its_connection_end(
    connections: tuple[socket.socket, socket.socket],
) -> None:
    """Whoever else has it."""
    ours, theirs = connections
    leg = found_leg("leg-1", kept(ours))
    assert leg is not None
    leg.close()
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(theirs.recv, 10) == b""
