"""What is new in a message that was read again from its beginning after its client was told a part of it."""

from collections.abc import Mapping
from typing import Any

from gateway.turns.chain import Diverged

_REASONING = ("reasoning", "reasoning_content")
"""The names that vLLM and SGLang use."""
_BLANKS = " \t\r\n"


def rest_of(read: Mapping[str, Any], told: Mapping[str, Any], is_whole: bool = False) -> dict[str, Any]:
    """The delta from what a client was told to what was read.

    Args:
        read: a message, or the beginning of one.
        told: the message as the client has it.
        is_whole: no more will be read, so it must contain all that was told, except for trailing blanks.

    Raises:
        Diverged: it is another message.
    """
    if is_whole and any(not isinstance(value, str) or value.strip() for value in rest_of(told, read).values()):
        raise Diverged
    rest = {}
    for name, value in read.items():
        if isinstance(value, str) and name != "role":
            known = _known_as(name, told)
            rest[known] = _behind(value, told.get(known) or "")
    calls = _rest_of_calls(read.get("tool_calls") or [], told.get("tool_calls") or [])
    return {name: value for name, value in rest.items() if value} | ({"tool_calls": calls} if calls else {})


def _known_as(name: str, told: Mapping[str, Any]) -> str:
    """The name under which the client knows a text."""
    names = (name, *_REASONING) if name in _REASONING else ()
    return next((other for other in names if told.get(other)), name)


def _rest_of_calls(calls: list[dict[str, Any]], told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rest: list[dict[str, Any]] = []
    for index, (call, known) in enumerate(zip(calls, told, strict=False)):
        function = call["function"]
        if function["name"] not in ("", known["function"]["name"]):
            raise Diverged
        arguments = _behind_json(function["arguments"], known["function"]["arguments"])
        if arguments:
            rest.append({"index": index, "function": {"arguments": arguments}})
    return rest + [{**calls[index], "index": index} for index in range(len(told), len(calls))]


def _behind(text: str, told: str) -> str:
    """The rest of a text; one reader may hold back more of it than another did."""
    if told.startswith(text):
        return ""
    if not text.startswith(told):
        raise Diverged
    return text[len(told) :]


def _behind_json(text: str, told: str) -> str:
    """The rest of a JSON text, which one reader gives as the model wrote it and another with its own whitespace."""
    at, is_string, is_escaped = 0, False, False
    for mark in told:
        if not is_string:
            if mark in _BLANKS:
                continue
            while at < len(text) and text[at] in _BLANKS:
                at += 1
        if at == len(text):
            return ""
        if text[at] != mark:
            raise Diverged
        at += 1
        if mark == '"' and not is_escaped:
            is_string = not is_string
        is_escaped = is_string and mark == "\\" and not is_escaped
    rest = text[at:]
    return rest if is_string or rest.strip(_BLANKS) else ""
