"""`/v1/responses`: text and function calls, whole and streamed. Nothing is stored."""

from functools import partial

import orjson

from engines.simulated.chat import render
from engines.simulated.dialect import Dialect
from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.fields import Body, flag, integer, mapping, wishes_of
from engines.simulated.live import Generation
from engines.simulated.openai_api import run
from engines.simulated.outcomes import call_fragment, finish_reason, text_of
from engines.simulated.routes import Routes
from engines.simulated.running import Asked, Running
from engines.simulated.service import EngineService


def responses_routes(service: EngineService, dialect: Dialect) -> Routes:
    """The table of this route."""
    return {("POST", "/v1/responses"): partial(_responses, service, dialect)}


async def _responses(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    body = await exchange.json()
    dialect.check_model(body)
    if body.get("previous_response_id") is not None:
        raise ApiError(404, "Response not found: nothing is stored here.", "NotFoundError", "previous_response_id")
    try:
        prompt = render(_messages(body), body.get("tools"), service.tokenizer)
    except (ValueError, AttributeError, TypeError) as error:
        raise ApiError(400, f"input: {error}", param="input") from error
    max_tokens = service.answer_limit(prompt, integer(body, "max_output_tokens", lowest=1))
    form: Body = {
        "temperature": body.get("temperature"),
        "tools": body.get("tools"),
        "tool_choice": body.get("tool_choice"),
        "ignore_eos": body.get("ignore_eos"),
        "response_format": _format(body),
    }
    asked = Asked(
        dialect.answer_id(exchange, body, "resp_"),
        [prompt],
        wishes_of(form, max_tokens, None),
        len(prompt),
        dialect.priority(exchange, body),
        str(body.get("cache_salt") or ""),
        flag(body, "stream"),
    )
    await run(
        service, dialect, exchange, asked, partial(_ResponseStream, service, body), partial(_whole, service, body)
    )


def _messages(body: Body) -> list[Body]:
    """The input's items as chat messages."""
    messages: list[Body] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ValueError("Input should be a string or a list")
    for item in given:
        match item.get("type", "message"):
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                messages.append({"role": "assistant", "content": None, "tool_calls": [{"function": function}]})
            case "function_call_output":
                messages.append({"role": "tool", "content": item.get("output")})
            case "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            case _:  # reasoning and the like is no part of this model's prompt
                continue
    return messages


def _format(body: Body) -> Body | None:
    form = mapping(mapping(body, "text"), "format")
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return form or None


def _item(running: Running, status: str) -> Body:
    """The one output item, as far as it has come."""
    generation = running.generations[0]
    call = generation.answer.call
    if call is not None:
        arguments = call.arguments if status == "completed" else ""
        ids = {"id": f"fc_{running.asked.id}", "call_id": f"call_{running.asked.id}"}
        return {"type": "function_call", **ids, "name": call.name, "arguments": arguments, "status": status}
    content = [] if status == "in_progress" else [_part(text_of(generation))]
    return {
        "type": "message",
        "id": f"msg_{running.asked.id}",
        "role": "assistant",
        "content": content,
        "status": status,
    }


def _part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _response(service: EngineService, body: Body, running: Running, status: str, output: list[Body]) -> Body:
    generation = running.generations[0]
    is_over = status != "in_progress"
    usage: Body = {
        "input_tokens": generation.prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens},
        "output_tokens": generation.num_done,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": generation.prompt_tokens + generation.num_done,
    }
    return {
        "id": running.asked.id,
        "object": "response",
        "created_at": running.created,
        "status": status,
        "model": service.settings.model,
        "output": output,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "parallel_tool_calls": True,
        "temperature": body.get("temperature", 1.0),
        "top_p": body.get("top_p", 1.0),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "max_output_tokens": body.get("max_output_tokens"),
        "usage": usage if is_over else None,
    }


def _status(generation: Generation) -> str:
    return {"length": "incomplete", "abort": "cancelled"}.get(finish_reason(generation), "completed")


def _whole(service: EngineService, body: Body, running: Running) -> Body:
    status = _status(running.generations[0])
    return _response(service, body, running, status, [_item(running, status)])


class _ResponseStream:
    """The events of one response with one output item."""

    def __init__(self, service: EngineService, body: Body, running: Running) -> None:
        self._service = service
        self._body = body
        self._running = running
        self._seen = 0
        self._num_events = 0

    def new_events(self) -> list[bytes]:
        generation = self._running.generations[0]
        begin, end = self._seen, generation.num_done
        is_call = generation.answer.call is not None
        events = self._opening(is_call) if begin == 0 and (end or generation.ended_at is not None) else []
        self._seen = end
        merges = self._service.settings.chunk_interval_s > 0
        for first, last in [(begin, end)] if merges else [(at, at + 1) for at in range(begin, end)]:
            if is_call:
                delta = call_fragment(generation, first, last)[1]
            else:
                delta = "".join(generation.answer.texts[first:last])
            if delta:
                kind = "response.function_call_arguments.delta" if is_call else "response.output_text.delta"
                events.append(self._event(kind, **self._place(is_call), delta=delta))
        return events

    def last_events(self) -> list[bytes]:
        generation = self._running.generations[0]
        is_call = generation.answer.call is not None
        status = _status(generation)
        item = _item(self._running, status)
        events = []
        if is_call:
            kind = "response.function_call_arguments.done"
            events.append(self._event(kind, **self._place(is_call), name=item["name"], arguments=item["arguments"]))
        else:
            text = text_of(generation)
            place = self._place(is_call)
            events.append(self._event("response.output_text.done", **place, text=text, logprobs=[]))
            events.append(self._event("response.content_part.done", **place, part=_part(text)))
        events.append(self._event("response.output_item.done", output_index=0, item=item))
        response = _response(self._service, self._body, self._running, status, [item])
        # Both engines end so, whatever the status inside says.
        events.append(self._event("response.completed", response=response))
        return events

    def _opening(self, is_call: bool) -> list[bytes]:
        response = _response(self._service, self._body, self._running, "in_progress", [])
        item = _item(self._running, "in_progress")
        events = [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
        ]
        if not is_call:
            events.append(self._event("response.content_part.added", **self._place(is_call), part=_part("")))
        return events

    def _place(self, is_call: bool) -> Body:
        """Where in the output a delta belongs."""
        if is_call:
            return {"item_id": f"fc_{self._running.asked.id}", "output_index": 0}
        return {"item_id": f"msg_{self._running.asked.id}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **content: object) -> bytes:
        number = self._num_events
        self._num_events += 1
        data = orjson.dumps({"type": kind, "sequence_number": number, **content})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
