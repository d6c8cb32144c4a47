"""Reads the conversations of requests, each from where the turn before ended.

An agent repeats its whole conversation with every turn, mostly byte for byte. What precedes the new messages is known
by a digest of its bytes, which takes a fifth of the time that parsing, normalising and hashing it takes.

Bounded by the number of digests kept: the least recently read conversation is forgotten first, and read whole when it
comes again. So is one that branches off before its last turn.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from gateway.messages.lazy_object import BrokenValue
from gateway.messages.transcripts import Hasher, History

# A shorter body is parsed and read in less time than it takes to find what is known of it.
_FROM_BYTES = 8_192
# About 260 bytes each, with its question.
_DIGESTS_OF_A_CONVERSATION = 10


class _Conversation(Struct):
    """Where the messages of a request's body begin and end. Other forms of a conversation do not decode."""

    messages: list[Raw] | None = None
    input: list[Raw] | None = None
    system: Raw = Raw()
    instructions: Raw = Raw()


_conversation = Decoder(_Conversation).decode


class Histories:
    """The conversations read recently.

    Args:
        new_hasher: for histories, and for the bytes by which they are known: SHA-256, or XXH3 within a trajectory.
        limit: conversations kept if they have ten answers each; fewer if they have more.
    """

    def __init__(self, new_hasher: Callable[[], Hasher], limit: int) -> None:
        self._new_hasher = new_hasher
        self._max_digests = _DIGESTS_OF_A_CONVERSATION * limit
        self._num_digests = 0
        self._read: OrderedDict[str, History] = OrderedDict()

    def __len__(self) -> int:
        return len(self._read)

    def read(self, request: Mapping[str, Any], body: bytes, within: str = "") -> History:
        """A request's conversation. Raises BrokenValue: a new message is not JSON after all.

        Args:
            body: the request's bytes.
            within: the trajectory, if histories are compared within one only.
        """
        raw = _messages(body) if len(body) >= _FROM_BYTES else None
        if raw is None:
            return History(request, self._new_hasher())
        preamble, messages = raw
        hasher = self._new_hasher()
        hasher.update(f"{len(within)}:{within}".encode())
        for part in preamble:
            hasher.update(memoryview(part))
            hasher.update(b",")
        keys = []
        for message in messages:
            hasher.update(memoryview(message))
            hasher.update(b",")
            keys.append(hasher.hexdigest())
        history = None
        for index in range(len(keys) - 1, -1, -1):
            before = self._read.get(keys[index])
            if before is not None:
                history = before.continued([_parsed(message) for message in messages[index + 1 :]])
                self._drop(keys[index])
                break
        if history is None:
            history = History(request, self._new_hasher())
        if keys:
            self._keep(keys[-1], history)
        return history

    def _keep(self, key: str, history: History) -> None:
        self._read[key] = history
        self._num_digests += 1 + len(history.digests)
        while self._num_digests > self._max_digests:
            self._drop(next(iter(self._read)))

    def _drop(self, key: str) -> None:
        self._num_digests -= 1 + len(self._read.pop(key).digests)


def _messages(body: bytes) -> tuple[tuple[Raw, Raw], list[Raw]] | None:
    """What precedes a request's messages, and each of them, as bytes; None for another form of a conversation."""
    try:
        found = _conversation(body)
    except (DecodeError, RecursionError):
        return None
    messages = found.input if found.messages is None else found.messages
    return None if messages is None else ((found.system, found.instructions), messages)


def _parsed(message: Raw) -> object:
    try:
        return orjson.loads(memoryview(message))
    except orjson.JSONDecodeError as error:
        raise BrokenValue(str(error)) from None
