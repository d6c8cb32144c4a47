"""What surrounds the answer of a turn, in the words of its API: the events of a stream, or a whole answer."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from engines.tokens import Rendered
from gateway.http.errors import api_error
from gateway.messages import anthropic, responses
from gateway.messages.answers import Usage
from gateway.turns.ask import Ask
from gateway.turns.outcome import LegFailed
from scheduling.types import Fault

_DONE = b"data: [DONE]\n\n"


class Frame:
    """The frame of chats and completions.

    Attributes:
        num_events: how many were made, for an API that numbers them; 0 for the others.
    """

    num_events = 0

    def __init__(self, ask: Ask, turn_id: str, created_at: float, stop_field: str = "") -> None:
        self.stop_field = stop_field
        is_chat = ask.api == "chat"
        kind = ("chat.completion.chunk" if ask.wants_stream else "chat.completion") if is_chat else "text_completion"
        answer_id = f"chatcmpl-{turn_id}" if is_chat else f"cmpl-{turn_id}"
        self._head = {"id": answer_id, "object": kind, "created": int(created_at), "model": ask.model}
        self._start = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[' if ask.wants_stream else b""
        self._around = b'"delta":{"content":' if is_chat else b'"text":', b"}" if is_chat else b""
        self._wants_usage = ask.wants_usage

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """The bytes before and after a JSON text that comes alone; empty if an event needs more than the text."""
        before, after = self._around
        start = b'%b{"index":%d,%b' % (self._start, index, before)
        return start, after + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def event(self, choice: Mapping[str, Any]) -> bytes:
        """The event that tells a stream's client this part of a choice."""
        return self._start + orjson.dumps(choice) + b"]}\n\n"

    def end(self, last: bytes, usage: Usage) -> bytes:
        """The events that end a stream."""
        told = b""
        if self._wants_usage:
            told = self._start + b'],"usage":' + orjson.dumps(_usage(usage)) + b"}\n\n"
        return last + told + _DONE

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """A whole answer."""
        return orjson.dumps({**self._head, "choices": choices, "usage": _usage(usage)})

    def content(self, answer: Any) -> Any:
        """The answer as its client sends it back."""
        return answer


class MessageFrame:
    """The frame of Anthropic's messages, which are built from a chat's one choice.

    Args:
        prompt: gives what is known of the prompt so far.
    """

    num_events = 0

    def __init__(
        self, ask: Ask, turn_id: str, stop_field: str, variant: anthropic.Variant, prompt: Callable[[], Usage]
    ) -> None:
        self.stop_field = stop_field
        self._variant = variant
        self._head = {"id": f"{variant.id_prefix}{turn_id}", "model": ask.model}
        self._prompt = prompt
        self._events = anthropic.MessageEvents(variant)
        self._content: list[dict[str, Any]] = self._events.content

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """Empty: a text may have to open a block first."""
        return b"", b""

    def event(self, choice: Mapping[str, Any]) -> bytes:
        """The event that tells a stream's client this part of the choice."""
        delta = choice["delta"]
        if "role" in delta:
            return self._events.start(self._head, self._prompt())
        return self._events.tell(delta, choice["finish_reason"], choice.get(self.stop_field))

    def end(self, last: bytes, usage: Usage) -> bytes:
        """The events that end a stream."""
        return last + self._events.end(usage)

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """A whole answer. Raises LegFailed if a call's arguments are not a JSON object, like the engine's own route."""
        [choice] = choices
        try:
            message = anthropic.message_of(self._head, choice, choice.get(self.stop_field), usage, self._variant)
        except ValueError as error:
            raise LegFailed(Fault.REQUEST, api_error(400, str(error))) from None
        self._content = message["content"]
        try:
            return orjson.dumps(message)
        except TypeError:  # integers of more than 64 bits and lone surrogates: JSON allows them
            return json.dumps(message).encode()

    def content(self, answer: Any) -> Any:
        """The answer as its client sends it back."""
        return {"role": "assistant", "content": self._content}


class ResponseFrame:
    """The frame of OpenAI's responses, which are built from a chat's one choice.

    Args:
        echo: the fields of the request that an answer repeats.
    """

    def __init__(
        self, ask: Ask, turn_id: str, created_at: float, variant: responses.Variant, echo: Mapping[str, Any]
    ) -> None:
        self.stop_field = ""  # this API does not report what ended an answer
        self._variant = variant
        head = {"id": f"resp_{turn_id}", "object": "response", "created_at": int(created_at), "model": ask.model}
        self._head = {**head, **echo}
        self._events = responses.ResponseEvents(self._head, variant)
        self._output: list[dict[str, Any]] = self._events.output

    @property
    def num_events(self) -> int:
        """How many were made."""
        return self._events.num_events

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """Empty: a text may have to open an item first, and events are numbered."""
        return b"", b""

    def event(self, choice: Mapping[str, Any]) -> bytes:
        """The event that tells a stream's client this part of the choice."""
        delta = choice["delta"]
        return self._events.start() if "role" in delta else self._events.tell(delta, choice["finish_reason"])

    def end(self, last: bytes, usage: Usage) -> bytes:
        """The events that end a stream."""
        return last + self._events.end(usage)

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """A whole answer."""
        [choice] = choices
        response = responses.response_of(self._head, choice, usage, self._variant)
        self._output = response["output"]
        return orjson.dumps(response)

    def content(self, answer: Any) -> Any:
        """The answer's items, as its client sends them back."""
        return self._output


AnyFrame = Frame | MessageFrame | ResponseFrame


def frame_of(
    ask: Ask, turn_id: str, created_at: float, stop_field: str, rendered: Rendered, prompt: Callable[[], Usage]
) -> AnyFrame:
    """The frame for a turn's API, in the manner of the engine that rendered it.

    Args:
        prompt: gives what is known of the prompt so far.
    """
    is_sglang = rendered.kind == "sglang"
    if ask.api == "messages":
        return MessageFrame(ask, turn_id, stop_field, anthropic.SGLANG if is_sglang else anthropic.VLLM, prompt)
    if ask.api == "responses" and is_sglang:
        return ResponseFrame(ask, turn_id, created_at, responses.SGLANG, responses.echo_of_sglang(ask.request))
    if ask.api == "responses":
        echo = responses.echo(ask.request, rendered.call["sampling_params"])
        return ResponseFrame(ask, turn_id, created_at, responses.VLLM, echo)
    return Frame(ask, turn_id, created_at, stop_field)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": None if usage.cached_tokens is None else {"cached_tokens": usage.cached_tokens},
    }
