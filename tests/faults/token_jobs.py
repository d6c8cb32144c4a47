"""Requests of all kinds at token level, and the comparable content of their answers: whatever happens to a fleet, its
answers must equal those of an undisturbed engine."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import orjson

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.faults.asking import PATHS, Reply, ask

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
    "stop that is included": {"stop": ["e w"], "include_stop_str_in_output": True},
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
KINDS_OF_APIS = {"messages": MESSAGES_KINDS, "responses": RESPONSES_KINDS}
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
    "token_legs": "auto", "max_attempts": 100, "max_killed_engines": 100, "retry_pause_s": 0.0,
    "faults_to_open": 10_000, "save_tokens_s": 0.01
}  # fmt: skip


def body_of(number: int, kind: str, api: str, stream: bool) -> dict[str, Any]:
    """A request for about eighty tokens."""
    body: dict[str, Any] = {"model": "simulated", "stream": stream, "ignore_eos": True, "temperature": 0}
    body["max_output_tokens" if api == "responses" else "max_tokens"] = 80
    body |= KINDS_OF_APIS.get(api, KINDS)[kind]
    if api == "responses":
        return body | {"input": f"question {number}", "store": False}
    if stream and api != "messages":
        body["stream_options"] = {"include_usage": True}
    if api != "completions":
        return body | {"messages": [{"role": "user", "content": f"question {number}"}]}
    return body | {"prompt": f"question {number}", "logprobs": 2 if kind == "logprobs" else None}


def comparable_content_of(reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
    """The content of a reply to this request, without token counts if SGLang may not report that a stop string ended
    it."""
    content = content_of(reply, body["stream"])
    return content | {"tokens": None} if body.get("stop_sequences") else content


def content_of(reply: Reply, stream: bool) -> dict[str, Any]:
    """All content of an answer: text, calls, log-probabilities, finish reason and token counts."""
    answers = reply.events if stream else [reply.json]
    content: dict[str, Any] = {"text": "", "calls": [], "logprobs": [], "reason": None, "stop": None, "tokens": None}
    if "response" in answers[0] or answers[0].get("object") == "response":
        return _content_of_response(answers, content)
    if "type" in answers[0]:
        return _content_of_message(answers, content)
    for answer in answers:
        if usage := answer.get("usage"):
            content["tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in answer["choices"]:
            part = choice.get("delta") or choice.get("message") or {}
            content["text"] += choice.get("text") or part.get("content") or ""
            for call in part.get("tool_calls") or ():
                content["calls"].append(call["function"].get("name"))
                content["text"] += call["function"].get("arguments") or ""
            logprobs = choice.get("logprobs") or {}
            content["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            content["reason"] = content["reason"] or choice.get("finish_reason")
            content["stop"] = content["stop"] or choice.get("stop_reason") or choice.get("matched_stop")
    content["calls"] = [name for name in content["calls"] if name]
    if content["reason"] == "stop" and content["stop"]:
        content["tokens"] = None  # a stop string that spans two legs is found late, see gateway/turns/chain.py
        content["logprobs"] = content["logprobs"][:1]
    return content


def _content_of_message(events: Sequence[dict[str, Any]], content: dict[str, Any]) -> dict[str, Any]:
    """The same for one of Anthropic's messages, whole or as events."""
    usage: dict[str, int] = {}
    for event in events:
        blocks = event["content"] if event["type"] == "message" else [event.get("content_block"), event.get("delta")]
        for block in filter(None, blocks):
            content["calls"] += [block["name"]] if block.get("type") == "tool_use" else []
            content["text"] += block.get("text") or block.get("partial_json") or ""
            content["text"] += str(block["input"]) if block.get("input") else ""
        ended = event if event["type"] == "message" else event.get("delta") or {}
        content["reason"], content["stop"] = ended.get("stop_reason") or content["reason"], ended.get("stop_sequence")
        usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
        read = usage.get("cache_creation_input_tokens", 0) + usage.get("cache_read_input_tokens", 0)
        content["tokens"] = usage["input_tokens"] + read, usage["output_tokens"]
        if content["stop"]:
            content["tokens"] = None  # as above
            break
    return content


