"""Puts that wait to be sent to Redis: for each trajectory its latest record and answer, its newest turns, its pieces,
and whether it is forgotten.

Rules: puts of one trajectory coalesce. Its pieces come before its record, so a kill leaves no record of a turn whose
tokens are lost. The order between trajectories does not matter. Count and bytes are bounded; the trajectory that has
waited longest is dropped first, and counted.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

from store.settings import StoreSettings

ENTRY_BYTES = 500
"""The cost of an entry beyond its values: the object, its deque, the key."""


class Operation(NamedTuple):
    """One step of a batch; safe to apply only in its place, and once."""

    name: Literal["record", "answer", "turn", "piece", "drop", "state", "forget", "rewrite", "replace", "sweep"]
    id: str
    value: bytes
    part: str = ""
    """The name of a piece, or the prefix of the names to drop."""


@dataclass(slots=True)
class _Entry:
    turns: deque[bytes]
    record: bytes | None = None
    answer: bytes | None = None
    forget: bool = False
    drops: list[str] = field(default_factory=list)
    pieces: dict[str, bytes] = field(default_factory=dict)
    num_bytes: int = ENTRY_BYTES


class Pending:
    """A bounded, coalescing queue of puts; `take` empties it into batches.

    Attributes:
        wanted: set by each put, until the queue is emptied.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._entries: dict[str, _Entry] = {}
        self._states: dict[str, bytes] = {}
        self._num_bytes = 0
        self._is_rewrite = False
        self._bounded = True
        self.wanted = asyncio.Event()
        self.num_puts = 0
        self.num_dropped = 0
        self.since = 0.0
        """When the oldest put was made, on the monotonic clock; 0 if there is none."""

    def __len__(self) -> int:
        return len(self._entries) + len(self._states)

    def put_trajectory(self, trajectory_id: str, record: bytes, answer: bytes | None = None) -> None:
        entry = self._entry(trajectory_id)
        self._grow(entry, len(record) - len(entry.record or b""))
        entry.record = record
        if answer is not None:
            self._grow(entry, len(answer) - len(entry.answer or b""))
            entry.answer = answer
        self._bound()

    def append_turn(self, trajectory_id: str, turn: bytes) -> None:
        entry = self._entry(trajectory_id)
        if len(entry.turns) == entry.turns.maxlen:
            self._grow(entry, -len(entry.turns[0]))
        self._grow(entry, len(turn))
        entry.turns.append(turn)
        self._bound()

    def forget_trajectory(self, trajectory_id: str) -> None:
        entry = self._entry(trajectory_id)
        self._grow(entry, ENTRY_BYTES - entry.num_bytes)
        entry.record = entry.answer = None
        entry.forget = True
        entry.turns.clear()
        entry.drops.clear()
        entry.pieces.clear()
        self._bound()

    def put_piece(self, trajectory_id: str, name: str, data: bytes) -> None:
        entry = self._entry(trajectory_id)
        if name not in entry.pieces:
            self._grow(entry, len(name) + len(data))
            entry.pieces[name] = data
            self._bound()

    def drop_pieces(self, trajectory_id: str, prefix: str) -> None:
        entry = self._entry(trajectory_id)
        for name in [name for name in entry.pieces if name.startswith(prefix)]:
            self._grow(entry, -len(name) - len(entry.pieces.pop(name)))
        self._drop_first(entry, prefix)
        self._bound()

    def put_state(self, name: str, value: bytes) -> None:
        self._note_put()
        self._states[name] = value  # a handful of names, so not bounded

    def replace_all(self, rewrite: Callable[[], None]) -> None:
        """Let `rewrite` put everything there is, without a limit; the record's other trajectories go once it is sent.

        Waiting puts are dropped: they are put again, or belong to a trajectory that was forgotten. Not all pieces are
        put again, so those that were to be dropped are dropped first, and pieces of trajectories without a record are
        swept away afterwards.
        """
        self._note_put()
        before, self._entries, self._num_bytes = self._entries, {}, 0
        self._is_rewrite, self._bounded = True, False
        try:
            rewrite()
            for trajectory_id in before.keys() & self._entries.keys():
                for prefix in ("",) if before[trajectory_id].forget else before[trajectory_id].drops:
                    self._drop_first(self._entries[trajectory_id], prefix)
        finally:
            self._bounded = True

    def take_forgotten(self) -> list[str]:
        """The trajectories that are to be forgotten, which is no longer pending; what was put of them since then is."""
        found = [trajectory_id for trajectory_id, entry in self._entries.items() if entry.forget]
        for trajectory_id in found:
            self._entries[trajectory_id].forget = False
        return found

    def take(self) -> Iterator[list[Operation]]:
        """Empty the queue into batches of about `batch_bytes`; a single larger value ends its batch, as does a whole
        trajectory that is rewritten.
        """
        entries, states, is_rewrite = self._entries, self._states, self._is_rewrite
        self._entries, self._states, self._is_rewrite = {}, {}, False
        self._num_bytes, self.since = 0, 0.0
        self.wanted.clear()
        batch = [Operation("rewrite", "", b"")] if is_rewrite else []
        num_bytes = 0
        last = [Operation("sweep", "", b"")] if is_rewrite else []
        for operation in chain(_operations(entries, states, is_rewrite), last):
            # What replaces a trajectory's old record, answer and turns comes in one batch with all of the new ones.
            is_divisible = not is_rewrite or operation.name not in ("record", "answer", "turn")
            if num_bytes >= self._settings.batch_bytes and is_divisible:
                yield batch
                batch, num_bytes = [], 0
            batch.append(operation)
            num_bytes += len(operation.id) + len(operation.value)
        if batch:
            yield batch

    def _entry(self, trajectory_id: str) -> _Entry:
        self._note_put()
        entry = self._entries.get(trajectory_id)
        if entry is None:
            entry = self._entries[trajectory_id] = _Entry(deque(maxlen=self._settings.max_turns_kept))
            self._num_bytes += ENTRY_BYTES
        return entry

    def _drop_first(self, entry: _Entry, prefix: str) -> None:
        """Have pieces that the server has dropped before those of this entry are put."""
        if prefix not in entry.drops:
            self._grow(entry, len(prefix))
            entry.drops.append(prefix)

    def _note_put(self) -> None:
        self.wanted.set()
        self.num_puts += 1
        self.since = self.since or time.monotonic()

    def _grow(self, entry: _Entry, num_bytes: int) -> None:
        entry.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _bound(self) -> None:
        while self._bounded and (
            len(self._entries) > self._settings.max_pending_trajectories
            or self._num_bytes > self._settings.max_pending_bytes
        ):
            dropped = self._entries.pop(next(iter(self._entries)))
            self._num_bytes -= dropped.num_bytes
            self.num_dropped += 1


