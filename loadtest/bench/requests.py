"""Chat requests of agents, of any size, as ready-made bytes."""

from __future__ import annotations

import random

import orjson

from loadtest.bench.answers import CALL, MODEL, TEXT, TOOL, Json

Body = list[bytes | memoryview]
"""A request's bytes, in pieces."""

ANSWER: Json = {"role": "assistant", "content": TEXT, "tool_calls": [CALL]}
"""What the backend answered, as agents send it back."""

_NUM_PROMPTS = 64
_MAX_BYTES = 16 * 2**20  # for all of them together
_TEXT_BYTES = 2**16
_NUMBER = b"00000000"  # stands for the number of a turn; the text around it has letters only
# Lines of code and logs: quotes, backslashes, indentation, and now and then a character beyond ASCII.
_LINES = (
    "def {0}({1}, {2}):\n",
    '    if {0} == "{1}":\n        return {2}[{3}]\n',
    "        {0}.{1}('{2}', {3})  # \"{1}\"\n",
    'src/{0}/{1}.py:{3}: error: no attribute "{2}"\n',
    "tests/{0}/test_{1}.py::test_{2} PASSED\t[{3}]\n",
    "  \u2713 {0} {1} ({3} ms)\n",
    "{0} {1} {2} {0} {2} {1} {0}.\n\n",
    '\\d+\\.{0}\t"{1}": "{2}",\n',
)


def bodies(seed: int, stream: bool, num_bytes: int, has_tools: bool = True) -> list[bytes]:
    """Different requests of this size: a system prompt, a task, and a turn followed by a tool call."""
    dice = random.Random(seed)
    words = ("".join(dice.choices("etaoinshrdlu", k=dice.randint(2, 9))) for _ in range(_TEXT_BYTES // 4))
    text = " ".join(words)[:_TEXT_BYTES]
    number = max(4, min(_NUM_PROMPTS, _MAX_BYTES // num_bytes))
    return [_body(text, dice, stream, num_bytes, has_tools) for _ in range(number)]


def in_turn(body: bytes, turn: int) -> Body:
    """One of these requests as its agent asks it in this turn: of the same size, but not the same."""
    start = body.index(_NUMBER)
    rest = memoryview(body)
    return [rest[:start], b"%08d" % turn, rest[start + len(_NUMBER) :]]


def _body(text: str, dice: random.Random, stream: bool, num_bytes: int, has_tools: bool) -> bytes:
    def some(length: int) -> str:
        start = dice.randrange(len(text))
        return (text[start:] + text * (length // len(text) + 1))[:length]

    call = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls -l"}'}}
    tool_result = {"role": "tool", "tool_call_id": "call_1", "content": _NUMBER.decode()}
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


def contexts(seed: int, stream: bool, num_bytes: int, number: int) -> list[list[Body]]:
    """Conversations of a coding agent, mostly files and logs that its tools returned.

    Args:
        num_bytes: of a request in the middle of a conversation.
        number: of conversations.

    Returns:
        The requests of each conversation, turn by turn: the answer that the backend gave and its call's result longer
        each time, from three quarters to five quarters of the size. They share the bytes that they have in common.
    """
    dice = random.Random(seed)
    names = ["".join(dice.choices("etaoinshrdlu", k=dice.randint(2, 9))) for _ in range(1_000)]
    lines = [dice.choice(_LINES).format(*dice.choices(names, k=3), dice.randrange(1_000)) for _ in range(2_000)]
    return [_context(lines, dice, stream, num_bytes) for _ in range(number)]


def _context(lines: list[str], dice: random.Random, stream: bool, num_bytes: int) -> list[Body]:
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    tool = {"type": "function", "function": {"name": TOOL, "description": "Runs it.", "parameters": parameters}}
    request = {"model": MODEL, "max_tokens": 512, "stream": stream, "tools": [tool] * 10}
    system = {"role": "system", "content": "".join(dice.choices(lines, k=40))}
    task = {"role": "user", "content": "".join(dice.choices(lines, k=5))}
    written = bytearray(orjson.dumps(request)[:-1] + b',"messages":' + orjson.dumps([system, task])[:-1])
    ends: list[int] = []
    while len(written) < num_bytes * 5 / 4 or not ends:
        result = "".join(dice.choices(lines, k=round(dice.lognormvariate(3.0, 1.0))))
        step = [ANSWER, {"role": "tool", "tool_call_id": CALL["id"], "content": result}]
        written += b"," + orjson.dumps(step)[1:-1]
        if len(written) >= num_bytes * 3 / 4:
            ends.append(len(written))
    whole = memoryview(bytes(written))
    return [[whole[:end], b"]}"] for end in ends]


def head(port: int, trajectory_id: str | None, length: int) -> bytes:
    """The bytes before a body, with the trajectory's name in each server's header, or in none."""
    names = ("X-Trajectory-Id", "X-Session-Id", "X-SMG-Routing-Key") if trajectory_id is not None else ()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        + "".join(f"{name}: {trajectory_id}\r\n" for name in names)
        + f"Content-Length: {length}\r\n\r\n"
    ).encode()
