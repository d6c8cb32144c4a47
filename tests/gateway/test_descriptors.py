"""What the gateway counts of the descriptors that its keeper has."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from gateway.app import gateway
from gateway.config import load_settings
from gateway.descriptors import DescriptorStore


async def test_descriptors_that_were_not_put_into_keeping_leave_their_room(tmp_path: Path) -> None:
    """The leg they belong to is cancelled while the keeper takes no message. The room was lost for the rest of the
    process, and in the end no leg was kept.
    """
    address, descriptor = str(tmp_path / "keeper"), os.memfd_create("kept")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as keeper:
        keeper.bind(address)
        fill(address)
        store = DescriptorStore(address, limit=1, found={})
        keeping = asyncio.create_task(store.keep("leg-1", [descriptor], timeout_s=60))
        await asyncio.sleep(0)
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
        keeper.recv(1)
        assert await store.keep("leg-2", [descriptor], timeout_s=60)
        store.close()
    os.close(descriptor)


async def test_a_descriptor_that_is_closed_while_the_keeper_is_waited_for_is_kept_all_the_same(tmp_path: Path) -> None:
    """Such as that of a connection that its engine closes. Its number was sent, which may be another connection's by
    then: that stayed open, and the next process read it as the leg's.
    """
    address, descriptor, other = str(tmp_path / "keeper"), os.memfd_create("kept"), os.memfd_create("other")
    is_kept = os.fstat(descriptor).st_ino
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as keeper:
        keeper.bind(address)
        fill(address)
        store = DescriptorStore(address, limit=1, found={})
        keeping = asyncio.create_task(store.keep("leg-1", [descriptor], timeout_s=60))
        await asyncio.sleep(0)
        os.dup2(other, descriptor)
        keeper.recv(1)
        assert await keeping
        store.close()
        message = b"x"
        while message == b"x":
            message, received, _, _ = socket.recv_fds(keeper, 100, 1)
    assert [os.fstat(number).st_ino for number in received] == [is_kept]
    for number in (descriptor, other, *received):
        os.close(number)


async def test_a_keeper_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    """Each leg that began while the gateway was being shut down waited `connect_timeout_s` for it."""
    address, descriptor = str(tmp_path / "keeper"), os.memfd_create("kept")
    store = DescriptorStore(address, limit=1, found={})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as keeper:
        async with asyncio.timeout(60):
            assert not await store.keep("leg-1", [descriptor], timeout_s=600)  # it has removed its socket
            keeper.bind(address)
            assert await store.keep("leg-1", [descriptor], timeout_s=600)
            store.drop("leg-1")
            keeper.close()
            assert not await store.keep("leg-2", [descriptor], timeout_s=600)  # it was killed
    store.close()
    os.close(descriptor)


async def test_the_names_of_all_that_is_kept_fit_into_the_environment_of_the_next_process(tmp_path: Path) -> None:
    """The legs of the largest rollout take 12,800 descriptors. From 3,200 on, a killed gateway could not be started
    again: their names were longer than a variable of the environment may be.
    """
    address, descriptor, names = str(tmp_path / "keeper"), os.memfd_create("kept"), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as keeper:
        keeper.bind(address)
        store = DescriptorStore(address, limit=10**6, found={"listener": [descriptor], "legAAAB": [descriptor]})
        is_kept = True
        while is_kept:
            name = store.new_name("leg")
            is_kept = await store.keep(name, [descriptor, descriptor], timeout_s=60)
            names += [name, name] * is_kept
            if is_kept:
                for received in socket.recv_fds(keeper, 100, 2)[1]:
                    os.close(received)
        store.close()
    os.close(descriptor)
    assert len(names) > 12_800 and len({*names, "legAAAB"}) == len(names) // 2 + 1
    environment = {"LISTEN_FDNAMES": ":".join(["listener", "legAAAB", *names])}
    assert await (await asyncio.create_subprocess_exec("true", env=environment)).wait() == 0


@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_a_gateway_that_keeps_no_turn_says_so_at_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, token_legs: str
) -> None:
    """Only token legs are kept. Whoever ran it under `heddle keep` without them learned so after a kill."""
    address = str(tmp_path / "keeper")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as keeper:
        keeper.bind(address)
        store = DescriptorStore(address, limit=8, found={})
        async with gateway(load_settings(store="memory:", start_timeout_s=0, token_legs=token_legs), store):
            warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
        store.close()
    assert warned == (["connections to engines are not kept"] if token_legs == "off" else [])


def fill(address: str) -> None:
    """Send messages until the socket there takes no more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                sender.sendto(b"x", address)
