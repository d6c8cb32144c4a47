"""Reduces a conversation to digests that do not depend on how a client spells it.

A request is read as messages. Each is normalised (a string and a list of text parts are the same text, None is "", tool
arguments are compared as JSON) and hashed into a chain, and the chain's digest is noted after every answer. Left out is
what clients drop or change between turns: thoughts, cache marks, item ids, and whitespace at the ends. An answer that
has its thoughts gets a second digest, which covers them too. This works for chat, Anthropic messages and responses;
plain completions have no messages and are compared as text (`gateway/messages/conversations.py`).

Cost: linear. A digest that identifies a trajectory is SHA-256, because a client that found a collision could continue
another client's trajectory (0.9 ms for 1 MB, a third of BLAKE2b's time). Within a trajectory it is XXH3 (0.03 ms); so
is a prompt's, which only groups.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol, Self

import orjson
from xxhash import xxh3_128, xxh3_128_hexdigest

_SHORT = 65_536  # characters
DIGEST_LENGTH = 32  # hexadecimal digits kept: 128 bits, ample for a table of some million conversations

# Tuples, not sets: a body's `type` may be a list, which cannot be looked up in a set.
_UNSAID = ("thinking", "redacted_thinking", "reasoning")
_CALLS = ("function_call", "tool_use", "custom_tool_call")
_PREAMBLES = ("tools", "functions", "system", "instructions")
# The fields of completions, and of vLLM's and SGLang's token routes.
_PROMPTS = ("prompt", "token_ids", "input_ids", "text")
_SYSTEM_ROLES = ("system", "developer")
_SYSTEM_SPELLED = tuple(f"{len(role)}:{role}" for role in _SYSTEM_ROLES)  # as `_said` begins


class History:
    """A request's conversation, read once for everything that is asked of it.

    Args:
        hasher: a new one; XXH3 for digests that are compared within a trajectory only.

    Attributes:
        digests: the chain's digest after each answer, oldest first.
        asked: the chain's digest before each answer but the first, with how many of `digests` came before it.
        num_calls: tool calls in a chat's answers.
        with_thoughts: the second digest of each answer that has its thoughts, by the first.
    """

    def __init__(self, body: Mapping[str, Any], hasher: "Hasher | None" = None) -> None:
        self.digests: list[str] = []
        self.asked: list[tuple[str, int]] = []
        self.num_calls = _num_calls(_conversation(body))
        self.with_thoughts: dict[str, str] = {}
        self._hasher: Hasher = hasher or sha256()
        self._was_answered = True
        self._read(_messages(body))

    def continued(self, messages: Sequence[object]) -> "History":
        """The history of a request that has these messages too, after all others."""
        longer = History({}, self._hasher.copy())
        longer.digests, longer.asked = self.digests.copy(), self.asked.copy()
        longer.num_calls = self.num_calls + _num_calls(messages)
        longer.with_thoughts = self.with_thoughts.copy()
        longer._was_answered = self._was_answered
        longer._read(map(_message, messages))
        return longer

    def _read(self, messages: Iterable["_Normalised"]) -> None:
        said: list[str] = []
        for answered, pieces, thoughts in messages:
            if not pieces:
                continue
            if answered and not self._was_answered and self.digests:
                _feed(self._hasher, said)
                said = []
                self.asked.append((self._hasher.hexdigest()[:DIGEST_LENGTH], len(self.digests)))
            said += pieces
            if answered:
                _feed(self._hasher, said)
                said = []
                self.digests.append(self._hasher.hexdigest()[:DIGEST_LENGTH])
                if thoughts:
                    self.with_thoughts[self.digests[-1]] = _with_thoughts(self._hasher, thoughts)
            self._was_answered = answered
        _feed(self._hasher, said)

    def digest(self, answer: object = ()) -> str:
        """The chain's digest after its last message, and after an answer to it: a message, or output items."""
        return self.digests_of(answer)[0]

    def digests_of(self, answer: object) -> tuple[str, ...]:
        """The chain's digest after an answer, and the one with the answer's thoughts if it has them."""
        hasher, thoughts = self._hasher.copy(), ""
        for message in answer if isinstance(answer, list | tuple) else [answer]:
            _, pieces, thoughts = _message(message)
            _feed(hasher, pieces)
        digest = hasher.hexdigest()[:DIGEST_LENGTH]
        return (digest, _with_thoughts(hasher, thoughts)) if thoughts else (digest,)


