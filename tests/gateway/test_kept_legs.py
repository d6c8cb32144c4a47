"""Which legs of an earlier process are resumed."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from engines.http.kept import bytes_sent
from engines.http.tape import new_tape
from gateway.config import load_settings
from gateway.descriptors import DescriptorStore
from gateway.server import serving
from gateway.turns.kept_legs import found_leg

REQUEST = b"x" * 1000


@pytest.fixture
def connections() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The gateway's end of a connection to an engine, and the engine's end."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            yield ours, theirs


def kept(ours: socket.socket) -> list[int]:
    """The descriptors that a gateway keeps of a leg before it sends the request."""
    header = {
        "trajectory": "t", "digest": "d", "index": 0, "engine": "e", "version": "", "prompt": "p", "arrived_at": 1.0,
        "leg": 1, "made": [[5, 6], [], [["v", 0, 2]]], "stream_form": "vllm", "length": len(REQUEST),
        "sent_before": bytes_sent(ours),
    }  # fmt: skip
    _, tape = new_tape(orjson.dumps(header), 2**16)
    return [os.dup(ours.fileno()), tape]


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 1000])
def test_a_leg_counts_as_asked_only_if_its_request_was_sent_whole(
    connections: tuple[socket.socket, socket.socket], num_bytes: int
) -> None:
    """An engine makes nothing for a partial request. What was made before the leg is known either way, in whatever
    order the descriptors come."""
    ours, _ = connections
    descriptors = kept(ours)
    ours.sendall(REQUEST[:num_bytes])
    leg = found_leg("leg-1", descriptors[:: 1 if num_bytes else -1])
    assert leg is not None
    assert leg.is_asked is (num_bytes == 1000)
    assert leg.made[0] == [5, 6] and leg.made[2][0].end == 2


def test_descriptors_that_are_not_a_leg_are_ignored(connections: tuple[socket.socket, socket.socket]) -> None:
    """A socket alone, or with memory that is no tape, as another program's would be."""
    ours, _ = connections
    memory = os.memfd_create("other")
    os.write(memory, b"nonsense" * 10)
    assert found_leg("leg-1", [os.dup(ours.fileno()), memory]) is None
    assert found_leg("leg-1", [os.dup(ours.fileno())]) is None


async def test_closing_a_leg_ends_the_engines_connection(
    connections: tuple[socket.socket, socket.socket],
) -> None:
    """Even if other descriptors of the connection are open."""
    ours, theirs = connections
    leg = found_leg("leg-1", kept(ours))
    assert leg is not None
    leg.close()
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(theirs.recv, 10) == b""


async def test_a_gateway_without_token_legs_ends_those_of_the_process_before(
    connections: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    """Nobody would take them up, and the keeper would hold them for ever: the engine would generate for nobody."""
    ours, theirs = connections
    settings = load_settings(store="memory:", host="127.0.0.1", port=0, token_legs="off")
    with ours, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as keeper:
        keeper.bind(str(tmp_path / "keeper"))
        descriptors = DescriptorStore(str(tmp_path / "keeper"), limit=10, found={"legAAAA": kept(ours)})
        ours.close()
        theirs.setblocking(False)
        async with serving(settings, descriptors):
            assert theirs.recv(10) == b""
            keeper.setblocking(False)
            assert b"FDSTOREREMOVE=1\nFDNAME=legAAAA" in (keeper.recv(100), keeper.recv(100))
        descriptors.close()
