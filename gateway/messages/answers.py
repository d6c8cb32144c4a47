"""Reads an engine's answer into OpenAI's contract: finish reasons, usage, the message itself.

Rules: `abort` and `error` are not ways to finish but faults, to retry elsewhere or to report (vLLM ends a paused or
aborted request with status 200 and `abort`). Any other reason outside OpenAI's set becomes the nearest one in it. A
body is changed only where it breaks the contract, and is otherwise the engine's own bytes.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeGuard

import orjson

from gateway.http.errors import Api, ApiError, api_error, engine_error
from gateway.messages.short_answers import MAX_COUNT, Counts, read_short
from scheduling.values import value_class

Content = dict[str, Any] | str | None
_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
_FAULTS = frozenset({"error", "failed"})
_REASON_NAME = b'"finish_reason"'
_REASON = re.compile(rb': ?"([^"]*)"')
_USAGE_NAME = b'"usage"'
_ID_TEXT = "token_id:"
# What is longer is searched in less time than it takes to pass by all that is not read.
_SHORT_BYTES = 4_096
_USAGE = re.compile(rb": ?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")


ABORTED = api_error(503, "The engine aborted the request before it was finished.", "engine_aborted")


@value_class(frozen=True, slots=True)
class Usage:
    """Tokens of one turn, each at least 0. `prompt_tokens` includes the cached ones; `cached_tokens` is None if
    unknown.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@value_class(frozen=True, slots=True)
class Answer:
    """A whole answer: what the client gets, or the error that it gets instead."""

    body: bytes
    finish_reason: str | None = None
    usage: Usage | None = None
    error: ApiError | None = None


def read_answer(api: Api, body: bytes, may_be_cut: bool = False) -> Answer:
    """Read a whole 200 answer. Cost: a long one in OpenAI's form is searched, not parsed: 50 us for 200 KB.

    Args:
        may_be_cut: its length was not told, so only parsing it shows whether it ends where it should.
    """
    if api in ("chat", "completions", "generate") and not may_be_cut:
        short = read_short(body) if len(body) <= _SHORT_BYTES else None
        if short is not None and short.choices and _REASONS.issuperset([one.finish_reason for one in short.choices]):
            return Answer(body, short.choices[0].finish_reason, _usage_in(short.usage))
        reasons = _reasons(body)
        # An engine that breaks JSON has cut it or put something before it; the part inside was encoded as a whole.
        if reasons and _REASONS.issuperset(reasons) and body.lstrip()[:1] == b"{" and body.rstrip()[-1:] == b"}":
            return Answer(body, reasons[0], _usage_at_end(body))
    if api == "other":
        return Answer(body)
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    if api == "generate" and (metas := metas_of(parsed)):
        return _read_metas(body, metas)
    if not isinstance(parsed, dict):
        return Answer(body, error=api_error(502, "The engine's answer is not a JSON object.", "engine_error"))
    return _read_parsed(api, body, parsed)


def metas_of(parsed: object) -> list[dict[str, Any]]:
    """The metadata of each output in an answer of SGLang's own route; empty for an answer of another form."""
    outputs = dicts(parsed if isinstance(parsed, list) else [parsed])
    return [meta for output in outputs if isinstance(meta := output.get("meta_info"), dict)]


def reason_of_meta(meta: dict[str, Any]) -> str | None:
    """How an output finished; None while it has not."""
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    return kind if isinstance(kind, str) else None


def fault_of_meta(meta: dict[str, Any]) -> ApiError | None:
    """The error with which an output ended, if it did; SGLang gives an abort the status that a whole answer has."""
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and isinstance(status := reason.get("status_code"), int):
        return engine_error(status, reason)
    return fault_of(reason_of_meta(meta))


