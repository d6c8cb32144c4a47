"""Reads requests, each from where an earlier one of the same conversation ended.

An agent repeats its whole context with every turn and appends to it, mostly byte for byte. If a body begins with the
very bytes with which an earlier one began, up to its last message, then only what follows is searched for members: a
digest of those bytes takes a thirtieth of the time of their search.

Bounded by the number of beginnings kept: the least recently used are forgotten first, and what continues them is
searched whole.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from msgspec import Raw
from xxhash import xxh3_128_hexdigest

from gateway.messages.lazy_object import Growth, LazyObject, Members, members_of
from gateway.messages.transcripts import Hasher

_CONVERSATIONS = ("messages", "input")
# Stands for the list in what follows a beginning. No client can know it, so no member has the same name.
_LIST = secrets.token_hex(16)
_OPENED = b'{"%s":[0' % _LIST.encode()
_NUM_OPENED = len(b"[0")
_BRACKET, _BRACE = b"[}"
# Branches of a trajectory, or siblings that name none, of which the most recent are known.
_MAX_BRANCHES = 64


class Beginning(NamedTuple):
    """How a body begins, up to the end of the last message of its conversation.

    Args:
        length: in bytes.
        digest: of these bytes.
        name: of the list of messages.
        start: where the list begins.
        places: the members before the list, and where their values begin and end.
    """

    length: int
    digest: bytes
    name: str
    start: int
    places: tuple[tuple[str, int, int], ...]


class Beginnings:
    """How requests began that were read recently.

    Args:
        new_hasher: SHA-256, or XXH3 if all requests name their trajectory.
        limit: beginnings kept, some 500 bytes each.
    """

    def __init__(self, new_hasher: Callable[[], Hasher], limit: int) -> None:
        self._new_hasher = new_hasher
        self._limit = limit
        self._num = 0
        self._known: OrderedDict[str, list[Beginning]] = OrderedDict()

    def __len__(self) -> int:
        return self._num

    def read(self, trajectory_id: str | None, body: bytes) -> LazyObject:
        """A request of this trajectory. One that names none is compared with those that share its first bytes.

        Raises as `members_of`.
        """
        size = len(body)
        keys = (trajectory_id,) if trajectory_id is not None else (_start(body, size), _start(body, size // 2))
        lazy, beginning = self._continued(keys, body) or self._searched(body)
        if beginning is not None:
            self._keep(keys[0] if trajectory_id is not None else _start(body, beginning.length), beginning)
        return lazy

    def _continued(self, keys: tuple[str, ...], body: bytes) -> tuple[LazyObject, Beginning | None] | None:
        """A body that continues one of these, and how the next may begin."""
        view, hasher, hashed = memoryview(body), self._new_hasher(), 0
        known, key, at_known = None, "", hasher
        of_keys = [(one, its_key) for its_key in keys for one in self._known.get(its_key, ())]
        for one, its_key in sorted(of_keys) if len(of_keys) > 1 else of_keys:
            if one.length > len(body):
                break
            hasher.update(view[hashed : one.length])
            hashed = one.length
            if hasher.digest() == one.digest:
                known, key, at_known = one, its_key, hasher.copy()
        if known is None:
            return None
        try:
            added = members_of(_OPENED + view[known.length :])
        except ValueError:
            return None
        self._drop(key, known)
        grown = memoryview(added.pop(_LIST))
        end = known.length + len(grown) - _NUM_OPENED
        members: Members = {name: view[first:last] for name, first, last in known.places}
        members[known.name] = view[known.start : end]
        if known.name in added or body[end - 2] != _BRACE:
            return LazyObject(members | added), None
        at_known.update(view[known.length : end - 1])
        beginning = known._replace(length=end - 1, digest=at_known.digest())
        growth = Growth(known.name, known.digest, beginning.digest, bytes(grown))
        return LazyObject(members | added, growth), beginning

    def _searched(self, body: bytes) -> tuple[LazyObject, Beginning | None]:
        """Any body, and how the next may begin."""
        members = members_of(body)
        name = next((name for name in _CONVERSATIONS if name in members), None)
        if name is None:
            return LazyObject(members), None
        start, end = _place(members[name], body)
        if body[start] != _BRACKET or body[end - 2] != _BRACE:
            return LazyObject(members), None
        # Searched again, because a name may come before the list and after it.
        head = body[:start] + b"[]}"
        places = tuple((other, *_place(value, head)) for other, value in members_of(head).items() if other != name)
        hasher = self._new_hasher()
        hasher.update(memoryview(body)[: end - 1])
        beginning = Beginning(end - 1, hasher.digest(), name, start, places)
        return LazyObject(members, Growth(name, None, beginning.digest, b"")), beginning

    def _keep(self, key: str, beginning: Beginning) -> None:
        branches = self._known.setdefault(key, [])
        self._known.move_to_end(key)
        branches.append(beginning)
        self._num += 1
        if len(branches) > _MAX_BRANCHES:
            self._drop(key, branches[0])
        while self._num > self._limit:
            oldest = next(iter(self._known))
            self._drop(oldest, self._known[oldest][0])

    def _drop(self, key: str, beginning: Beginning) -> None:
        branches = self._known[key]
        branches.remove(beginning)
        self._num -= 1
        if not branches:
            del self._known[key]


def _start(body: bytes, length: int) -> str:
    """A digest of the first bytes, as many as the largest power of two up to a length."""
    return xxh3_128_hexdigest(memoryview(body)[: (1 << length.bit_length()) >> 1])


def _place(part: Raw | memoryview, whole: bytes) -> tuple[int, int]:
    """Where a part of these very bytes begins and ends."""
    first, address = (np.frombuffer(data, np.uint8).__array_interface__["data"][0] for data in (whole, part))
    return address - first, address - first + len(memoryview(part))
