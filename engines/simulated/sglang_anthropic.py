"""`/v1/messages` as SGLang serves it on top of its chat route (0.5.23, srt/entrypoints/anthropic/serving.py).

Its answers differ from vLLM's: a stop sequence is an `end_turn`, cached tokens are reported with the first event, a
block opens with its first content, and fields that its schema does not know (`ignore_eos`) are ignored.
"""

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import orjson

from engines.simulated.chat import render
from engines.simulated.dialect import Dialect
from engines.simulated.exchange import ApiError, Exchange, InvalidField, named_event
from engines.simulated.fields import Body, flag, integer, items, mapping, wishes_of
from engines.simulated.live import Generation
from engines.simulated.openai_api import run
from engines.simulated.outcomes import call_fragment, finish_reason, text_of
from engines.simulated.routes import Routes
from engines.simulated.running import Asked, Running
from engines.simulated.service import EngineService

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_routes(service: EngineService, dialect: Dialect) -> Routes:
    """The table of these routes."""
    return {
        ("POST", "/v1/messages"): partial(_messages, service, dialect),
        ("POST", "/v1/messages/count_tokens"): partial(_count_tokens, service, dialect),
    }


async def _messages(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    body = await exchange.json()
    dialect.check_model(body)
    wanted = integer(body, "max_tokens", lowest=1)
    if wanted is None:
        raise InvalidField("max_tokens", "Field required")
    prompt, tools = _prompt(service, body)
    shape = mapping(mapping(body, "output_config"), "format")
    form = {
        "stop": body.get("stop_sequences"),
        "temperature": body.get("temperature"),
        "tools": tools,
        "tool_choice": _tool_choice(body) if tools else None,
        "structured_outputs": {"json": shape["schema"]} if shape.get("schema") else None,
    }
    asked = Asked(
        dialect.answer_id(exchange, {}, "msg_"),
        [prompt],
        wishes_of(form, service.answer_limit(prompt, wanted), None),
        dialect.priority(exchange, {}),
        "",
        flag(body, "stream"),
    )
    await run(service, dialect, exchange, asked, partial(_MessageStream, service), partial(_whole, service))


async def _count_tokens(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    body = await exchange.json()
    dialect.check_model(body)
    await exchange.respond_json({"input_tokens": len(_prompt(service, body)[0])})


def _prompt(service: EngineService, body: Body) -> tuple[list[int], list[Body]]:
    """The model's prompt, and its tools."""
    thinking = mapping(body, "thinking")
    if thinking and thinking.get("type") != "disabled" and service.settings.reasoning_parser is None:
        raise ApiError(400, "Anthropic thinking is not supported for models without a reasoning parser")
    try:
        tools = [_tool(tool) for tool in body.get("tools") or []]
        told = tools if _tool_choice(body) != "none" else []
        return render(_chat(body), told, service.tokenizer), tools
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ApiError(400, f"messages: {error}", param="messages") from error


def _chat(body: Body) -> list[Body]:
    """The messages as chat messages; system messages all at the head, for a template that accepts no others."""
    given, chat = body.get("system") or "", []
    system = (
        [block["text"] for block in given if block["text"]]
        if isinstance(given, list)
        else [given] * bool(given.strip())
    )
    for message in items(body, "messages"):
        content = message["content"]
        if message["role"] == "system":
            system.append(
                content if isinstance(content, str) else "\n".join(block["text"].strip() for block in content)
            )
        elif isinstance(content, str):
            chat.append({"role": message["role"], "content": content})
        else:
            chat += _of_blocks(message["role"], content)
    return [{"role": "system", "content": "\n".join(system)}, *chat] if system else chat


def _of_blocks(role: str, blocks: Iterable[Body]) -> list[Body]:
    """One message; a tool's result becomes a separate message, in its place."""
    chat: list[Body] = []
    said: str = ""
    calls: list[Body] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                said += block["text"]
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                calls.append({"function": {"name": block["name"], "arguments": arguments}})
            case "tool_result":
                chat += [{"role": role, "content": said}] if said else []
                chat.append({"role": "tool", "content": block.get("content")})
                said = ""
            case "thinking":
                continue  # no reasoning parser puts it back
            case _:
                raise ValueError(f"a block of type {block.get('type')!r} is not simulated")
    if said or calls or not chat:
        chat.append({"role": role, "content": said, "tool_calls": calls})
    return chat


def _tool(tool: Body) -> Body:
    schema = {**tool["input_schema"]}
    schema.setdefault("type", "object")
    told = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": told | {"strict": tool.get("strict", False)}}


def _tool_choice(body: Body) -> Any:
    chosen = body.get("tool_choice")
    if chosen is None:
        return "auto"
    return _CHOICES.get(chosen["type"]) or {"type": "function", "function": {"name": chosen["name"]}}


def _stop_reason(generation: Generation) -> str:
    return _STOPS.get(finish_reason(generation), "end_turn")


def _prompt_usage(generation: Generation) -> Body:
    cached = generation.cached_tokens
    told = {"input_tokens": generation.prompt_tokens - cached}
    return told | ({"cache_read_input_tokens": cached} if cached else {})


def _whole(service: EngineService, running: Running) -> Body:
    generation = running.generations[0]
    call = generation.answer.call
    if call is not None and finish_reason(generation) == "tool_calls":
        block = {"type": "tool_use", "id": f"call_{running.asked.id}", "name": call.name}
        content = [{**block, "input": orjson.loads(call.arguments)}]
    else:
        content = [{"type": "text", "text": text_of(generation)}]
    usage = _prompt_usage(generation) | {"output_tokens": generation.num_done}
    return _envelope(service, running, content) | {"stop_reason": _stop_reason(generation), "usage": usage}


def _envelope(service: EngineService, running: Running, content: list[Body]) -> Body:
    head = {"id": f"msg_{running.asked.id}", "type": "message", "role": "assistant"}
    return {**head, "content": content, "model": service.settings.model}


class _MessageStream:
    """Anthropic's events: the message, its one content block in deltas, and the end."""

    def __init__(self, service: EngineService, running: Running) -> None:
        self._service = service
        self._running = running
        self._seen = 0
        self._has_begun = False
        self._is_open = False

    def new_events(self) -> list[bytes]:
        generation = self._running.generations[0]
        say = self._of_text if generation.answer.call is None else self._of_call
        spans = self._service.chunks(self._seen, generation.num_done)
        self._seen = generation.num_done
        return [event for span in spans for event in say(*span)]

    def last_events(self) -> list[bytes]:
        generation = self._running.generations[0]
        closed = [named_event({"type": "content_block_stop", "index": 0})] if self._is_open else []
        delta = {"stop_reason": _stop_reason(generation)}
        usage = {"output_tokens": generation.num_done}
        ended = named_event({"type": "message_delta", "delta": delta, "usage": usage})
        return [*self._begun(), *closed, ended, named_event({"type": "message_stop"})]

    def _of_text(self, begin: int, end: int) -> list[bytes]:
        text = "".join(self._running.generations[0].answer.texts[begin:end])
        if not text:
            return []
        opened = self._opened({"type": "text", "text": ""})
        return [*opened, _delta({"type": "text_delta", "text": text})]

    def _of_call(self, begin: int, end: int) -> list[bytes]:
        generation = self._running.generations[0]
        assert generation.answer.call is not None
        names_it, arguments = call_fragment(generation, begin, end)
        block = {"type": "tool_use", "id": f"call_{self._running.asked.id}", "name": generation.answer.call.name}
        opened = self._opened(block | {"input": {}}) if names_it else []
        told = [_delta({"type": "input_json_delta", "partial_json": arguments})] if arguments else []
        return opened + told

    def _opened(self, block: Body) -> list[bytes]:
        if self._is_open:
            return []
        self._is_open = True
        return [*self._begun(), named_event({"type": "content_block_start", "index": 0, "content_block": block})]

    def _begun(self) -> list[bytes]:
        if self._has_begun:
            return []
        self._has_begun = True
        usage = _prompt_usage(self._running.generations[0]) | {"output_tokens": 0}
        message = _envelope(self._service, self._running, []) | {"usage": usage}
        return [named_event({"type": "message_start", "message": message})]


def _delta(delta: Body) -> bytes:
    return named_event({"type": "content_block_delta", "index": 0, "delta": delta})
