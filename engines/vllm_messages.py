"""What vLLM's parsers must know of a request, as a chat without its texts.

From the messages a parser reads only how many calls they contain, by which some parsers number the next ones (vLLM
0.33, parser/utils.py); everything else would be sent, read and checked for nothing with every part of an answer.
Anthropic's requests become chats as in vLLM (entrypoints/anthropic/serving.py), as far as a parser reads them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

_CALL = {"id": "call", "type": "function", "function": {"name": "call", "arguments": "{}"}}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_CHANGES = ("tool_addition", "tool_removal")


def chat_of_chat(request: Mapping[str, Any], num_calls: int | None = None) -> dict[str, Any]:
    """A chat without its texts.

    Args:
        num_calls: in its messages; None to count them.
    """
    if num_calls is None:
        answers = (message for message in request["messages"] if message.get("role") == "assistant")
        num_calls = sum(len(message.get("tool_calls") or ()) for message in answers)
    chat = {name: request[name] for name in request if name != "messages"}
    return chat | {"messages": asked_after(num_calls)}


def chat_of_messages(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """A request of Anthropic's messages as such a chat; None if only the engine's own route serves it.

    Raises: AttributeError, KeyError or TypeError for requests that the engine would have refused.
    """
    thinking, config = request.get("thinking") or {}, request.get("output_config") or {}
    # How to disable a model's thinking depends on its template, or on an option of the server.
    if thinking.get("type") == "disabled" or any(_changes_tools(message) for message in request["messages"]):
        return None
    tools = [_tool(tool) for tool in request.get("tools") or ()]
    chat: dict[str, Any] = {"model": request["model"], "messages": asked_after(_num_uses(request["messages"]))}
    further = {
        "chat_template_kwargs": request.get("chat_template_kwargs"),
        "reasoning_effort": config.get("effort"),
        "response_format": _format(config.get("format")),
    }
    chat |= {name: value for name, value in further.items() if value is not None}
    if not tools:
        return chat
    chosen = request.get("tool_choice") or {"type": "auto"}
    choice: Any = _CHOICES.get(chosen["type"])
    if choice is None:
        if chosen["name"] not in [tool["function"]["name"] for tool in tools]:
            return None
        choice = {"type": "function", "function": {"name": chosen["name"]}}
    parallel = not chosen.get("disable_parallel_tool_use")
    return chat | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}


def asked_after(number: int) -> list[dict[str, Any]]:
    """A conversation with this many calls."""
    asked = {"role": "user", "content": ""}
    return [asked, {"role": "assistant", "content": "", "tool_calls": [_CALL] * number}] if number else [asked]


def _parts(message: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    content = message["content"]
    return () if isinstance(content, str) else content


def _num_uses(messages: Iterable[Mapping[str, Any]]) -> int:
    answers = (message for message in messages if message["role"] == "assistant")
    return sum(part.get("type") == "tool_use" for message in answers for part in _parts(message))


def _changes_tools(message: Mapping[str, Any]) -> bool:
    """Only a system message may change tools."""
    return message["role"] == "system" and any(part.get("type") in _TOOL_CHANGES for part in _parts(message))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    about = {name: tool[name] for name in ("description", "strict", "defer_loading") if tool.get(name) is not None}
    schema = {"type": "object", **tool["input_schema"]}
    return {"type": "function", "function": {"name": tool["name"], "parameters": schema, **about}}


def _format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    schema = given.get("schema") if given else None
    return {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}} if schema else None
