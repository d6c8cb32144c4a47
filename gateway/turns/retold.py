"""What is new of a message that was read from its beginning once more, after its client was told a part of it."""

from collections.abc import Mapping
from typing import Any

from gateway.turns.chain import Diverged


def rest_of(delta: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The delta of a whole message without what was told.

    Args:
        told: a message as the client put it together.

    Raises:
        Diverged: it is another message.
    """
    rest = {name: _behind(value, told.get(name) or "") for name, value in delta.items() if isinstance(value, str)}
    rest.pop("role", None)
    calls: list[Mapping[str, Any]] = delta.get("tool_calls") or []
    known: list[Mapping[str, Any]] = told.get("tool_calls") or []
    more = []
    for call in calls:
        if call["index"] >= len(known):
            more.append(call)
            continue
        function = known[call["index"]]["function"]
        if call["function"].get("name") != function["name"]:
            raise Diverged
        arguments = _behind(call["function"].get("arguments") or "", function.get("arguments") or "")
        if arguments:
            more.append({"index": call["index"], "function": {"arguments": arguments}})
    return {name: value for name, value in rest.items() if value} | ({"tool_calls": more} if more else {})


def _behind(text: str, told: str) -> str:
    """One reader may hold back more of a text than another did."""
    if told.startswith(text):
        return ""
    if not text.startswith(told):
        raise Diverged
    return text[len(told) :]
