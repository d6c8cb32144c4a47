"""SGLang's routes from tokens to text, and from text to the parts of a message (SGLang 0.5.23, srt/entrypoints)."""

from functools import partial
from typing import Any

import orjson

from engines.simulated.chat import parse_call
from engines.simulated.exchange import ApiError, Exchange, InvalidField
from engines.simulated.fields import Body, items
from engines.simulated.routes import Routes
from engines.simulated.service import EngineService
from engines.simulated.sglang_dialect import TOOL_CALL_PARSER
from engines.simulated.text import END, SYSTEM, Tokenizer, packed

_TOOLS = "Tools: "
_THINK, _END_OF_THINKING = "<think>", "</think>"


def message_routes(service: EngineService) -> Routes:
    """The table of these routes."""
    detokenize = partial(_detokenize, service)
    return {
        ("POST", "/v1/detokenize"): detokenize,
        ("POST", "/detokenize"): detokenize,
        ("POST", "/parse_function_call"): _parse_function_call,
        ("POST", "/separate_reasoning"): partial(_separate_reasoning, service),
    }


def tools_in(prompt: list[int], tokenizer: Tokenizer) -> list[Body]:
    """The tools that the template wrote at the head of a prompt: all that a model knows of them."""
    if prompt[:1] != [SYSTEM] or END not in prompt:
        return []
    text = tokenizer.decode(prompt[1 : prompt.index(END)])
    try:
        made = orjson.loads(text.removeprefix(_TOOLS)) if text.startswith(_TOOLS) else []
    except orjson.JSONDecodeError:
        return []
    return made if isinstance(made, list) else []


async def _detokenize(service: EngineService, exchange: Exchange) -> None:
    """One text, or one for each list of ids; an incomplete character becomes a replacement character."""
    body = await exchange.json()
    tokens = items(body, "tokens")
    lists: list[Any] = tokens if tokens and isinstance(tokens[0], list) else [tokens]
    for ids in lists:
        if not isinstance(ids, list) or any(isinstance(id, bool) or not isinstance(id, int) for id in ids):
            raise InvalidField("tokens", "Input should be a valid list of token ids")
        try:
            packed(ids)
        except ValueError as error:
            raise ApiError(400, f"Error decoding tokens: {error}", "DecodeError") from error
    texts = [service.tokenizer.decode(ids) for ids in lists]
    await exchange.respond_json({"text": texts if lists is tokens else texts[0]})


async def _parse_function_call(exchange: Exchange) -> None:
    """The part of a text that is not a call, and the calls; an incomplete call is text."""
    body = await exchange.json()
    text = _text(body)
    if body.get("tool_call_parser") != TOOL_CALL_PARSER:
        raise ApiError(400, f"Unsupported tool_call_parser: {body.get('tool_call_parser')}")
    said, marker, written = text.partition("<tool_call>")
    call = parse_call(marker + written) if items(body, "tools") else None
    if call is None:
        await exchange.respond_json({"normal_text": text, "calls": []})
        return
    made = {"tool_index": 0, "name": call.name, "parameters": call.arguments}
    await exchange.respond_json({"normal_text": said.strip(), "calls": [made]})


async def _separate_reasoning(service: EngineService, exchange: Exchange) -> None:
    """Like the detectors that are not forced: reasoning runs from its opening marker to its closing one, or to the
    text's end.
    """
    body = await exchange.json()
    text = _text(body)
    if body.get("reasoning_parser") != service.settings.reasoning_parser:
        raise ApiError(400, f"Unsupported model type: {body.get('reasoning_parser')}")
    reasoning = ""
    if _THINK in text:
        reasoning, _, text = text.removeprefix(_THINK).partition(_END_OF_THINKING)
    await exchange.respond_json({"reasoning_text": reasoning, "text": text})


def _text(body: Body) -> str:
    text = body.get("text")
    if not isinstance(text, str):
        raise InvalidField("text", "Input should be a valid string")
    return text
