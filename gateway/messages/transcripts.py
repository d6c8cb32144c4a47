"""Reduces a conversation to digests that do not depend on how a client spells it.

A request is read as messages. Each is normalised (`normalised.py`) and hashed into a chain, and the chain's digest is
noted after every answer. An answer that has its thoughts gets a second digest, which covers them too. This works for
chat, Anthropic messages and responses; plain completions have no messages and are compared as text
(`conversations.py`).

Cost: linear. A digest that identifies a trajectory is SHA-256, because a client that found a collision could continue
another client's trajectory (0.9 ms for 1 MB, a third of BLAKE2b's time). Within a trajectory it is XXH3 (0.03 ms); so
is a prompt's, which only groups.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol, Self

import orjson
from xxhash import xxh3_128, xxh3_128_hexdigest

from gateway.messages.normalised import (
    Normalised,
    as_json,
    conversation_of,
    normalised,
    normalised_message,
    sized,
    text_of,
    unmarked,
)

_SHORT = 65_536  # characters
DIGEST_LENGTH = 32  # hexadecimal digits kept: 128 bits, ample for a table of some million conversations

_PREAMBLES = ("tools", "functions", "system", "instructions")
# The fields of completions, and of vLLM's and SGLang's token routes.
_PROMPTS = ("prompt", "token_ids", "input_ids", "text")
# What stands beside such a prompt and is part of it (SGLang's image_data; vLLM's content_parts).
_BESIDE_PROMPTS = ("image_data", "video_data", "audio_data", "input_embeds", "prompt_embeds", "content_parts")
_SYSTEM_ROLES = ("system", "developer")
_SYSTEM_SPELLED = tuple(f"{len(role)}:{role}" for role in _SYSTEM_ROLES)  # as the pieces of such a message begin


class History:
    """A request's conversation, read once for everything that is asked of it.

    Args:
        hasher: a new one; XXH3 for digests that are compared within a trajectory only.

    Attributes:
        digests: the chain's digest after each answer, oldest first.
        asked: the chain's digest before each answer but the first, with how many of `digests` came before it.
        num_calls: tool calls in a chat's answers.
        with_thoughts: the second digest of each answer that has its thoughts, by the first.
        before_last: the chain's digest before the last message, if there are several and no answers; else "".
    """

    def __init__(self, body: Mapping[str, Any], hasher: "Hasher | None" = None) -> None:
        self.digests: list[str] = []
        self.asked: list[tuple[str, int]] = []
        self.num_calls = _num_calls(conversation_of(body))
        self.with_thoughts: dict[str, str] = {}
        self.before_last = ""
        self._hasher: Hasher = hasher or sha256()
        self._was_answered = True
        self._has_begun = False
        self._thoughts = ""  # of the answer so far, if the conversation ends with one: it may consist of several items
        self._read(normalised(body))

    def continued(self, messages: Sequence[object]) -> "History":
        """The history of a request that has these messages too, after all others."""
        longer = History({}, self._hasher.copy())
        longer.digests, longer.asked = self.digests.copy(), self.asked.copy()
        longer.num_calls = self.num_calls + _num_calls(messages)
        longer.with_thoughts = self.with_thoughts.copy()
        longer._was_answered, longer._thoughts = self._was_answered, self._thoughts
        longer._has_begun, longer.before_last = self._has_begun, self.before_last
        longer._read(map(normalised_message, messages))
        return longer

    def _read(self, messages: Iterable[Normalised]) -> None:
        said: list[str] = []
        num_last = 0
        for answered, pieces, thoughts in messages:
            self._thoughts += thoughts
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
                if self._thoughts:
                    self.with_thoughts[self.digests[-1]] = _with_thoughts(self._hasher, self._thoughts)
            else:
                self._thoughts = ""
            self._was_answered = answered
            num_last = len(pieces)
        if self.digests:
            self.before_last = ""
        elif num_last and (self._has_begun or num_last < len(said)):
            _feed(self._hasher, said[:-num_last])
            said = said[-num_last:]
            self.before_last = self._hasher.hexdigest()[:DIGEST_LENGTH]
        _feed(self._hasher, said)
        self._has_begun = self._has_begun or num_last > 0

    def digest(self, answer: object = ()) -> str:
        """The chain's digest after its last message, and after an answer to it: a message, or output items."""
        return self.digests_of(answer)[0]

    def digests_of(self, answer: object) -> tuple[str, ...]:
        """The chain's digest after an answer, and the one with the answer's thoughts if it has them."""
        hasher, thoughts = self._hasher.copy(), self._thoughts
        for message in answer if isinstance(answer, list | tuple) else [answer]:
            _, pieces, its_thoughts = normalised_message(message)
            thoughts += its_thoughts
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
    content = whole_text(body, text_of(begun.get("content")), text_of(answer.get("content")))
    return History({**preamble, "messages": before}, new_hasher()), {**begun, **answer, "content": content}


def whole_text(body: Mapping[str, Any], begun: str, made: str) -> str:
    """A text that a request began, with what was made of it, which may repeat the beginning (vLLM's and SGLang's
    `echo`; not every form of answer heeds it).
    """
    return made if body.get("echo") and made.startswith(begun) else begun + made


def beginnings_of(body: Mapping[str, Any]) -> list[tuple[str, int]]:
    """What precedes each answer, oldest first, and everything; for a completion, its prompt.

    Returns:
        For each its digest, and its length in characters without the system prompt that it begins with.
    """
    hasher, beginnings, length, was_answered = xxh3_128(), [], 0, False
    prompt = prompt_of(body)
    if prompt is not None:
        said = spelled(prompt) or as_json(prompt).encode()
        hasher.update(said)
        length = len(said)
    if beside := _beside_prompt(body):
        hasher.update(as_json(beside).encode())
    for answered, pieces, _ in normalised(body):
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
    """The prompt of a request without messages: text or tokens, in any API's field; else None.

    A list of one prompt is that prompt.
    """
    prompt = next((body[name] for name in _PROMPTS if body.get(name) is not None), None)
    if prompt is None or conversation_of(body) is not None:  # a long conversation is not parsed for this
        return None
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt


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
    said = [unmarked(body[name]) for name in _PREAMBLES if body.get(name)]
    messages = conversation_of(body)
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

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...


def _beside_prompt(body: Mapping[str, Any]) -> list[Any]:
    """The images of a prompt, and the like; of vLLM's features their hashes, because the engine may have the rest."""
    features = body.get("features")
    hashes = features.get("mm_hashes") if isinstance(features, dict) else None
    return [beside for beside in (hashes, *map(body.get, _BESIDE_PROMPTS)) if beside]


def _with_thoughts(hasher: Hasher, thoughts: str) -> str:
    """The second digest of an answer that was just hashed."""
    hasher = hasher.copy()
    _feed(hasher, ("thoughts", sized(thoughts)))  # no message begins with a letter
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


def _num_calls(messages: object) -> int:
    answers = messages if isinstance(messages, list) else ()
    calls = (
        answer.get("tool_calls") for answer in answers if isinstance(answer, dict) and answer.get("role") == "assistant"
    )
    return sum(len(its_calls) for its_calls in calls if isinstance(its_calls, list))
