"""The tokens of unfinished turns, written down as they come, so that a killed gateway loses at most the last
interval.
"""

from store.port import Store

PREFIX = "partial/"


class Partials:
    """Unfinished turns in the store.

    A turn's tokens are put in numbered parts, each with only what is new since the one before, so that a long turn is
    not written again and again. A trajectory's parts are dropped with its record.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, trajectory_id: str, turn_key: str, number: int, data: bytes) -> None:
        """Keep a part of an unfinished turn. It does not wait, and an existing part stays as it is.

        Args:
            turn_key: names the turn within its trajectory, for the next process too; without "/".
            number: 0, 1, 2, ...
        """
        self._store.put_piece(trajectory_id, f"{PREFIX}{turn_key}/{number}", data)

    async def get(self, trajectory_id: str, turn_key: str) -> list[bytes]:
        """The parts from the first one up to the first that is missing. Raises StoreAway."""
        prefix = f"{PREFIX}{turn_key}/"
        found = await self._store.get_pieces(trajectory_id, prefix)
        parts: list[bytes] = []
        while (part := found.get(f"{prefix}{len(parts)}")) is not None:
            parts.append(part)
        return parts

    def drop(self, trajectory_id: str, turn_key: str) -> None:
        """The turn has ended."""
        self._store.drop_pieces(trajectory_id, f"{PREFIX}{turn_key}/")
