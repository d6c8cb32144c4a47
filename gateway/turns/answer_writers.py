"""Tells a client what a chain of token legs made: whole, or as the events of a stream. `frames.py` has the API's words.

If the engine gave text beside the tokens, `TextWriter` only puts it into its frame. If tool calls or reasoning must be
separated, `ParsedWriter` has an engine read the tokens. Any engine of the model will do, because the state needed to
continue reading is kept here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from engines.http import HttpClient
from engines.tokens import Delta, TokenRoutes, Whole
from engines.upstream import Upstream
from gateway.http.errors import api_error
from gateway.messages.answers import openai_reason
from gateway.turns.ask import Ask
from gateway.turns.chain import Chain, Diverged
from gateway.turns.deltas import rest_of
from gateway.turns.frames import AnyFrame
from gateway.turns.outcome import LegFailed
from scheduling.types import Fault

_MAX_DERENDERED_BYTES = 64 * 2**20
# A parser reads all tokens again for each event, so events grow with the answer: the work is n log n, not n squared.
# Each is also a request, so they come no faster than a reader's eye can follow.
_SHARE_OF_ANSWER = 16
_PAUSE_S = 0.1
_NO_END: Mapping[str, Any] = {"finish_reason": None}


def _chat_logprobs(request: Mapping[str, Any], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A chat's log-probabilities, with alternatives only if the client asked for them: token routes list the token
    itself as one (vLLM 0.32).
    """
    if not request.get("top_logprobs"):
        entries = [entry | {"top_logprobs": []} for entry in entries]
    return {"content": entries}


class TextWriter:
    """For answers that are exactly the text that came."""

    def __init__(self, ask: Ask, frame: AnyFrame, index: int) -> None:
        self._request = ask.request
        self._is_chat = ask.api != "completions"
        self.frame = frame
        self._index = index
        self._has_begun = not self._is_chat
        self._text_offset = 0
        self._before, self._after = frame.around_text(index) if ask.wants_stream else (b"", b"")

    def tell(
        self, text: str, logprobs: Sequence[dict[str, Any]], reason: str | None = None, stop: str | int | None = None
    ) -> bytes:
        """The events for what is new."""
        begin = b""
        if not self._has_begun:
            self._has_begun = True
            begin = self._event({"delta": {"role": "assistant", "content": ""}}, None)
        if not logprobs and reason is None:
            if not text:
                return begin
            if self._before:
                return begin + self._before + orjson.dumps(text) + self._after
        part: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
        told = self._logprobs(logprobs) if logprobs else None
        if reason is None:
            return begin + self._event(part, told)
        return begin + self._event(part, told, {"finish_reason": openai_reason(reason), self.frame.stop_field: stop})

    def _event(self, part: dict[str, Any], logprobs: dict[str, Any] | None, end: Mapping[str, Any] = _NO_END) -> bytes:
        return self.frame.event({"index": self._index, **part, "logprobs": logprobs, **end})

    def whole(self, chain: Chain) -> dict[str, Any]:
        """The one choice of a whole answer."""
        message = {"role": "assistant", "content": chain.text}
        return {
            "index": self._index,
            **({"message": message} if self._is_chat else {"text": chain.text}),
            "logprobs": self._logprobs(chain.told_logprobs) if chain.told_logprobs else None,
            "finish_reason": self.finish_reason(chain),
            self.frame.stop_field: chain.stop_reason,
        }

    def finish_reason(self, chain: Chain) -> str:
        """Why the answer ended, in a chat's words."""
        return openai_reason(chain.finish_reason or "")

    def content(self, chain: Chain) -> Any:
        """The answer as the client will send it back with its next turn."""
        return self.frame.content({"role": "assistant", "content": chain.text} if self._is_chat else chain.text)

    def _logprobs(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self._is_chat:
            return _chat_logprobs(self._request, entries)
        tokens = [entry["token"] for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._text_offset)
            self._text_offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "tokens": tokens,
            "top_logprobs": [
                {rival["token"]: rival["logprob"] for rival in entry.get("top_logprobs") or ()} for entry in entries
            ],
        }


