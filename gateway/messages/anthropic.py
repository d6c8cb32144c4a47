"""Converts an answer in chat's form into Anthropic's messages: whole, or delta by delta as events.

This follows what the engines do on top of their own chat routes (vLLM 0.33, entrypoints/anthropic/serving.py; SGLang
0.5.23, srt/entrypoints/anthropic/serving.py): reasoning is a block of thinking, each call is its own block, and text
that comes while a call is open follows it. How much of the prompt was written to the cache is not reported; those
tokens are in `input_tokens`.
"""

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import orjson

from gateway.messages.answers import Usage
from scheduling.values import value_class

_TEXT_FIELDS = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
_DELTAS = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}


@value_class(frozen=True, slots=True)
class Variant:
    """How one kind of engine differs.

    Args:
        id_prefix: of an answer's id.
        signs: thinking has a signature, which is meaningless.
        names_stop: the stop sequence that ended an answer is reported; otherwise the answer just ended.
        takes_calls: in a whole answer, a call whose arguments are not JSON gets empty ones; otherwise there is no
            answer.
        counts_late: a stream's end reports the prompt's tokens too, because vLLM knows only then what was cached; zero
            cached tokens are also reported.
    """

    id_prefix: str
    signs: bool
    names_stop: bool
    takes_calls: bool
    counts_late: bool


VLLM = Variant("chatcmpl-", signs=True, names_stop=True, takes_calls=False, counts_late=True)
SGLANG = Variant("msg_", signs=False, names_stop=False, takes_calls=True, counts_late=False)


def usage_told(usage: Usage, variant: Variant = VLLM) -> dict[str, int]:
    """Anthropic's usage object, which counts cached tokens separately."""
    if usage.cached_tokens is None or not (usage.cached_tokens or variant.counts_late):
        return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens, 0),
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def stop_told(reason: str, stop: object, has_call: bool, is_call_whole: bool) -> dict[str, str | None]:
    """How an answer ended, from chat's finish reason and the stop string or token that ended it.

    A call that a stop string cut short must not run, so the stop string is reported instead.
    """
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reason not in ("stop", "tool_calls"):
        return {"stop_reason": None, "stop_sequence": None}
    if is_call_whole:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    is_call = has_call or reason == "tool_calls"
    return {"stop_reason": "tool_use" if is_call else "end_turn", "stop_sequence": None}


def message_of(
    head: Mapping[str, Any], choice: Mapping[str, Any], stop: object, usage: Usage, variant: Variant = VLLM
) -> dict[str, Any]:
    """A whole answer.

    Args:
        head: its id and model.
        choice: the one choice of a chat's answer.

    Raises:
        ValueError: the arguments of a call are not a JSON object: the call was cut, or the model wrote it this way.
    """
    message = choice["message"]
    calls = message.get("tool_calls") or ()
    content: list[dict[str, Any]] = []
    if reasoning := _reasoning(message):
        content.append({"type": "thinking", "thinking": reasoning, **_signature(variant)})
    if text := message.get("content"):
        content.append({"type": "text", "text": text})
    for call in calls:
        function = call["function"]
        arguments = _object(function["arguments"])
        if arguments is None and variant.takes_calls and not _is_json(function["arguments"]):
            arguments = {}
        if arguments is None:
            raise ValueError(f"The arguments of the call of {function['name']} are no JSON object.")
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    has_call = bool(calls) and variant.names_stop  # SGLang decides by the reason alone
    ended = stop_told(choice["finish_reason"], stop if variant.names_stop else None, has_call, has_call)
    return {
        "id": head["id"],
        "type": "message",
        "role": "assistant",
        "content": content or [{"type": "text", "text": ""}],
        "model": head["model"],
        **{name: value for name, value in ended.items() if value is not None},
        "usage": usage_told(usage, variant),
    }


