"""The ledger: what it writes down is what it knows after a restart."""

import asyncio
from dataclasses import asdict, fields
from typing import Any

import pytest

from gateway.state.ledger import Ledger
from scheduling.types import TrajectoryRecord, TrajectoryState
from store import StoreCorrupt, StoredTrajectory
from store.memory import MemoryStore
from store.settings import StoreSettings


def test_a_record_comes_back_with_all_its_fields() -> None:
    """Each field of a record outlives the process, and so does what a client said of its trajectory."""
    record = TrajectoryRecord("t-1", "g", "r", TrajectoryState.FINISHED, "e-1", 12, 34, 5, 67.5, 1.25, 2.5)
    assert all(getattr(record, field.name) for field in fields(record)), "a field left out would not be noticed"
    store = MemoryStore(StoreSettings())
    ledger = Ledger(store, max_turns_kept=10)
    ledger.save(record)
    ledger.declare("t-1", {"expected_output_tokens": 100})
    ledger.rewarded("t-1", {"reward": 1.0})
    turn = {"turn_id": "a", "outcome": "finished"}
    ledger.add_turn("t-1", turn)
    ledger.add_turn("t-1", {"turn_id": "b"}, b'{"turn_id":"b"}')

    restored = Ledger(store, max_turns_kept=10)
    assert restored.restore(asyncio.run(store.load()), now=100.0) == [record]
    before, after = ledger.get("t-1"), restored.get("t-1")
    assert after == before and after is not None
    assert list(after.turns) == [turn, {"turn_id": "b"}] and after.record.state is TrajectoryState.FINISHED


@pytest.mark.parametrize(
    "change", [{"of_a_newer_version": 1}, {"state": "resting"}, {"num_turns": ...}, {"group_id": ...}]
)
def test_a_record_of_another_version_is_told_in_one_line(change: dict[str, Any]) -> None:
    """With its trajectory; it was a traceback. A field that is not there is `...` here."""
    record = TrajectoryRecord("t-1", "g", None, TrajectoryState.ACTIVE, None, 1, 1, 1, 1.0, 1.0, 1.0)
    fields = {name: value for name, value in (asdict(record) | change).items() if value is not ...}
    ledger = Ledger(MemoryStore(StoreSettings()), max_turns_kept=10)
    with pytest.raises(StoreCorrupt, match="record of trajectory 't-1' is of another version"):
        ledger.restore([StoredTrajectory("t-1", fields, [])], now=100.0)


def test_a_record_of_a_clock_that_was_ahead_is_of_now() -> None:
    """The longest idle one is the first to expire: one of tomorrow kept all others until then."""
    record = TrajectoryRecord("t-1", "g", None, TrajectoryState.ACTIVE, None, 1, 1, 1, 1.0, 150.0, 200.0)
    stored = [StoredTrajectory("t-1", asdict(record), [])]
    (found,) = Ledger(MemoryStore(StoreSettings()), max_turns_kept=10).restore(stored, now=100.0)
    assert (found.created_at, found.last_at) == (100.0, 100.0)
