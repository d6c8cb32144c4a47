"""Connections whose other end is gone without a farewell."""

import asyncio
import socket
from typing import Any

import pytest

from engines.listener import bound

from .raw_server import Peer
from .test_http import HELLO, TIMEOUT_S, server_and_client


def probes(connection: socket.socket) -> bool:
    """Whether the system probes the other end within four minutes, which the most forgetful firewall allows."""
    is_on = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return bool(is_on) and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 240


async def test_an_engines_connection_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole answer may take hours, in which nothing is sent."""
    loop = asyncio.get_running_loop()
    really, made = loop.create_connection, []

    async def create_connection(*args: Any, **more: Any) -> Any:
        made.append(await really(*args, **more))
        return made[-1]

    monkeypatch.setattr(loop, "create_connection", create_connection)

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(HELLO)
        await peer.until_client_leaves()

    async with server_and_client(handler) as (_, http):
        assert await http.get("/", TIMEOUT_S) == (200, b"hello")
        assert [probes(transport.get_extra_info("socket")) for transport, _ in made] == [True]


def test_a_clients_connection_is_probed() -> None:
    """It takes the option from the socket at which it was accepted."""
    with bound("127.0.0.1", 0, 1) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert probes(accepted)