class MessageEvents:
    """The events of one stream, in order: `start`, `tell` for each delta, `end`.

    Attributes:
        content: the blocks; complete once closed.
    """

    def __init__(self, variant: Variant = VLLM) -> None:
        self._variant = variant
        self.content: list[dict[str, Any]] = []
        self._parts: list[str] = []  # of the open block
        self._kind = ""  # of the open block; "" if none is open
        self._call_ids: dict[int, str] = {}
        self._late: list[str] = []  # text that came while a call was open
        self._ended: tuple[str, object] = ("stop", None)
        self._call: str | None = None  # the last call's arguments, once it is closed

    def start(self, head: Mapping[str, Any], prompt: Usage) -> bytes:
        """The event that begins the answer.

        Args:
            prompt: what is known of it.
        """
        known = Usage(prompt.prompt_tokens, 0, None) if self._variant.counts_late else prompt
        empty = {"type": "message", "role": "assistant", "content": (), "stop_reason": None, "stop_sequence": None}
        return _event(type="message_start", message={**head, **empty, "usage": usage_told(known, self._variant)})

    def tell(self, delta: Mapping[str, Any], reason: str | None, stop: object) -> bytes:
        """The events for a delta; the last delta comes with its finish reason."""
        events: list[bytes] = []
        if reason is not None:
            self._ended = reason, stop
        if reasoning := _reasoning(delta):
            self._say("thinking", reasoning, events)
        if text := delta.get("content"):
            if self._kind == "tool_use":
                self._late.append(text)
            else:
                self._say("text", text, events)
        for call in delta.get("tool_calls") or ():
            self._tell_call(call, events)
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        """The events that close the stream."""
        events: list[bytes] = []
        self._close(events)
        reason, stop = self._ended
        if self._variant.names_stop:
            ended = stop_told(reason, stop, self._call is not None, self._call is not None and _is_json(self._call))
        else:
            ended = stop_told(reason, None, has_call=False, is_call_whole=False)
        told = (
            usage_told(usage, self._variant)
            if self._variant.counts_late
            else {"output_tokens": usage.completion_tokens}
        )
        events.append(_event(type="message_delta", delta=ended, usage=told))
        events.append(_event(type="message_stop"))
        return b"".join(events)

    def _tell_call(self, call: Mapping[str, Any], events: list[bytes]) -> None:
        function, index = call.get("function") or {}, call["index"]
        call_id = call.get("id")
        if call_id is not None:
            self._call_ids[index] = call_id
            if function.get("name") is not None and self._open_call != call_id:
                block = {"type": "tool_use", "id": call_id, "name": function["name"], "input": {}}
                self._open(block, events)
        if function.get("arguments") and self._open_call == self._call_ids.get(index, ""):
            self._part(function["arguments"], events)

    @property
    def _open_call(self) -> str | None:
        return self.content[-1]["id"] if self._kind == "tool_use" else None

    def _say(self, kind: str, text: str, events: list[bytes]) -> None:
        if self._kind != kind:
            self._open({"type": kind, _TEXT_FIELDS[kind]: ""}, events)
        self._part(text, events)

    def _part(self, text: str, events: list[bytes]) -> None:
        self._parts.append(text)
        delta = {"type": _DELTAS[self._kind], _TEXT_FIELDS[self._kind]: text}
        events.append(_event(type="content_block_delta", index=len(self.content) - 1, delta=delta))

    def _open(self, block: dict[str, Any], events: list[bytes]) -> None:
        self._close(events)
        events.append(_event(type="content_block_start", index=len(self.content), content_block=block))
        self.content.append(dict(block))
        self._kind = block["type"]

    def _close(self, events: list[bytes]) -> None:
        if not self._kind:
            return
        block, said, index = self.content[-1], "".join(self._parts), len(self.content) - 1
        if self._kind == "tool_use":
            self._call = said
            block["input"] = _object(said) or {}
        else:
            block[self._kind] = said
        if self._kind == "thinking" and self._variant.signs:
            block |= _signature(self._variant)
            signed = {"type": "signature_delta", "signature": block["signature"]}
            events.append(_event(type="content_block_delta", index=index, delta=signed))
        events.append(_event(type="content_block_stop", index=index))
        self._kind, self._parts = "", []
        if self._late:
            late, self._late = "".join(self._late), []
            self._say("text", late, events)
            self._close(events)


def _reasoning(said: Mapping[str, Any]) -> str | None:
    """A message's reasoning; vLLM's chats use one name for it, SGLang's the other."""
    return said.get("reasoning") or said.get("reasoning_content")


def _signature(variant: Variant) -> dict[str, str]:
    return {"signature": uuid4().hex} if variant.signs else {}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _object(text: str) -> dict[str, Any] | None:
    parsed = json.loads(text) if _is_json(text) else None
    return parsed if isinstance(parsed, dict) else None


def _event(**content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), orjson.dumps(content))
