"""`/v1/chat/completions` and `/v1/completions`: OpenAI's routes, as both engines serve them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from engines.simulated.answers import Wish
from engines.simulated.chat import render
from engines.simulated.dialect import Dialect
from engines.simulated.exchange import ApiError, Exchange, InvalidField
from engines.simulated.fields import Body, flag, integer, items, wishes_of
from engines.simulated.logprobs import chat_logprobs, completion_logprobs
from engines.simulated.openai_stream import DONE, OpenAIStream, chat_choice, completion_choice, wants_id_names
from engines.simulated.outcomes import call_id_of, chat_finish_reason, finish_reason, message_of, text_of, usage_of
from engines.simulated.running import Asked, Running
from engines.simulated.service import EngineService


class EventStream(Protocol):
    """Turns the progress of a request into server-sent events."""

    def new_events(self) -> list[bytes]:
        """Events for what is new since the last call."""

    def last_events(self) -> list[bytes]:
        """Events that end the stream."""


async def chat_completions(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    """Answers one chat request, streamed or whole."""
    body = await exchange.json()
    asked = chat_asked(service, dialect, exchange, body)
    await run(
        service,
        dialect,
        exchange,
        asked,
        partial(_chat_stream, service, dialect, body),
        partial(_whole_chat, service, dialect, body),
    )


async def completions(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    """Answers one completion request; prompts are texts or token ids."""
    body = await exchange.json()
    dialect.check_model(body)
    wanted = integer(body, "max_tokens", 16, lowest=1) or 16
    num_logprobs = integer(body, "logprobs", lowest=0)
    prompts, wishes = [], []
    for prompt in prompts_of(service, body, "prompt"):
        for wish in wishes_of(body, service.answer_limit(prompt, wanted), num_logprobs):
            prompts.append(prompt)
            wishes.append(wish)
    asked = asked_of(dialect, exchange, body, "cmpl-", prompts, wishes)
    await run(
        service,
        dialect,
        exchange,
        asked,
        partial(_completion_stream, service, dialect, body),
        partial(_whole_completion, service, dialect, body),
    )


def chat_asked(service: EngineService, dialect: Dialect, exchange: Exchange, body: Body) -> Asked:
    """What a chat body asks for."""
    dialect.check_model(body)
    dialect.check_chat(body)
    prompt = chat_prompt(service, body)
    wanted = integer(body, "max_completion_tokens", lowest=1) or integer(body, "max_tokens", lowest=1)
    max_tokens = service.answer_limit(prompt, wanted)
    num_logprobs = None
    if flag(body, "logprobs"):
        num_logprobs = integer(body, "top_logprobs", 0, lowest=0)
    wishes = wishes_of(body, max_tokens, num_logprobs)
    return asked_of(dialect, exchange, body, "chatcmpl-", [prompt] * len(wishes), wishes)


def asked_of(
    dialect: Dialect,
    exchange: Exchange,
    body: Body,
    id_prefix: str,
    prompts: Sequence[list[int]],
    wishes: Sequence[Wish],
) -> Asked:
    """A request's choices, with what bodies of all routes name alike."""
    return Asked(
        dialect.answer_id(exchange, body, id_prefix),
        prompts,
        wishes,
        dialect.priority(exchange, body),
        str(body.get("cache_salt") or ""),
        flag(body, "stream"),
        body.get("kv_transfer_params"),
    )


