"""Converts requests to /v1/responses into chats as SGLang does (0.5.23, srt/entrypoints/openai).

SGLang's token routes know only chats, so the conversion of its own route is repeated here. Requests that it would have
to remember, tools that are not functions, and everything that depends on the model's template pass through.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import orjson

from engines.sglang_anthropic import has_types

# As its schema has them; it refuses values of another type, and ignores unknown fields.
_TYPES: dict[str, tuple[type, ...]] = {
    "cache_salt": (str,),
    "chat_template_kwargs": (dict,),
    "extra_key": (str,),
    "frequency_penalty": (int, float),
    "include": (list,),
    "instructions": (str,),
    "max_output_tokens": (int,),
    "max_tool_calls": (int,),
    "metadata": (dict,),
    "min_p": (int, float),
    "model": (str,),
    "parallel_tool_calls": (bool,),
    "presence_penalty": (int, float),
    "priority": (int,),
    "reasoning": (dict,),
    "repetition_penalty": (int, float),
    "request_id": (str,),
    "session_id": (str,),
    "stop": (str, list),
    "store": (bool,),
    "temperature": (int, float),
    "text": (dict,),
    "top_k": (int,),
    "top_p": (int, float),
    "user": (str,),
}
_WORDS = {
    "service_tier": ("auto", "default", "flex", "scale", "priority"),
    "tool_choice": ("auto", "none"),
    "truncation": ("auto", "disabled"),
}
_BEYOND = (
    "background",
    "bootstrap_host",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "previous_response_id",
    "request_id",
    "routed_dp_rank",
    "top_logprobs",
)
_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_TOOL_FIELDS = ("name", "description", "parameters", "strict")
_HEADROOM = 2
"""This many tokens of `max_output_tokens` are not made."""
_NOTHING = (None, "")
_LABEL = "Developer instructions:\n"


def chat_of_response(request: Mapping[str, Any], is_storing: bool) -> dict[str, Any] | None:
    """Such a request as a chat; None if only the engine's own route serves it.

    Args:
        is_storing: the server keeps responses, unless their client declines.

    Raises: AttributeError, KeyError, TypeError or ValueError for requests that the engine would refuse.
    """
    if not has_types(request, _TYPES) or any(request.get(name) for name in _BEYOND):
        return None
    if any(request.get(name, words[0]) not in words for name, words in _WORDS.items()):
        return None
    is_kept = is_storing and request.get("store", True)
    if is_kept or any(name != "reasoning.encrypted_content" for name in request.get("include") or ()):
        return None
    messages, tools = _messages(request), [_tool(tool) for tool in request.get("tools") or ()]
    if messages is None or None in tools:
        return None
    chat: dict[str, Any] = {"messages": messages, "temperature": 0.7}
    chat |= {name: request[name] for name in ("model", *_SAMPLED) if request.get(name) is not None}
    if (wanted := request.get("max_output_tokens")) is not None:
        chat["max_tokens"] = wanted - _HEADROOM
    if tools:
        parallel = request.get("parallel_tool_calls")
        chat |= {"tools": tools, "tool_choice": request.get("tool_choice", "auto")}
        chat["parallel_tool_calls"] = True if parallel is None else parallel
    if (shape := ((request.get("text") or {}).get("format") or {})).get("type", "text") != "text":
        chat["response_format"] = _form(shape)
    if (reasoning := request.get("reasoning")) is not None:
        chat["reasoning_effort"] = reasoning.get("effort", "medium")
    further = ("stop", "chat_template_kwargs", "cache_salt", "extra_key")
    return chat | {name: request[name] for name in further if request.get(name) is not None}


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    messages: list[dict[str, Any]] = []
    if instructions := request.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    given = request["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        message = _message(item)
        if message is None:
            return None
        messages.append(message)
    # With several, their positions depend on the template; so does the handling of one that has parts.
    if any(message["role"] == "system" for message in messages[1:]):
        return None
    if messages and messages[0]["role"] == "system" and not isinstance(messages[0]["content"], str):
        return None
    return _merged(messages)


def _message(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """One item as a message; None for any other kind."""
    match item.get("type"):
        case "function_call":
            function = {"name": item["name"], "arguments": _arguments(item.get("arguments"))}
            call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            output = item.get("output", "")
            if isinstance(output, list):
                output = "".join(part.get("text", "") for part in output)
            return {"role": "tool", "tool_call_id": item["call_id"], "content": output}
        case None | "message":
            return _said(item)
    return None


def _said(item: Mapping[str, Any]) -> dict[str, Any] | None:
    role, content = item["role"], item["content"]
    if role not in ("system", "developer", "user", "assistant") or item.keys() - {
        "id", "status", "type", "role", "content", "phase"
    }:  # fmt: skip
        return None
    if role == "developer":
        if not isinstance(content, str):
            return None
        role, content = "system", _LABEL + content
    if not isinstance(content, str):
        if any(part["type"] not in ("input_text", "output_text") for part in content):
            return None
        content = [{"type": "text", "text": part.get("text", "")} for part in content]
    phase = item.get("phase")
    return {"role": role, "content": content, **({"phase": phase} if phase is not None else {})}


def _arguments(given: Any) -> str:
    """An object as JSON, whatever was sent."""
    if isinstance(given, dict):
        return orjson.dumps(given).decode()
    try:
        made = orjson.loads(given) if isinstance(given, str) and given else None
    except orjson.JSONDecodeError:
        made = None
    return str(given) if isinstance(made, dict) else "{}"


def _merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an assistant said and called in one phase, merged into one message."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else {}
        if not message["role"] == last.get("role") == "assistant" or last.get("phase") != message.get("phase"):
            merged.append(message)
            continue
        merged[-1] = joined = dict(last)
        if (new := message.get("content")) not in _NOTHING:
            joined["content"] = _both(last.get("content"), new)
        if calls := message.get("tool_calls"):
            joined["tool_calls"] = [*(last.get("tool_calls") or ()), *calls]
    return merged


def _both(old: Any, new: Any) -> Any:
    if old in _NOTHING:
        return new
    if isinstance(old, str) and isinstance(new, str):
        return f"{old}\n\n{new}"
    parts = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in (old, new))
    return list(chain.from_iterable(parts))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    if tool["type"] != "function" or tool.get("defer_loading") is not None:
        return None
    told = {"strict": False, **tool}
    if any(told.get(name) is None for name in _TOOL_FIELDS):
        return None  # its route shows the template a null in its place, /v1/tokenize at the end
    return {"type": "function", "function": {name: told[name] for name in _TOOL_FIELDS}}


def _form(shape: Mapping[str, Any]) -> dict[str, Any]:
    if shape["type"] == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": shape["name"], "schema": shape["schema"]}}
    return {"type": shape["type"]}
