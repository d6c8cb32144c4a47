"""`/v1/responses`: text and function calls, whole and streamed. Nothing is stored."""

from functools import partial

from engines.simulated.chat import render
from engines.simulated.dialect import Dialect
from engines.simulated.exchange import ApiError, Exchange, named_event
from engines.simulated.fields import Body, flag, integer, mapping, wishes_of
from engines.simulated.live import Generation
from engines.simulated.openai_api import asked_of, run
from engines.simulated.outcomes import call_fragment, finish_reason, text_of
from engines.simulated.routes import Routes
from engines.simulated.running import Running
from engines.simulated.service import EngineService


def responses_routes(service: EngineService, dialect: Dialect) -> Routes:
    """The table of this route."""
    return {("POST", "/v1/responses"): partial(_responses, service, dialect)}


async def _responses(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    body = await exchange.json()
    dialect.check_model(body)
    if flag(body, "background") and not service.settings.response_store:
        message = "This vLLM engine does not support `store=True` and therefore does not support the background mode."
        raise ApiError(400, message, "invalid_request_error", "background")
    if body.get("previous_response_id") is not None:
        raise ApiError(404, "Response not found: nothing is stored here.", "NotFoundError", "previous_response_id")
    prompt, max_tokens, form = chat_of(service, body)
    max_tokens = service.answer_limit(prompt, max_tokens)
    body |= {"max_output_tokens": max_tokens}
    asked = asked_of(dialect, exchange, body, "resp_", [prompt], wishes_of(form, max_tokens, None))
    await run(
        service, dialect, exchange, asked, partial(_ResponseStream, service, body), partial(_whole, service, body)
    )


def chat_of(service: EngineService, body: Body) -> tuple[list[int], int | None, Body]:
    """A request as a chat: its prompt, the limit of its answer, and its other fields."""
    try:
        tools = [_tool(tool) for tool in body.get("tools") or []]
        prompt = render(_messages(body), tools, service.tokenizer)
    except (ValueError, AttributeError, TypeError) as error:
        raise ApiError(400, f"input: {error}", param="input") from error
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    form: Body = {
        "temperature": body.get("temperature"),
        "tools": tools,
        "tool_choice": choice,
        "ignore_eos": body.get("ignore_eos"),
        "response_format": format_of(body),
    }
    return prompt, integer(body, "max_output_tokens", lowest=1), form


def _tool(tool: Body) -> Body:
    return {"type": "function", "function": {name: tool[name] for name in ("name", "parameters") if name in tool}}


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
            case _:  # reasoning and the like is not part of this model's prompt
                continue
    return messages


def format_of(body: Body) -> Body | None:
    """The form that the text must have, as a chat asks for it."""
    form = mapping(mapping(body, "text"), "format")
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return form or None


# For turns with the engine's own tools.
_PROMPTED: Body = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
_MADE: Body = {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
_ECHOED = {
    "background": False,
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "text": None,
    "truncation": "disabled",
    "user": None,
}


def call_item(running: Running, arguments: str, status: str) -> Body:
    """The output item of the answer's call."""
    call = running.generations[0].answer.call
    assert call is not None
    ids = {"id": f"fc_{running.asked.id}", "call_id": f"call_{running.asked.id}"}
    return {"type": "function_call", **ids, "name": call.name, "arguments": arguments, "status": status}


def _message(running: Running, content: list[Body], status: str) -> Body:
    item_id = f"msg_{running.asked.id}"
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, "status": status}


def _item_of(running: Running) -> Body:
    """The one item of a whole answer: a call that was cut is text."""
    generation = running.generations[0]
    if generation.answer.call is not None and finish_reason(generation) == "tool_calls":
        return call_item(running, generation.answer.call.arguments, "completed")
    return _message(running, [text_part(text_of(generation))], "completed")


def text_part(text: str) -> Body:
    """The content of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _response(service: EngineService, body: Body, running: Running, status: str, output: list[Body]) -> Body:
    generation = running.generations[0]
    is_over = status != "in_progress"
    usage: Body = {
        "input_tokens": generation.prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens, **_PROMPTED},
        "output_tokens": generation.num_done,
        "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0, **_MADE},
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
        **{name: body.get(name, default) for name, default in _ECHOED.items()},
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "temperature": body.get("temperature", 1.0),
        "top_p": body.get("top_p", 1.0),
        "tool_choice": (body.get("tool_choice") or "auto") if body.get("tools") else "none",
        "tools": body.get("tools") or [],
        "max_output_tokens": body.get("max_output_tokens"),
        "usage": usage if is_over else None,
    }


def _status(generation: Generation) -> str:
    """An aborted response is `completed` too, as vLLM has it."""
    return "incomplete" if finish_reason(generation) == "length" else "completed"


def _whole(service: EngineService, body: Body, running: Running) -> Body:
    status = _status(running.generations[0])
    return _response(service, body, running, status, [_item_of(running)]) | {"kv_transfer_params": running.kv_offer}


class _ResponseStream:
    """The events of one response with one output item, or with none if a call was cut before it had a name."""

    def __init__(self, service: EngineService, body: Body, running: Running) -> None:
        self._service = service
        self._body = body
        self._running = running
        self._is_call = running.generations[0].answer.call is not None
        self._seen = 0
        self._num_events = 0
        self._is_open = False
        self._said: list[str] = []

    def new_events(self) -> list[bytes]:
        generation = self._running.generations[0]
        begin, end = self._seen, generation.num_done
        events = []
        if begin == 0 and (end or generation.ended_at is not None):
            response = _response(self._service, self._body, self._running, "in_progress", [])
            events = [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]
        self._seen = end
        for first, last in self._service.chunks(begin, end):
            events += self._call_events(first, last) if self._is_call else self._text_events(first, last)
        return events

    def last_events(self) -> list[bytes]:
        status = _status(self._running.generations[0])
        said, place, events, output = "".join(self._said), self._place(), [], []
        if self._is_open and self._is_call:
            output = [call_item(self._running, said, "completed")]
            done = {"name": output[0]["name"], "arguments": said}
            events.append(self._event("response.function_call_arguments.done", **place, **done))
        elif self._is_open:
            output = [_message(self._running, [text_part(said)], "completed")]
            events.append(self._event("response.output_text.done", **place, text=said, logprobs=[]))
            events.append(self._event("response.content_part.done", **place, part=text_part(said)))
        events += [self._event("response.output_item.done", output_index=0, item=item) for item in output]
        response = _response(self._service, self._body, self._running, status, output)
        # Both engines end this way, whatever the status inside is.
        return [*events, self._event("response.completed", response=response)]

    def _text_events(self, first: int, last: int) -> list[bytes]:
        text = "".join(self._running.generations[0].answer.texts[first:last])
        if not text:
            return []
        events = []
        if not self._is_open:
            self._is_open = True
            item = _message(self._running, [], "in_progress")
            events.append(self._event("response.output_item.added", output_index=0, item=item))
            events.append(
                self._event("response.content_part.added", **self._place(), part=text_part("") | {"logprobs": []})
            )
        self._said.append(text)
        return [*events, self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])]

    def _call_events(self, first: int, last: int) -> list[bytes]:
        names_it, arguments = call_fragment(self._running.generations[0], first, last)
        events = []
        if names_it:
            self._is_open = True
            item = call_item(self._running, "", "in_progress")
            events.append(self._event("response.output_item.added", output_index=0, item=item))
        if arguments:
            self._said.append(arguments)
            events.append(self._event("response.function_call_arguments.delta", **self._place(), delta=arguments))
        return events

    def _place(self) -> Body:
        """Where in the output a delta belongs."""
        if self._is_call:
            return {"item_id": f"fc_{self._running.asked.id}", "output_index": 0}
        return {"item_id": f"msg_{self._running.asked.id}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **content: object) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": number, **content})
