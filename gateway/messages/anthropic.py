"""An answer in chat's words, told in those of Anthropic's messages: whole, or delta by delta as its events.

As the engine tells it on top of its own chat route (vLLM 0.33, entrypoints/anthropic/serving.py; SGLang 0.5.23,
srt/entrypoints/anthropic/serving.py): reasoning is a block of thinking, each call a block of its own, and what is said
while a call is open comes behind it. Not told is how much of the prompt was written to the cache, which is in
`input_tokens` here.
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
class Manner:
    """What one kind of engine tells in its own way.

    Args:
        id_prefix: of an answer's id.
        signs: thinking has a signature, which means nothing.
        names_stop: the stop sequence that ended an answer is told; else it is an end as any.
        takes_calls: a whole answer's call whose arguments are no JSON has none; else there is no answer.
        counts_late: a stream's end tells the prompt's tokens, too, which is when vLLM knows what was cached; and that
            nothing was, is told as well.
    """

    id_prefix: str
    signs: bool
    names_stop: bool
    takes_calls: bool
    counts_late: bool


VLLM = Manner("chatcmpl-", signs=True, names_stop=True, takes_calls=False, counts_late=True)
SGLANG = Manner("msg_", signs=False, names_stop=False, takes_calls=True, counts_late=False)


def usage_told(usage: Usage, manner: Manner = VLLM) -> dict[str, int]:
    """Anthropic counts cached tokens apart."""
    if usage.cached_tokens is None or not (usage.cached_tokens or manner.counts_late):
        return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens, 0),
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def stop_told(reason: str, stop: object, has_call: bool, is_call_whole: bool) -> dict[str, str | None]:
    """How an answer ended, by chat's finish reason and the stop string or token that ended it.

    A call that a stop string cut short must not run, so then the string is told.
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
    head: Mapping[str, Any], choice: Mapping[str, Any], stop: object, usage: Usage, manner: Manner = VLLM
) -> dict[str, Any]:
    """A whole answer.

    Args:
        head: its id and model.
        choice: the one of a chat's answer.

    Raises:
        ValueError: the arguments of a call are no JSON object: it was cut, or the model may call so.
    """
    message = choice["message"]
    calls = message.get("tool_calls") or ()
    content: list[dict[str, Any]] = []
    if reasoning := _reasoning(message):
        content.append({"type": "thinking", "thinking": reasoning, **_signature(manner)})
    if text := message.get("content"):
        content.append({"type": "text", "text": text})
    for call in calls:
        function = call["function"]
        arguments = _object(function["arguments"])
        if arguments is None and manner.takes_calls and not _is_json(function["arguments"]):
            arguments = {}
        if arguments is None:
            raise ValueError(f"The arguments of the call of {function['name']} are no JSON object.")
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    has_call = bool(calls) and manner.names_stop  # SGLang goes by the reason alone
    ended = stop_told(choice["finish_reason"], stop if manner.names_stop else None, has_call, has_call)
    return {
        "id": head["id"],
        "type": "message",
        "role": "assistant",
        "content": content or [{"type": "text", "text": ""}],
        "model": head["model"],
        **{name: value for name, value in ended.items() if value is not None},
        "usage": usage_told(usage, manner),
    }


class MessageEvents:
    """The events of one stream, in their order: `start`, `tell` for each delta, `end`.

    Attributes:
        content: the blocks, complete as far as they are closed.
    """

    def __init__(self, manner: Manner = VLLM) -> None:
        self._manner = manner
        self.content: list[dict[str, Any]] = []
        self._parts: list[str] = []  # of the open block
        self._kind = ""  # of it; "" where none is open
        self._call_ids: dict[int, str] = {}
        self._late: list[str] = []  # said while a call was open
        self._ended: tuple[str, object] = ("stop", None)
        self._call: str | None = None  # the arguments of the last one, once it is closed

    def start(self, head: Mapping[str, Any], prompt: Usage) -> bytes:
        """What tells that the answer begins.

        Args:
            prompt: what is known of it.
        """
        known = Usage(prompt.prompt_tokens, 0, None) if self._manner.counts_late else prompt
        empty = {"type": "message", "role": "assistant", "content": (), "stop_reason": None, "stop_sequence": None}
        return _event(type="message_start", message={**head, **empty, "usage": usage_told(known, self._manner)})

    def tell(self, delta: Mapping[str, Any], reason: str | None, stop: object) -> bytes:
        """What a delta adds; with its finish reason if it is the last."""
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
        """What closes the stream."""
        events: list[bytes] = []
        self._close(events)
        reason, stop = self._ended
        if self._manner.names_stop:
            ended = stop_told(reason, stop, self._call is not None, self._call is not None and _is_json(self._call))
        else:
            ended = stop_told(reason, None, has_call=False, is_call_whole=False)
        told = (
            usage_told(usage, self._manner) if self._manner.counts_late else {"output_tokens": usage.completion_tokens}
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
        if self._kind == "thinking" and self._manner.signs:
            block |= _signature(self._manner)
            signed = {"type": "signature_delta", "signature": block["signature"]}
            events.append(_event(type="content_block_delta", index=index, delta=signed))
        events.append(_event(type="content_block_stop", index=index))
        self._kind, self._parts = "", []
        if self._late:
            late, self._late = "".join(self._late), []
            self._say("text", late, events)
            self._close(events)


def _reasoning(said: Mapping[str, Any]) -> str | None:
    """vLLM's chats have it under one name, SGLang's under the other."""
    return said.get("reasoning") or said.get("reasoning_content")


def _signature(manner: Manner) -> dict[str, str]:
    return {"signature": uuid4().hex} if manner.signs else {}


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
