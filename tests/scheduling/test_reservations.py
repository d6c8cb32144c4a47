"""What happens behind a turn that fits nowhere: one engine gathers room for it, the others serve those behind it."""

import pytest

from scheduling.limits import Limits
from scheduling.types import Fault, Refusal, Reject
from tests.scheduling.fleet import Fleet


def crowded() -> Fleet:
    """Engines A and B of 100 KV tokens, each with one running turn of 40; 50 more fit under the watermark."""
    fleet = Fleet()
    for engine_id, turn_id in (("A", "a"), ("B", "b")):
        fleet.engine(engine_id, slots=8, kv=100)
        fleet.arrive(turn_id, prompt=40)
    assert (fleet.home("a"), fleet.home("b")) == ("A", "B")
    return fleet


def test_small_ones_enter_elsewhere_while_a_large_one_waits() -> None:
    """It fits on neither engine. One is kept for it; the other takes what fits, and then that is full too."""
    fleet = crowded()
    assert fleet.arrive("large", prompt=80, predicted=9_000) == []
    assert fleet.sent(fleet.arrive("small", prompt=30)) == [("small", "B")]
    assert fleet.arrive("next", prompt=30) == []


def test_the_large_one_gets_the_engine_that_was_kept_for_it() -> None:
    """Though small ones waited for it too; and these enter the other one as soon as it has room."""
    fleet = crowded()
    fleet.arrive("large", prompt=80, predicted=9_000)
    fleet.arrive("small", prompt=30)
    fleet.arrive("next", prompt=30)
    fleet.finish("a", prompt=40)
    assert fleet.sent(fleet.close("a")) == [("large", "A")]
    fleet.finish("small", prompt=30)
    assert fleet.sent(fleet.close("small")) == [("next", "B")]


def test_the_large_one_takes_whichever_engine_has_room_first() -> None:
    """Then those for whom its engine had room all the time enter there."""
    fleet = crowded()
    fleet.arrive("large", prompt=80, predicted=9_000)
    fleet.arrive("waits", prompt=60)
    assert fleet.arrive("small", prompt=20) == []
    fleet.finish("b", prompt=40)
    assert fleet.sent(fleet.close("b")) == [("large", "B"), ("small", "A")]


def test_a_more_urgent_one_passes_it() -> None:
    """A client's hint goes before every prediction, on the engine that is kept too."""
    fleet = crowded()
    fleet.arrive("large", prompt=80, predicted=9_000)
    fleet.arrive("fills", prompt=50)
    assert fleet.sent(fleet.arrive("first", prompt=50, priority=-1)) == [("first", "A")]


@pytest.mark.parametrize("end", ["leaves", "cordoned", "lost"])
def test_a_kept_engine_is_free_again_when_nobody_waits_for_it(end: str) -> None:
    """The large one's client leaves; or the engine will not serve it, and then another one is kept."""
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


def test_an_engine_that_is_lost_while_it_gathers_room_for_one_that_lived_there_is_not_filled() -> None:
    """Such a turn leaves its queue as its engine is lost, when others may use the room that was kept: there is none."""
    fleet = crowded()
    fleet.progress("b", 1, output=20)
    fleet.finish("a", prompt=40)
    fleet.tick(later_s=100.0)
    assert fleet.sent(fleet.arrive("entrant", prompt=50)) == [("entrant", "A")]  # a's context gave way
    assert fleet.arrive("a-2", "a", prompt=80, predicted=9_000) == []
    kept = fleet.scheduler.engines["A"].reserved_for
    assert kept is not None and kept.turn_id == "a-2"
    fleet.lose("A")
    fleet.fail("entrant")
    fleet.lose("B")
    fleet.finish("b", prompt=40)  # said of an engine that is no more
    assert fleet.sent(fleet.engine("C", slots=8, kv=200)) == [("a-2", "C"), ("entrant", "C")]


def test_a_full_queue_refuses_no_resident_that_goes_at_once() -> None:
    """Its home gathers room for a more urgent one, whom residents may pass."""
    fleet = Fleet(limits=Limits(max_waiting_turns=1))
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("m1", "m", prompt=40)
    fleet.finish("m1", prompt=40, output=10)
    assert fleet.arrive("large", prompt=60, predicted=90_000) == []
    assert fleet.sent(fleet.arrive("m2", "m", prompt=50)) == [("m2", "A")]
    assert fleet.arrive("new", prompt=10) == [Reject("new", Refusal.QUEUE_FULL, 5.0)]


def test_the_engine_with_the_most_room_is_kept_a_shared_prompt_counted_once() -> None:
    """Three siblings claim 120 of 100 tokens and hold 40 of them, so A has more room than B, where one holds 70."""
    fleet = Fleet()
    fleet.engine("A", slots=8, kv=100)
    for number in range(3):
        fleet.arrive(f"s{number}", prompt=40, group="g")
    fleet.engine("B", slots=8, kv=100)
    assert fleet.sent(fleet.arrive("other", prompt=70)) == [("other", "B")]
    assert fleet.arrive("large", prompt=80, predicted=9_000) == []
    kept = [engine_id for engine_id, engine in fleet.scheduler.engines.items() if engine.reserved_for]
    assert kept == ["A"]
    assert fleet.sent(fleet.arrive("small", prompt=15)) == [("small", "B")]
