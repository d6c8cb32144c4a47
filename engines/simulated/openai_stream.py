"""Server-sent events of chat and completion streams.

Events are assembled from bytes: creating a dictionary per token would cost more than everything else about it.
"""

from collections.abc import Callable

import orjson

from engines.simulated.dialect import Dialect
from engines.simulated.fields import Body, flag, mapping
from engines.simulated.live import Generation
from engines.simulated.logprobs import chat_logprobs, completion_logprobs
from engines.simulated.outcomes import call_fragment, call_id_of, chat_finish_reason, usage_of
from engines.simulated.running import Running
from engines.simulated.service import EngineService
from engines.simulated.text import Tokenizer

DONE = b"data: [DONE]\n\n"

ChoiceBytes = Callable[[Tokenizer, Generation, str, int, int, bool], bytes]
"""The part of a choice for tokens `begin` to `end` of its answer, as the inside of a JSON object."""


def wants_id_names(dialect: Dialect, body: Body) -> bool:
    """Whether log-probabilities name tokens by their ids."""
    return dialect.shape.has_id_names and flag(body, "return_tokens_as_token_ids")


class OpenAIStream:
    """Turns the progress of one request into events."""

    def __init__(
        self,
        service: EngineService,
        dialect: Dialect,
        body: Body,
        running: Running,
        object_name: str,
        choice_bytes: ChoiceBytes,
    ) -> None:
        options = mapping(body, "stream_options")
        self._service = service
        self._tokenizer = service.tokenizer
        self._dialect = dialect
        self._running = running
        self._choice_bytes = choice_bytes
        self._include_usage = flag(options, "include_usage")
        self._continuous_usage = self._include_usage and flag(options, "continuous_usage_stats")
        self._ends_apart = dialect.shape.ends_apart and object_name == "chat.completion.chunk"
        self._wants_ids = flag(body, "return_token_ids")
        self._as_ids = wants_id_names(dialect, body)
        self._merges = service.settings.chunk_interval_s > 0
        num_choices = len(running.generations)
        self._seen = [0] * num_choices
        self._has_begun = [object_name != "chat.completion.chunk"] * num_choices
        self._has_ended = [False] * num_choices
        head = {
            "id": running.asked.id,
            "object": object_name,
            "created": running.created,
            "model": service.settings.model,
        }
        fingerprint = dialect.shape.fingerprint
        self._fingerprint = b',"system_fingerprint":' + orjson.dumps(fingerprint) if fingerprint else b""
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['

    def new_events(self) -> list[bytes]:
        """Events for what is new since the last call: one per token, or one per call if chunks have an interval."""
        events: list[bytes] = []
        for index, generation in enumerate(self._running.generations):
            begin, end = self._seen[index], generation.num_done
            has_ended = generation.ended_at is not None
            if not self._has_begun[index] and (end or has_ended):
                self._has_begun[index] = True
                events.append(self._role_event(index))
            self._seen[index] = end
            for first, last in self._service.chunks(begin, end):
                is_last = has_ended and last == end and not self._ends_apart
                # A token that only begins a tool call adds nothing yet; vLLM sends no event for it.
                if self._merges or is_last or self._says_something(generation, first):
                    events.append(self._token_event(index, generation, first, last, is_last))
            if has_ended and not self._has_ended[index]:
                self._has_ended[index] = True
                if self._ends_apart:
                    events.append(self._end_event(index, generation))
                elif begin == end:  # aborted between two tokens: none of them carries the end
                    events.append(self._token_event(index, generation, end, end, True))
        return events

    def last_events(self) -> list[bytes]:
        """Events that end the stream."""
        if self._include_usage:
            usage = b'],"usage":' + orjson.dumps(usage_of(self._running)) + self._fingerprint
            return [self._head + usage + b"}\n\n", DONE]
        return [DONE]

    def _says_something(self, generation: Generation, at: int) -> bool:
        if generation.answer.call is None:
            # SGLang sends no event for the token that ends an answer, unless it has log-probabilities.
            is_end = at + 1 == generation.num_done and not generation.answer.texts[at]
            return not (self._ends_apart and is_end and generation.answer.logprobs is None)
        return self._wants_ids or bool(_call_delta(generation, "", at, at + 1))

    def _role_event(self, index: int) -> bytes:
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        prompt_ids = b""
        if self._wants_ids:
            prompt_ids = b',"prompt_token_ids":' + orjson.dumps(self._running.asked.prompts[index])
        return self._event(index, 0, choice, prompt_ids, has_usage=not self._ends_apart)

    def _end_event(self, index: int, generation: Generation) -> bytes:
        """The finish reason alone."""
        ending = {"finish_reason": chat_finish_reason(generation, self._dialect.shape)}
        ending.update(self._dialect.final_fields(generation.answer.stop_reason))
        choice = b'{"index":%d,"delta":{},"logprobs":null,%b' % (index, orjson.dumps(ending)[1:])
        return self._event(index, generation.num_done, choice, has_usage=False)

    def _token_event(self, index: int, generation: Generation, begin: int, end: int, is_last: bool) -> bytes:
        call_id = call_id_of(self._running.asked.id, index, self._dialect.shape)
        said = self._choice_bytes(self._tokenizer, generation, call_id, begin, end, self._as_ids)
        choice = b'{"index":%d,%b' % (index, said)
        if is_last:
            ending = {"finish_reason": chat_finish_reason(generation, self._dialect.shape)}
            ending.update(self._dialect.final_fields(generation.answer.stop_reason))
            choice += b"," + orjson.dumps(ending)[1:-1]
        else:
            choice += b',"finish_reason":null'
        if self._wants_ids:
            choice += b',"token_ids":' + orjson.dumps(generation.answer.token_ids[begin:end])
        # The fingerprint goes with what ends the answer: the finish reason, or the usage after it.
        return self._event(index, end, choice + b"}", self._fingerprint if is_last and not self._include_usage else b"")

    def _event(self, index: int, end: int, choice: bytes, extra: bytes = b"", has_usage: bool = True) -> bytes:
        if self._continuous_usage and has_usage:
            prompt_tokens = self._running.generations[index].prompt_tokens
            usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + end, "completion_tokens": end}
            extra += b',"usage":' + orjson.dumps(usage)
        elif self._include_usage and not self._ends_apart:
            extra += self._dialect.shape.usage_elsewhere
        return b"%b%b]%b}\n\n" % (self._head, choice, extra)


