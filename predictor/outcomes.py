"""Outcomes of tool calls, read from the messages themselves, each as `tool:size:status`.

It reads OpenAI chat (`tool_calls` and role `tool`), OpenAI Responses items (`function_call`, `function_call_output` and
similar ones) and Anthropic messages (`tool_use`, `tool_result`). Rules:
- Agents that speak plain text send an observation as a user message. It counts as the tool `user` if the turn has no
  other result: a reminder beside a tool's result is not a result.
- Tools that ran inside the engine's own answer are not included: no gap between turns belongs to them.
- predictor/status.py decides what failed.
- A malformed message is skipped. Nothing here raises.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from predictor.status import status_of

UNKNOWN_TOOL = "?"
USER = "user"

# Characters from which a result is medium, and large: Libra's defaults.
_MEDIUM_FROM, _LARGE_FROM = 500, 5_000
# What an image counts as: about 750 tokens, whatever the length of its encoding.
_IMAGE_CHARACTERS = 3_000
# A tool's name comes from a client, so it is cut: no chain of outcomes may grow without limit.
_MAX_NAME = 48
_NAMED_KINDS = ("function_call_output", "custom_tool_call_output")


def outcomes(messages: object) -> tuple[str, ...]:
    """Every outcome of a conversation, oldest first.

    Args:
        messages: the parsed `messages` or `input` of a request's body.

    Cost: linear in the messages; only the ends of a result's text are searched, and JSON is parsed up to 64 KB.
    """
    return tuple(_read(messages)) if isinstance(messages, Sequence) else ()


def outcome(tool: object, characters: int, status: str) -> str:
    """One outcome from its parts."""
    name = tool.strip().replace(":", ".")[:_MAX_NAME] if isinstance(tool, str) else ""
    if characters >= _LARGE_FROM:
        size = "large"
    elif characters >= _MEDIUM_FROM:
        size = "medium"
    else:
        size = "small"
    return f"{name or UNKNOWN_TOOL}:{size}:{status}"


@dataclass(frozen=True, slots=True)
class _Result:
    call_id: object
    name: object
    content: object
    is_error: bool


def _read(messages: Sequence[object]) -> Iterator[str]:
    names: dict[str, object] = {}
    results: list[_Result] = []
    said: object = None
    is_answered = False
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        if _is_answer(message):
            yield from _turn(results, said, names)
            results, said, is_answered = [], None, True
            names.update(_calls(message))
        elif found := list(_results(message)):
            results += found
        elif is_answered and message.get("role") == "user":
            said = message.get("content")
    yield from _turn(results, said, names)


def _turn(results: list[_Result], said: object, names: Mapping[str, object]) -> Iterator[str]:
    """The outcomes between two answers."""
    if not results and said:
        results = [_Result(None, USER, said, is_error=False)]
    for result in results:
        name = names.get(result.call_id) if isinstance(result.call_id, str) else None
        text, characters = _text(result.content)
        yield outcome(name or result.name, characters, status_of(text, result.is_error))


def _is_answer(message: Mapping[str, object]) -> bool:
    if message.get("role") == "assistant":
        return True
    kind = message.get("type")
    return isinstance(kind, str) and (kind.endswith("_call") or kind in ("reasoning", "item_reference"))


def _calls(answer: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """(call id, tool) of each call in an answer."""
    if isinstance(call_id := answer.get("call_id"), str):
        yield call_id, answer.get("name")
    for call in _mappings(answer.get("tool_calls")):
        function = call.get("function") or call.get("custom")
        if isinstance(call_id := call.get("id"), str) and isinstance(function, Mapping):
            yield call_id, function.get("name")
    for part in _mappings(answer.get("content")):
        if part.get("type") == "tool_use" and isinstance(call_id := part.get("id"), str):
            yield call_id, part.get("name")


def _results(message: Mapping[str, object]) -> Iterator[_Result]:
    """The tool results in a message that is not an answer."""
    kind, role = message.get("type"), message.get("role")
    if role in ("tool", "function"):
        # LangChain's messages have `status: error`.
        failed = message.get("is_error") is True or message.get("status") == "error"
        yield _Result(message.get("tool_call_id"), message.get("name"), message.get("content"), failed)
    elif isinstance(kind, str) and kind.endswith("_call_output"):
        failed = message.get("status") in ("failed", "incomplete")
        # The API's own shell or editor has no name but its kind.
        name = None if kind in _NAMED_KINDS else kind.removesuffix("_call_output")
        yield _Result(message.get("call_id"), name, message.get("output"), failed)
    else:
        for part in _mappings(message.get("content")):
            if part.get("type") == "tool_result":
                yield _Result(part.get("tool_use_id"), None, part.get("content"), part.get("is_error") is True)


def _text(content: object) -> tuple[object, int]:
    """A result as `status_of` reads it (its text, or the data itself if it is not text), and its length in
    characters."""
    if isinstance(content, str):
        return content, len(content)
    if isinstance(content, Mapping):
        return content, sum(len(value) for value in content.values() if isinstance(value, str))
    parts = list(_mappings(content))
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    images = sum("image" in str(part.get("type")) for part in parts)
    characters = images * _IMAGE_CHARACTERS
    if not texts and not images and parts:
        # A shell's output as separate items (Responses: `shell_call_output`).
        return parts, sum(len(value) for part in parts for value in part.values() if isinstance(value, str))
    text = "\n".join(map(str, texts))
    return text, characters + len(text)


def _mappings(value: object) -> Iterator[Mapping[str, object]]:
    if isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, Mapping))
