"""An engine that looks like vLLM to the gateway's watch, and answers turns with any bytes that a test chooses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_MODELS = b'{"object":"list","data":[{"id":"simulated","object":"model","owned_by":"vllm","max_model_len":40960}]}'
_PAGE = """vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.1
vllm:generation_tokens_total{{engine="0"}} {tokens}
vllm:cache_config_info{{block_size="16",num_gpu_blocks="10000"}} 1.0
process_start_time_seconds {started_at}
"""


@dataclass
class RawEngine:
    """What it answers, and what it received.

    Args:
        answer: writes the answer to a POST; its connection is closed afterwards.
        watched: whether models and metrics are answered at all; if False, they hang too.
        running, tokens: its gauge of running requests and its token counter, on its metrics page.
        page: a whole metrics page instead of its own.
        models: the body of its list of models.
        keeps_open: a connection stays open after an answer, unless `answer` closed it.

    Attributes:
        posts: head and body of every POST.
        num_open: POSTs whose connection is open.
    """

    answer: Answer
    watched: bool = True
    running: int = 0
    tokens: int = 0
    started_at: float = 1000.0
    page: bytes | None = None
    models: bytes = _MODELS
    keeps_open: bool = False
    url: str = ""
    posts: list[bytes] = field(default_factory=list)
    num_open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            self.posts.append(head + await reader.readexactly(length))
            self.num_open += 1
            try:
                await self.answer(reader, writer)
            finally:
                self.num_open -= 1
            return self.keeps_open and not writer.is_closing()
        if not self.watched:
            await reader.read()
            return False
        path = head.split()[1]
        if path == b"/v1/models":
            writer.write(whole(self.models))
        elif path == b"/metrics":
            page = _PAGE.format(running=self.running, tokens=self.tokens, started_at=self.started_at).encode()
            writer.write(whole(page if self.page is None else self.page, content_type=b"text/plain"))
        else:
            writer.write(whole(b'{"detail":"Not Found"}', status=b"404 Not Found"))
        return True


@asynccontextmanager
async def raw_engine(answer: Answer, port: int = 0, **settings: object) -> AsyncIterator[RawEngine]:
    """An engine that serves until exit."""
    engine = RawEngine(answer, **settings)  # type: ignore[arg-type]
    tasks: set[asyncio.Task[None]] = set()
    has_ended = False

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if has_ended:  # it was accepted when the server closed
            writer.transport.abort()
            return
        task = asyncio.create_task(engine.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        has_ended = True
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def whole(body: bytes, status: bytes = b"200 OK", content_type: bytes = b"application/json") -> bytes:
    """A whole HTTP answer."""
    return b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (status, content_type, len(body), body)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHAT_EVENT = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


def writes(data: bytes) -> Answer:
    """An answer of these bytes; the connection is closed afterwards."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reset the connection before the first byte."""
    writer.transport.abort()


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Never answer; ends when the other side leaves."""
    await reader.read()


async def endless_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A head that does not end until the other side gives up."""
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x-filler: " + b"y" * 1000 + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0)


async def endless_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A JSON body that does not end until the other side gives up."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(chunk(b'{"a": "'))
    while True:
        writer.write(chunk(b"y" * 1000))
        await writer.drain()
        await asyncio.sleep(0)


async def asked_behind(client: httpx.AsyncClient, url: str, post: bytes) -> httpx.Response:
    """What the engine at this URL answers to a request that a raw engine got."""
    head, _, body = post.partition(b"\r\n\r\n")
    path = head.split()[1].decode()
    return await client.post(url + path, content=body, headers={"content-type": "application/json"})
