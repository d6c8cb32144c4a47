"""Requests sent straight to an engine and through the gateway, and what must be equal in both answers.

Rules of the comparison:

1. Everything in a whole answer is compared except ids and times; a null field equals an absent one.
2. A stream is compared as the answer that a client assembles from it, and as the order in which kinds of events came.
   How many tokens one event holds, or how many were made when the first event was sent, depends on timing and is not
   compared.
3. Of an error, the status and the message are compared, without web addresses, which the gateway removes; the rest must
   be OpenAI's (or Anthropic's) form, whatever the engine sent. If the gateway refuses a request that no engine should
   see, the wording is its own (SGLang even serves a model that it does not have).
4. What an engine's prefix cache holds depends on what it served before, so each request is sent once beforehand.
"""

import re
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from tests.api.requests_table import Case

Json = dict[str, Any]
_ADDRESS = re.compile(r"\w+://[^\s'\"<>)]+")
CREATED = "cache_creation_input_tokens"
_IDS = frozenset({"id", "item_id", "call_id", "response_id", "request_id", "signature"})
_TIMES = frozenset({"created", "created_at", "completed_at"})
_WORDS = frozenset({"id", "type", "role", "name", "object", "model", "finish_reason", "call_id", "system_fingerprint"})
_KINDS = ("role", "reasoning", "content", "text", "tool_calls")  # in the order in which one choice sends them
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "invalid_request_error"}
_ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One answer: its status, and what rule 1, 2 or 3 leaves of its body."""

    status: int
    content: Any
    kinds: list[str]
    message: str | None = None


async def compare(
    straight: httpx.AsyncClient, through: httpx.AsyncClient, case: Case, untold: frozenset[str] = frozenset()
) -> list[str]:
    """The differences that the rules do not allow; empty if there are none.

    Args:
        untold: fields that the gateway may omit. If it omits tokens that were written to the cache (`CREATED`), they
            are counted among those that were not read from it.
    """
    await exchange(straight, case)
    direct, passed = await exchange(straight, case), await exchange(through, case)
    _leave_out(untold, direct.content, passed.content)
    return [f"{case.name}: {difference}" for difference in _differences(direct, passed, case)]


def _leave_out(names: frozenset[str], direct: Any, passed: Any) -> None:
    if isinstance(direct, list) and isinstance(passed, list):
        for before, after in zip(direct, passed, strict=False):
            _leave_out(names, before, after)
    if not isinstance(direct, dict) or not isinstance(passed, dict):
        return
    for name in names - passed.keys():
        value = direct.pop(name, None)
        if name == CREATED and value is not None:
            direct["input_tokens"] += value
    for name in direct.keys() & passed.keys():
        _leave_out(names, direct[name], passed[name])


async def exchange(client: httpx.AsyncClient, case: Case) -> Exchanged:
    """Send a request and read its answer."""
    raw = case.body if isinstance(case.body, bytes) else orjson.dumps(case.body)
    answer = await client.post(case.path, content=raw, headers={"content-type": "application/json"})
    if answer.status_code != 200:
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        body = answer.json() if is_json else answer.text  # a web framework's own 500 is plain text
        return Exchanged(answer.status_code, body, [], message_of(body))
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = events_of(answer.text)
        return Exchanged(200, normalised(assembled(events)), kinds_of(events))
    return Exchanged(200, normalised(answer.json()), [])


def _differences(direct: Exchanged, passed: Exchanged, case: Case) -> list[str]:
    if case.refused_with is not None:
        found = [] if passed.status == case.refused_with else [f"not refused: {passed}"]
        found += [] if direct.status in (200, case.refused_with) else [f"the engine answers {direct.status}"]
        return found + error_defects(passed.status, passed.content, case.path)
    if direct.status != passed.status:
        return [f"status {direct.status} became {passed.status}: {passed.message} (was: {direct.message})"]
    if passed.status != 200:
        found = [f"message {direct.message!r} became {passed.message!r}"] if direct.message != passed.message else []
        return found + error_defects(passed.status, passed.content, case.path)
    pairs = (("content", direct.content, passed.content), ("events", direct.kinds, passed.kinds))
    return [f"{name} {before}\nbecame {after}" for name, before, after in pairs if before != after]


def error_defects(status: int, body: Any, path: str) -> list[str]:
    """What is wrong with the form of an error from the gateway."""
    is_anthropic = path.startswith("/v1/messages")
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return [f"no error object: {body}"]
    known, default = (_ANTHROPIC_TYPES if is_anthropic else _OPENAI_TYPES), "invalid_request_error"
    defects = [] if error.get("type") == known.get(status, default) or status >= 500 else [f"type {error.get('type')}"]
    if is_anthropic:
        return defects if body.get("type") == "error" else [*defects, "not Anthropic's frame"]
    if set(error) != {"message", "type", "param", "code"}:
        defects.append(f"fields {sorted(error)}")
    odd = [name for name in ("param", "code") if not isinstance(error.get(name), str | None)]
    return defects + [f"{name} is {error[name]!r}" for name in odd]


def message_of(body: Any) -> str | None:
    """An error's message in any of the forms that engines use."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return _ADDRESS.sub("[address]", message) if isinstance(message, str) else None


