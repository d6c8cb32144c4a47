"""What a gateway stores of what its predictor learned, and what it restores."""

import pytest

from gateway.config import load_settings
from gateway.memory import restored
from gateway.state.ledger import Ledger
from predictor.named import predictor_named
from predictor.progress import Predictor, Progress
from scheduling.types import TrajectoryRecord, TrajectoryState
from store import StoreSettings, open_store


async def test_unchanged_predictor_state_is_written_once() -> None:
    """It can be megabytes, and a gateway may be idle for days."""
    store = open_store("memory:", StoreSettings())
    memory = await restored(load_settings(), store, lambda: 0.0, predictor_named("tabular"))
    learned = memory.save_predictor()
    assert await store.get_state("predictor") == learned
    store.put_state("predictor", b"")
    assert memory.save_predictor(learned) == learned
    assert await store.get_state("predictor") == b""
    memory.predictor.ended(Progress("t", "g", output_tokens=100))
    assert memory.save_predictor(learned) == await store.get_state("predictor") != learned


async def test_trajectories_of_an_earlier_process_are_not_waited_for() -> None:
    """Their first turns ran when it was killed, and their clients ended with it: later trajectories count as soon as
    they do without them."""
    store = open_store("memory:", StoreSettings())
    for rollout in range(3):
        memory = await restored(load_settings(), store, lambda: 0.0, predictor_named("tabular"))
        for number in range(100):
            memory.predictor.predict(Progress(f"{rollout}-{number}", f"g{rollout}", "", 100, 100))
        memory.save_predictor()
    after = (await restored(load_settings(), store, lambda: 0.0, predictor_named("tabular"))).predictor
    assert predicted_for_new(after) == pytest.approx(predicted_for_new(predictor_named("tabular")), rel=0.02)


def predicted_for_new(predictor: Predictor) -> float:
    """The prediction for a new trajectory after 128 of 50,000 tokens, one after the other."""
    for number in range(128):
        predictor.predict(Progress(f"t{number}", f"t{number}", "", 100, 100))
        predictor.ended(Progress(f"t{number}", f"t{number}", "", 100, 50_100, 50_000, 50_000, 1))
    return predictor.predict(Progress("new", "new", "", 100, 100)).total_tokens


async def test_what_was_used_last_is_restored_in_whatever_order_the_store_has_it() -> None:
    """Of more trajectories than there is room for, those that asked longest ago lose their conversations and answers.
    It was those that the store gave first: the oldest that still run, or, with Redis, any."""
    store = open_store("memory:", StoreSettings())
    ledger = Ledger(store, max_turns_kept=10)
    for name, last_at in (("latest", 9.0), ("oldest", 1.0), ("later", 8.0), ("older", 2.0)):
        ledger.save(TrajectoryRecord(name, "g", None, TrajectoryState.ACTIVE, None, 1, 1, 1, 1.0, 0.5, last_at))
        entry = ledger.get(name)
        assert entry is not None
        entry.conversation = [f"digest-of-{name}"]
        ledger.answered(name, b'["digest","chat","turn",false]\n' + b"x" * 100)
        ledger.save(entry.record)
    settings = load_settings(max_conversations=2, max_kept_answer_bytes=300)
    memory = await restored(settings, store, lambda: 10.0, predictor_named("tabular"))
    names = [entry.record.trajectory_id for entry in memory.ledger]
    assert [name for name in names if memory.conversations.dump(name)] == ["latest", "later"]
    assert [name for name in names if memory.repeats.stored(name)] == ["latest", "later"]
