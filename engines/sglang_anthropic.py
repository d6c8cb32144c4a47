"""Converts Anthropic's requests into chats as SGLang does (SGLang 0.5.23, srt/entrypoints/anthropic/serving.py).

SGLang's token routes know only chats, so the conversion of its `/v1/messages` is repeated here. Requests that depend on
the model's template, on its reasoning toggle, or on more than text pass through.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The fields that its schema accepts and this conversion does not read; the engine refuses those of another type.
_TYPES: dict[str, tuple[type, ...]] = {
    "betas": (list,),
    "max_tokens": (int,),
    "metadata": (dict,),
    "model": (str,),
    "stop_sequences": (list,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
}
_ROUTED = ("bootstrap_host", "data_parallel_rank", "disagg_prefill_dp_rank", "routed_dp_rank")
_GIVEN = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "stop_sequences": "stop"}
# Parsers whose detector puts reasoning of earlier turns back between <think> and </think>. DeepSeek-V3.2's template,
# which is Python, handles it differently, under the same parser name as V3.
_WRAPPED = ("glm45", "qwen3", "qwen3-thinking", "step3")


def chat_of_messages(request: Mapping[str, Any], reasoning_parser: str | None) -> dict[str, Any] | None:
    """Such a request as a chat; None if only the engine's own route serves it.

    Raises: AttributeError, KeyError, TypeError or ValueError for requests that the engine would refuse.
    """
    config = request.get("output_config") or {}
    if request.get("thinking") is not None or config.get("effort") is not None:
        return None  # the template decides which of its variables they become
    if not has_types(request, _TYPES) or any(request.get(name) is not None for name in _ROUTED):
        return None
    messages = _messages(request, reasoning_parser)
    tools = [_tool(tool) for tool in request.get("tools") or ()]
    if messages is None or None in tools:
        return None
    chat = {"model": request["model"], "messages": messages, "max_tokens": request["max_tokens"]}
    chat |= {theirs: request[name] for name, theirs in _GIVEN.items() if request.get(name) is not None}
    if config.get("format") is not None:
        shape = {"name": "response", "schema": config["format"]["schema"], "strict": True}
        chat["response_format"] = {"type": config["format"]["type"], "json_schema": shape}
    chosen = request.get("tool_choice")
    if chosen is not None and chosen["type"] not in ("auto", "none"):
        return None
    if tools:
        chat |= {"tools": tools, "tool_choice": chosen["type"] if chosen else "auto"}
    if chosen:
        chat["parallel_tool_calls"] = not chosen.get("disable_parallel_tool_use", False)
    return chat


def has_types(request: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> bool:
    """Whether these fields, if given, are of these types; a boolean is not a number."""
    given = ((request[name], kinds) for name, kinds in types.items() if request.get(name) is not None)
    return all(isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)) for value, kinds in given)


def _messages(request: Mapping[str, Any], reasoning_parser: str | None) -> list[dict[str, Any]] | None:
    messages: list[dict[str, Any]] = []
    if system := _system(request.get("system")):
        messages.append({"role": "system", "content": system})
    for message in request["messages"]:
        role, content = message["role"], message["content"]
        if role == "system":
            return None  # whether in its place or at the start depends on the template
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
            continue
        made = _of_user(content) if role == "user" else _of_assistant(content, reasoning_parser)
        if made is None:
            return None
        messages += made
    return messages


def _system(given: str | Sequence[Mapping[str, Any]] | None) -> str:
    if given is None or isinstance(given, str):
        return given if given and given.strip() else ""
    return "\n".join(block["text"] for block in given if block["type"] == "text" and block["text"])


def _of_user(content: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Its texts and tool results, in order."""
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in content:
        if block["type"] == "text":
            parts.append({"type": "text", "text": _text(block["text"])})
            continue
        result = _result(block.get("content")) if block["type"] == "tool_result" else None
        if result is None:
            return None
        messages += _said("user", parts)
        parts = []
        asked_by = block.get("tool_use_id") or block.get("id") or ""
        messages.append({"role": "tool", "tool_call_id": asked_by, "content": result})
    return messages + _said("user", parts)


def _of_assistant(content: Sequence[Mapping[str, Any]], reasoning_parser: str | None) -> list[dict[str, Any]] | None:
    if any(block["type"] not in ("text", "thinking", "tool_use") for block in content):
        return None
    thoughts = [block["thinking"] for block in content if block["type"] == "thinking" and block["thinking"]]
    parts: list[dict[str, Any]] = []
    if thoughts and reasoning_parser is not None:  # a server without a parser drops them
        if reasoning_parser not in _WRAPPED:
            return None
        parts.append({"type": "text", "text": "<think>" + "\n".join(thoughts) + "\n</think>"})
    parts += [{"type": "text", "text": _text(block["text"])} for block in content if block["type"] == "text"]
    calls = [_call(block) for block in content if block["type"] == "tool_use"]
    said = _said("assistant", parts)
    if calls:
        return [(said[0] if said else {"role": "assistant"}) | {"tool_calls": calls}]
    return said or [{"role": "assistant", "content": ""}]


def _said(role: str, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A single text is sent as a string, without a part."""
    if not parts:
        return []
    return [{"role": role, "content": parts[0]["text"] if len(parts) == 1 else parts}]


def _result(content: Any) -> str | list[dict[str, Any]] | None:
    """A tool's result; None if it is more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if any(block["type"] != "text" for block in content):
        return None
    parts = [{"type": "text", "text": _text(block["text"])} for block in content if block["text"]]
    return parts if len(parts) > 1 else parts[0]["text"] if parts else ""


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    made = block.get("input") or {}
    if not isinstance(made, dict):
        raise TypeError("a call's input is an object")
    return {
        "id": _text(block["id"]) or "call",
        "type": "function",
        "function": {"name": _text(block["name"]), "arguments": json.dumps(made)},
    }


def _tool(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    if tool.get("type") not in (None, "custom") or tool.get("defer_loading") is not None:
        return None  # the engine omits Anthropic's own tools, and shows some of the others late
    schema = tool["input_schema"]
    if not isinstance(schema, dict):
        raise TypeError("a schema is an object")
    return {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": schema if "type" in schema else {**schema, "type": "object"},
            "strict": tool.get("strict", False),
        },
    }


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is a string")
    return value