def chat_choice(
    tokenizer: Tokenizer, generation: Generation, call_id: str, begin: int, end: int, as_ids: bool
) -> bytes:
    """A chat delta: text, or a fragment of a tool call."""
    if generation.answer.call is not None:
        delta = orjson.dumps(_call_delta(generation, call_id, begin, end))
    else:
        texts = generation.answer.texts
        text = texts[begin] if end - begin == 1 else "".join(texts[begin:end])
        delta = b'{"content":%b}' % orjson.dumps(text)
    if generation.answer.logprobs is None:
        return b'"delta":%b,"logprobs":null' % delta
    logprobs = orjson.dumps(chat_logprobs(tokenizer, generation, begin, end, as_ids))
    return b'"delta":%b,"logprobs":%b' % (delta, logprobs)


def completion_choice(
    tokenizer: Tokenizer, generation: Generation, call_id: str, begin: int, end: int, as_ids: bool
) -> bytes:
    """A piece of completion text."""
    text = orjson.dumps("".join(generation.answer.texts[begin:end]))
    logprobs = orjson.dumps(completion_logprobs(tokenizer, generation, begin, end, as_ids))
    return b'"text":%b,"logprobs":%b' % (text, logprobs)


def _call_delta(generation: Generation, call_id: str, begin: int, end: int) -> Body:
    """The first fragment names the function; the others are pieces of its arguments."""
    names_it, arguments = call_fragment(generation, begin, end)
    if names_it:
        assert generation.answer.call is not None
        function = {"name": generation.answer.call.name, "arguments": arguments}
        return {"tool_calls": [{"index": 0, "id": call_id, "type": "function", "function": function}]}
    if arguments:
        return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}
    return {}
