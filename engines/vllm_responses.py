"""What vLLM's parsers must know of a request to /v1/responses, as a chat without its texts.

Its tools are a chat's, one level flatter (vLLM 0.32, entrypoints/openai/responses/protocol.py). This serves clients
that keep the conversation themselves, and all clients if the engine keeps nothing: unless it was started with
VLLM_ENABLE_RESPONSES_API_STORE=1, it silently treats `store` as false (serving.py).
"""

from collections.abc import Mapping
from typing import Any

from engines.vllm_messages import asked_after

_CHOICES = ("auto", "none", "required")
# What an answer built from tokens lacks, or the engine would have to remember.
_BEYOND_TOKENS = (
    "background",
    "enable_response_messages",
    "previous_response_id",
    "prompt",
    "request_id",
    "stream_options",
    "top_logprobs",
)


def chat_of_response(request: Mapping[str, Any], is_storing: bool) -> dict[str, Any] | None:
    """Such a request as a chat; None if only the engine's own route serves it.

    Args:
        is_storing: the server keeps responses, unless their client declines.
    """
    if (is_storing and request.get("store") is not False) or any(request.get(name) for name in _BEYOND_TOKENS):
        return None
    if "message.output_text.logprobs" in (request.get("include") or ()):
        return None
    given = request["input"]
    items = [] if isinstance(given, str) else given
    num_calls = sum(isinstance(item, dict) and item.get("type") == "function_call" for item in items)
    chat: dict[str, Any] = {"model": request.get("model"), "messages": asked_after(num_calls)}
    if shape := _format(request.get("text")):
        chat["response_format"] = shape
    tools = request.get("tools") or ()
    if not tools:
        return chat
    if any(tool.get("type") != "function" or "namespace" in tool for tool in tools):
        return None
    choice = request.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice["name"]}}
    elif choice not in _CHOICES:
        return None
    parallel = request.get("parallel_tool_calls")
    return chat | {
        "tools": [_tool(tool) for tool in tools],
        "tool_choice": choice,
        "parallel_tool_calls": True if parallel is None else parallel,
    }


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    shape = (text or {}).get("format") or {}
    if shape.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": shape.get("name"), "schema": shape.get("schema")}}
    return {"type": shape["type"]} if shape.get("type") == "json_object" else None
