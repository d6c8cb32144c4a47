"""`/v1/responses` as SGLang serves it (0.5.23, srt/entrypoints/openai/serving_responses.py, protocol.py).

Its answers differ from vLLM's: two tokens of the limit are not made, texts have a phase, a stream ends with an event
named for its status, and the request's fields are repeated as sent. No response is kept.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from engines.simulated.chat import render
from engines.simulated.dialect import Dialect
from engines.simulated.exchange import ApiError, Exchange, named_event
from engines.simulated.fields import Body, flag, integer, wishes_of
from engines.simulated.live import Generation
from engines.simulated.openai_api import run
from engines.simulated.outcomes import call_fragment, finish_reason, text_of
from engines.simulated.responses_api import call_item, format_of, text_part
from engines.simulated.routes import Routes
from engines.simulated.running import Asked, Running
from engines.simulated.service import EngineService

_HEADROOM = 2
_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "user", "previous_response_id")


def responses_routes(service: EngineService, dialect: Dialect) -> Routes:
    """The table of this route."""
    return {("POST", "/v1/responses"): partial(_responses, service, dialect)}


async def _responses(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    body = await exchange.json()
    dialect.check_model(body)
    for name in ("previous_response_id", "background"):
        if body.get(name) and not service.settings.response_store:
            raise ApiError(400, "Response store is disabled.", "invalid_request_error", name)
    if (known := body.get("previous_response_id")) is not None:
        raise ApiError(404, f"Response with id '{known}' not found.", "invalid_request_error", "response_id")
    prompt, tools, choice = _prompt(service, body)
    wanted = integer(body, "max_output_tokens", lowest=_HEADROOM + 1)
    form = {
        "stop": body.get("stop"),
        "temperature": body.get("temperature"),
        "tools": tools,
        "tool_choice": choice if tools else None,
        "response_format": format_of(body),
    }
    limit = service.answer_limit(prompt, None if wanted is None else wanted - _HEADROOM)
    asked = Asked(
        dialect.answer_id(exchange, {}, "resp_"),
        [prompt],
        wishes_of(form, limit, None),
        dialect.priority(exchange, body),
        str(body.get("cache_salt") or ""),
        flag(body, "stream"),
    )
    await run(
        service, dialect, exchange, asked, partial(_ResponseStream, service, body), partial(_whole, service, body)
    )


def _prompt(service: EngineService, body: Body) -> tuple[list[int], list[Body], Any]:
    """The model's prompt, its tools, and the tool choice."""
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    try:
        tools = [_tool(tool) for tool in body.get("tools") or [] if tool["type"] == "function"]
        told = tools if choice != "none" else []
        return render(_chat(body), told, service.tokenizer), tools, choice
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ApiError(400, f"input: {error}", param="input") from error


def _tool(tool: Body) -> Body:
    told = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("parameters")}
    return {"type": "function", "function": told | {"strict": tool.get("strict", False)}}


