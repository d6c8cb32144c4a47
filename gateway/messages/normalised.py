"""Messages and output items as pieces of text that do not depend on how a client spells them.

A string and a list of text parts are the same text, None is "", and tool arguments are compared as JSON, in which 1.0
is 1. Left out is what clients drop or change between turns: cache marks, item ids, and whitespace at the ends. Thoughts
are kept apart, without whitespace and the mark that opens them; those that are encrypted say nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

# Tuples, not sets: a body's `type` may be a list, which cannot be looked up in a set.
_UNSAID = ("thinking", "redacted_thinking", "reasoning")
_CALLS = ("function_call", "tool_use", "custom_tool_call")
_EXACT = 2**53  # floats below it have every integer

Normalised = tuple[bool, Sequence[str], str]
"""Whether it is an answer, its normalised pieces, its thoughts. Without pieces it is not part of the conversation; its
thoughts are part of the answer that follows.
"""


def conversation_of(body: Mapping[str, Any]) -> object:
    """A request's messages or input items, or whatever the client sent instead."""
    messages = body.get("messages")
    return body.get("input") if messages is None else messages


def normalised(body: Mapping[str, Any]) -> Iterator[Normalised]:
    """Each message; a separate system prompt comes first."""
    messages = conversation_of(body)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if system := unmarked(body.get("system")) or body.get("instructions"):
        yield False, _said("system", text_of(system).strip()), ""
    yield from map(normalised_message, messages if isinstance(messages, list) else ())


def unmarked(system: Any) -> Any:
    """A system prompt without the block that Claude Code puts into it, with a number that every request has of its own.
    vLLM leaves it out of the prompt (0.33, entrypoints/anthropic/serving.py).
    """
    return [part for part in system if not _is_mark(part)] if isinstance(system, list) else system


def _is_mark(part: object) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header")


def normalised_message(message: object) -> Normalised:
    """One message or output item.

    Every text is preceded by its length, so that none can pass for another's structure.
    """
    if not isinstance(message, dict):
        return False, (sized(as_json(message)),), ""
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and isinstance(role, str) and isinstance(content, str) and role != "assistant":
        return False, _said(role, content.strip()), ""  # the form of most messages; equivalent to the code below
    kind = message.get("type")
    if kind in _UNSAID:
        return False, (), _bare(_texts(message.get("content")) or _texts(message.get("summary")))
    if kind in _CALLS:
        call_id, name = message.get("call_id") or message.get("id"), message.get("name")
        return True, (_call(call_id, name, _arguments_of(message)),), ""
    if role is None:
        kept = {key: value for key, value in message.items() if key not in ("id", "status", "cache_control")}
        return False, (sized(as_json(kept)),), ""
    answered, thoughts = role == "assistant", ""
    if answered and (len(message) > 2 or not isinstance(content, str)):
        thoughts = _thoughts(message)
    content = text_of(content)
    if answered and "</think>" in content:
        # Reasoning that the engine left in the text; most agents remove it before they send the answer back.
        thoughts, _, content = content.rpartition("</think>")
    said, text = _said(str(role), content.strip()), ""
    if "tool_call_id" in message:
        text = sized(str(message["tool_call_id"]))
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                text += _call(call.get("id"), function.get("name"), function.get("arguments"))
            else:
                text += sized(as_json(call))
    return answered, (*said, text), _bare(thoughts) if thoughts else ""


def _thoughts(answer: dict[str, Any]) -> str:
    """What stands beside an answer's text: in a field of its own, or in Anthropic's blocks."""
    thoughts = answer.get("reasoning") or answer.get("reasoning_content")
    if not thoughts and isinstance(content := answer.get("content"), list):
        thoughts = _texts([part for part in content if isinstance(part, dict) and part.get("type") == "thinking"])
    return thoughts if isinstance(thoughts, str) else ""


def _texts(parts: object) -> str:
    """The text of thoughts in parts: Anthropic's blocks, or the content or summary of a response's item."""
    if not isinstance(parts, list):
        return ""
    found = [part.get("thinking") or part.get("text") for part in parts if isinstance(part, dict)]
    return "".join([text for text in found if isinstance(text, str)])


def _bare(thoughts: str) -> str:
    return thoughts.strip().removeprefix("<think>").strip()


def _said(role: str, text: str) -> tuple[str, str]:
    # A long text is not copied just to follow its length.
    return f"{len(role)}:{role}{len(text)}:", text


def text_of(content: object, is_result: bool = False) -> str:
    """The text of a message's content.

    Args:
        is_result: it is a tool's result.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        return as_json(content)
    return "".join([_part(part, is_result) for part in content])


def _part(part: object, is_of_result: bool) -> str:
    if not isinstance(part, dict):
        return as_json(part)
    kind = part.get("type")
    text = part.get("text")
    if isinstance(text, str) and kind in ("text", "input_text", "output_text", None):
        return text
    if kind in _UNSAID:
        return ""
    if kind in _CALLS:
        return _call(part.get("id"), part.get("name"), part.get("input"))
    if kind == "tool_result" and not is_of_result:  # results contain none, but may pretend to without end
        return sized(str(part.get("tool_use_id"))) + sized(text_of(part.get("content"), True))
    return as_json({key: value for key, value in part.items() if key != "cache_control"})


def _arguments_of(item: dict[str, Any]) -> object:
    return item["arguments"] if "arguments" in item else item.get("input")


def _call(call_id: object, name: object, arguments: object) -> str:
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            return sized(f"{call_id} {name}") + sized(str(arguments))
    said = as_json(arguments or {})
    if ".0" in said:
        said = as_json(_with_whole_numbers(arguments))
    return sized(f"{call_id} {name}") + sized(said)


def _with_whole_numbers(value: Any) -> Any:
    """A value with integers in place of equal floats: clients in JavaScript send 1.0 back as 1."""
    if isinstance(value, dict):
        return {name: _with_whole_numbers(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(member) for member in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return int(value) if is_whole else value


def sized(text: str) -> str:
    """A text behind its length."""
    return f"{len(text)}:{text}"


def as_json(value: object) -> str:
    """Any value, its members in order."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONEncodeError:
        # Nested deeper than the encoder goes, or a lone surrogate: no engine accepts it either.
        return "?"