def _content_of_response(events: Sequence[dict[str, Any]], content: dict[str, Any]) -> dict[str, Any]:
    """The same for one of OpenAI's responses, whose last event repeats the content of all deltas."""
    response = events[-1].get("response", events[-1])
    for item in response["output"]:
        content["calls"] += [item["name"]] if item["type"] == "function_call" else []
        content["text"] += item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
    if len(events) > 1:
        assert "".join(event["delta"] for event in events if event["type"].endswith(".delta")) == content["text"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    content["reason"] = response["status"]
    content["tokens"] = response["usage"]["input_tokens"], response["usage"]["output_tokens"]
    return content


def engine_of(kind: str, **more: Any) -> SimulatedEngineSettings:
    """The settings of one engine of a fleet."""
    dialect, _, is_incremental = kind.partition("-")
    more |= {"incremental_streaming_output": bool(is_incremental)}
    return SimulatedEngineSettings(dialect=dialect, **more)  # type: ignore[arg-type]


def requests_of_all_kinds(seed: int, num: int, fleet: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all kinds that the fleet serves at token level, in all its APIs, streamed and not."""
    dice = random.Random(seed)
    made = []
    # Only SGLang's chat route knows the grammar of a required call.
    kinds = [kind for kind in KINDS if fleet == "vllm" or kind != "tool required"]
    for number in range(num):
        kind, api, stream = dice.choice(kinds), dice.choice(("chat", "completions")), dice.random() < 0.6
        if kind.startswith("tool"):
            api = "chat"
        others = [other for other, kinds_of in KINDS_OF_APIS.items() if kind in kinds_of]
        if fleet == "mixed":  # for all others, the two kinds of engine differ slightly in token counts
            others = ["messages"] if kind == "ends by itself" else []
        if api == "chat" and others and dice.random() < 0.5:
            api = dice.choice(others)
        made.append((api, body_of(seed * 10_000 + number, kind, api, stream)))
    return made


async def contents_of_replies(
    client: httpx.AsyncClient, url: str, requests: Sequence[tuple[str, dict[str, Any]]]
) -> list[Any]:
    """The content of the reply to each of these requests, all sent at once; the text of a reply that is not
    finished."""
    replies = await asyncio.gather(*(ask(client, url, api, body) for api, body in requests))
    return [
        comparable_content_of(one, body) if one.is_finished(api) else one.text
        for one, (api, body) in zip(replies, requests, strict=True)
    ]


@asynccontextmanager
async def fleet_of(*settings: SimulatedEngineSettings) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serve_engine(one)) for one in settings]


async def undisturbed_contents(requests: Sequence[tuple[str, dict[str, Any]]], fleet: str = "vllm") -> list[Any]:
    """The content of an idle engine's answers, without a gateway. It is of the fleet's kind if the fleet has one
    kind."""
    settings = engine_of("sglang" if fleet == "sglang" else "vllm", speed_up=200)
    async with httpx.AsyncClient(timeout=120) as client, serve_engine(settings) as engine:
        content = []
        for start in range(0, len(requests), 50):
            for api, body in requests[start : start + 50]:
                answer = await client.post(engine + PATHS[api], json=body)
                content.append(comparable_content_of(Reply(answer.status_code, answer.headers, answer.text), body))
        return content


def count_of(metrics: str, series: str) -> float:
    return next((float(line.split()[1]) for line in metrics.splitlines() if line.startswith(series)), 0.0)


def differences(
    expected: Sequence[Any], got: Sequence[Any], requests: Sequence[tuple[str, dict[str, Any]]]
) -> list[str]:
    return [
        f"{api} {orjson.dumps(body).decode()}\n  wanted {want}\n  got    {have}"
        for want, have, (api, body) in zip(expected, got, requests, strict=True)
        if want != have
    ]
