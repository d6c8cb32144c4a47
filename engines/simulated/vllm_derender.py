"""vLLM's derender routes: tokens to an answer, whole or by chunks (vLLM 0.33, scale_out/derender)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from engines.simulated.chat import CALL_TAIL, call_head, parse_call
from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.fields import Body, flag, items, mapping
from engines.simulated.routes import Routes
from engines.simulated.service import EngineService
from engines.simulated.text import END, Tokenizer
from engines.simulated.vllm_dialect import VllmDialect


def derender_routes(service: EngineService) -> Routes:
    """The table of these routes."""
    return {
        ("POST", "/v1/chat/completions/derender"): partial(_derender_chat, service),
        ("POST", "/v1/completions/derender"): partial(_derender_completion, service),
    }


async def _derender_chat(service: EngineService, exchange: Exchange) -> None:
    """A chat completion from the whole answer of `/inference/v1/generate`, or a chunk from one of its events."""
    body = await exchange.json()
    if flag(body, "stream"):
        await exchange.respond_json(_derender_chunk(service, body))
        return
    made = mapping(body, "generate_response")
    choices = []
    for choice in _choices(made):
        text = _parsed_text(service.tokenizer, choice["token_ids"])
        message: Body = {"role": "assistant", "content": text, **VllmDialect.shape.message_fields}
        call = parse_call(text)
        if call is not None:
            function = {"name": call.name, "arguments": call.arguments}
            call_id = f"call-{made.get('request_id')}-{choice.get('index')}"
            calls = [{"id": call_id, "type": "function", "function": function}]
            message |= {"content": VllmDialect.shape.call_content, "tool_calls": calls}
        choices.append(
            {
                "index": choice.get("index", 0),
                "message": message,
                "logprobs": _chat_logprobs(service.tokenizer, choice.get("logprobs")),
                "finish_reason": choice.get("finish_reason"),  # a call does not change the reason here
                "stop_reason": choice.get("stop_reason"),
            }
        )
    await exchange.respond_json(_envelope(service, made, "chat.completion", choices))


async def _derender_completion(service: EngineService, exchange: Exchange) -> None:
    """A completion with a choice for each answer of `/inference/v1/generate`; stop strings stay in the text."""
    body = await exchange.json()
    responses: list[Body] = items(body, "generate_responses")
    if not responses:
        raise ApiError(400, "generate_responses must not be empty")
    choices: list[Body] = []
    for response in responses:
        for choice in _choices(response):
            text = _whole_text(service.tokenizer, choice["token_ids"])
            choices.append({"index": len(choices), "text": text, "finish_reason": choice.get("finish_reason")})
    await exchange.respond_json(_envelope(service, responses[0], "text_completion", choices))


def _derender_chunk(service: EngineService, body: Body) -> Body:
    chunk, state = mapping(body, "generate_chunk"), mapping(body, "stream_state")
    before: list[int] = state.get("output_token_ids") or []
    (choice,) = _choices(chunk, may_be_empty=True)
    ids = [*before, *choice["token_ids"]]
    is_call = state.get("is_call")
    if is_call is None:
        is_call = _may_be_call(_whole_text(service.tokenizer, ids), mapping(body, "chat_request"))
    reason = choice.get("finish_reason")
    if is_call:
        delta, reason = _call_delta(service.tokenizer, body, before, ids, reason)
    else:
        said = _whole_text(service.tokenizer, before)
        text = _whole_text(service.tokenizer, ids) if reason is None else _parsed_text(service.tokenizer, ids)
        delta = {"content": text[len(said) :] or None}
    if not state.get("role_sent"):
        delta["role"] = "assistant"
    new_state = {
        "output_token_ids": ids,
        "role_sent": True,
        "is_call": is_call if ids else None,
    }
    made = {"index": 0, "delta": delta, "finish_reason": reason, "stop_reason": choice.get("stop_reason")}
    return {"chunk": _envelope(service, chunk, "chat.completion.chunk", [made]), "stream_state": new_state}


def _may_be_call(text: str, request: Body) -> bool:
    """The simulated model begins a call with its very first token, or does not call."""
    return bool(request.get("tools")) and request.get("tool_choice") != "none" and text.startswith("<too")


def _call_delta(
    tokenizer: Tokenizer, body: Body, before: Sequence[int], ids: Sequence[int], reason: str | None
) -> tuple[Body, str | None]:
    """The function's name once it is complete, and its arguments so far."""
    text = _parsed_text(tokenizer, ids)
    names = [tool["function"]["name"] for tool in items(mapping(body, "chat_request"), "tools")]
    name = next((name for name in names if text.startswith(call_head(name))), None)
    if name is None:
        return {}, reason
    said = tokenizer.decode(before)
    first = len(call_head(name))
    arguments = _arguments(text)[first:] if reason is None else text[first:].removesuffix(CALL_TAIL)
    told = _arguments(said)[first:]
    function: Body = {"arguments": arguments[len(told) :]}
    delta: Body = {"tool_calls": [{"index": 0, "function": function}]}
    if not said.startswith(call_head(name)):
        function["name"] = name
        call_id = f"call-{mapping(body, 'generate_chunk').get('request_id')}"
        delta["tool_calls"][0] |= {"id": call_id, "type": "function"}
    is_named = isinstance(mapping(body, "chat_request").get("tool_choice"), dict)
    return delta, "tool_calls" if reason == "stop" and not is_named else reason


def _arguments(text: str) -> str:
    """The text without a possible tail of a call, no character of which is sent before the call's end."""
    for length in range(min(len(CALL_TAIL), len(text)), 0, -1):
        if text.endswith(CALL_TAIL[:length]):
            return text[:-length]
    return text


def _choices(made: Body, may_be_empty: bool = False) -> list[Body]:
    choices = items(made, "choices")
    for choice in choices:
        ids = choice.get("token_ids") if isinstance(choice, dict) else None
        if not isinstance(ids, list) or not all(isinstance(id, int) for id in ids) or not (ids or may_be_empty):
            raise ApiError(400, "generate_response: a choice needs its token_ids", param="generate_response")
    return choices


def _parsed_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """What a parser sees: special tokens are included, because it may look for them, and so is the end of the turn."""
    return tokenizer.decode(ids) + ("<|im_end|>" if ids and ids[-1] == END else "")


def _whole_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text so far, without an incomplete character."""
    return b"".join(map(tokenizer.bytes_of, ids)).decode("utf-8", "ignore")


def _chat_logprobs(tokenizer: Tokenizer, logprobs: Any) -> Body | None:
    if not isinstance(logprobs, dict):
        return None

    def entry(token: Body) -> Body:
        data = tokenizer.bytes_of(token["token_id"])
        return {"token": data.decode("utf-8", "replace"), "logprob": token["logprob"], "bytes": list(data)}

    content = [
        {**entry(token), "top_logprobs": [entry(rival) for rival in token.get("top_logprobs") or []]}
        for token in logprobs["content"]
    ]
    return {"content": content}


def _envelope(service: EngineService, made: Body, object_name: str, choices: list[Body]) -> Body:
    return {
        "id": made.get("request_id"),
        "object": object_name,
        "created": int(service.started_at),
        "model": service.settings.model,
        "choices": choices,
        "usage": made.get("usage"),
    }
