"""Reads the conversations of requests, each from where the request before it ended (`beginnings.py`).

Bounded by the number of digests kept: the least recently read conversation is forgotten first, and read whole when it
comes again. So is one that branches off before its last turn.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from gateway.messages.lazy_object import BrokenValue, LazyObject
from gateway.messages.transcripts import Hasher, History

# About 260 bytes each, with its question.
_DIGESTS_OF_A_CONVERSATION = 10


class Histories:
    """The conversations read recently.

    Args:
        new_hasher: for histories: SHA-256, or XXH3 within a trajectory.
        limit: conversations kept if they have ten answers each; fewer if they have more.
    """

    def __init__(self, new_hasher: Callable[[], Hasher], limit: int) -> None:
        self._new_hasher = new_hasher
        self._max_digests = _DIGESTS_OF_A_CONVERSATION * limit
        self._num_digests = 0
        self._read: OrderedDict[tuple[object, ...], History] = OrderedDict()

    def __len__(self) -> int:
        return len(self._read)

    def read(self, request: Mapping[str, Any], within: str = "") -> History:
        """A request's conversation. Raises BrokenValue: a new message is not JSON after all.

        Args:
            within: the trajectory, if histories are compared within one only.
        """
        if not isinstance(request, LazyObject) or (growth := request.growth) is None:
            return History(request, self._new_hasher())
        preamble = self._new_hasher()  # which may follow the messages in the body
        preamble.update(b"%b,%b" % (request.raw("system"), request.raw("instructions")))
        about = within, growth.name, preamble.hexdigest()
        before = None if growth.before is None else self._read.get((*about, growth.before))
        if before is None:
            history = History(request, self._new_hasher())
        else:
            history = before.continued(_parsed(growth.added)[1:])
            self._drop((*about, growth.before))
        self._keep((*about, growth.after), history)
        return history

    def _keep(self, key: tuple[object, ...], history: History) -> None:
        if key in self._read:
            self._drop(key)
        self._read[key] = history
        self._num_digests += 1 + len(history.digests)
        while self._num_digests > self._max_digests:
            self._drop(next(iter(self._read)))

    def _drop(self, key: tuple[object, ...]) -> None:
        self._num_digests -= 1 + len(self._read.pop(key).digests)


def _parsed(messages: bytes) -> list[Any]:
    try:
        parsed: list[Any] = orjson.loads(messages)
    except orjson.JSONDecodeError as error:
        raise BrokenValue(str(error)) from None
    return parsed
