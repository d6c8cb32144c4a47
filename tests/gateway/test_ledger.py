"""The ledger: what it has written is what it knows after a restart."""

import asyncio
from dataclasses import asdict, fields
from typing import Any

import orjson
import pytest

from gateway.state.ledger import Ledger
from scheduling.types import TrajectoryRecord, TrajectoryState
from store import StoreCorrupt, StoredTrajectory
from store.memory import MemoryStore
from store.settings import StoreSettings


def test_a_restored_record_has_all_its_fields() -> None:
    """Each field of a record outlives the process, and so do the trajectory's declaration and turns."""
    record = TrajectoryRecord("t-1", "g", "r", TrajectoryState.FINISHED, "e-1", 12, 34, 5, 67.5, 1.25, 2.5)
    assert all(getattr(record, field.name) for field in fields(record)), (
        "the loss of an empty field would not be noticed"
    )
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


@pytest.mark.parametrize("change", [{"state": "resting"}, {"num_turns": ...}, {"group_id": ...}])
def test_a_record_of_another_version_is_reported_with_its_trajectory(change: dict[str, Any]) -> None:
    """It used to be a traceback. `...` stands for a missing field here."""
    record = TrajectoryRecord("t-1", "g", None, TrajectoryState.ACTIVE, None, 1, 1, 1, 1.0, 1.0, 1.0)
    fields = {name: value for name, value in (asdict(record) | change).items() if value is not ...}
    ledger = Ledger(MemoryStore(StoreSettings()), max_turns_kept=10)
    with pytest.raises(StoreCorrupt, match="record of trajectory 't-1' is of another version"):
        ledger.restore([StoredTrajectory("t-1", fields, [])], now=100.0)


def test_a_field_of_a_newer_version_is_ignored() -> None:
    """After a rollback the record is there, without what this version cannot know. The start was refused."""
    record = TrajectoryRecord("t-1", "g", None, TrajectoryState.ACTIVE, None, 1, 1, 1, 1.0, 1.0, 1.0)
    stored = [StoredTrajectory("t-1", asdict(record) | {"of_a_newer_version": 1, "reward": {"reward": 0.5}}, [])]
    ledger = Ledger(MemoryStore(StoreSettings()), max_turns_kept=10)
    assert ledger.restore(stored, now=100.0) == [record]
    entry = ledger.get("t-1")
    assert entry is not None and entry.reward == {"reward": 0.5}


def test_a_record_from_the_future_gets_the_current_time() -> None:
    """The record that has been idle longest expires first; one of tomorrow, from a clock that was ahead, kept all
    others until then."""
    record = TrajectoryRecord("t-1", "g", None, TrajectoryState.ACTIVE, None, 1, 1, 1, 1.0, 150.0, 200.0)
    stored = [StoredTrajectory("t-1", asdict(record), [])]
    (found,) = Ledger(MemoryStore(StoreSettings()), max_turns_kept=10).restore(stored, now=100.0)
    assert (found.created_at, found.last_at) == (100.0, 100.0)


def test_a_whole_prediction_is_restored_as_the_number_that_it_is() -> None:
    """Stores have `6000` from declarations of earlier versions. Saved again so, it differed from what a replay of the
    event log writes: `6000.0`."""
    record = TrajectoryRecord("t-1", "g", None, TrajectoryState.ACTIVE, None, 1, 1, 1, 6_000, 1.0, 1.0)
    stored = [StoredTrajectory("t-1", asdict(record), [])]
    (found,) = Ledger(MemoryStore(StoreSettings()), max_turns_kept=10).restore(stored, now=100.0)
    assert orjson.dumps(found.predicted_tokens) == b"6000.0"
