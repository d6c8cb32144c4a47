"""Requests of all kinds at token level, and what is compared of their answers: what an undisturbed engine says of each
is what every fleet must say, whatever happens to it.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import orjson

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.faults.asking import PATHS, Heard, ask

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"x": {}}}}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": ["n t", " of the"]},
    "stop that is told": {"stop": ["e w"], "include_stop_str_in_output": True},
    "ends by itself": {"ignore_eos": False, "max_tokens": 400},
    "json": {"response_format": SCHEMA},
    "tools": {"tools": [TOOL]},
    "tool required": {"tools": [TOOL], "tool_choice": "required"},
}
_MESSAGES_TOOL = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
MESSAGES_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop_sequences": ["n t", " of the"]},
    "ends by itself": {"ignore_eos": False, "max_tokens": 400},
    "tools": {"tools": [_MESSAGES_TOOL]},
    "tool required": {"tools": [_MESSAGES_TOOL], "tool_choice": {"type": "any"}},
}
_RESPONSES_TOOL = {"type": "function", "description": "Weather.", **TOOL["function"]}  # type: ignore[dict-item]
_RESPONSES_SHAPE = {"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": {"x": {}}}}
RESPONSES_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ends by itself": {"ignore_eos": False, "max_output_tokens": 400},
    "json": {"text": {"format": _RESPONSES_SHAPE}},
    "tools": {"tools": [_RESPONSES_TOOL]},
    "tool required": {"tools": [_RESPONSES_TOOL], "tool_choice": "required"},
}
OF_CHATS = {"messages": MESSAGES_KINDS, "responses": RESPONSES_KINDS}
FLEETS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm", "vllm"),
    "sglang": ("sglang", "sglang", "sglang-incremental"),
    "mixed": ("vllm", "sglang", "sglang-incremental"),
}
PAIRS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm"),
    "sglang": ("sglang-incremental", "sglang"),
    "mixed": ("vllm", "sglang"),
}
URGENT = {"agent_hints": {"priority": 9}}
ENDURING: dict[str, Any] = {
    "token_legs": "auto", "max_attempts": 100, "retry_pause_s": 0.0, "faults_to_open": 10_000, "save_tokens_s": 0.01
}  # fmt: skip


def body_of(number: int, kind: str, api: str, stream: bool) -> dict[str, Any]:
    """A request for about eighty tokens."""
    body: dict[str, Any] = {"model": "simulated", "stream": stream, "ignore_eos": True, "temperature": 0}
    body["max_output_tokens" if api == "responses" else "max_tokens"] = 80
    body |= OF_CHATS.get(api, KINDS)[kind]
    if api == "responses":
        return body | {"input": f"question {number}", "store": False}
    if stream and api != "messages":
        body["stream_options"] = {"include_usage": True}
    if api != "completions":
        return body | {"messages": [{"role": "user", "content": f"question {number}"}]}
    return body | {"prompt": f"question {number}", "logprobs": 2 if kind == "logprobs" else None}


def told_of(heard: Heard, body: dict[str, Any]) -> dict[str, Any]:
    """The same of the answer to a request; where SGLang does not say that a stop string ended it, it may have."""
    said = told(heard, body["stream"])
    return said | {"tokens": None} if body.get("stop_sequences") else said


def told(heard: Heard, stream: bool) -> dict[str, Any]:
    """All that an answer says: text, calls, log-probabilities, how it ended, how many tokens it took."""
    answers = heard.events if stream else [heard.json]
    said: dict[str, Any] = {"text": "", "calls": [], "logprobs": [], "reason": None, "stop": None, "tokens": None}
    if "response" in answers[0] or answers[0].get("object") == "response":
        return _response_told(answers, said)
    if "type" in answers[0]:
        return _message_told(answers, said)
    for answer in answers:
        if usage := answer.get("usage"):
            said["tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in answer["choices"]:
            part = choice.get("delta") or choice.get("message") or {}
            said["text"] += choice.get("text") or part.get("content") or ""
            for call in part.get("tool_calls") or ():
                said["calls"].append(call["function"].get("name"))
                said["text"] += call["function"].get("arguments") or ""
            logprobs = choice.get("logprobs") or {}
            said["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            said["reason"] = said["reason"] or choice.get("finish_reason")
            said["stop"] = said["stop"] or choice.get("stop_reason") or choice.get("matched_stop")
    said["calls"] = [name for name in said["calls"] if name]
    if said["reason"] == "stop" and said["stop"]:
        said["tokens"] = None  # a stop string found over a seam comes late, see gateway/turns/chain.py
        said["logprobs"] = said["logprobs"][:1]
    return said


def _message_told(events: Sequence[dict[str, Any]], said: dict[str, Any]) -> dict[str, Any]:
    """The same of one of Anthropic's messages, whole or by its events."""
    usage: dict[str, int] = {}
    for event in events:
        blocks = event["content"] if event["type"] == "message" else [event.get("content_block"), event.get("delta")]
        for block in filter(None, blocks):
            said["calls"] += [block["name"]] if block.get("type") == "tool_use" else []
            said["text"] += block.get("text") or block.get("partial_json") or ""
            said["text"] += str(block["input"]) if block.get("input") else ""
        ended = event if event["type"] == "message" else event.get("delta") or {}
        said["reason"], said["stop"] = ended.get("stop_reason") or said["reason"], ended.get("stop_sequence")
        usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
        read = usage.get("cache_creation_input_tokens", 0) + usage.get("cache_read_input_tokens", 0)
        said["tokens"] = usage["input_tokens"] + read, usage["output_tokens"]
        if said["stop"]:
            said["tokens"] = None  # as above
            break
    return said