def whole_answer(
    body: Mapping[str, Any], history: History, answer: Any, new_hasher: "Callable[[], Hasher]"
) -> tuple[History, Any]:
    """A request's history and its answer as its client will send them with its next turn.

    If the request has the beginning of the answer (`continue_final_message`), its client makes one message of both.

    Args:
        history: of the body.
        answer: a message; others are returned as they are.
        new_hasher: makes one as `history` has.
    """
    messages = body.get("messages") if body.get("continue_final_message") else None
    *before, begun = messages if isinstance(messages, list) and messages else [None]
    if not isinstance(begun, dict) or begun.get("role") != "assistant" or not isinstance(answer, dict):
        return history, answer
    preamble = {name: body.get(name) for name in ("system", "instructions")}
    content = _text(begun.get("content")) + _text(answer.get("content"))
    return History({**preamble, "messages": before}, new_hasher()), {**begun, **answer, "content": content}


def beginnings_of(body: Mapping[str, Any]) -> list[tuple[str, int]]:
    """What precedes each answer, oldest first, and everything; for a completion, its prompt.

    Returns:
        For each its digest, and its length in characters without the system prompt that it begins with.
    """
    hasher, beginnings, length, was_answered = xxh3_128(), [], 0, False
    prompt = prompt_of(body)
    if prompt is not None:
        said = spelled(prompt) or _json(prompt).encode()
        hasher.update(said)
        length = len(said)
    for answered, pieces, _ in _messages(body):
        if not pieces:
            continue
        if answered and not was_answered:
            beginnings.append((hasher.hexdigest(), length))
        num_fed = _feed(hasher, pieces)
        if length or not pieces[0].startswith(_SYSTEM_SPELLED):
            length += num_fed
        was_answered = answered
    return [*beginnings, (hasher.hexdigest(), length)]


def prompt_of(body: Mapping[str, Any]) -> object:
    """The prompt of a request without messages: text or tokens, in any API's field; else None."""
    if "messages" in body or "input" in body:
        return None
    return next((body[name] for name in _PROMPTS if body.get(name) is not None), None)


def spelled(said: object) -> bytes | None:
    """Text or token ids as bytes, so that a prefix stays a prefix; None for anything else."""
    if isinstance(said, str):
        return said.encode("utf-8", "replace")
    if not isinstance(said, list) or not all(type(id) is int for id in said):
        return None
    try:
        return b"\0" + orjson.dumps(said)[1:-1] + b"," if said else b"\0"
    except orjson.JSONEncodeError:
        return None


def preamble_of(body: Mapping[str, Any]) -> tuple[str, int]:
    """The preamble of a prompt, with which prompts of other groups begin too: its tools, and the system prompt.

    Returns:
        Its digest as spelled, because clients of one kind spell it alike, and how many of the body's bytes it takes.
        ("", 0) if there is none, or it is nested deeper than engines accept.
    """
    said = [body[name] for name in _PREAMBLES if body.get(name)]
    messages = _conversation(body)
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict) or message.get("role") not in _SYSTEM_ROLES:
            break
        said.append(message)
    if not said:
        return "", 0
    try:
        spelled = orjson.dumps(said)
    except orjson.JSONEncodeError:
        return "", 0
    return xxh3_128_hexdigest(spelled), len(spelled)


