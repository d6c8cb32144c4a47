"""What a finished stream said, put together from its events."""

from collections.abc import Iterable
from typing import Any

import orjson

from gateway.http.errors import Api
from gateway.http.sse import data_of, split_events
from gateway.messages.answers import Content, content_of_parsed, dicts, ids_of, made_by, metas_of, with_tokens
from gateway.messages.streams import ENDS_OF_RESPONSES


def content_of_stream(api: Api, blocks: Iterable[bytes]) -> Content:
    """As `answers.content_of`, from the events of a finished stream; None if an engine broke the format."""
    try:
        return _content(api, blocks)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def _content(api: Api, blocks: Iterable[bytes]) -> Content:
    parsed = [orjson.loads(data) for data in map(data_of, split_events(b"".join(blocks))) if data[:1] == b"{"]
    match api:
        case "chat":
            return _chat_message(parsed)
        case "generate" if any(map(metas_of, parsed)):
            return _sglang_output(parsed)
        case "completions" | "generate":
            texts: list[str] = []
            ids: list[int] = []
            for choice in _choices(parsed):
                texts.append(str(choice.get("text") or ""))
                ids += ids_of(choice)
            return made_by("".join(texts), ids)
        case "messages":
            return _anthropic_message(parsed)
        case "responses":
            ends = [event.get("response") for event in parsed if event.get("type") in ENDS_OF_RESPONSES]
            return content_of_parsed(api, ends[-1]) if ends else None
        case _:
            return None


def _sglang_output(events: list[dict[str, Any]]) -> Content:
    """Each event repeats everything before it, unless the server was told to send only what is new."""
    first = [event for event in events if event.get("index", 0) == 0 and "meta_info" in event]
    last = first[-1]
    num_made = len(last["output_ids"])
    if num_made >= last["meta_info"]["completion_tokens"]:
        return made_by(last.get("text"), last["output_ids"])
    ids = [id for event in first for id in event["output_ids"]]
    return made_by("".join([event.get("text") or "" for event in first]), ids)


def _choices(events: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    return (choice for event in events for choice in dicts(event.get("choices")) if choice.get("index", 0) == 0)


def _chat_message(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    content: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    ids: list[int] = []
    seen = False
    for choice in _choices(events):
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            continue
        seen = True
        content.append(delta.get("content") or "")
        ids += ids_of(choice)
        thoughts.append(delta.get("reasoning") or delta.get("reasoning_content") or "")
        for part in dicts(delta.get("tool_calls")):
            call = calls.setdefault(part.get("index") or 0, {"id": None, "name": "", "arguments": ""})
            function = part.get("function") or {}
            call["id"] = part.get("id") or call["id"]
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""
    if not seen:
        return None
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if reasoning := "".join(thoughts):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.pop("id"), "type": "function", "function": call} for _, call in sorted(calls.items())
        ]
    return with_tokens(message, events[0].get("prompt_token_ids"), ids)


def _anthropic_message(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    blocks: dict[int, dict[str, Any]] = {}
    arguments: dict[int, str] = {}
    for event in events:
        index, delta = event.get("index", 0), event.get("delta") or {}
        match event.get("type"), delta.get("type"):
            case "content_block_start", _:
                blocks[index] = dict(event.get("content_block") or {})
            case "content_block_delta", "text_delta":
                block = blocks.setdefault(index, {"type": "text"})
                block["text"] = block.get("text", "") + delta.get("text", "")
            case "content_block_delta", "thinking_delta":
                block = blocks.setdefault(index, {"type": "thinking"})
                block["thinking"] = block.get("thinking", "") + delta.get("thinking", "")
            case "content_block_delta", "input_json_delta":
                arguments[index] = arguments.get(index, "") + delta.get("partial_json", "")
    for index, text in arguments.items():
        if text and index in blocks:
            blocks[index]["input"] = orjson.loads(text)
    return {"role": "assistant", "content": [blocks[index] for index in sorted(blocks)]} if blocks else None
