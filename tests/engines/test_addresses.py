"""An engine that is named: how often its name is looked up, and which of its addresses is used."""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import engines.http.addresses
from engines.http import EngineUnreachable, HttpClient, HttpLimits, NothingListens

from .raw_server import Peer, raw_server

HELLO = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello"
TIMEOUT_S = 20.0


class Names:
    """What the system says to a lookup: addresses, an error, or nothing for as long as `answers` is unset."""

    def __init__(self) -> None:
        self.said: list[str] | OSError = ["127.0.0.1"]
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_asked = 0

    async def look_up(self, host: str, port: int, **_: Any) -> list[Any]:
        """In place of the event loop's own."""
        self.num_asked += 1
        await self.answers.wait()
        if isinstance(self.said, OSError):
            raise self.said
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.said]


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Every lookup asks these, and its answer is news for no time."""
    found = Names()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found.look_up)
    monkeypatch.setattr(engines.http.addresses, "_FRESH_S", 0.0)
    return found


def named(url: str, **limits: float) -> HttpClient:
    """A client for a server at this address, which it knows by name."""
    return HttpClient(f"http://engine.test:{url.rpartition(':')[2]}", HttpLimits(**limits))  # type: ignore[arg-type]


def greets(with_: bytes = HELLO) -> Callable[[Peer], Any]:
    """Answer one request."""

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(with_)

    return handler


@contextmanager
def swallowing(address: str, port: int) -> Iterator[None]:
    """An address whose packets vanish: connections are neither accepted nor refused."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((address, port))
        yield


async def test_a_burst_of_connections_looks_a_name_up_once(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand lookups at once would outlast the connections' timeout, since the system does only a few at a time.
    The answer is used for further connections, too, while it is fresh.
    """
    monkeypatch.setattr(engines.http.addresses, "_FRESH_S", 3600.0)
    async with raw_server(greets()) as server:
        http = named(server.url)
        for _ in range(2):
            assert await asyncio.gather(*(http.get("/", TIMEOUT_S) for _ in range(50))) == [(200, b"hello")] * 50
        assert names.num_asked == 1
        http.close()


async def test_a_name_server_that_is_away_for_a_moment_is_not_noticed(names: Names) -> None:
    """The last address is used. A name that is gone is an engine that is gone, until the name is back."""
    async with raw_server(greets()) as server:
        http = named(server.url)
        names.said = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        with pytest.raises(EngineUnreachable, match="Temporary failure"):
            await http.get("/", TIMEOUT_S)
        before, names.said = names.said, ["127.0.0.1"]
        assert await http.get("/", TIMEOUT_S) == (200, b"hello")
        for names.said in (before, OSError(errno.EMFILE, "Too many open files")):
            assert await http.get("/", TIMEOUT_S) == (200, b"hello")
        names.said = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        with pytest.raises(EngineUnreachable, match="not known"):
            await http.get("/", TIMEOUT_S)
        names.said = ["127.0.0.1"]
        assert await http.get("/", TIMEOUT_S) == (200, b"hello")
        http.close()


async def test_a_slow_name_server_delays_only_the_first_connection(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timeouts are longer than a connection's. One lookup waits for it, however many connections are made."""
    monkeypatch.setattr(engines.http.addresses, "_PATIENCE_S", 0.0)
    async with raw_server(greets()) as server:
        http = named(server.url)
        assert await http.get("/", TIMEOUT_S) == (200, b"hello")
        names.answers.clear()
        for _ in range(3):
            assert await http.get("/", TIMEOUT_S) == (200, b"hello")
        assert names.num_asked == 2
        names.answers.set()
        http.close()


async def test_an_engine_is_found_at_its_new_address(names: Names) -> None:
    """Its name leads elsewhere after it was launched again."""
    async with raw_server(greets()) as first:
        port = int(first.url.rpartition(":")[2])
        server = await asyncio.start_server(_answers_again, "127.0.0.2", port)
        http = named(first.url)
        assert await http.get("/", TIMEOUT_S) == (200, b"hello")
        names.said = ["127.0.0.2"]
        assert await http.get("/", TIMEOUT_S) == (200, b"again")
        http.close()
        server.close()


async def _answers_again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HELLO.replace(b"hello", b"again"))
    writer.close()


async def test_a_dead_address_among_several_costs_time_once(names: Names) -> None:
    """The first one swallows packets, as IPv6 does in many a network: it must not take the time of the other. From then
    on, the other is tried first.
    """
    async with raw_server(greets()) as server:
        port = int(server.url.rpartition(":")[2])
        with swallowing("127.0.0.2", port):
            names.said = ["127.0.0.2", "127.0.0.1"]
            http = named(server.url, connect_timeout_s=2.0)
            assert await http.get("/", TIMEOUT_S) == (200, b"hello")
            async with asyncio.timeout(0.9):  # less than the dead one's share
                assert await http.get("/", TIMEOUT_S) == (200, b"hello")
            http.close()


async def test_a_connection_that_is_neither_made_nor_refused_timed_out(names: Names) -> None:
    """Its error says so; and it is no sign that nothing listens there, as a refused one is."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        http = named(f"http://engine.test:{unused.getsockname()[1]}")
        with pytest.raises(NothingListens, match="no connection"):
            await http.get("/", TIMEOUT_S)
    with socket.socket() as unused:
        unused.bind(("127.0.0.2", 0))
        port = unused.getsockname()[1]
    with swallowing("127.0.0.2", port):
        names.said = ["127.0.0.2"]
        http = named(f"http://engine.test:{port}", connect_timeout_s=0.2)
        with pytest.raises(EngineUnreachable, match="timed out") as raised:
            await http.get("/", TIMEOUT_S)
        assert not isinstance(raised.value, NothingListens)
