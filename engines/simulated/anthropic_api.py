"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's routes, as vLLM serves them on top of its chat route."""

from functools import partial
from typing import Any

import orjson

from engines.simulated.chat import render
from engines.simulated.dialect import Dialect
from engines.simulated.exchange import ApiError, Exchange, InvalidField, named_event
from engines.simulated.fields import Body, integer, items, mapping, wishes_of
from engines.simulated.live import Generation
from engines.simulated.openai_api import asked_of, run
from engines.simulated.outcomes import call_fragment, finish_reason, text_of
from engines.simulated.routes import Routes
from engines.simulated.running import Running
from engines.simulated.service import EngineService


def anthropic_routes(service: EngineService, dialect: Dialect) -> Routes:
    """The table of these routes."""
    return {
        ("POST", "/v1/messages"): partial(_messages, service, dialect),
        ("POST", "/v1/messages/count_tokens"): partial(_count_tokens, service, dialect),
    }


def anthropic_error(error: ApiError, kind: str) -> bytes:
    """An error body in Anthropic's form."""
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})


async def _messages(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    body = await exchange.json()
    dialect.check_model(body)
    prompt, max_tokens, form = chat_of(service, body)
    wishes = wishes_of(form, service.answer_limit(prompt, max_tokens), None)
    asked = asked_of(dialect, exchange, body, "chatcmpl-", [prompt], wishes)
    await run(service, dialect, exchange, asked, partial(_MessageStream, service), partial(_whole, service))


def chat_of(service: EngineService, body: Body) -> tuple[list[int], int, Body]:
    """A request as a chat: its prompt, the limit of its answer, and its other fields."""
    prompt, max_tokens = _prompt(service, body), integer(body, "max_tokens", lowest=1)
    if max_tokens is None:
        raise InvalidField("max_tokens", "Field required")
    _check_thinking(body, max_tokens)
    form = {
        "stop": body.get("stop_sequences"),
        "temperature": body.get("temperature"),
        "tools": _tools(body),
        "tool_choice": _tool_choice(body),
        "ignore_eos": body.get("ignore_eos"),
    }
    return prompt, max_tokens, form


def _check_thinking(body: Body, max_tokens: int) -> None:
    """vLLM 0.33 checks the budget, except in a request that only offers KV."""
    thinking, transfer = mapping(body, "thinking"), mapping(body, "kv_transfer_params")
    budget = (integer(thinking, "budget_tokens", lowest=1024) or 0) if thinking.get("type") == "enabled" else 0
    if budget >= max_tokens and not transfer.get("do_remote_decode"):
        raise ApiError(400, "thinking.budget_tokens must be less than max_tokens", param="thinking")


async def _count_tokens(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    body = await exchange.json()
    dialect.check_model(body)
    await exchange.respond_json({"input_tokens": len(_prompt(service, body))})


def _prompt(service: EngineService, body: Body) -> list[int]:
    messages: list[Body] = []
    try:
        if system := body.get("system"):
            messages.append({"role": "system", "content": system})
        for message in items(body, "messages"):
            messages += _chat_messages(message)
        return render(messages, _tools(body), service.tokenizer)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ApiError(400, f"messages: {error}", param="messages") from error


def _chat_messages(message: Body) -> list[Body]:
    """One of Anthropic's messages as OpenAI's: tool results become separate messages."""
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    results = [
        {"role": "tool", "content": part.get("content")} for part in content if part.get("type") == "tool_result"
    ]
    texts = [part for part in content if part.get("type") not in ("tool_result", "tool_use")]
    calls = [
        {"function": {"name": part["name"], "arguments": orjson.dumps(part["input"]).decode()}}
        for part in content
        if part.get("type") == "tool_use"
    ]
    if not texts and not calls:
        return results
    return [*results, {"role": message.get("role"), "content": texts, "tool_calls": calls}]


def _tools(body: Body) -> list[Body]:
    return [
        {"type": "function", "function": {"name": tool.get("name"), "parameters": tool.get("input_schema")}}
        for tool in body.get("tools") or []
    ]


def _tool_choice(body: Body) -> Any:
    match body.get("tool_choice"):
        case {"type": "tool", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "any"}:
            return "required"
        case {"type": "none"}:
            return "none"
        case _:
            return None


def _stop_reason(generation: Generation) -> str | None:
    """None for an aborted answer: Anthropic has no word for it."""
    if generation.answer.stop_reason is not None and not generation.is_aborted:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}.get(finish_reason(generation))


def _usage(service: EngineService, generation: Generation) -> Body:
    """Tokens that were not cached count as written to the cache as far as they fill whole blocks."""
    block = service.settings.block_size
    created = max(generation.prompt_tokens // block * block - generation.cached_tokens, 0)
    return {
        "input_tokens": generation.prompt_tokens - generation.cached_tokens - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": generation.cached_tokens,
        "output_tokens": generation.num_done,
    }


def _block(running: Running, *, is_empty: bool = False) -> Body:
    """The one content block of an answer."""
    generation = running.generations[0]
    call = generation.answer.call
    if call is None:
        return {"type": "text", "text": "" if is_empty else text_of(generation)}
    complete = not is_empty and finish_reason(generation) == "tool_calls"
    arguments = orjson.loads(call.arguments) if complete else {}
    return {"type": "tool_use", "id": f"toolu_{running.asked.id}", "name": call.name, "input": arguments}


def _envelope(
    service: EngineService, running: Running, content: list[Body], stop_reason: str | None, usage: Body
) -> Body:
    return {
        "id": running.asked.id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": service.settings.model,
        "stop_reason": stop_reason,
        "usage": usage,
    }


def _whole(service: EngineService, running: Running) -> Body:
    generation = running.generations[0]
    stop_reason = _stop_reason(generation)
    message = _envelope(service, running, [_block(running)], stop_reason, _usage(service, generation))
    if stop_reason == "stop_sequence":
        message["stop_sequence"] = generation.answer.stop_reason
    message["kv_transfer_params"] = running.kv_offer
    return {name: value for name, value in message.items() if value is not None}


class _MessageStream:
    """Anthropic's events: the message, its one content block in deltas, and the end."""

    def __init__(self, service: EngineService, running: Running) -> None:
        self._service = service
        self._running = running
        self._seen = 0

    def new_events(self) -> list[bytes]:
        generation = self._running.generations[0]
        begin, end = self._seen, generation.num_done
        events = []
        if begin == 0 and (end > 0 or generation.ended_at is not None):
            # What was cached is not known yet; the last event reports it.
            usage = {"input_tokens": generation.prompt_tokens, "output_tokens": 0}
            message = _envelope(self._service, self._running, [], None, usage) | {"stop_sequence": None}
            events.append(named_event({"type": "message_start", "message": message}))
        if begin == 0 and end > 0:
            block = _block(self._running, is_empty=True)
            events.append(named_event({"type": "content_block_start", "index": 0, "content_block": block}))
        self._seen = end
        deltas = [_delta(generation, *span) for span in self._service.chunks(begin, end)]
        content = [{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas if delta]
        events += [named_event(delta) for delta in content]
        return events

    def last_events(self) -> list[bytes]:
        generation = self._running.generations[0]
        stop_reason = _stop_reason(generation)
        stop_sequence = generation.answer.stop_reason if stop_reason == "stop_sequence" else None
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return [
            *([named_event({"type": "content_block_stop", "index": 0})] if generation.num_done else []),
            named_event({"type": "message_delta", "delta": delta, "usage": _usage(self._service, generation)}),
            named_event({"type": "message_stop"}),
        ]


def _delta(generation: Generation, begin: int, end: int) -> Body | None:
    if generation.answer.call is not None:
        _, arguments = call_fragment(generation, begin, end)
        return {"type": "input_json_delta", "partial_json": arguments} if arguments else None
    text = "".join(generation.answer.texts[begin:end])
    return {"type": "text_delta", "text": text} if text else None
