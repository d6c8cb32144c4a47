"""A proxy to Redis that tests redirect and cut, as happens to the address of a server that fails over.

It must not split a question, so questions must be shorter than a packet.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class RedisProxy:
    """A connection to `port` goes to the `target_port` of the moment when it was made.

    Args:
        port: of 127.0.0.1.
        target_port: port of the server that new connections reach.
        num_answers_to_lose: as many of the next answers end their connections instead of being passed on.
        num_questions_to_lose: the same for questions that contain `lost_words`.
    """

    port: int
    target_port: int
    num_answers_to_lose: int = 0
    num_questions_to_lose: int = 0
    lost_words: bytes = b""


@asynccontextmanager
async def proxy_to(redis_port: int) -> AsyncIterator[RedisProxy]:
    """A proxy that leads to this server at first."""

    async def serve(client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.target_port)

        async def pass_on_questions() -> None:
            while question := await client_reader.read(2**20):
                if proxy.num_questions_to_lose and proxy.lost_words in question:
                    proxy.num_questions_to_lose -= 1
                    break
                writer.write(question)
            writer.close()

        questions = asyncio.create_task(pass_on_questions())
        try:
            while answer := await reader.read(2**20):
                if proxy.num_answers_to_lose:
                    proxy.num_answers_to_lose -= 1
                    return
                client_writer.write(answer)
        finally:
            questions.cancel()
            writer.close()
            client_writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = RedisProxy(server.sockets[0].getsockname()[1], redis_port)
    try:
        yield proxy
    finally:
        server.close()
