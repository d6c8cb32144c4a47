"""Parses tool calls and reasoning out of tokens, with SGLang's own parsers (SGLang 0.5.23).

Its routes `/separate_reasoning` and `/parse_function_call` parse a whole text. While an answer is still being made, its
reasoning and its content up to the first call are sent as they come, without anything that may be the beginning of a
marker; calls are sent whole, at the end. So only parsers are supported whose marker is known and precedes all calls.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import orjson

from engines.token_ids import TokenIds, with_ids
from engines.tokens import Asking, Delta, Whole, has_tools
from engines.upstream import Upstream

# The marker before the first call, by parser (function_call/*_detector.py). Not supported are parsers that make a
# grammar for optional calls, number their calls across the history, or have no such marker.
_CALL_MARKERS = {
    "deepseekv3": "<｜tool▁calls▁begin｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜>",
    "glm45": "<tool_call>",
    "hermes": "<tool_call>",
    "minimax-m2": "<minimax:tool_call>",
    "mistral": "[TOOL_CALLS]",
    "qwen": "<tool_call>",
    "qwen25": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "step3": "<｜tool_calls_begin｜>",
}
# Parsers of reasoning between these two markers (parser/reasoning_parser.py).
_THINK, _END_OF_THINKING = "<think>", "</think>"
_THINKERS = ("deepseek-r1", "deepseek-v3", "glm45", "qwen3", "qwen3-thinking", "step3")


class MessageReader:
    """Parses with one server's parsers, given by name; None for no parser."""

    def __init__(self, tool_parser: str | None, reasoning_parser: str | None) -> None:
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    @property
    def limits(self) -> str:
        """Which requests it cannot parse."""
        if self.passed:
            return f"all chats pass through: {self.passed}"
        if self._tool_parser is None:
            return "requests with tools pass through: it has no --tool-call-parser"
        if self._tool_parser not in _CALL_MARKERS:
            return f"requests with tools pass through: --tool-call-parser {self._tool_parser} is not among those known"
        return "requests with a forced or strict tool call pass through"

    @property
    def passed(self) -> str:
        """Why it can parse no chat at all; "" if it can."""
        is_known = self._reasoning_parser in (None, *_THINKERS)
        return "" if is_known else f"--reasoning-parser {self._reasoning_parser} is not among those known"

    def is_needed(self, request: Mapping[str, Any]) -> bool:
        """Whether a chat's answer is more than its text."""
        return has_tools(request) or self._separates(request)

    def can_read(self, request: Mapping[str, Any]) -> bool:
        """Whether it can be parsed here, and the chat route would impose no grammar of its own."""
        if self._separates(request) and self._reasoning_parser not in _THINKERS:
            return False
        if not has_tools(request):
            return True
        return (
            self._tool_parser in _CALL_MARKERS
            and request.get("tool_choice") in (None, "auto")
            and not any((tool.get("function") or {}).get("strict") for tool in request["tools"])
        )

    async def whole(self, ask: Asking, request: Mapping[str, Any], tail: TokenIds, last: Whole) -> dict[str, Any]:
        """The one choice of a chat's answer.

        Args:
            tail: the last tokens of the prompt.
        """
        is_ended = last.finish_reason == "stop" and not isinstance(last.stop_reason, str)
        text = await self._text(ask, request, tail, last.ids[:-1] if is_ended else last.ids)
        reasoning, text = await self._separated(ask, request, text)
        content, calls = await self._parsed(ask, request, text)
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": 0,
            "message": message,
            "logprobs": {"content": list(last.logprobs)} if last.logprobs is not None else None,
            "finish_reason": "tool_calls" if calls and last.finish_reason == "stop" else last.finish_reason,
            "matched_stop": last.stop_reason,
        }

    async def delta(
        self, ask: Asking, request: Mapping[str, Any], tail: TokenIds, last: Delta
    ) -> tuple[dict[str, Any], Any]:
        """What new tokens add to the message, and the state: all ids so far, and what was sent of them."""
        before = last.state or {"ids": [], "reasoning_content": "", "content": ""}
        ids = [*before["ids"], *last.ids]
        is_ended = last.finish_reason == "stop" and not isinstance(last.stop_reason, str)
        text = await self._text(ask, request, tail, ids[:-1] if is_ended else ids)
        calls: list[dict[str, Any]] = []
        marker = _CALL_MARKERS[self._tool_parser or ""] if has_tools(request) else ""
        if last.finish_reason is None:
            text = text.rstrip("\ufffd")
            if self._separates(request):
                text = _without_beginning(text, (_THINK, _END_OF_THINKING))
            reasoning, content = await self._separated(ask, request, text)
            if marker:
                content = _without_beginning(content.partition(marker)[0], (marker,)).rstrip()
        else:
            reasoning, content = await self._separated(ask, request, text)
            _, calls = await self._parsed(ask, request, content)
            if calls or (marker and last.finish_reason == "length"):  # a call that was cut is not text
                content = content.partition(marker)[0].rstrip()
        said = {"reasoning_content": reasoning, "content": content}
        delta: dict[str, Any] = {
            name: value[len(before[name]) :] for name, value in said.items() if value.startswith(before[name])
        }
        if last.state is None:
            delta["role"] = "assistant"
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        reason = "tool_calls" if calls and last.finish_reason == "stop" else last.finish_reason
        return {"index": 0, "delta": delta, "finish_reason": reason}, {"ids": ids, **said}

    def _separates(self, request: Mapping[str, Any]) -> bool:
        return self._reasoning_parser is not None and request.get("separate_reasoning") is not False

    async def _text(self, ask: Asking, request: Mapping[str, Any], tail: TokenIds, ids: Sequence[int]) -> str:
        """The text after the prompt; preceded by the reasoning marker if the prompt ends with it."""
        skips_special = request.get("skip_special_tokens") is not False and not has_tools(request)
        call = {"tokens": [tail, tail + ids], "skip_special_tokens": skips_special}
        before, text = orjson.loads(await ask(Upstream("/v1/detokenize", b"", with_ids(call))))["text"]
        is_thinking = self._separates(request) and before.rstrip().endswith(_THINK)
        return (_THINK if is_thinking else "") + str(text[len(before) :])

    async def _separated(self, ask: Asking, request: Mapping[str, Any], text: str) -> tuple[str, str]:
        if not self._separates(request):
            return "", text
        call = {"text": text, "reasoning_parser": self._reasoning_parser}
        made = orjson.loads(await ask(Upstream("/separate_reasoning", b"", orjson.dumps(call))))
        return made["reasoning_text"] or "", made["text"] or ""

    async def _parsed(self, ask: Asking, request: Mapping[str, Any], text: str) -> tuple[str, list[dict[str, Any]]]:
        if not has_tools(request) or _CALL_MARKERS[self._tool_parser or ""] not in text:
            return text, []
        call = {"text": text, "tools": request["tools"], "tool_call_parser": self._tool_parser}
        made = orjson.loads(await ask(Upstream("/parse_function_call", b"", orjson.dumps(call))))
        calls = [
            {
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": found["name"], "arguments": found["parameters"]},
            }
            for found in made["calls"]
        ]
        return made["normal_text"], calls


def _without_beginning(text: str, markers: Iterable[str]) -> str:
    """The text without an end that may be the beginning of a marker."""
    held = 0
    for marker in markers:
        held = max(held, next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0))
    return text[: len(text) - held]
