"""A way to Redis that tests lead elsewhere and cut, as the address of a server does that fails over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Way:
    """Connections to `port` go to where it led when they came.

    Args:
        port: of 127.0.0.1.
        leads_to: port of the server that new connections reach.
        num_to_lose: so many answers from now on end their connections in place of being passed on.
    """

    port: int
    leads_to: int
    num_to_lose: int = 0


@asynccontextmanager
async def way_to(redis_port: int) -> AsyncIterator[Way]:
    """One that leads there at first."""

    async def serve(client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", way.leads_to)

        async def ask() -> None:
            while asked := await client_reader.read(2**20):
                writer.write(asked)
            writer.close()

        asking = asyncio.create_task(ask())
        try:
            while answered := await reader.read(2**20):
                if way.num_to_lose:
                    way.num_to_lose -= 1
                    return
                client_writer.write(answered)
        finally:
            asking.cancel()
            writer.close()
            client_writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    way = Way(server.sockets[0].getsockname()[1], redis_port)
    try:
        yield way
    finally:
        server.close()
