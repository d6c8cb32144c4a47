"""The interface of every store: a record of trajectories, their turns, and small named blobs, that outlives the
process.

Rules:
- Puts are synchronous, wait for no network and raise for no operating fault: `health()` reports what went wrong.
- Records and turns are JSON objects whose content the store does not read; they are copied at the put. Beside its
  record, a trajectory may have an answer. It is bytes, because as text within JSON 15 KB of events cost 100 us more.
- Large data of a trajectory are pieces: bytes under a name, each put once, read on demand and not at the start. Lost
  pieces are not healed, unless the owner still has them and puts them again.
- One process owns a record. A second one is refused (embedded) or takes over, and the first is fenced off (Redis).
- If the record may have lost something (a full queue, a Redis restarted without its data, a full disk), the owner heals
  it: it puts everything again when `on_loss` calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """One trajectory as it was put: its latest record, its newest turns, oldest first, and its latest answer."""

    trajectory_id: str
    record: dict[str, Any]
    turns: list[dict[str, Any]]
    answer: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """How well the record keeps up with the puts.

    Args:
        ok: Puts reach the record.
        detail: One sentence for a person; no secrets.
        num_pending: Trajectories and state blobs with something that is not in the record yet.
        lag_s: Age of the oldest put that is not in the record yet; 0 if there is none.
        num_dropped: How often pending puts were dropped since the start.
        num_losses: How often the record was found to lack something that was put.
    """

    ok: bool
    detail: str
    num_pending: int = 0
    lag_s: float = 0.0
    num_dropped: int = 0
    num_losses: int = 0


class StoreError(Exception):
    """The store cannot do what was asked; the message states why and what to do."""


class BadStoreUrl(StoreError, ValueError):
    """The configured store URL names no store. Repeating it does not help."""


class StoreInUse(StoreError):
    """Another process owns this record. Safe to repeat once that process has ended."""


class StoreCorrupt(StoreError):
    """The record is damaged or of another format version. Repeating does not help."""


class StoreFenced(StoreError):
    """Another process has taken over the record. Repeating does not help."""


class StoreAway(StoreError):
    """The record cannot be reached now. Safe to repeat."""


Json = dict[str, Any] | bytes
"""A JSON object, or the encoded text of one."""


def encoded(json: Json) -> bytes:
    """The text of a JSON object."""
    return json if isinstance(json, bytes) else orjson.dumps(json)


class Store(Protocol):
    """The record of one process: restore with `open` and `load`, then put, and `settle` when a put must be safe."""

    async def open(self) -> None:
        """Take ownership of the record; once in the life of a store.

        Raises:
            StoreInUse, StoreCorrupt: see there. A Redis that is away does not raise: see `health`.
            StoreError: the server cannot hold the record, or refuses it. Repeating does not help.
        """

    @property
    def is_fenced(self) -> bool:
        """Whether another process has taken over the record: nothing that is put will ever be in it."""

    async def load(self) -> list[StoredTrajectory]:
        """Everything in the record, in no order. A trajectory of which only turns were put has an empty record.

        Raises:
            StoreAway: the record cannot be read now.
            StoreFenced: see there.
            StoreCorrupt: it can be read, but not understood.
        """

    def on_loss(self, rewrite: Callable[[], None]) -> None:
        """Have `rewrite` called, on the event loop, when the record may lack something that was put.

        It must put, synchronously, everything that must be found after a restart: all other trajectories are removed
        from the record. Named blobs and pieces that were not lost stay, but it should put those again, too.
        """

    def put_trajectory(self, trajectory_id: str, record: Json, answer: bytes | None = None) -> None:
        """Keep this record for the trajectory, and this answer unless it is None; the last of each wins."""

    def append_turn(self, trajectory_id: str, turn: Json) -> None:
        """Add a turn to the trajectory's history, of which the newest `max_turns_kept` stay."""

    def forget_trajectory(self, trajectory_id: str) -> None:
        """Remove record, history, answer and pieces; does nothing if there are none."""

    def put_piece(self, trajectory_id: str, name: str, data: bytes) -> None:
        """Keep these bytes of a trajectory. An existing name keeps its bytes."""

    def drop_pieces(self, trajectory_id: str, prefix: str = "") -> None:
        """Remove the trajectory's pieces whose names start with `prefix`."""

    async def get_pieces(self, trajectory_id: str, prefix: str = "") -> dict[str, bytes]:
        """The trajectory's pieces whose names start with `prefix`, by name, in no order.

        Raises:
            StoreAway: the record cannot be read now.
            StoreFenced: see there.
        """

    async def piece_sizes(self) -> dict[str, int]:
        """Bytes of all pieces of each trajectory that has any.

        Raises:
            StoreAway: the record cannot be read now.
            StoreFenced: see there.
        """

    def put_state(self, name: str, value: bytes) -> None:
        """Keep a small blob (predictor state, cordoned engines) under a name; the last one wins."""

    async def get_state(self, name: str) -> bytes | None:
        """The blob last put under the name, or None.

        Raises:
            StoreAway: the record cannot be read now.
            StoreFenced: see there.
        """

    async def settle(self, timeout_s: float) -> bool:
        """Wait until everything put so far is in the record.

        Returns:
            False after `timeout_s`, or at once if the store is known to be away, or fenced.

        Cost: nothing when nothing is pending; concurrent callers share one flush (embedded: one iteration of the event
        loop).
        """

    def when_settled(self, call: Callable[[], None]) -> bool:
        """Call `call` once everything put so far is in the record: now, or at the end of this iteration of the event
        loop.

        Returns:
            False, with nothing called, if that may take longer: then await `settle`.
        """

    def health(self) -> StoreHealth:
        """How well the record keeps up; reads memory only."""

    async def close(self) -> None:
        """Settle for a moment, then release the record."""
