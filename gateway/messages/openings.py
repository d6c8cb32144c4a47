"""Tells the events with which engines open a stream from those that have some of its answer.

Both kinds of engine open a stream before anything of it is made (vLLM 0.33, SGLang 0.5.23): a chat with each choice's
role, responses with `response.created` and `response.in_progress`, messages with `message_start`. As long as nothing
else has come, another engine can start over.
"""

from typing import Any

from gateway.http.errors import Api
from gateway.messages.answers import dicts

_OPENINGS = frozenset({"message_start", "ping", "response.created", "response.queued", "response.in_progress"})


def is_opening(api: Api, event: dict[str, Any]) -> bool:
    """Whether an event has nothing of an answer; False for an event of unknown form. Usage alone is nothing yet."""
    if api in ("messages", "responses"):
        kind, delta = event.get("type"), event.get("delta")
        if kind == "message_delta":
            return isinstance(delta, dict) and delta.get("stop_reason") is None
        return isinstance(kind, str) and kind in _OPENINGS
    choices = event.get("choices")
    return isinstance(choices, list) and not any(map(_says_something, dicts(choices)))


def _says_something(choice: dict[str, Any]) -> bool:
    """Whether a choice has text, a call, tokens, a finish reason or anything else beside its role."""
    delta = choice.get("delta")
    said = {**choice, "delta": None, **delta} if isinstance(delta, dict) else choice
    return any(value for name, value in said.items() if name not in ("index", "role"))
