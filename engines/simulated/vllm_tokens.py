"""vLLM's token routes: a request to tokens, tokens to tokens (vLLM 0.33, scale_out/). `vllm_derender.py` converts
tokens back to an answer.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from engines.simulated import anthropic_api, responses_api
from engines.simulated.answers import Wish
from engines.simulated.exchange import Exchange, InvalidField
from engines.simulated.fields import Body, flag, integer, items, mapping, wishes_of
from engines.simulated.live import Generation
from engines.simulated.logprobs import chat_logprobs, token_logprobs
from engines.simulated.openai_api import chat_prompt, prompts_of, run
from engines.simulated.openai_stream import DONE
from engines.simulated.outcomes import usage_of
from engines.simulated.routes import Routes
from engines.simulated.running import Asked, Running
from engines.simulated.service import EngineService
from engines.simulated.vllm_derender import derender_routes
from engines.simulated.vllm_dialect import VllmDialect

# The render leaves this value out; generate without it goes on to the end of the context.
_DEFAULT_MAX_TOKENS = 16
# Sampling parameters that change nothing here.
_PASSED_ON = ("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "repetition_detection")

ChatOf = Callable[[EngineService, Body], tuple[list[int], int | None, Body]]
"""A request as a chat: its prompt, the limit of its answer, and its other fields."""


def token_routes(service: EngineService, dialect: VllmDialect) -> Routes:
    """The table of these routes."""
    return {
        ("POST", "/v1/chat/completions/render"): partial(_render_chat, service, dialect),
        ("POST", "/v1/messages/render"): partial(_render_as_chat, service, dialect, anthropic_api.chat_of, "chatcmpl-"),
        ("POST", "/v1/responses/render"): partial(_render_as_chat, service, dialect, responses_api.chat_of, "resp_"),
        ("POST", "/v1/completions/render"): partial(_render_completion, service, dialect),
        ("POST", "/inference/v1/generate"): partial(_generate, service, dialect),
        **derender_routes(service),
    }


async def _render_chat(service: EngineService, dialect: VllmDialect, exchange: Exchange) -> None:
    """What to send to `/inference/v1/generate` for a chat body."""
    body = await exchange.json()
    dialect.check_model(body)
    dialect.check_chat(body)
    prompt = chat_prompt(service, body)
    wanted = integer(body, "max_completion_tokens", lowest=1) or integer(body, "max_tokens", lowest=1)
    num_logprobs = integer(body, "top_logprobs", 0, lowest=0) if flag(body, "logprobs") else None
    await exchange.respond_json(_rendered(service, dialect, exchange, body, "chatcmpl-", prompt, wanted, num_logprobs))


async def _render_as_chat(
    service: EngineService, dialect: VllmDialect, chat_of: ChatOf, id_prefix: str, exchange: Exchange
) -> None:
    """The same for a body that is a chat in another API's form."""
    body = await exchange.json()
    dialect.check_model(body)
    prompt, max_tokens, chat = chat_of(service, body)
    chat |= {name: body.get(name) for name in ("cache_salt", "stream")}
    await exchange.respond_json(_rendered(service, dialect, exchange, chat, id_prefix, prompt, max_tokens, None))


async def _render_completion(service: EngineService, dialect: VllmDialect, exchange: Exchange) -> None:
    """The same for a completion body: one for each prompt."""
    body = await exchange.json()
    dialect.check_model(body)
    wanted, num_logprobs = integer(body, "max_tokens", 16, lowest=1), integer(body, "logprobs", lowest=0)
    await exchange.respond_json(
        [
            _rendered(service, dialect, exchange, body, "cmpl-", prompt, wanted, num_logprobs)
            for prompt in prompts_of(service, body, "prompt")
        ]
    )


def _rendered(
    service: EngineService,
    dialect: VllmDialect,
    exchange: Exchange,
    body: Body,
    id_prefix: str,
    prompt: list[int],
    wanted: int | None,
    num_logprobs: int | None,
) -> Body:
    wish = wishes_of(body, service.answer_limit(prompt, wanted), num_logprobs)[0]
    sampling: Body = {
        "n": integer(body, "n", 1, lowest=1),
        "max_tokens": wish.max_tokens,
        "min_tokens": wish.min_tokens,
        "ignore_eos": wish.ignore_eos,
        "stop": list(wish.stop),
        "stop_token_ids": list(wish.stop_token_ids),
        "include_stop_str_in_output": wish.include_stop,
        "seed": wish.seed,
        "temperature": body.get("temperature", 1.0),
        "logprobs": num_logprobs,
    }
    if wish.max_tokens == _DEFAULT_MAX_TOKENS:
        del sampling["max_tokens"]
    sampling |= {name: body[name] for name in _PASSED_ON if body.get(name) is not None}
    if wish.schema is not None:
        sampling["structured_outputs"] = {"json": wish.schema}
    if wish.tools and wish.tool_choice != "none":
        # The real engine turns a forced tool call into a grammar; here the tools themselves are the grammar.
        sampling["structured_outputs"] = {"tools": wish.tools, "tool_choice": wish.tool_choice}
        if wish.schema is not None:
            sampling["structured_outputs"]["json"] = wish.schema
    return {
        "request_id": dialect.answer_id(exchange, body, id_prefix),
        "token_ids": prompt,
        "sampling_params": sampling,
        "model": service.settings.model,
        "stream": flag(body, "stream"),
        "stream_options": body.get("stream_options"),
        "cache_salt": body.get("cache_salt"),
        "priority": dialect.priority(exchange, body),
    }


