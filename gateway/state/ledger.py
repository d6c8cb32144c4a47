"""What is known of each trajectory beyond what scheduling needs: its turns, and what its client declared. It feeds the
API and the store; after a restart it is filled from the store.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from scheduling.types import TrajectoryRecord, TrajectoryState
from store.port import Store, StoreCorrupt, StoredTrajectory

_FIELDS = [one.name for one in fields(TrajectoryRecord)]
_SHOWN = [name for name in _FIELDS if name != "trajectory_id"]


@dataclass(slots=True)
class Entry:
    """One trajectory.

    Args:
        record: the scheduler's latest record of it.
        turns: its ended turns, oldest first, as the API shows them.
        declared: what its client declared: metadata and hints.
        conversation: digests, one per turn, by which a client without an id is recognised.
        reward: what its client reported as its worth: `reward`, `components`, `metadata`.
    """

    record: TrajectoryRecord
    turns: deque[dict[str, Any]]
    declared: dict[str, Any] = field(default_factory=dict)
    conversation: list[str] = field(default_factory=list)
    reward: dict[str, Any] | None = None


class Ledger:
    """All trajectories that are not forgotten.

    Args:
        store: where they are written down.
        max_turns_kept: in the history of one trajectory.
    """

    def __init__(self, store: Store, max_turns_kept: int) -> None:
        self._store = store
        self._max_turns_kept = max_turns_kept
        self._entries: dict[str, Entry] = {}
        self._answers: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, trajectory_id: str) -> Entry | None:
        """The entry of a trajectory, if there is one."""
        return self._entries.get(trajectory_id)

    def save(self, record: TrajectoryRecord) -> TrajectoryRecord | None:
        """Take the scheduler's record of a trajectory and write it down; returns the previous one."""
        before = None
        entry = self._entries.get(record.trajectory_id)
        if entry is None:
            entry = self._entries[record.trajectory_id] = Entry(record, deque(maxlen=self._max_turns_kept))
        else:
            before, entry.record = entry.record, record
        self._put(entry)
        return before

    def declare(self, trajectory_id: str, declared: dict[str, Any]) -> None:
        """Note what a client declares about a trajectory that was saved before."""
        entry = self._entries[trajectory_id]
        entry.declared |= declared
        self._put(entry)

    def rewarded(self, trajectory_id: str, reward: dict[str, Any]) -> None:
        """Note the reward that a client reports; the last one counts."""
        entry = self._entries[trajectory_id]
        entry.reward = reward
        self._put(entry)

    def add_turn(self, trajectory_id: str, turn: dict[str, Any], encoded: bytes | None = None) -> None:
        """Add an ended turn to its trajectory's history; `encoded` is its JSON, if known."""
        entry = self._entries.get(trajectory_id)
        if entry is not None:
            entry.turns.append(turn)
            self._store.append_turn(trajectory_id, encoded or turn)

    def answered(self, trajectory_id: str, answer: bytes) -> None:
        """Write this answer down with the trajectory's next record. It is not kept here, because it may be long."""
        self._answers[trajectory_id] = answer

    def outdated(self, trajectory_id: str) -> None:
        """Write down that a trajectory's last answer is no answer any more."""
        entry = self._entries.get(trajectory_id)
        if entry is not None:
            self._answers[trajectory_id] = b""
            self._put(entry)

    def forget(self, trajectory_id: str) -> None:
        """Drop a trajectory, here and in the store."""
        self._answers.pop(trajectory_id, None)
        if self._entries.pop(trajectory_id, None) is not None:
            self._store.forget_trajectory(trajectory_id)

    def restore(self, stored: list[StoredTrajectory], now: float) -> list[TrajectoryRecord]:
        """Fill an empty ledger; returns the records for the scheduler, oldest trajectory first.

        Args:
            now: no record may be later, because the clock may have been set back since.

        Raises:
            StoreCorrupt: another version wrote them. Fields that only a newer one knows are ignored.
        """
        for item in stored:
            if item.record:
                self._entries[item.trajectory_id] = self._entry(item, now)
        return sorted((entry.record for entry in self._entries.values()), key=lambda record: record.created_at)

    def rewrite(self, answer_of: Callable[[str], bytes | None]) -> None:
        """Write everything down again, after the store lost something.

        Args:
            answer_of: the last answer of a trajectory, if it is to be stored.
        """
        for trajectory_id, entry in self._entries.items():
            answer = answer_of(trajectory_id)
            if answer is not None:
                self._answers.setdefault(trajectory_id, answer)
            self._put(entry)
            for turn in entry.turns:
                self._store.append_turn(trajectory_id, turn)

    def _entry(self, item: StoredTrajectory, now: float) -> Entry:
        try:
            stored = item.record
            record = TrajectoryRecord(**{name: stored[name] for name in _FIELDS if name in stored})
            created_at, last_at = min(record.created_at, now), min(record.last_at, now)
            record = replace(
                record,
                state=TrajectoryState(record.state),
                predicted_tokens=float(record.predicted_tokens),  # earlier versions stored what a client declared
                created_at=created_at,
                last_at=last_at,
            )
        except (TypeError, ValueError) as fault:
            raise StoreCorrupt(
                f"the store's record of trajectory {item.trajectory_id!r} is of another version ({fault}); "
                "start the one that wrote it, or choose another store"
            ) from fault
        declared, conversation = stored.get("declared", {}), stored.get("conversation", [])
        return Entry(record, deque(item.turns, self._max_turns_kept), declared, conversation, stored.get("reward"))

    def _put(self, entry: Entry) -> None:
        record = entry.record
        # Field by field, because orjson takes twice as long to find them itself; `_entry` is the inverse.
        value = {
            "trajectory_id": record.trajectory_id,
            "group_id": record.group_id,
            "rollout_id": record.rollout_id,
            "state": record.state,
            "home": record.home,
            "context_tokens": record.context_tokens,
            "output_tokens": record.output_tokens,
            "num_turns": record.num_turns,
            "predicted_tokens": record.predicted_tokens,
            "created_at": record.created_at,
            "last_at": record.last_at,
            "declared": entry.declared,
            "conversation": entry.conversation,
        }
        if entry.reward is not None:
            value["reward"] = entry.reward
        self._store.put_trajectory(record.trajectory_id, value, self._answers.pop(record.trajectory_id, None))


def as_json(entry: Entry) -> dict[str, Any]:
    """An entry as the API shows it, without its turns."""
    return {
        "id": entry.record.trajectory_id,
        "object": "trajectory",
        **{name: getattr(entry.record, name) for name in _SHOWN},
        "declared": entry.declared,
        "reward": entry.reward,
    }
