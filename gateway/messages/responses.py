"""Converts an answer in chat's form into OpenAI's responses: whole, or delta by delta as events.

This follows what the engines do for a model without reasoning (vLLM 0.32, entrypoints/openai/responses: serving.py,
streaming_events.py; SGLang 0.5.23, srt/entrypoints/openai/serving_responses.py): a text and each call are separate
items, and one item is open at a time.
"""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import orjson

from gateway.messages.answers import Usage
from scheduling.values import value_class

# What a response repeats of its request, with defaults for fields that were not sent.
_ECHOED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_tool_calls": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "text": None,
    "tools": [],
    "truncation": "disabled",
    "user": None,
}
# The same for its sampling, as the engine resolved it.
_SAMPLED = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


# SGLang repeats these as requested; missing ones are null, except for those in `_BY_SGLANG`.
_REPEATED = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "text", "top_p", "user")
_BY_SGLANG: dict[str, Any] = {
    "metadata": {},
    "parallel_tool_calls": True,
    "tools": [],
    "tool_choice": "auto",
}
_TOLD_EFFORTS = ("minimal", "low", "medium", "high")
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict", "tools", "defer_loading", "format")


@value_class(frozen=True, slots=True)
class Variant:
    """How one kind of engine differs.

    Args:
        has_phases: a text is a `commentary` before calls, else the `final_answer`. So if tools may be called, a stream
            sends a text only once a call follows or it is over.
        ends_by_status: a stream's last event is named for how it ended, instead of always `response.completed`.
    """

    has_phases: bool
    ends_by_status: bool


VLLM = Variant(has_phases=False, ends_by_status=False)
SGLANG = Variant(has_phases=True, ends_by_status=True)