def fault_of(reason: object) -> ApiError | None:
    """The error that a finish reason or status stands for; None if it is a way to finish."""
    if reason == "abort" or reason == "cancelled":
        return ABORTED
    if isinstance(reason, str) and reason in _FAULTS:
        return api_error(500, "The engine failed while it generated.", "engine_error")
    return None


def openai_reason(reason: str) -> str:
    """The finish reason in OpenAI's set: `repetition` and any other end that an engine names is `stop`."""
    return reason if reason in _REASONS else "stop"


def usage_of(usage: object) -> Usage | None:
    """A `usage` object of any API; None if it is not one. Anthropic counts cached tokens separately."""
    if not isinstance(usage, dict):
        return None
    if _is_count(prompt := usage.get("prompt_tokens")):
        details = usage.get("prompt_tokens_details")
        return Usage(prompt, _count(usage, "completion_tokens"), _cached(details))
    if not _is_count(prompt := usage.get("input_tokens")):
        return None
    if "input_tokens_details" in usage:
        return Usage(prompt, _count(usage, "output_tokens"), _cached(usage["input_tokens_details"]))
    read = usage.get("cache_read_input_tokens")
    prompt += _count(usage, "cache_read_input_tokens") + _count(usage, "cache_creation_input_tokens")
    return Usage(prompt, _count(usage, "output_tokens"), read if _is_count(read) else None)


def usage_of_metas(metas: list[dict[str, Any]]) -> Usage | None:
    """The usage of all outputs together."""
    return total_of([usage for meta in metas if (usage := usage_of_meta(meta))])


def usage_of_meta(meta: dict[str, Any]) -> Usage | None:
    """The usage of one output."""
    return usage_of({**meta, "prompt_tokens_details": {"cached_tokens": meta.get("cached_tokens")}})


def total_of(usages: Sequence[Usage]) -> Usage | None:
    """The first output's prompt, which the others share, and the total of tokens made."""
    if not usages:
        return None
    made = sum(usage.completion_tokens for usage in usages)
    return Usage(usages[0].prompt_tokens, made, usages[0].cached_tokens)


def content_of(api: Api, body: bytes) -> Content:
    """The answer that a client will send back with its next turn, from a whole body.

    Returns: the first choice as an assistant message (chat, messages; `with_tokens` if they are known), as text, or as
    `{"text", "token_ids"}` if the tokens are known (completions, generate), or as `{"id", "output"}` (responses); None
    if there is none. `Conversations.remember` takes it.
    """
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return content_of_parsed(api, parsed)


def content_of_parsed(api: Api, parsed: Any) -> Content:
    """The same from a body that is parsed already."""
    if api == "generate" and isinstance(parsed, list) and parsed:
        parsed = parsed[0]
    if not isinstance(parsed, dict):
        return None
    if api == "generate" and "meta_info" in parsed:
        return made_by(parsed.get("text"), parsed.get("output_ids"))
    if api == "responses":
        output = parsed.get("output")
        return {"id": parsed.get("id"), "output": output} if isinstance(output, list) else None
    if api == "messages":
        return {"role": "assistant", "content": parsed["content"]} if "content" in parsed else None
    for choice in dicts(parsed.get("choices")):
        if choice.get("index", 0) == 0:
            if api != "chat":
                return made_by(choice.get("text"), ids_of(choice))
            message = choice.get("message")
            if not isinstance(message, dict):
                return None
            return with_tokens(message, parsed.get("prompt_token_ids"), ids_of(choice))
    return None


def with_tokens(message: dict[str, Any], prompt_ids: object, ids: list[Any]) -> dict[str, Any]:
    """A chat's answer, with the tokens of its prompt and its own as `tokens` if the client was told both (vLLM's
    `return_token_ids`): it may go on with them.
    """
    return message | {"tokens": prompt_ids + ids} if isinstance(prompt_ids, list) and ids else message


