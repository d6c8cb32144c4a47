"""Assembles a chat answer from what a server sends: a stream's events, or all at once.

It reads the clock only to note when the first token came, and has no sockets, so asyncio and gevent clients share it.
"""

from __future__ import annotations

import time
from typing import Any

from loadtest.agent import Answer

# What reading an answer of another form raises: no JSON, a missing field, a field of another type.
NONSENSE = (ValueError, LookupError, TypeError, AttributeError)


class StreamBroken(Exception):
    """A stream began and did not end. The turn may be repeated: a gateway that still has it joins or repeats it."""


class Assembly:
    """An answer assembled from a stream's pieces."""

    def __init__(self) -> None:
        self.first_token_at: float | None = None
        self.finish_reason: str | None = None
        self.usage: tuple[int, int, int] | None = None
        self._pieces: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}

    def add_text(self, text: str) -> None:
        self._pieces.append(text)
        self.note_token()

    def add_tool_call(self, index: int, call_id: str | None, name: str | None, arguments: str | None) -> None:
        call = self._tool_calls.setdefault(
            index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] += call_id or ""
        call["function"]["name"] += name or ""
        call["function"]["arguments"] += arguments or ""
        self.note_token()

    def note_token(self) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()

    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            StreamBroken: If the stream ended without a finish reason or without usage.
            ValueError: If usage is no count of tokens.
        """
        if self.finish_reason is None:
            raise StreamBroken("the stream ended without a finish_reason")
        if self.usage is None:
            raise StreamBroken("the stream ended without usage")
        for name, count in zip(("prompt_tokens", "cached_tokens", "completion_tokens"), self.usage, strict=True):
            if type(count) is not int or count < 0:
                raise ValueError(f"usage: {name} must be a whole number from 0, not {count!r}")
        return Answer("".join(self._pieces), tuple(self._tool_calls.values()), self.finish_reason, *self.usage)


def add_event(event: dict[str, Any], assembly: Assembly) -> None:
    """Add one event of a chat stream.

    Raises:
        StreamBroken: If the event reports that the stream ends with an error.
    """
    if "error" in event:
        raise StreamBroken(f"error event: {event['error']}")
    if usage := event.get("usage"):
        assembly.usage = _counts(usage)
    for choice in event["choices"]:
        delta = choice["delta"]
        if delta.get("reasoning_content") or delta.get("reasoning"):
            assembly.note_token()
        if delta.get("content"):
            assembly.add_text(delta["content"])
        _add_tool_calls(delta, assembly)
        if choice.get("finish_reason"):
            assembly.finish_reason = choice["finish_reason"]


def add_completion(completion: dict[str, Any], assembly: Assembly) -> None:
    """Add a chat completion that came whole."""
    choice = completion["choices"][0]
    assembly.add_text(choice["message"].get("content") or "")
    _add_tool_calls(choice["message"], assembly)
    # The first token of a whole answer cannot be observed.
    assembly.first_token_at = None
    assembly.finish_reason = choice["finish_reason"]
    assembly.usage = _counts(completion["usage"])


def _add_tool_calls(message: dict[str, Any], assembly: Assembly) -> None:
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        assembly.add_tool_call(
            call.get("index", index), call.get("id"), function.get("name"), function.get("arguments")
        )


def _counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    details = usage.get("prompt_tokens_details") or {}
    return usage["prompt_tokens"], details.get("cached_tokens") or 0, usage["completion_tokens"]
