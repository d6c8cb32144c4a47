"""Agents that ask one turn after the other, as fast as they are answered, and check every answer.

    python -m loadtest.bench.load --port 8080 --connections 32 --seconds 3 [--stream] [--seed 1]

Each connection is an agent with its own X-Trajectory-Id and begins a new trajectory every ten turns. Prints one JSON
line: answers and their latencies. Ends with an error at the first answer that is not the backend's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from functools import partial
from time import perf_counter
from typing import Any, cast

import orjson
import uvloop

from loadtest.bench.backend import MODEL, NUM_CHUNKS, TEXT

TURNS_PER_TRAJECTORY = 10
NUM_PROMPTS = 64
BODY_BYTES = 5_500


def bodies(seed: int, stream: bool, num_bytes: int) -> list[bytes]:
    """Chat requests of this size: a system prompt, a task, and a turn with a tool call behind it."""
    dice = random.Random(seed)
    return [_body(dice, stream, num_bytes) for _ in range(NUM_PROMPTS)]


def _body(dice: random.Random, stream: bool, size: int) -> bytes:
    def text(num_bytes: int) -> str:
        words = ("".join(dice.choices("etaoinshrdlu", k=dice.randint(2, 9))) for _ in range(num_bytes))
        return " ".join(words)[:num_bytes]

    call = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls -l"}'}}
    request = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": text(1_500)},
            {"role": "user", "content": text(1_000)},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": text(1_500)},
        ],
        "tools": [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}],
        "max_tokens": 512,
        "temperature": 1.0,
        "stream": stream,
    }
    padding = size - len(orjson.dumps(request))
    request["messages"][-1]["content"] += text(padding)  # type: ignore[index]
    return orjson.dumps(request)


class Agent(asyncio.Protocol):
    """One connection; `done` is set when it has had its last answer."""

    def __init__(
        self, name: str, number: int, port: int, payloads: list[bytes], stream: bool, until: float, limit: int
    ) -> None:
        self.latencies_s: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._name = f"{name}-{number}"
        self._number = number
        self._payloads = payloads
        self._stream = stream
        self._until = until
        self._limit = limit
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        )
        self._pieces: list[bytes] = []
        self._size = self._wanted = 0
        self._asked_at = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or EOFError("the server closed the connection"))

    def _ask(self) -> None:
        trajectory = len(self.latencies_s) // TURNS_PER_TRAJECTORY
        payload = self._payloads[(7 * self._number + trajectory) % len(self._payloads)]
        name = f"{self._name}-{trajectory}"
        ids = f"X-Trajectory-Id: {name}\r\nX-Session-Id: {name}\r\nContent-Length: {len(payload)}\r\n\r\n"
        self._pieces, self._size, self._wanted = [], 0, 0
        self._asked_at = perf_counter()
        self._transport.write((self._head + ids).encode() + payload)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self._stream:
            if not data.endswith(b"0\r\n\r\n"):
                return
        elif not self._is_whole():
            return
        self.latencies_s.append(perf_counter() - self._asked_at)
        try:
            check(b"".join(self._pieces), self._stream)
        except ValueError as error:
            self.done.set_exception(error)
            self._transport.close()
            return
        if perf_counter() < self._until and len(self.latencies_s) < self._limit:
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _is_whole(self) -> bool:
        if not self._wanted:
            start = b"".join(self._pieces)
            head, blank, _ = start.partition(b"\r\n\r\n")
            if not blank:
                return False
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._wanted = len(head) + 4 + int(length or 0)
        return self._size >= self._wanted


def check(answer: bytes, stream: bool) -> None:
    """Raise ValueError unless this is the backend's answer, whole and in order."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ValueError(f"not an answer: {answer[:300]!r}")
    if not stream:
        text = orjson.loads(body)["choices"][0]["message"]["content"]
    else:
        events = _unchunked(body).split(b"\n\n")
        if events[-2:] != [b"data: [DONE]", b""]:
            raise ValueError(f"a stream without its end: {body[-300:]!r}")
        # A part of a stream of events, each with one word; parsing all would cost the client more than the server.
        if len(events) != NUM_CHUNKS + 2:
            odd = [event for event in events if b'"content":"' not in event]
            raise ValueError(f"{len(events) - 2} events instead of {NUM_CHUNKS}; without a word: {odd!r}")
        text = b"".join(event.partition(b'"content":"')[2].partition(b'"')[0] for event in events).decode()
    if text != TEXT:
        raise ValueError(f"another answer: {text[:300]!r}")


def _unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    start = 0
    while True:
        line_end = body.index(b"\r\n", start)
        size = int(body[start:line_end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[line_end + 2 : line_end + 2 + size])
        start = line_end + size + 4


async def load(
    port: int, connections: int, seconds: float, stream: bool, seed: int, num_bytes: int, num_answers: int
) -> dict[str, Any]:
    """Ask for so long; seconds, number of answers, and latencies in microseconds, ordered."""
    loop = asyncio.get_running_loop()
    payloads = bodies(seed, stream, num_bytes)
    began_at = perf_counter()
    # The same trajectory must not come back in a later run against the same server.
    run = f"{seed}-{random.SystemRandom().randrange(16**6):06x}"
    agents = []
    for number in range(connections):
        _, agent = await loop.create_connection(
            partial(Agent, run, number, port, payloads, stream, began_at + seconds, num_answers // connections),
            "127.0.0.1",
            port,
        )
        agents.append(agent)
    await asyncio.gather(*(agent.done for agent in agents))
    latencies = sorted(latency for agent in agents for latency in agent.latencies_s)
    return {
        "seconds": perf_counter() - began_at,
        "num_answers": len(latencies),
        "p50_us": latencies[len(latencies) // 2] * 1e6,
        "p99_us": latencies[len(latencies) * 99 // 100] * 1e6,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--body", type=int, default=5_500)
    parser.add_argument("--answers", type=int, default=10**9)
    arguments = parser.parse_args()
    result = uvloop.run(
        load(
            arguments.port,
            arguments.connections,
            arguments.seconds,
            arguments.stream,
            arguments.seed,
            arguments.body,
            arguments.answers,
        )
    )
    print(orjson.dumps(result).decode())
