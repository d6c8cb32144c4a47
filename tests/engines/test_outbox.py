"""Requests of one round of the event loop are sent together, in their order, and none waits longer than that."""

import asyncio
import gc
import socket
import weakref

import pytest

from engines.http.outbox import MOST_WAITING, outbox_of


async def _connected() -> tuple[asyncio.Transport, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    return transport, theirs


async def test_a_request_leaves_when_the_round_ends() -> None:
    loop = asyncio.get_running_loop()
    transport, engine = await _connected()
    outbox_of(loop).put(loop, transport, (b"head ", b"body "))
    outbox_of(loop).put(loop, transport, (b"next",))
    with pytest.raises(BlockingIOError):
        engine.recv(100)
    await asyncio.sleep(0)
    assert engine.recv(100) == b"head body next"
    transport.close()
    engine.close()


async def test_the_first_of_many_does_not_wait_for_all() -> None:
    loop = asyncio.get_running_loop()
    transport, engine = await _connected()
    for number in range(MOST_WAITING + 1):
        outbox_of(loop).put(loop, transport, (b"%d," % number,))
    assert engine.recv(100) == b"0,1,2,3,4,5,6,7,"
    await asyncio.sleep(0)
    assert engine.recv(100) == b"8,"
    outbox_of(loop).put(loop, transport, (b"later",))
    await asyncio.sleep(0)
    assert engine.recv(100) == b"later"
    transport.close()
    engine.close()


async def test_a_connection_that_was_closed_meanwhile_holds_up_no_other() -> None:
    loop = asyncio.get_running_loop()
    (left, its_engine), (transport, engine) = await _connected(), await _connected()
    outbox_of(loop).put(loop, left, (b"lost",))
    outbox_of(loop).put(loop, transport, (b"sent",))
    left.abort()
    await asyncio.sleep(0)
    assert engine.recv(100) == b"sent"
    assert its_engine.recv(100) == b""
    transport.close()
    engine.close()
    its_engine.close()


def test_an_event_loop_is_not_kept_alive() -> None:
    loop = asyncio.new_event_loop()
    assert outbox_of(loop) is outbox_of(loop)
    ended = weakref.ref(loop)
    loop.close()
    del loop
    gc.collect()
    assert ended() is None