def ids_of(choice: dict[str, Any]) -> list[Any]:
    """The tokens of a choice, or of one event of it: in their own field, or with vLLM's
    `return_tokens_as_token_ids` in place of their texts beside the log-probabilities; empty if they are in neither.
    """
    ids = choice.get("token_ids")
    if isinstance(ids, list) and ids:
        return ids
    logprobs = choice.get("logprobs")
    texts = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.startswith(_ID_TEXT) for text in texts):
        return []
    numbers = [text[len(_ID_TEXT) :] for text in texts]
    return list(map(int, numbers)) if all(map(str.isdecimal, numbers)) else []


def made_by(text: object, token_ids: object) -> Content:
    """What a completion made: its text, with the tokens if they are known."""
    said = text if isinstance(text, str) else ""
    if isinstance(token_ids, list) and token_ids:
        return {"text": said, "token_ids": token_ids}
    return said or None


def dicts(value: object) -> list[dict[str, Any]]:
    """The objects in a list; empty if it is not a list, because engines are not trusted to keep to types."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _reasons(body: bytes) -> list[str]:
    """Every choice's finish reason. `find` skips long texts and log-probabilities faster than any pattern."""
    reasons = []
    start = body.find(_REASON_NAME)
    while start >= 0:
        start += len(_REASON_NAME)
        if match := _REASON.match(body, start):
            reasons.append(match[1].decode("utf-8", "replace"))
        start = body.find(_REASON_NAME, start)
    return reasons


def _usage_in(counts: Counts | None) -> Usage | None:
    if counts is None:
        return None
    details = counts.prompt_tokens_details
    return Usage(counts.prompt_tokens, counts.completion_tokens, None if details is None else details.cached_tokens)


def _read_parsed(api: Api, body: bytes, parsed: dict[str, Any]) -> Answer:
    if parsed.get("error") or parsed.get("object") == "error":
        return Answer(body, error=engine_error(200, parsed))
    usage = usage_of(parsed.get("usage"))
    if api == "messages":
        reason = parsed.get("stop_reason")
        # vLLM's messages have no word for an abort (0.33, entrypoints/anthropic/serving.py).
        return Answer(body, reason, usage, ABORTED if reason is None else fault_of(reason))
    if api == "responses":
        status = parsed.get("status")
        return Answer(body, status, usage, fault_of(status))
    changed, first = False, None
    for choice in dicts(parsed.get("choices")):
        reason = choice.get("finish_reason")
        if fault := fault_of(reason):
            return Answer(body, None, usage, fault)
        if isinstance(reason, str):
            choice["finish_reason"] = openai_reason(reason)
            changed = changed or choice["finish_reason"] != reason
            first = first or choice["finish_reason"]
    return Answer(orjson.dumps(parsed) if changed else body, first, usage)


def _read_metas(body: bytes, metas: list[dict[str, Any]]) -> Answer:
    faults = [fault for meta in metas if (fault := fault_of_meta(meta))]
    if faults:
        return Answer(body, None, usage_of_metas(metas), faults[0])
    return Answer(body, reason_of_meta(metas[0]), usage_of_metas(metas))


def _usage_at_end(body: bytes) -> Usage | None:
    """The usage of a chat or completions body. A quoted name cannot occur unescaped within a JSON string."""
    start = body.rfind(_USAGE_NAME)
    match = _USAGE.match(body, start + len(_USAGE_NAME)) if start >= 0 else None
    try:
        return usage_of(orjson.loads(match[1])) if match else None
    except orjson.JSONDecodeError:
        return None


def _count(usage: dict[str, Any], name: str) -> int:
    number = usage.get(name)
    return number if _is_count(number) else 0


def _cached(details: object) -> int | None:
    number = details.get("cached_tokens") if isinstance(details, dict) else None
    return number if _is_count(number) else None


def _is_count(number: object) -> TypeGuard[int]:
    """Whether it can be a number of tokens: sums of these fit into the 64 bits that JSON and stores hold."""
    return type(number) is int and 0 <= number < MAX_COUNT
