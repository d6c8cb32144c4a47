"""Behind a turn that fits nowhere: one engine is reserved for it, and the others serve the turns behind it."""

import pytest

from scheduling.limits import Limits
from scheduling.types import Fault, Refusal, Reject
from tests.scheduling.fleet import MODEL, Fleet


def crowded() -> Fleet:
    """Engines A and B with 100 KV tokens, each with a running turn of 40; 50 more fit under the watermark."""
    fleet = Fleet()
    for engine_id, turn_id in (("A", "a"), ("B", "b")):
        fleet.engine(engine_id, slots=8, kv=100)
        fleet.arrive(turn_id, prompt=40)
    assert (fleet.home("a"), fleet.home("b")) == ("A", "B")
    return fleet


def test_small_turns_enter_other_engines_while_a_large_one_waits() -> None:
    """It fits on neither engine. One is reserved for it; the other takes turns until it is full, too."""
    fleet = crowded()
    assert fleet.arrive("large", prompt=80, predicted=9_000) == []
    assert fleet.sent(fleet.arrive("small", prompt=30)) == [("small", "B")]
    assert fleet.arrive("next", prompt=30) == []


def test_a_large_turn_gets_the_engine_reserved_for_it() -> None:
    """Although small turns waited for that engine, too. They enter the other one as soon as it has room."""
    fleet = crowded()
    fleet.arrive("large", prompt=80, predicted=9_000)
    fleet.arrive("small", prompt=30)
    fleet.arrive("next", prompt=30)
    fleet.finish("a", prompt=40)
    assert fleet.sent(fleet.close("a")) == [("large", "A")]
    fleet.finish("small", prompt=30)
    assert fleet.sent(fleet.close("small")) == [("next", "B")]


def test_a_large_turn_takes_the_first_engine_with_room() -> None:
    """Then the turns that fit on the engine reserved for it enter there."""
    fleet = crowded()
    fleet.arrive("large", prompt=80, predicted=9_000)
    fleet.arrive("waits", prompt=60)
    assert fleet.arrive("small", prompt=20) == []
    fleet.finish("b", prompt=40)
    assert fleet.sent(fleet.close("b")) == [("large", "B"), ("small", "A")]


def test_no_engine_is_reserved_for_a_turn_that_it_can_never_hold() -> None:
    """The one that can has less free KV now, but is kept for it."""
    fleet = Fleet()
    fleet.engine("A", slots=8, kv=100, models=(MODEL, "other"))
    fleet.arrive("a", prompt=70)
    fleet.engine("B", slots=8, kv=50)
    assert fleet.arrive("large", prompt=60, predicted=9_000) == []
    assert fleet.arrive("small", model="other", prompt=20) == []


def test_a_more_urgent_turn_passes_a_reservation() -> None:
    """A client's priority outranks every prediction, on the reserved engine, too."""
    fleet = crowded()
    fleet.arrive("large", prompt=80, predicted=9_000)
    fleet.arrive("fills", prompt=50)
    assert fleet.sent(fleet.arrive("first", prompt=50, priority=-1)) == [("first", "A")]


@pytest.mark.parametrize("end", ["leaves", "cordoned", "lost"])
def test_a_reservation_ends_with_its_turn_or_its_engine(end: str) -> None:
    """The large turn's client leaves. Or the engine stops serving it, and another one is reserved."""
    fleet = crowded()
    fleet.arrive("large", prompt=80, predicted=9_000)
    fleet.arrive("fills", prompt=50)
    assert fleet.arrive("small", prompt=30) == []
    if end == "leaves":
        assert fleet.sent(fleet.fail("large", leg=0, fault=Fault.CLIENT_LEFT)) == [("small", "A")]
    else:
        fleet.engine("A", slots=8, kv=100, accepting=False) if end == "cordoned" else fleet.lose("A")
        fleet.finish("fills", prompt=50)
        assert fleet.close("fills") == []
        assert fleet.sent(fleet.engine("C", slots=8, kv=100)) == [("large", "C"), ("small", "B")]


