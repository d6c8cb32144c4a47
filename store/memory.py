"""The store that is lost at exit: for tests, for simulated runs, and as the double of the others.

It keeps JSON text, not the caller's objects, so it fails and copies exactly where the others do.
"""

from collections import deque
from collections.abc import Callable

import orjson

from store.port import Json, StoredTrajectory, StoreHealth, encoded
from store.settings import StoreSettings


class MemoryStore:
    """A Store in plain dictionaries; every put is in the record at once, until the process ends."""

    is_fenced = False

    def __init__(self, settings: StoreSettings) -> None:
        self._max_turns = settings.max_turns_kept
        self._records: dict[str, bytes] = {}
        self._turns: dict[str, deque[bytes]] = {}
        self._answers: dict[str, bytes] = {}
        self._states: dict[str, bytes] = {}
        self._pieces: dict[str, dict[str, bytes]] = {}

    async def open(self) -> None:
        pass

    async def load(self) -> list[StoredTrajectory]:
        return [
            StoredTrajectory(
                trajectory_id,
                orjson.loads(record),
                [orjson.loads(turn) for turn in self._turns.get(trajectory_id, ())],
                self._answers.get(trajectory_id),
            )
            for trajectory_id, record in self._records.items()
        ]

    def on_loss(self, rewrite: Callable[[], None]) -> None:
        """Nothing can be lost here."""

    def put_trajectory(self, trajectory_id: str, record: Json, answer: bytes | None = None) -> None:
        self._records[trajectory_id] = encoded(record)
        if answer is not None:
            self._answers[trajectory_id] = answer

    def append_turn(self, trajectory_id: str, turn: Json) -> None:
        value = encoded(turn)
        self._records.setdefault(trajectory_id, b"{}")
        self._turns.setdefault(trajectory_id, deque(maxlen=self._max_turns)).append(value)

    def forget_trajectory(self, trajectory_id: str) -> None:
        self._records.pop(trajectory_id, None)
        self._turns.pop(trajectory_id, None)
        self._answers.pop(trajectory_id, None)
        self._pieces.pop(trajectory_id, None)

    def put_piece(self, trajectory_id: str, name: str, data: bytes) -> None:
        self._pieces.setdefault(trajectory_id, {}).setdefault(name, data)

    def drop_pieces(self, trajectory_id: str, prefix: str = "") -> None:
        pieces = self._pieces.pop(trajectory_id, {})
        left = {name: data for name, data in pieces.items() if not name.startswith(prefix)}
        if left:
            self._pieces[trajectory_id] = left

    async def get_pieces(self, trajectory_id: str, prefix: str = "") -> dict[str, bytes]:
        pieces = self._pieces.get(trajectory_id, {})
        return {name: data for name, data in pieces.items() if name.startswith(prefix)}

    async def piece_sizes(self) -> dict[str, int]:
        return {trajectory_id: sum(map(len, pieces.values())) for trajectory_id, pieces in self._pieces.items()}

    def put_state(self, name: str, value: bytes) -> None:
        self._states[name] = value

    async def get_state(self, name: str) -> bytes | None:
        return self._states.get(name)

    async def settle(self, timeout_s: float) -> bool:
        return True

    def when_settled(self, call: Callable[[], None]) -> bool:
        call()
        return True

    def health(self) -> StoreHealth:
        return StoreHealth(ok=True, detail="in memory: nothing outlives the process")

    async def close(self) -> None:
        pass
