"""Reads the requests of a trajectory, each from where the one before it ended.

An agent repeats its whole context with every turn and appends to it, mostly byte for byte. If a body begins with the
very bytes with which the trajectory's last one began, up to its last message, then only what follows is searched for
members: a digest of those bytes takes a thirtieth of the time of their search.

Bounded: the trajectory that was read least recently is forgotten first, and its next request is searched whole.
"""

import secrets
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from msgspec import Raw
from xxhash import xxh3_128

from gateway.messages.lazy_object import LazyObject, Members, members_of

# Stands for the list in what follows a beginning. No client can know it, so no member has the same name.
_LIST = secrets.token_hex(16)
_OPENED = b'{"%s":[0' % _LIST.encode()
_NUM_OPENED = len(b"[0")
_BRACKET, _BRACE = b"[}"


class Beginning(NamedTuple):
    """How a body begins, up to the end of the last element of its longest list.

    Args:
        length: in bytes.
        digest: of these bytes; XXH3, because it is compared within a trajectory only.
        name: of the list.
        start: where the list begins.
        places: the members before the list, and where their values begin and end.
    """

    length: int
    digest: int
    name: str
    start: int
    places: tuple[tuple[str, int, int], ...]


class Beginnings:
    """How the last requests of trajectories began.

    Args:
        limit: trajectories known, some 500 bytes each.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[str, Beginning] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def read(self, trajectory_id: str, body: bytes) -> LazyObject:
        """A request of this trajectory. Raises as LazyObject."""
        known = self._known.pop(trajectory_id, None)
        members, beginning = (known and _continued(known, body)) or _searched(body)
        if beginning is not None:
            self._known[trajectory_id] = beginning
            if len(self._known) > self._limit:
                self._known.popitem(last=False)
        return LazyObject(body, members)


def _continued(known: Beginning, body: bytes) -> tuple[Members, Beginning | None] | None:
    """The members of a body that begins so, and how the next may begin; None if it does not begin so."""
    view, hasher = memoryview(body), xxh3_128()
    hasher.update(view[: known.length])
    if hasher.intdigest() != known.digest:
        return None
    try:
        added = members_of(_OPENED + view[known.length :])
    except ValueError:
        return None
    end = known.length + len(memoryview(added.pop(_LIST))) - _NUM_OPENED
    members: Members = {name: view[first:last] for name, first, last in known.places}
    members[known.name] = view[known.start : end]
    if known.name in added or body[end - 2] != _BRACE:
        return members | added, None
    hasher.update(view[known.length : end - 1])
    return members | added, known._replace(length=end - 1, digest=hasher.intdigest())


def _searched(body: bytes) -> tuple[Members, Beginning | None]:
    """The members of any body, and how the next may begin."""
    members = members_of(body)
    if not members:
        return members, None
    places = {name: _place(value, body) for name, value in members.items()}
    name = max(places, key=lambda name: places[name][1] - places[name][0])
    start, end = places[name]
    if body[start] != _BRACKET or body[end - 2] != _BRACE:
        return members, None
    # Searched again, because a name may come before the list and after it.
    head = body[:start] + b"[]}"
    before = [(other, *_place(value, head)) for other, value in members_of(head).items() if other != name]
    digest = xxh3_128(memoryview(body)[: end - 1]).intdigest()
    return members, Beginning(end - 1, digest, name, start, tuple(before))


def _place(part: Raw | memoryview, whole: bytes) -> tuple[int, int]:
    """Where a part of these very bytes begins and ends."""
    first, address = (np.frombuffer(data, np.uint8).__array_interface__["data"][0] for data in (whole, part))
    return address - first, address - first + len(memoryview(part))