def _response_told(events: Sequence[dict[str, Any]], said: dict[str, Any]) -> dict[str, Any]:
    """The same of one of OpenAI's responses, whose last event has all that its deltas say."""
    response = events[-1].get("response", events[-1])
    for item in response["output"]:
        said["calls"] += [item["name"]] if item["type"] == "function_call" else []
        said["text"] += item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
    if len(events) > 1:
        assert "".join(event["delta"] for event in events if event["type"].endswith(".delta")) == said["text"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    said["reason"] = response["status"]
    said["tokens"] = response["usage"]["input_tokens"], response["usage"]["output_tokens"]
    return said


def engine_of(kind: str, **more: Any) -> SimulatedEngineSettings:
    """The settings of an engine of a fleet."""
    dialect, _, is_incremental = kind.partition("-")
    more |= {"incremental_streaming_output": bool(is_incremental)}
    return SimulatedEngineSettings(dialect=dialect, **more)  # type: ignore[arg-type]


def jobs(seed: int, num: int, fleet: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all kinds that the fleet serves at token level, in all its APIs, streamed and not."""
    dice = random.Random(seed)
    made = []
    # What holds a call to a grammar is known only to SGLang's chat route.
    kinds = [kind for kind in KINDS if fleet == "vllm" or kind != "tool required"]
    for number in range(num):
        kind, api, stream = dice.choice(kinds), dice.choice(("chat", "completions")), dice.random() < 0.6
        if kind.startswith("tool"):
            api = "chat"
        others = [other for other, kinds_of in OF_CHATS.items() if kind in kinds_of]
        if fleet == "mixed":  # in all else one kind of engine takes these for a little more or less than the other
            others = ["messages"] if kind == "ends by itself" else []
        if api == "chat" and others and dice.random() < 0.5:
            api = dice.choice(others)
        made.append((api, body_of(seed * 10_000 + number, kind, api, stream)))
    return made


async def all_told(client: httpx.AsyncClient, url: str, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What each of these requests is told, all of them sent at once."""
    heard = await asyncio.gather(*(ask(client, url, api, body) for api, body in asked))
    return [
        told_of(one, body) if one.is_finished(api) else one.text for one, (api, body) in zip(heard, asked, strict=True)
    ]


@asynccontextmanager
async def fleet_of(*settings: SimulatedEngineSettings) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serve_engine(one)) for one in settings]


async def undisturbed(asked: Sequence[tuple[str, dict[str, Any]]], fleet: str = "vllm") -> list[Any]:
    """What a quiet engine says, asked without a gateway; of the fleet's kind if all are of one."""
    settings = engine_of("sglang" if fleet == "sglang" else "vllm", speed_up=200)
    async with httpx.AsyncClient(timeout=120) as client, serve_engine(settings) as engine:
        said = []
        for start in range(0, len(asked), 50):
            for api, body in asked[start : start + 50]:
                answer = await client.post(engine + PATHS[api], json=body)
                said.append(told_of(Heard(answer.status_code, answer.headers, answer.text), body))
        return said


def count_of(metrics: str, series: str) -> float:
    return next((float(line.split()[1]) for line in metrics.splitlines() if line.startswith(series)), 0.0)


def differences(expected: Sequence[Any], got: Sequence[Any], asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    return [
        f"{api} {orjson.dumps(body).decode()}\n  wanted {want}\n  got    {have}"
        for want, have, (api, body) in zip(expected, got, asked, strict=True)
        if want != have
    ]
