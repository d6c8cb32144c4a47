"""On a busy gateway, requests of one round of the event loop are sent together, in their order."""

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engines.http.outbox import MOST_WAITING, Outbox, outbox_of


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.Transport, socket.socket]]:
    """A connection's transport, and the engine's end of it."""
    ours, engine = socket.socketpair()
    engine.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    with engine:
        yield transport, engine
        transport.close()


async def _after_a_busy_round(transport: asyncio.Transport, engine: socket.socket) -> Outbox:
    """The outbox of an event loop whose last round had two requests."""
    loop = asyncio.get_running_loop()
    outbox = outbox_of(loop)
    for _ in range(2):
        outbox.put(loop, transport, (b"before",))
    await asyncio.sleep(0)
    assert engine.recv(100) == b"beforebefore"
    return outbox


async def test_a_request_that_is_alone_leaves_at_once_and_the_others_of_its_round_when_it_ends() -> None:
    loop = asyncio.get_running_loop()
    async with connected() as (transport, engine):
        outbox = outbox_of(loop)
        outbox.put(loop, transport, (b"head ", b"body "))
        assert engine.recv(100) == b"head body "
        outbox.put(loop, transport, (b"next",))
        with pytest.raises(BlockingIOError):
            engine.recv(100)
        await asyncio.sleep(0)
        assert engine.recv(100) == b"next"


async def test_after_a_busy_round_requests_leave_when_theirs_ends() -> None:
    loop = asyncio.get_running_loop()
    async with connected() as (transport, engine):
        outbox = await _after_a_busy_round(transport, engine)
        outbox.put(loop, transport, (b"head ", b"body"))
        with pytest.raises(BlockingIOError):
            engine.recv(100)
        await asyncio.sleep(0)
        assert engine.recv(100) == b"head body"
        outbox.put(loop, transport, (b"alone again",))
        assert engine.recv(100) == b"alone again"


async def test_the_first_of_many_does_not_wait_for_all() -> None:
    loop = asyncio.get_running_loop()
    async with connected() as (transport, engine):
        outbox = await _after_a_busy_round(transport, engine)
        for number in range(MOST_WAITING + 1):
            outbox.put(loop, transport, (b"%d," % number,))
        assert engine.recv(100) == b"0,1,2,3,4,5,6,7,"
        await asyncio.sleep(0)
        assert engine.recv(100) == b"8,"


async def test_a_connection_that_was_closed_meanwhile_holds_up_no_other() -> None:
    loop = asyncio.get_running_loop()
    async with connected() as (left, its_engine), connected() as (transport, engine):
        outbox = await _after_a_busy_round(transport, engine)
        outbox.put(loop, left, (b"lost",))
        outbox.put(loop, transport, (b"sent",))
        left.abort()
        await asyncio.sleep(0)
        assert engine.recv(100) == b"sent"
        assert its_engine.recv(100) == b""


def test_an_event_loop_is_not_kept_alive() -> None:
    loop = asyncio.new_event_loop()
    assert outbox_of(loop) is outbox_of(loop)
    ended = weakref.ref(loop)
    loop.close()
    del loop
    gc.collect()
    assert ended() is None