def _chat(body: Body) -> list[Body]:
    """The input's items as chat messages, those of one answer merged; system messages at the head."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise ValueError("Input should be a string or a list")
    system = [body["instructions"]] if body.get("instructions") else []
    chat: list[Body] = []
    for item in items:
        message = _message_of(item)
        last = chat[-1] if chat else None
        if message["role"] == "system":
            system.append(message["content"])
        elif last and last["role"] == message["role"] == "assistant" and last["phase"] == message["phase"]:
            last["content"] = "\n\n".join(filter(None, (last["content"], message["content"])))
            last["tool_calls"] += message["tool_calls"]
        else:
            chat.append(message)
    return [{"role": "system", "content": "\n\n".join(system)}, *chat] if system else chat


def _message_of(item: Body) -> Body:
    match item.get("type", "message"):
        case "function_call":
            function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
            return {"role": "assistant", "content": "", "phase": None, "tool_calls": [{"function": function}]}
        case "function_call_output":
            return {"role": "tool", "content": _text(item.get("output"))}
        case "message":
            said: Body = {"content": _text(item["content"]), "phase": item.get("phase"), "tool_calls": []}
            if item["role"] == "developer":
                return {"role": "system", **said, "content": f"Developer instructions:\n{said['content']}"}
            return {"role": item["role"], **said}
    raise ValueError(f"an item of type {item.get('type')!r} is not simulated")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _response(service: EngineService, body: Body, running: Running, status: str, output: list[Body]) -> Body:
    generation = running.generations[0]
    is_text = output and all(item["type"] == "message" for item in output)
    usage: Body = {
        "input_tokens": generation.prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": generation.num_done,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": generation.prompt_tokens + generation.num_done,
    }
    reasoning = body.get("reasoning")
    tool = {"tools": None, "defer_loading": None, "format": None, "strict": False}
    choice = body.get("tool_choice", "auto")
    return {
        "id": running.asked.id,
        "object": "response",
        "created_at": running.created,
        "status": status,
        "model": service.settings.model,
        "output": output,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort", "medium") if reasoning is not None else None, "summary": None},
        "store": body.get("store", True),
        "text": body.get("text") or ({"format": {"type": "text"}} if is_text else None),
        "tool_choice": choice,
        "tools": [tool | given for given in body.get("tools") or []],
        "truncation": body.get("truncation", "disabled"),
        **{name: body.get(name) for name in _ECHOED},
        "usage": usage if status != "in_progress" else None,
    }


def _status(generation: Generation) -> str:
    return {"length": "incomplete", "abort": "failed"}.get(finish_reason(generation), "completed")


def _message(running: Running, text: str | None, status: str) -> Body:
    content = [] if text is None else [text_part(text)]
    said = {"type": "message", "id": f"msg_{running.asked.id}", "role": "assistant", "content": content}
    return said | {"status": status, "phase": "final_answer"}


def _whole(service: EngineService, body: Body, running: Running) -> Body:
    generation = running.generations[0]
    output = [_message(running, text, "completed")] if (text := text_of(generation)) else []
    if generation.answer.call is not None and finish_reason(generation) == "tool_calls":
        output = [call_item(running, generation.answer.call.arguments, "completed")]
    return _response(service, body, running, _status(generation), output)


class _ResponseStream:
    """The events of one response with one output item, or with none if a call was cut before it had a name.

    If tools may be called, a text's events are sent at the end, when its phase is known.
    """

    def __init__(self, service: EngineService, body: Body, running: Running) -> None:
        self._service = service
        self._body = body
        self._running = running
        self._holds_text = bool(body.get("tools")) and body.get("tool_choice", "auto") != "none"
        self._held: list[bytes] = []
        self._num_events = 0
        self._seen = 0
        self._open: Body | None = None
        self._said: list[str] = []

    def new_events(self) -> list[bytes]:
        begin, self._seen = self._seen, self._running.generations[0].num_done
        events = self._begun()
        for span in self._service.chunks(begin, self._seen):
            events += self._spoken(*span)
        return events

    def last_events(self) -> list[bytes]:
        status, said, output = _status(self._running.generations[0]), "".join(self._said), []
        events = self._begun()
        if self._open is not None and self._open["type"] == "function_call":
            output = [call_item(self._running, said, "completed")]
            done = {"name": self._open["name"], "arguments": said}
            events.append(self._event("response.function_call_arguments.done", **self._place(), **done))
        elif self._open is not None:
            output = [_message(self._running, said, "completed")]
            told = [
                self._event("response.output_text.done", **self._place(), text=said, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=text_part(said)),
            ]
            events += [*self._held, *told]
        events += [self._event("response.output_item.done", output_index=0, item=item) for item in output]
        response = _response(self._service, self._body, self._running, status, output)
        return [*events, self._event(f"response.{status}", response=response)]

    def _begun(self) -> list[bytes]:
        generation = self._running.generations[0]
        if self._num_events or not (generation.num_done or generation.ended_at is not None):
            return []
        response = _response(self._service, self._body, self._running, "in_progress", [])
        return [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def _spoken(self, begin: int, end: int) -> Iterable[bytes]:
        answer = self._running.generations[0].answer
        if answer.call is not None:
            names_it, arguments = call_fragment(self._running.generations[0], begin, end)
            opened = [self._added(call_item(self._running, "", "in_progress"))] if names_it else []
            return opened + self._delta("response.function_call_arguments.delta", arguments)
        text = "".join(answer.texts[begin:end])
        if not text:
            return []
        events = []
        if self._open is None:
            events.append(self._added(_message(self._running, None, "in_progress")))
            events.append(self._event("response.content_part.added", **self._place(), part=text_part("")))
        events += self._delta("response.output_text.delta", text, logprobs=[])
        if self._holds_text:
            self._held += events
            return []
        return events

    def _added(self, item: Body) -> bytes:
        self._open = item
        return self._event("response.output_item.added", output_index=0, item=item)

    def _delta(self, kind: str, said: str, **more: Any) -> list[bytes]:
        self._said.append(said)
        return [self._event(kind, **self._place(), delta=said, **more)] if said else []

    def _place(self) -> Body:
        """Where in the output a delta belongs."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": 0}
        return place | {"content_index": 0} if self._open["type"] == "message" else place

    def _event(self, kind: str, **content: object) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": number, **content})
