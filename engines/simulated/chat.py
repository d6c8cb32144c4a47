"""The simulated model's chat template: messages to tokens, and an answer's text back to a message."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from engines.simulated.text import ASSISTANT, END, SYSTEM, TOOL, USER, Tokenizer

_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL, "function": TOOL}
_CALL = re.compile(r'<tool_call>\n\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (.*)\}\n</tool_call>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model writes it: `arguments` is JSON text."""

    name: str
    arguments: str


def render(
    messages: Sequence[Any],
    tools: Sequence[Any] | None,
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """The prompt's token ids.

    Raises:
        ValueError: a message has an unknown role, or its content an unknown form.
    """
    ids: list[int] = []
    if tools:
        ids.append(SYSTEM)
        ids += tokenizer.encode("Tools: " + orjson.dumps(tools).decode())
        ids.append(END)
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError("each message needs a role: system, developer, user, assistant or tool")
        ids.append(_ROLES[message["role"]])
        ids += tokenizer.encode(text_of(message.get("content")))
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            ids += tokenizer.encode(call_text(ToolCall(function.get("name", ""), function.get("arguments") or "{}")))
        ids.append(END)
    if continue_final_message and messages:
        ids.pop()
    elif add_generation_prompt:
        ids.append(ASSISTANT)
    return ids


def text_of(content: Any) -> str:
    """The text of a message's content: a string, None, or a list of parts; images become a placeholder.

    Raises:
        ValueError: it is something else.
    """
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_part_text(part) for part in content)
        case _:
            raise ValueError("a message's content must be a string or a list of parts")


def _part_text(part: Any) -> str:
    match part:
        case {"text": str(text)}:
            return text
        case str():
            return part
        case {"type": str(kind)}:
            return f"<{kind}>"
        case _:
            raise ValueError("a part of a message's content needs a type")


def call_text(call: ToolCall) -> str:
    """A tool call as the model writes it (Hermes form)."""
    return call_head(call.name) + call.arguments + CALL_TAIL


def call_head(name: str) -> str:
    return f'<tool_call>\n{{"name": {orjson.dumps(name).decode()}, "arguments": '


CALL_TAIL = "}\n</tool_call>"


def parse_call(text: str) -> ToolCall | None:
    """The tool call in an answer's text, if the text is one complete call."""
    found = _CALL.fullmatch(text)
    return ToolCall(orjson.loads(found[1]), found[2]) if found else None