def normalised(value: Any) -> Any:
    """Rule 1: ids and times are replaced by their names, and null fields are dropped."""
    if isinstance(value, list):
        return [normalised(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: f"<{name}>" if name in _IDS or name in _TIMES else normalised(item)
        for name, item in value.items()
        if item is not None
    }


def events_of(text: str) -> list[tuple[str, Any]]:
    """Name and JSON of each event with data; `[DONE]` as that text, comments left out."""
    events: list[tuple[str, Any]] = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        name, data = "", ""
        for line in block.split("\n"):  # a text may contain other kinds of line ends
            if line.startswith("event:"):
                name = line[6:].strip()
            elif line.startswith("data:"):
                data += line[5:].removeprefix(" ")
        if data:
            events.append((name, data if data == "[DONE]" else orjson.loads(data)))
    return events


def assembled(events: list[tuple[str, Any]]) -> Any:
    """Rule 2: all events in one. Deltas of the same place are joined; other events stand for themselves."""
    whole: Json = {}
    for name, data in events:
        if not isinstance(data, dict):
            continue
        if not name:  # chat and completions
            whole = merged(whole, data)
            continue
        place = f"{name} {data.get('output_index', '')} {data.get('content_index', '')} {data.get('index', '')}"
        data = {key: item for key, item in data.items() if key != "sequence_number"}
        whole[place] = merged(whole[place], data) if place in whole and name.endswith("delta") else data
        if name == "message_start":
            data["message"]["usage"].pop("output_tokens", None)
    return whole


def merged(old: Any, new: Any, name: str = "") -> Any:
    """Two chunks as one: texts and lists are joined, items are matched by `index`; the later number counts."""
    if new is None:
        return old
    if old is None and isinstance(new, dict):
        return {key: merged(None, item, key) for key, item in new.items()}
    if old is None:  # one chunk may name an index twice
        return merged([], new, name) if isinstance(new, list) else new
    if isinstance(old, str) and isinstance(new, str) and name not in _WORDS:
        return old + new
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: merged(old.get(key), new.get(key), key) for key in [*old, *(key for key in new if key not in old)]}
    if isinstance(old, list) and isinstance(new, list):
        if all(isinstance(item, dict) and "index" in item for item in old + new):
            by_index: dict[int, Any] = {}
            for item in old + new:
                by_index[item["index"]] = merged(by_index.get(item["index"]), item)
            return [by_index[index] for index in sorted(by_index)]
        return old + new
    return new


def kinds_of(events: list[tuple[str, Any]]) -> list[str]:
    """The kinds of events in order, without repetitions; several choices come one after the other.

    An engine that makes tokens faster than it sends events puts several into one event; this changes nothing here.
    """
    lanes: dict[int, list[str]] = {}
    for name, data in events:
        if isinstance(data, dict) and isinstance(data.get("choices"), list):
            for choice in data["choices"]:
                lane = lanes.setdefault(choice.get("index", 0), [])
                delta = choice.get("delta", choice)
                lane += [kind for kind in _KINDS if delta.get(kind)]
                lane += ["finish"] if choice.get("finish_reason") else []
            if data["choices"] and data.get("usage"):
                lanes.setdefault(999, []).append("usage with a choice")
            if not data["choices"]:
                lanes.setdefault(1_000, []).append("usage event")
        else:
            lanes.setdefault(1_001, []).append(name or str(data))
    kinds = []
    for index in sorted(lanes):
        lane = lanes[index]
        kinds += [f"{index}:{kind}" for place, kind in enumerate(lane) if kind not in lane[:place]]
    return kinds
