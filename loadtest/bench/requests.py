"""Chat requests of agents, of any size, as ready-made bytes."""

from __future__ import annotations

import random

import orjson

from loadtest.bench.answers import MODEL

_NUM_PROMPTS = 64
_MAX_BYTES = 16 * 2**20  # for all of them together
_TEXT_BYTES = 2**16


def bodies(seed: int, stream: bool, num_bytes: int, has_tools: bool = True) -> list[bytes]:
    """Different requests of this size: a system prompt, a task, and a turn followed by a tool call."""
    dice = random.Random(seed)
    words = ("".join(dice.choices("etaoinshrdlu", k=dice.randint(2, 9))) for _ in range(_TEXT_BYTES // 4))
    text = " ".join(words)[:_TEXT_BYTES]
    number = max(4, min(_NUM_PROMPTS, _MAX_BYTES // num_bytes))
    return [_body(text, dice, stream, num_bytes, has_tools) for _ in range(number)]


def _body(text: str, dice: random.Random, stream: bool, num_bytes: int, has_tools: bool) -> bytes:
    def some(length: int) -> str:
        start = dice.randrange(len(text))
        return (text[start:] + text * (length // len(text) + 1))[:length]

    call = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls -l"}'}}
    tool_result = {"role": "tool", "tool_call_id": "call_1", "content": ""}
    request = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": some(num_bytes // 4)},
            {"role": "user", "content": some(num_bytes // 8)},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            tool_result,
        ],
        "max_tokens": 512,
        "temperature": 1.0,
        "stream": stream,
    }
    if has_tools:
        request["tools"] = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]
    tool_result["content"] += some(max(0, num_bytes - len(orjson.dumps(request))))
    return orjson.dumps(request)


def head(port: int, trajectory_id: str, length: int) -> bytes:
    """The bytes before a body, with the trajectory's name in each server's header."""
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"X-Trajectory-Id: {trajectory_id}\r\nX-Session-Id: {trajectory_id}\r\nX-SMG-Routing-Key: {trajectory_id}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()