def chat_prompt(service: EngineService, body: Body) -> list[int]:
    """The prompt of a chat body: its messages through the template, or SGLang's `input_ids` unchanged."""
    if service.settings.dialect == "sglang" and body.get("input_ids") is not None:
        return prompts_of(service, body, "input_ids")[0]
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    try:
        return render(
            items(body, "messages"),
            tools,
            service.tokenizer,
            add_generation_prompt=flag(body, "add_generation_prompt", True),
            continue_final_message=flag(body, "continue_final_message"),
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise ApiError(400, str(error), param="messages") from error


async def run(
    service: EngineService,
    dialect: Dialect,
    exchange: Exchange,
    asked: Asked,
    stream: Callable[[Running], EventStream],
    whole: Callable[[Running], Body],
) -> None:
    """Runs the request, and answers as a stream or as a whole."""
    await dialect.admit()
    refusal = dialect.late_refusal()
    if refusal is not None and not asked.is_stream:
        raise refusal
    if refusal is not None:
        await exchange.start_stream()
        await exchange.write([dialect.error_event(refusal), DONE])
        await exchange.end_stream()
        return
    is_fetched = service.kv is not None and await service.kv.fetched(asked)
    if service.tier is not None:
        await service.tier.loaded(asked)
    running = service.begin(asked, exchange)
    try:
        if asked.is_stream:
            await _send_stream(running, exchange, stream(running))
        else:
            await running.end()
            if service.kv is not None:
                service.kv.report(running, is_fetched)
                running.kv_offer = service.kv.offered(running, exchange)
            if service.tier is not None:
                service.tier.keep(running)  # before a client asks another server for the continuation
            await exchange.respond_json(whole(running))
    finally:
        service.abort(running)
        service.finish(running)


async def _send_stream(running: Running, exchange: Exchange, events: EventStream) -> None:
    await exchange.start_stream()
    is_over = False
    while not is_over:
        await running.signal.wait()
        is_over = running.is_over  # read before the events: it may end while a slow reader takes them
        if new := events.new_events():
            await exchange.write(new)
    await exchange.write(events.last_events())
    await exchange.end_stream()


def _chat_stream(service: EngineService, dialect: Dialect, body: Body, running: Running) -> OpenAIStream:
    return OpenAIStream(service, dialect, body, running, "chat.completion.chunk", chat_choice)


def _completion_stream(service: EngineService, dialect: Dialect, body: Body, running: Running) -> OpenAIStream:
    return OpenAIStream(service, dialect, body, running, "text_completion", completion_choice)


def _whole_chat(service: EngineService, dialect: Dialect, body: Body, running: Running) -> Body:
    wants_ids, as_ids = flag(body, "return_token_ids"), wants_id_names(dialect, body)
    choices = []
    for index, generation in enumerate(running.generations):
        choice: Body = {
            "index": index,
            "message": message_of(generation, call_id_of(running.asked.id, index, dialect.shape), dialect.shape),
            "logprobs": chat_logprobs(service.tokenizer, generation, 0, generation.num_done, as_ids),
            "finish_reason": chat_finish_reason(generation, dialect.shape),
            **dialect.final_fields(generation.answer.stop_reason),
            **dialect.shape.choice_nulls,
        }
        if wants_ids:
            choice["token_ids"] = generation.answer.token_ids[: generation.num_done]
        choices.append(choice)
    answer = _envelope("chat.completion", service, dialect, running, choices)
    if wants_ids:
        answer["prompt_token_ids"] = running.asked.prompts[0]
    return answer


def _whole_completion(service: EngineService, dialect: Dialect, body: Body, running: Running) -> Body:
    wants_ids, echo = flag(body, "return_token_ids"), flag(body, "echo")
    as_ids = wants_id_names(dialect, body)
    choices = []
    for index, generation in enumerate(running.generations):
        prompt = running.asked.prompts[index]
        text = text_of(generation)
        choice: Body = {
            "index": index,
            "text": service.tokenizer.decode(prompt) + text if echo else text,
            "logprobs": completion_logprobs(service.tokenizer, generation, 0, generation.num_done, as_ids),
            "finish_reason": finish_reason(generation),
            **dialect.final_fields(generation.answer.stop_reason),
            **dialect.shape.choice_nulls,
        }
        if wants_ids:
            choice["token_ids"] = generation.answer.token_ids[: generation.num_done]
            choice["prompt_token_ids"] = prompt
        choices.append(choice)
    return _envelope("text_completion", service, dialect, running, choices)


def _envelope(
    object_name: str, service: EngineService, dialect: Dialect, running: Running, choices: list[Body]
) -> Body:
    fingerprint = {"system_fingerprint": dialect.shape.fingerprint} if dialect.shape.fingerprint else {}
    return {
        **dialect.shape.answer_nulls,
        **fingerprint,
        "id": running.asked.id,
        "object": object_name,
        "created": running.created,
        "model": service.settings.model,
        "choices": choices,
        "usage": usage_of(running),
        **({"kv_transfer_params": running.kv_offer} if running.kv_offer is not None else {}),
    }


def prompts_of(service: EngineService, body: Body, name: str) -> list[list[int]]:
    """The prompts in a field that is a text, token ids, or a list of either."""
    prompt = body.get(name)
    match prompt:
        case str():
            return [list(service.tokenizer.encode(prompt))]
        case [str(), *_] if all(isinstance(one, str) for one in prompt):
            return [list(service.tokenizer.encode(one)) for one in prompt]
        case [int(), *_]:
            prompts = [prompt]
        case [list(), *_] if all(isinstance(one, list) for one in prompt):
            prompts = prompt
        case _:
            raise InvalidField(name, "Input should be a text, or a list of token ids")
    if not all(isinstance(id, int) and not isinstance(id, bool) for one in prompts for id in one):
        raise InvalidField(name, "Input should be a list of token ids")
    return prompts
