"""A TCP server that sends exactly the bytes a test wants, when it wants."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Peer:
    """The server's end of one connection. `number` counts from 0; `ended` is set when its handler has returned."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def request(self) -> bytes:
        """The next request, head and body. Raises IncompleteReadError when the client has left."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        return head + await self.reader.readexactly(int(lengths[0]) if lengths else 0)

    async def send(self, *parts: bytes) -> None:
        """Send each part as a segment of its own: the client, in the same event loop, reads it before the next is
        sent."""
        for part in parts:
            self.writer.write(part)
            for _ in range(3):
                await asyncio.sleep(0)
        await self.writer.drain()

    async def until_client_leaves(self) -> None:
        """Returns when the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65_536):
                pass


Handler = Callable[[Peer], Awaitable[None]]


@dataclass
class RawServer:
    """Its address, and its connections."""

    url: str
    peers: list[Peer] = field(default_factory=list)


@asynccontextmanager
async def raw_server(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[RawServer]:
    """Runs the handler on every connection, and closes the connection when the handler returns."""
    raw = RawServer("")
    handlers: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())  # type: ignore[arg-type]
        peer = Peer(len(raw.peers), reader, writer)
        raw.peers.append(peer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await handler(peer)
        finally:
            peer.ended.set()
            writer.close()

    server = await asyncio.start_server(run, host, 0)
    port = server.sockets[0].getsockname()[1]
    raw.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        yield raw
    finally:
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