async def _generate(service: EngineService, dialect: VllmDialect, exchange: Exchange) -> None:
    """Tokens in, tokens out. The priority is the body's; no header overrides it."""
    body = await exchange.json()
    dialect.check_model(body)
    prompt = items(body, "token_ids")
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in prompt):
        raise InvalidField("token_ids", "Input should be a list of token ids")
    sampling = mapping(body, "sampling_params")
    wishes = _wishes(sampling, service.answer_limit(prompt, integer(sampling, "max_tokens", lowest=1)))
    asked = Asked(
        f"generate-tokens-{body.get('request_id') or os.urandom(16).hex()}",
        [prompt] * len(wishes),
        wishes,
        integer(body, "priority", 0) or 0,
        str(body.get("cache_salt") or ""),
        flag(body, "stream"),
    )
    await run(
        service,
        dialect,
        exchange,
        asked,
        partial(TokenStream, service, body),
        partial(_whole_tokens, service, body),
    )


def _wishes(sampling: Body, wanted: int) -> list[Wish]:
    structured = mapping(sampling, "structured_outputs")
    choice: Any = structured.get("tool_choice")
    if isinstance(choice, str) and choice.startswith("="):
        choice = {"type": "function", "function": {"name": choice[1:]}}
    form: Body = {**sampling, "tools": structured.get("tools"), "tool_choice": choice, "response_format": None}
    return wishes_of(form, wanted, integer(sampling, "logprobs", lowest=0))


def _choice(
    service: EngineService, body: Body, generation: Generation, index: int, begin: int, end: int, is_last: bool
) -> Body:
    reason = "abort" if generation.is_aborted else generation.answer.finish_reason
    choice: Body = {
        "index": index,
        "token_ids": generation.answer.token_ids[begin:end],
        "finish_reason": reason if is_last else None,
        "stop_reason": generation.answer.stop_reason if is_last else None,
        "weight_versions": generation.weight_versions() if is_last else None,
    }
    if body.get("output_mode") == "text":
        choice["text"] = "".join(generation.answer.texts[begin:end])
        choice["logprobs"] = chat_logprobs(service.tokenizer, generation, begin, end)
    else:
        choice["logprobs"] = token_logprobs(generation, begin, end)
    return choice


def _whole_tokens(service: EngineService, body: Body, running: Running) -> Body:
    return {
        "request_id": running.asked.id,
        "choices": [
            _choice(service, body, generation, index, 0, generation.num_done, True)
            for index, generation in enumerate(running.generations)
        ],
        "usage": usage_of(running),
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }


class TokenStream:
    """Events of a token stream: one per token, or fewer if chunks or the request have an interval."""

    def __init__(self, service: EngineService, body: Body, running: Running) -> None:
        self._service = service
        self._running = running
        self._body = body
        self._interval = integer(mapping(body, "sampling_params"), "stream_interval", 1, lowest=1) or 1
        self._merges = service.settings.chunk_interval_s > 0
        self._include_usage = flag(mapping(body, "stream_options"), "include_usage")
        self._seen = [0] * len(running.generations)
        self._has_ended = [False] * len(running.generations)

    def new_events(self) -> list[bytes]:
        events = []
        for index, generation in enumerate(self._running.generations):
            while (begin := self._seen[index]) < generation.num_done:
                end = self._end_of_chunk(begin, generation)
                if end is None:
                    break
                self._seen[index] = end
                events.append(self._chunk(index, generation, begin, end))
            if generation.ended_at is not None and not self._has_ended[index]:  # aborted between two tokens
                events.append(self._chunk(index, generation, self._seen[index], self._seen[index]))
        return events

    def _end_of_chunk(self, begin: int, generation: Generation) -> int | None:
        """Where the chunk that begins there ends; None while it is not full. The first token comes at once."""
        done = generation.num_done
        if self._merges:
            return done
        if begin + self._interval <= done:
            return begin + (self._interval if begin else 1)
        return done if generation.ended_at is not None or not begin else None

    def _chunk(self, index: int, generation: Generation, begin: int, end: int) -> bytes:
        is_last = generation.ended_at is not None and end == generation.num_done
        self._has_ended[index] = is_last
        return self._event({"choices": [_choice(self._service, self._body, generation, index, begin, end, is_last)]})

    def last_events(self) -> list[bytes]:
        if self._include_usage:
            return [self._event({"choices": [], "usage": usage_of(self._running)}), DONE]
        return [DONE]

    def _event(self, content: Body) -> bytes:
        return b"data: " + orjson.dumps({"request_id": self._running.asked.id, **content}) + b"\n\n"