def forgotten_first(batches: list[list[Operation]], since_forgotten: list[str]) -> list[list[Operation]]:
    """These batches, of which none was sent, behind one that forgets what they forget or what was forgotten since.

    Returns:
        One batch more, with the same effect; nothing if nothing is to be forgotten.
    """
    forgotten = dict.fromkeys(since_forgotten)
    wanted = [[each for each in batch if each.name == "state" or each.id not in forgotten] for batch in batches]
    forgotten |= {each.id: None for batch in wanted for each in batch if each.name == "forget"}
    if not forgotten:
        return []
    first = [Operation("forget", trajectory_id, b"") for trajectory_id in forgotten]
    return [first, *([each for each in batch if each.name != "forget"] for batch in wanted)]


def _operations(entries: dict[str, _Entry], states: dict[str, bytes], is_rewrite: bool) -> Iterator[Operation]:
    for trajectory_id, entry in entries.items():
        if entry.forget:
            yield Operation("forget", trajectory_id, b"")
        for prefix in entry.drops:
            yield Operation("drop", trajectory_id, b"", prefix)
        for name, data in entry.pieces.items():
            yield Operation("piece", trajectory_id, data, name)
        if is_rewrite and (entry.record is not None or entry.turns):
            yield Operation("replace", trajectory_id, b"")
        if entry.record is not None:
            yield Operation("record", trajectory_id, entry.record)
        if entry.answer is not None:
            yield Operation("answer", trajectory_id, entry.answer)
        for turn in entry.turns:
            yield Operation("turn", trajectory_id, turn)
    for name, value in states.items():
        yield Operation("state", name, value)
