"""The tokens of unfinished turns, written down as they come, so that a killed gateway loses at most the last
interval.
"""

import itertools

from store.port import Store

PREFIX = "partial/"


class Partials:
    """Unfinished turns in the store.

    A turn's tokens are put in numbered parts, each with only what is new since the one before, so that a long turn is
    not written again and again. Siblings may make the same request at the same time, so a part names its request, by
    which the next process finds it, and its turn. A trajectory's parts are dropped with its record.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, trajectory_id: str, request: str, turn: str, number: int, data: bytes) -> None:
        """Keep a part of an unfinished turn. It does not wait, and an existing part stays as it is.

        Args:
            request: its digest.
            turn: names the turn among those of this request; without "/", like the digest.
            number: 0, 1, 2, ...
        """
        self._store.put_piece(trajectory_id, f"{PREFIX}{request}/{turn}/{number}", data)

    async def get(self, trajectory_id: str, request: str) -> dict[str, list[bytes]]:
        """The parts of each unfinished turn of a request, from the first up to the first that is missing. Raises
        StoreAway.
        """
        prefix = f"{PREFIX}{request}/"
        found = await self._store.get_pieces(trajectory_id, prefix)
        parts: dict[str, list[bytes]] = {}
        for first in found:
            turn, _, number = first.removeprefix(prefix).partition("/")
            if number == "0":  # it is "" in an earlier form, which did not name the turn
                names = (f"{prefix}{turn}/{number}" for number in itertools.count())
                parts[turn] = [found[name] for name in itertools.takewhile(found.__contains__, names)]
        return parts

    async def drop_behind(self, trajectory_id: str, request: str, turn: str, num_parts: int) -> None:
        """Drop an unfinished turn's parts after its first ones, of which there are so many: where `get` found one
        missing, those behind it would stay in place of what is put next. Raises StoreAway.
        """
        prefix = f"{PREFIX}{request}/{turn}/"
        for name in await self._store.get_pieces(trajectory_id, prefix):
            if int(name.removeprefix(prefix)) >= num_parts:
                self._store.drop_pieces(trajectory_id, name)

    def drop(self, trajectory_id: str, request: str, turn: str | None) -> None:
        """This turn has ended; None for all of the request."""
        self._store.drop_pieces(trajectory_id, f"{PREFIX}{request}/" + ("" if turn is None else f"{turn}/"))