class ParsedWriter:
    """For answers that an engine must parse."""

    def __init__(self, ask: Ask, frame: AnyFrame, index: int) -> None:
        self._request = ask.request
        self.frame = frame
        self._index = index
        self._untold: list[int] = []
        self._due_at = 0.0
        self._told: list[int] = []
        self._state: Any = None
        self._kind = ""  # of the engine that gave this state
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._finish_reason = ""
        self._read = self._message  # what that kind has read: what was told, until another kind reads it all again

    def add(self, ids: Sequence[int]) -> None:
        """Take new tokens."""
        self._untold += ids

    def is_due(self, now: float) -> bool:
        """Whether it is time to tell them."""
        return now >= self._due_at and len(self._untold) > len(self._told) // _SHARE_OF_ANSWER

    def pause(self, now: float) -> None:
        """Something was told: the next part is due after a pause."""
        self._due_at = now + _PAUSE_S

    async def tell(self, routes: TokenRoutes, http: HttpClient, chain: Chain, timeout_s: float) -> bytes:
        """The events for the tokens added, with the finish reason if the chain has one.

        Raises: LegFailed, also if this kind of engine reads the tokens differently from what another kind told; what
        `_ask` and malformed answers raise.
        """
        ids, reason = list(self._untold), chain.finish_reason
        if not ids and reason is None:
            return b""
        knows_state = self._kind == routes.kind or not self._told
        part = Delta(
            ids if knows_state else self._told + ids,
            reason,
            chain.stop_reason,
            self._state if knows_state else None,
        )
        choice, self._state = await self._ask(routes, http, chain, part, timeout_s)
        self._kind = routes.kind
        if not knows_state:
            self._read = {}
        del self._untold[: len(ids)]
        self._told += ids
        delta = {name: value for name, value in choice["delta"].items() if value not in (None, [], "")}
        delta = _with_whole_calls(_without_nulls(delta))
        if self._read is not self._message:
            delta = self._rest_of(delta, is_whole=reason is not None)
        events: list[dict[str, Any]] = []
        if delta.pop("role", None):
            events.append({"delta": {"role": "assistant", "content": ""}})
        if delta or reason is not None:
            _add(self._message, delta)
            events.append({"delta": delta})
        if reason is not None:
            if "tool_calls" in delta:
                # By itself: OpenAI's SDK does not tell that a call is done if it ends in the event that begins it.
                events.append({"delta": {}})
            told_reason = choice["finish_reason"] if reason == "stop" else reason
            self._finish_reason = openai_reason(told_reason)
            events[-1] |= {"finish_reason": self._finish_reason, self.frame.stop_field: chain.stop_reason}
        nulls = {"index": self._index, "logprobs": None, "finish_reason": None}
        return b"".join([self.frame.event(nulls | event) for event in events])

    def _rest_of(self, delta: dict[str, Any], is_whole: bool) -> dict[str, Any]:
        """What is new to a client that was told by another kind of engine.

        A kind may at first tell less than the client knows (SGLang tells a call only once it is whole), so all that it
        has read is compared each time.
        """
        _add(self._read, delta)
        try:
            return rest_of(self._read, self._message, is_whole)
        except Diverged:
            self._kind = ""  # the next engine reads everything again
            error = api_error(503, "The engine reads otherwise what another kind of engine told.", "engine_unlike")
            raise LegFailed(Fault.BUSY, error) from None

    async def whole(self, routes: TokenRoutes, http: HttpClient, chain: Chain, timeout_s: float) -> dict[str, Any]:
        """The one choice of a whole answer."""
        whole = Whole(chain.output_ids, chain.told_logprobs or None, chain.finish_reason or "", chain.stop_reason)
        choice, _ = await self._ask(routes, http, chain, whole, timeout_s)
        choice["finish_reason"] = self._finish_reason = openai_reason(choice["finish_reason"])
        if choice.get("logprobs"):
            choice["logprobs"] = _chat_logprobs(self._request, choice["logprobs"]["content"])
        self._message = choice["message"]
        return choice | {"index": self._index}

    def finish_reason(self, _: Chain) -> str:
        """Why the answer ended, in a chat's words: an engine's tokens do not tell that they are a call."""
        return self._finish_reason

    def content(self, _: Chain) -> Any:
        """The answer as the client will send it back with its next turn."""
        return self.frame.content(self._message)

    async def _ask(
        self, routes: TokenRoutes, http: HttpClient, chain: Chain, part: Whole | Delta, timeout_s: float
    ) -> tuple[dict[str, Any], Any]:
        async def ask(asked: Upstream) -> bytes:
            status, body = await http.post(asked.path, asked.body, timeout_s, _MAX_DERENDERED_BYTES)
            if status != 200:
                raise LegFailed(Fault.ENGINE, api_error(502, "The engine cannot read what it made.", "engine_error"))
            return body

        return await routes.derender(ask, chain.rendered, chain.prompt_ids, part)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _with_whole_calls(delta: dict[str, Any]) -> dict[str, Any]:
    """One entry for each call; several tokens at once may bring a call in parts."""
    calls: dict[int, dict[str, Any]] = {}
    for call in delta.get("tool_calls", ()):
        known = calls.setdefault(call["index"], call)
        if known is not call:
            function = known.setdefault("function", {})
            for name, part in call.get("function", {}).items():
                function[name] = function.get(name, "") + part
    return delta | {"tool_calls": list(calls.values())} if calls else delta


def _add(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Accumulate a delta as a client of the stream does."""
    for name, text in delta.items():
        if isinstance(text, str) and name != "role":
            message[name] = (message.get(name) or "") + text
    calls = message.setdefault("tool_calls", [])
    for part in delta.get("tool_calls", ()):
        if part["index"] >= len(calls):
            calls.append({"function": {"name": "", "arguments": ""}})
        call, function = calls[part["index"]], part.get("function") or {}
        call |= {name: part[name] for name in ("id", "type") if name in part}
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""
