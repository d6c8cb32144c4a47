"""A model server that costs next to nothing: the form of vLLM's answers, without a model.

    python -m loadtest.bench.backend --port 9001 [--interval-ms 5] [--endless 2000]

Every chat is answered with the same 64 words: whole, for coding agents with a tool call, or as a stream of 64 chunks,
one every `--interval-ms`. With `--endless` a stream never ends: it gets its first chunk at once and the others once
that many streams are open. Each chunk has its send time, in microseconds of the machine's monotonic clock. Without an
interval there are no further chunks. HTTP is parsed by hand and answers are ready-made bytes, because this server
shares a core with the client, and neither may dominate the measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from collections.abc import Callable
from typing import cast

import uvloop

from loadtest.bench import answers, token_answers
from loadtest.bench.answers import NUM_CHUNKS

# Microseconds with a fixed number of digits, so that all chunks have the same length.
STAMP = "@%015d"
_GROUPS = 20  # streams of one pace are served in this many groups, each as one batch

_LENGTH = re.compile(rb"content-length: ?(\d+)", re.IGNORECASE)


# Makes the chunk of a chat, or of a token stream, with this text.
MakeChunk = Callable[[str], bytes]


class EndlessStreams:
    """Sends each open stream a chunk every `interval_s`, once enough are open; a batch at a time, with one stamp."""

    def __init__(self, interval_s: float, number: int) -> None:
        self._interval_s = interval_s
        self._groups: list[dict[int, tuple[asyncio.Transport, MakeChunk]]] = [{} for _ in range(_GROUPS)]
        self._missing = number
        self._loop = asyncio.get_running_loop()

    def join(self, transport: asyncio.Transport, make: MakeChunk) -> int:
        """Begin a stream here; returns its number."""
        transport.write(answers.STREAM_HEAD + make(_stamp()))
        descriptor: int = transport.get_extra_info("socket").fileno()
        self._groups[descriptor % _GROUPS][descriptor] = (transport, make)
        self._missing -= 1
        if self._interval_s and not self._missing:
            self._loop.call_soon(self._tick, 0, self._loop.time())
        return descriptor

    def leave(self, descriptor: int) -> None:
        """The stream of this number was closed."""
        self._groups[descriptor % _GROUPS].pop(descriptor, None)

    def _tick(self, number: int, due_at: float) -> None:
        stamp = _stamp()
        makers: tuple[MakeChunk, ...] = (answers.word_event, token_answers.said)
        chunks = {make: make(stamp) for make in makers}
        for descriptor, (transport, make) in tuple(self._groups[number].items()):
            chunk = chunks[make]
            # Bypasses the transport, which has nothing to send: at 100,000 chunks a second its queues cost too much.
            try:
                is_sent = os.write(descriptor, chunk) == len(chunk)
            except OSError:
                is_sent = False
            if not is_sent:  # a client that does not read for so long sees a broken stream
                transport.abort()
        # A late tick is not made up for: the client sees fewer chunks.
        due_at = max(due_at + self._interval_s / _GROUPS, self._loop.time())
        self._loop.call_at(due_at, self._tick, (number + 1) % _GROUPS, due_at)


def _stamp() -> str:
    return STAMP % (time.monotonic_ns() // 1000)


class Server(asyncio.Protocol):
    """One connection of a client that waits for each answer before it asks again."""

    def __init__(self, interval_s: float, streams: EndlessStreams | None) -> None:
        self._interval_s = interval_s
        self._streams = streams
        self._pieces: list[bytes] = []
        self._start = b""
        self._missing = 0
        self._stream_number: int | None = None
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._streams is not None and self._stream_number is not None:
            self._streams.leave(self._stream_number)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        if self._start:
            self._missing -= len(data)
        else:
            data = b"".join(self._pieces)
            head_end = data.find(b"\r\n\r\n")
            if head_end < 0:
                return
            length = _LENGTH.search(data, 0, head_end)
            self._start = data[: data.index(b" HTTP/")]
            self._pieces = [data[head_end + 4 :]]
            self._missing = (int(length[1]) if length else 0) - len(self._pieces[0])
        if self._missing <= 0:
            start, body = self._start, b"".join(self._pieces)
            self._start, self._pieces = b"", []
            self._answer(start.partition(b" ")[2].partition(b"?")[0], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        write = self._transport.write
        match path:
            case b"/v1/chat/completions":
                self._chat(body)
            case b"/v1/chat/completions/render":
                write(token_answers.rendered(body))
            case b"/inference/v1/generate":
                self._tokens(body)
            case b"/v1/chat/completions/derender":
                write(token_answers.derendered(body))
            case b"/v1/completions/render" | b"/v1/completions/derender":
                write(token_answers.REFUSED)
            case b"/metrics":
                write(answers.metrics(int(self._loop.time() * 1000)))
            case _:
                write(answers.PAGES.get(path, answers.EMPTY))

    def _tokens(self, body: bytes) -> None:
        # Only if the client has a stream too: a whole answer consists of a few large events.
        num_tokens = token_answers.event_tokens(body)
        if self._streams is not None and num_tokens < token_answers.WHOLE_EVENT_TOKENS:
            self._stream_number = self._streams.join(self._transport, token_answers.said)
        else:
            self._transport.write(answers.STREAM_HEAD)
            self._stream(token_answers.generated(body), 0, num_tokens * self._interval_s)

    def _chat(self, body: bytes) -> None:
        if not (b'"stream":true' in body or b'"stream": true' in body):
            self._transport.write(answers.CALLING_CHAT if answers.offers_tool(body) else answers.CHAT)
        elif self._streams is not None:
            self._stream_number = self._streams.join(self._transport, answers.word_event)
        else:
            self._transport.write(answers.STREAM_HEAD)
            wants_usage = b'"include_usage":true' in body or b'"include_usage": true' in body
            self._stream(_STREAM_WITH_USAGE if wants_usage else _STREAM, 0, self._interval_s)

    def _stream(self, chunks: list[bytes], number: int, interval_s: float) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(chunks[number])
        if number + 1 < len(chunks):
            self._loop.call_later(interval_s, self._stream, chunks, number + 1, interval_s)


_STREAM = [*answers.STREAM[:-1], answers.STREAM[NUM_CHUNKS - 1] + answers.STREAM_END]
_STREAM_WITH_USAGE = [*answers.STREAM[:-1], answers.STREAM[-1] + answers.USAGE_EVENT + answers.STREAM_END]


async def serve(ports: list[int], interval_s: float, num_endless: int) -> None:
    """Serve at these loopback ports until cancelled."""
    loop = asyncio.get_running_loop()
    streams = EndlessStreams(interval_s, num_endless) if num_endless else None
    servers = [
        await loop.create_server(lambda: Server(interval_s, streams), "127.0.0.1", port, backlog=4096) for port in ports
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, action="append", required=True, help="may be repeated")
    parser.add_argument("--interval-ms", type=float, default=0.0)
    parser.add_argument("--endless", type=int, default=0, metavar="STREAMS")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.interval_ms / 1000, arguments.endless))