def test_a_lost_engine_that_was_reserved_for_a_resident_is_not_filled() -> None:
    """The turn leaves its queue when its engine is lost. That would let others use the reserved room, but there is none
    left."""
    fleet = crowded()
    fleet.progress("b", 1, output=20)
    fleet.finish("a", prompt=40)
    fleet.tick(later_s=100.0)
    assert fleet.sent(fleet.arrive("entrant", prompt=50)) == [("entrant", "A")]  # the claim of `a` gave way
    assert fleet.arrive("a-2", "a", prompt=80, predicted=9_000) == []
    reserved_for = fleet.scheduler.engines["A"].reserved_for
    assert reserved_for is not None and reserved_for.turn_id == "a-2"
    fleet.lose("A")
    fleet.fail("entrant")
    fleet.lose("B")
    fleet.finish("b", prompt=40)  # reported by an engine that is gone
    assert fleet.sent(fleet.engine("C", slots=8, kv=200)) == [("a-2", "C"), ("entrant", "C")]


def test_a_full_queue_accepts_a_resident_that_can_run_at_once() -> None:
    """Its home is reserved for a more urgent turn, which residents may pass."""
    fleet = Fleet(limits=Limits(max_waiting_turns=1))
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("m1", "m", prompt=40)
    fleet.finish("m1", prompt=40, output=10)
    assert fleet.arrive("large", prompt=60, predicted=90_000) == []
    assert fleet.sent(fleet.arrive("m2", "m", prompt=50)) == [("m2", "A")]
    assert fleet.arrive("new", prompt=10) == [Reject("new", Refusal.QUEUE_FULL, 5.0)]


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.ENGINE])
def test_a_resident_that_its_engine_failed_passes_the_turn_that_its_claim_keeps_out(fault: Fault) -> None:
    """It waits among those without a home for as long as it avoids the engine. Each kept the other out, beside an idle
    engine, until the queue timeout."""
    fleet = Fleet()
    fleet.engine("A", slots=8, kv=100)
    fleet.arrive("m1", "m", prompt=40)
    fleet.finish("m1", prompt=40, output=10)
    assert fleet.sent(fleet.arrive("m2", "m", prompt=50)) == [("m2", "A")]
    assert fleet.arrive("large", prompt=60, predicted=90_000) == []
    assert fleet.fail("m2", fault=fault) == []
    assert fleet.sent(fleet.tick(later_s=10.0)) == [("m2", "A")]
    fleet.finish("m2", leg=2, prompt=50)
    assert fleet.sent(fleet.close("m")) == [("large", "A")]


def test_the_claim_at_a_home_that_serves_its_model_no_more_keeps_nobody_out() -> None:
    """An adapter was unloaded there, and its trajectory waits for an engine that has it. It kept a turn of another
    model out, beside an idle engine, until the queue timeout."""
    fleet = Fleet()
    fleet.engine("A", slots=8, kv=100, models=("x", "y"))
    fleet.arrive("m1", "m", model="x", prompt=40)
    fleet.finish("m1", prompt=40, output=10)
    fleet.engine("A", slots=8, kv=100, models=("y",))
    assert fleet.arrive("m2", "m", model="x", prompt=50) == []
    assert fleet.arrive("large", model="y", prompt=60) == []
    assert fleet.sent(fleet.tick(later_s=10.0)) == [("large", "A")]


def test_the_engine_with_the_most_room_is_reserved() -> None:
    """A shared prompt counts once: three siblings claim 120 of 100 tokens but hold 40, so A has more room than B, where
    one turn holds 70."""
    fleet = Fleet()
    fleet.engine("A", slots=8, kv=100)
    for number in range(3):
        fleet.arrive(f"s{number}", prompt=40, group="g")
    fleet.engine("B", slots=8, kv=100)
    assert fleet.sent(fleet.arrive("other", prompt=70)) == [("other", "B")]
    assert fleet.arrive("large", prompt=80, predicted=9_000) == []
    reserved = [engine_id for engine_id, engine in fleet.scheduler.engines.items() if engine.reserved_for]
    assert reserved == ["A"]
    assert fleet.sent(fleet.arrive("small", prompt=15)) == [("small", "B")]