def echo(request: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What a vLLM response repeats of its request.

    Args:
        sampling: as the engine resolved it.
    """
    echoed = {name: default if request.get(name) is None else request[name] for name, default in _ECHOED.items()}
    sampled = {name: default if sampling.get(name) is None else sampling[name] for name, default in _SAMPLED.items()}
    # If there are no tools, vLLM reports "none".
    choice = (request.get("tool_choice") or "auto") if request.get("tools") else "none"
    limits = {"max_output_tokens": sampling["max_tokens"], "top_logprobs": sampling.get("logprobs")}
    return {**echoed, **sampled, **limits, "tool_choice": choice}


def echo_of_sglang(request: Mapping[str, Any]) -> dict[str, Any]:
    """What an SGLang response repeats of its request."""
    echoed = {name: request.get(name) for name in _REPEATED}
    echoed |= {name: default if request.get(name) is None else request[name] for name, default in _BY_SGLANG.items()}
    unsaid = dict.fromkeys(_TOOL_FIELDS) | {"strict": False}
    asked = request.get("reasoning")
    effort = asked.get("effort", "medium") if asked is not None else None
    return echoed | {
        "error": None,
        "reasoning": {"effort": effort if effort in _TOLD_EFFORTS else None, "summary": None},
        "store": request.get("store", True),
        "tools": [unsaid | tool for tool in request.get("tools") or ()],
        "truncation": request.get("truncation", "disabled"),
    }


def usage_told(usage: Usage, variant: Variant = VLLM) -> dict[str, Any]:
    """The usage of a response: the prompt's tokens include the cached ones. vLLM's counts for turns with built-in tools
    are empty.
    """
    read: dict[str, Any] = {"cached_tokens": usage.cached_tokens or 0}
    made: dict[str, Any] = {"reasoning_tokens": 0}
    if variant.has_phases:
        read |= {"cache_write_tokens": 0}
    else:
        read |= {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        made |= {"tool_output_tokens": 0, "output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": read,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": made,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_of(
    head: Mapping[str, Any], choice: Mapping[str, Any], usage: Usage, variant: Variant = VLLM
) -> dict[str, Any]:
    """A whole answer.

    Args:
        head: its id, time and model, and what it repeats of its request.
        choice: the one choice of a chat's answer.
    """
    message, output = choice["message"], []
    calls = message.get("tool_calls") or ()
    if text := message.get("content"):
        phase = _phase(variant, "commentary" if calls else "final_answer")
        output.append(_message(_new_id("msg"), [_part(text)]) | phase)
    for call in calls:
        function = call["function"]
        output.append(_call(_new_id("fc"), call["id"], function["name"], function["arguments"]))
    return _response(head, output, choice["finish_reason"], usage, variant)


class ResponseEvents:
    """The events of one stream, in order: `start`, `tell` for each delta, `end`.

    Args:
        head: as for `response_of`.

    Attributes:
        output: the closed items.
        num_events: how many were made; also the number of the next one.
    """

    def __init__(self, head: Mapping[str, Any], variant: Variant = VLLM) -> None:
        self.output: list[dict[str, Any]] = []
        self._head = head
        self._variant = variant
        self._holds_texts = variant.has_phases and bool(head["tools"]) and head["tool_choice"] != "none"
        self._held: list[tuple[str, dict[str, Any]]] = []  # events of a text whose phase is not known yet
        self.num_events = 0
        self._item: dict[str, Any] | None = None  # the open one
        self._parts: list[str] = []  # of the open item
        self._call_index = 0
        self._reason = "stop"

    def start(self) -> bytes:
        """The events that begin the answer."""
        begun = {**self._head, "status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def tell(self, delta: Mapping[str, Any], reason: str | None) -> bytes:
        """The events for a delta; the last delta comes with its finish reason."""
        if reason is not None:
            self._reason = reason
        told = []
        if text := delta.get("content"):
            if self._item is None or self._item["type"] != "message":
                told += [self._close(), self._open_message()]
            self._parts.append(text)
            told.append(self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[]))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if self._item is None or self._item["type"] != "function_call" or self._call_index != call["index"]:
                told += [self._close(), self._settle("commentary")]
                told.append(self._open_call(call["index"], call.get("id"), function.get("name")))
            if arguments := function.get("arguments"):
                self._parts.append(arguments)
                told.append(self._event("response.function_call_arguments.delta", **self._place(), delta=arguments))
        return b"".join(told)

    def end(self, usage: Usage) -> bytes:
        """The events that close the stream."""
        closed = self._close() + self._settle("final_answer")
        response = _response(self._head, self.output, self._reason, usage, self._variant)
        ended = response["status"] if self._variant.ends_by_status else "completed"
        return closed + self._event(f"response.{ended}", response=response)

    def _settle(self, phase: str) -> bytes:
        """The events of the text that was held back."""
        held, self._held = self._held, []
        for _, content in held:
            if "item" in content:
                content["item"]["phase"] = phase
        return b"".join(self._number(kind, content) for kind, content in held)

    def _open_message(self) -> bytes:
        self._item = _message(_new_id("msg"), [], "in_progress") | _phase(self._variant, "final_answer")
        self._parts = []
        added = self._event("response.output_item.added", output_index=len(self.output), item=self._item)
        part = _part("", None if self._variant.has_phases else [])
        return added + self._event("response.content_part.added", **self._place(), part=part)

    def _open_call(self, index: int, call_id: str | None, name: str | None) -> bytes:
        self._item = _call(_new_id("fc"), call_id or _new_id("call"), name or "", "", "in_progress")
        self._parts, self._call_index = [], index
        return self._event("response.output_item.added", output_index=len(self.output), item=self._item)

    def _close(self) -> bytes:
        if self._item is None:
            return b""
        said, item, place = "".join(self._parts), self._item, self._place()
        if item["type"] == "message":
            item = _message(item["id"], [_part(said)]) | _phase(self._variant, "final_answer")
            told = self._event("response.output_text.done", **place, text=said, logprobs=[])
            told += self._event("response.content_part.done", **place, part=_part(said))
        else:
            item = _call(item["id"], item["call_id"], item["name"], said)
            done = {"arguments": said, "name": item["name"]}
            told = self._event("response.function_call_arguments.done", **place, **done)
        told += self._event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self._item = None
        return told

    def _place(self) -> dict[str, Any]:
        """Where in the output a delta belongs."""
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.output)}
        return place | {"content_index": 0} if self._item["type"] == "message" else place

    def _event(self, kind: str, **content: Any) -> bytes:
        if self._holds_texts and self._item is not None and self._item["type"] == "message":
            self._held.append((kind, content))
            return b""
        return self._number(kind, content)

    def _number(self, kind: str, content: Mapping[str, Any]) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self.num_events, **content})
        self.num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _response(
    head: Mapping[str, Any], output: list[dict[str, Any]], reason: str, usage: Usage, variant: Variant
) -> dict[str, Any]:
    is_cut = reason == "length"
    is_text = variant.has_phases and output and all(item["type"] == "message" for item in output)
    return {
        **head,
        **({"text": {"format": {"type": "text"}}} if is_text and head["text"] is None else {}),
        "status": "incomplete" if is_cut else "completed",
        "output": output,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": usage_told(usage, variant),
    }


def _phase(variant: Variant, phase: str) -> dict[str, str]:
    return {"phase": phase} if variant.has_phases else {}


def _message(item_id: str, content: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    return {"id": item_id, "type": "message", "role": "assistant", "content": content, "status": status}


def _part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call(item_id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    told = {"id": item_id, "type": "function_call", "call_id": call_id, "name": name}
    return {**told, "arguments": arguments, "status": status}


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