class Hasher(Protocol):
    """SHA-256, or XXH3."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def copy(self) -> Self: ...

    def hexdigest(self) -> str: ...


_Normalised = tuple[bool, Sequence[str], str]
"""Whether it is an answer, its normalised pieces, its thoughts. Without pieces it is not part of the conversation."""


def _with_thoughts(hasher: Hasher, thoughts: str) -> str:
    """The second digest of an answer that was just hashed."""
    hasher = hasher.copy()
    _feed(hasher, ("thoughts", _sized(thoughts)))  # no message begins with a letter
    return hasher.hexdigest()[:DIGEST_LENGTH]


def _feed(hasher: Hasher, pieces: Sequence[str]) -> int:
    """Returns: the number of characters."""
    length = sum(map(len, pieces))
    # Calling it for many short pieces costs more than joining them; a copy of a megabyte costs 0.1 ms.
    if length < _SHORT:
        pieces = ("".join(pieces),)
    for piece in pieces:
        hasher.update(piece.encode("utf-8", "replace"))
    return length


def _conversation(body: Mapping[str, Any]) -> object:
    messages = body.get("messages")
    return body.get("input") if messages is None else messages


def _messages(body: Mapping[str, Any]) -> Iterator[_Normalised]:
    """Each message; a separate system prompt comes first."""
    messages = _conversation(body)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if system := body.get("system") or body.get("instructions"):
        yield False, _said("system", _text(system).strip()), ""
    yield from map(_message, messages if isinstance(messages, list) else ())


def _message(message: object) -> _Normalised:
    """One message or output item.

    Every text is preceded by its length, so that none can pass for another's structure.
    """
    if not isinstance(message, dict):
        return False, (_sized(_json(message)),), ""
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and isinstance(role, str) and isinstance(content, str) and role != "assistant":
        return False, _said(role, content.strip()), ""  # the form of most messages; equivalent to the code below
    kind = message.get("type")
    if kind in _UNSAID:
        return False, (), ""
    if kind in _CALLS:
        call_id, name = message.get("call_id") or message.get("id"), message.get("name")
        return True, (_call(call_id, name, _arguments_of(message)),), ""
    if role is None:
        kept = {key: value for key, value in message.items() if key not in ("id", "status", "cache_control")}
        return False, (_sized(_json(kept)),), ""
    answered, thoughts = role == "assistant", ""
    if answered and (len(message) > 2 or not isinstance(content, str)):
        thoughts = _thoughts(message)
    content = _text(content)
    if answered and "</think>" in content:
        # Reasoning that the engine left in the text; most agents remove it before they send the answer back.
        thoughts, _, content = content.rpartition("</think>")
    said, text = _said(str(role), content.strip()), ""
    if "tool_call_id" in message:
        text = _sized(str(message["tool_call_id"]))
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                text += _call(call.get("id"), function.get("name"), function.get("arguments"))
            else:
                text += _sized(_json(call))
    return answered, (*said, text), thoughts


def _thoughts(answer: dict[str, Any]) -> str:
    """What stands beside an answer's text: in a field of its own, or in Anthropic's blocks."""
    thoughts = answer.get("reasoning") or answer.get("reasoning_content")
    if not thoughts and isinstance(content := answer.get("content"), list):
        blocks = [part for part in content if isinstance(part, dict) and part.get("type") == "thinking"]
        thoughts = "".join([str(block.get("thinking")) for block in blocks])
    return thoughts if isinstance(thoughts, str) else ""


def _num_calls(messages: object) -> int:
    answers = messages if isinstance(messages, list) else ()
    calls = (
        answer.get("tool_calls") for answer in answers if isinstance(answer, dict) and answer.get("role") == "assistant"
    )
    return sum(len(its_calls) for its_calls in calls if isinstance(its_calls, list))


def _said(role: str, text: str) -> tuple[str, str]:
    # A long text is not copied just to follow its length.
    return f"{len(role)}:{role}{len(text)}:", text


def _text(content: object, is_result: bool = False) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        return _json(content)
    return "".join([_part(part, is_result) for part in content])


def _part(part: object, is_of_result: bool) -> str:
    if not isinstance(part, dict):
        return _json(part)
    kind = part.get("type")
    text = part.get("text")
    if isinstance(text, str) and kind in ("text", "input_text", "output_text", None):
        return text
    if kind in _UNSAID:
        return ""
    if kind in _CALLS:
        return _call(part.get("id"), part.get("name"), part.get("input"))
    if kind == "tool_result" and not is_of_result:  # results contain none, but may pretend to without end
        return _sized(str(part.get("tool_use_id"))) + _sized(_text(part.get("content"), True))
    return _json({key: value for key, value in part.items() if key != "cache_control"})


def _arguments_of(item: dict[str, Any]) -> object:
    return item["arguments"] if "arguments" in item else item.get("input")


def _call(call_id: object, name: object, arguments: object) -> str:
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            return _sized(f"{call_id} {name}") + _sized(str(arguments))
    return _sized(f"{call_id} {name}") + _sized(_json(arguments or {}))


def _sized(text: str) -> str:
    return f"{len(text)}:{text}"


def _json(value: object) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONEncodeError:
        # Nested deeper than the encoder goes, or a lone surrogate: no engine accepts it either.
        return "?"
