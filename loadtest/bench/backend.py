"""A model server that costs next to nothing: the shape of vLLM's answers, without a model.

    python -m loadtest.bench.backend --port 9001 [--interval-ms 5]

Every chat is answered with the same 64 words: whole, or as a stream of 64 chunks, one every `--interval-ms`. HTTP is
read by hand, because it shares a core with the client, and neither may be what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from typing import cast

import orjson
import uvloop

MODEL = "bench"
NUM_CHUNKS = 64
WORDS = [f" word{number}" for number in range(NUM_CHUNKS)]
TEXT = "".join(WORDS)

_LENGTH = re.compile(rb"content-length: ?(\d+)", re.IGNORECASE)
_WANTS_STREAM = re.compile(rb'"stream": ?true')
_WANTS_USAGE = re.compile(rb'"include_usage": ?true')
_ABOUT = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "created": 1_700_000_000, "model": MODEL}
_USAGE = {
    "prompt_tokens": 1400,
    "total_tokens": 1400 + NUM_CHUNKS,
    "completion_tokens": NUM_CHUNKS,
    "prompt_tokens_details": {"cached_tokens": 1024},
}
# Far more KV than a run's trajectories claim, so that turns are scheduled but never wait for memory.
_METRICS = b"""# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
vllm:num_requests_running{engine="0",model_name="bench"} 4.0
vllm:num_requests_waiting{engine="0",model_name="bench"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="bench"} 0.25
vllm:generation_tokens_total{engine="0",model_name="bench"} %d.0
vllm:prompt_tokens_total{engine="0",model_name="bench"} 1000.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="62500000",cache_dtype="auto",engine="0"} 1.0
"""


def _whole(status: str, kind: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\ncontent-type: {kind}\r\n\r\n".encode() + body


def _json(body: dict[str, object]) -> bytes:
    return _whole("200 OK", "application/json", orjson.dumps(body))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(choices: list[dict[str, object]], **more: object) -> bytes:
    return _chunk(
        b"data: " + orjson.dumps(_ABOUT | {"object": "chat.completion.chunk", "choices": choices} | more) + b"\n\n"
    )


def _word_event(number: int, word: str) -> bytes:
    delta = {"content": word} if number else {"role": "assistant", "content": word}
    reason = "stop" if number == NUM_CHUNKS - 1 else None
    return _event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "token_ids": None}])


_MESSAGE: dict[str, object] = {
    "role": "assistant",
    "content": TEXT,
    "refusal": None,
    "tool_calls": [],
    "reasoning": None,
}
_CHOICE = {"index": 0, "message": _MESSAGE, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
_CHAT = _json(_ABOUT | {"object": "chat.completion", "choices": [_CHOICE], "usage": _USAGE})
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_STREAM = [_word_event(number, word) for number, word in enumerate(WORDS)]
_USAGE_EVENT = _event([], usage=_USAGE)
_STREAM_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_CARD = {"id": MODEL, "object": "model", "owned_by": "vllm", "created": 1_700_000_000, "max_model_len": 131_072}
_PAGES = {
    b"/v1/models": _json({"object": "list", "data": [_CARD]}),
    b"/version": _json({"version": "0.33.0"}),
    b"/health": _json({}),
}
_EMPTY = _json({})


class Server(asyncio.Protocol):
    """One connection of a client that waits for each answer before it asks again."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._buffer = b""
        self._num_chats = 0
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        length = _LENGTH.search(self._buffer, 0, head_end)
        if len(self._buffer) < head_end + 4 + (int(length[1]) if length else 0):
            return
        request, self._buffer = self._buffer, b""
        self._answer(request[: request.index(b" HTTP/")], request[head_end + 4 :])

    def _answer(self, start: bytes, body: bytes) -> None:
        path = start.partition(b" ")[2].partition(b"?")[0]
        if path == b"/v1/chat/completions" and _WANTS_STREAM.search(body):
            self._transport.write(_STREAM_HEAD)
            self._stream(0, bool(_WANTS_USAGE.search(body)))
        elif path == b"/v1/chat/completions":
            self._transport.write(_CHAT)
        elif path == b"/metrics":
            # A work counter that grows, as that of an engine that does not hang.
            page = _METRICS % int(self._loop.time() * 1000)
            self._transport.write(_whole("200 OK", "text/plain; version=0.0.4", page))
        else:
            self._transport.write(_PAGES.get(path, _EMPTY))

    def _stream(self, number: int, wants_usage: bool) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_STREAM[number])
        if number + 1 < NUM_CHUNKS:
            self._loop.call_later(self._interval_s, self._stream, number + 1, wants_usage)
            return
        if wants_usage:
            self._transport.write(_USAGE_EVENT)
        self._transport.write(_STREAM_END)


async def serve(ports: list[int], interval_s: float) -> None:
    """Serve at these ports of the loopback until cancelled."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: Server(interval_s), "127.0.0.1", port, backlog=1024) for port in ports]
    print("serving", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, action="append", required=True, help="may be repeated")
    parser.add_argument("--interval-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.interval_ms / 1000))
