"""What the scheduler remembers about engines and queues: sums stay right and nothing accumulates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.engine import Engine
from scheduling.estimate import Work, estimate_finish_s
from scheduling.limits import Limits
from scheduling.state import Trajectory
from scheduling.types import EngineSpec, Fault, Prediction, Tick, TurnArrived
from tests.scheduling.fleet import MODEL, Fleet


def test_an_engine_without_residents_has_no_work() -> None:
    """Exactly none, and at once, whatever rounding did to the sums."""
    fleet = Fleet()
    fleet.engine("A", slots=3)
    for name, predicted in [("a", 0.1), ("b", 1e9 / 3), ("c", 7e7 / 9)]:
        fleet.arrive(name, prompt=77, predicted=predicted)
        fleet.finish(name, prompt=77)
    for name in ["b", "a", "c"]:
        fleet.close(name)
    assert fleet.scheduler.engines["A"].facts(fleet.at).work == Work()


@given(st.data())
def test_an_engines_work_is_the_sum_over_its_residents(data: st.DataObject) -> None:
    """Residents come, grow, get new predictions and leave in any order. The running sums equal sums from scratch, over
    all residents and over the others if one left. An engine knows its longest trajectory a second later."""
    engine = Engine(EngineSpec("A", frozenset({MODEL}), 4, data.draw(st.sampled_from([0, 9_000]))), True)
    residents: dict[str, tuple[Trajectory, int]] = {}
    tokens = st.integers(1, 5_000)
    for at in range(2, 2 + data.draw(st.integers(1, 15))):
        name = data.draw(st.sampled_from("abcd"))
        if name in residents and data.draw(st.booleans()):
            engine.release(name)
            del residents[name]
        else:
            prediction = Prediction(float(data.draw(tokens)), float(data.draw(tokens)))
            residents[name] = Trajectory(name, 0, "", None, 0.0, 0.0, prediction), data.draw(tokens)
            engine.claim(*residents[name])
        facts = engine.facts(float(at))
        assert sums(facts.work) == pytest.approx(sums(work_of(residents)))
        assert facts.finish_s == pytest.approx(estimate_finish_s(facts.profile, facts.work))
        assert facts.kv_claimed == sum(claim for _, claim in residents.values())
        assert facts.num_trajectories == len(residents)
        for leaver in residents:
            others = {name: resident for name, resident in residents.items() if name != leaver}
            assert sums(engine.work_without(leaver)) == pytest.approx(sums(work_of(others)))


def work_of(residents: dict[str, tuple[Trajectory, int]]) -> Work:
    work = Work()
    for trajectory, claim in residents.values():
        work.add(*trajectory.share(claim))
    return work


def sums(work: Work) -> tuple[float, float, float]:
    return work.longest_tokens, work.total_tokens, work.token_context_products


def test_an_engines_longest_trajectory_is_updated_within_a_second() -> None:
    """When the longest has left, the next longest sets the estimate."""
    fleet = Fleet()
    fleet.engine("A", slots=2)
    fleet.arrive("long", predicted=9_000)
    fleet.arrive("short", predicted=400)
    fleet.finish("long", output=10)
    fleet.close("long")
    assert fleet.scheduler.engines["A"].facts(0.5).work.longest_tokens == 9_000
    assert fleet.scheduler.engines["A"].facts(1.0).work.longest_tokens == 400


def test_vague_tokens_are_those_of_the_longest_trajectory() -> None:
    """When a vaguely predicted trajectory has left, the next longest is as certain as its own prediction."""
    fleet = Fleet()
    fleet.engine("A", slots=3)
    for name, prediction in [("vague", Prediction(4_000, 10_000)), ("sure", Prediction(5_000, 6_000))]:
        fleet.handle(TurnArrived(0.0, name, name, MODEL, 100, prediction))
    assert fleet.scheduler.engines["A"].work.vague_tokens == 10_000
    fleet.finish("vague", output=10)
    fleet.close("vague")
    assert fleet.scheduler.engines["A"].facts(1.0).work.vague_tokens == 0
    fleet.finish("sure", output=10)
    fleet.handle(TurnArrived(2.0, "again", "sure", MODEL, 100, Prediction(4_000, 10_000)))
    assert fleet.scheduler.engines["A"].facts(3.0).work.vague_tokens == 9_990


def test_an_engines_facts_are_always_current() -> None:
    """Cached facts are dropped when the engine's turns, work or description change."""
    fleet = Fleet()
    fleet.engine("A", slots=1)
    engine = fleet.scheduler.engines["A"]
    assert engine.facts(0.0).num_turns == 0
    fleet.arrive("t1", "t")
    assert engine.facts(0.0).num_turns == 1
    fleet.arrive("t2", "t")
    assert engine.facts(0.0).num_turns == 2
    fleet.engine("A", slots=1, kv=500)
    assert engine.facts(0.0).profile.kv_capacity_tokens == 500
    fleet.fail("t2", leg=0, fault=Fault.CLIENT_LEFT)
    assert engine.facts(0.0).num_turns == 1
    fleet.progress("t1", 1, 60)
    assert engine.facts(0.0).work.token_context_products == 1_000 * (70 + 1_000 / 2)


def test_an_empty_queue_is_dropped() -> None:
    """Clients choose the names of models, so their queues must not accumulate."""
    fleet = Fleet(limits=Limits(queue_timeout_s=1))
    for number in range(20):
        fleet.arrive(f"t{number}", model=f"no-such-model-{number}")
    fleet.tick(1.0)
    fleet.tick(1.0)
    assert fleet.scheduler._queues.homeless == {}


def test_after_a_retry_pause_the_policy_chooses_the_engine() -> None:
    """At a tick several engines may be free: the turn goes where it ends soonest, not to the first in the list."""
    fleet = Fleet()
    fleet.engine("A", slots=2)
    fleet.engine("B", slots=2)
    fleet.arrive("t")
    fleet.fail("t", leg=1)
    fleet.fail("t", leg=2)
    fleet.arrive("much", predicted=90_000)
    assert fleet.home("much") == "A"
    assert fleet.sent(fleet.tick(2.0)) == [("t", "B")]


def test_the_policy_chooses_although_a_more_urgent_turn_fits_nowhere() -> None:
    """The more urgent turn waits for room at C. Of the other two engines, this turn goes to the one that ends
    sooner."""
    fleet = Fleet()
    for engine_id in "ABC":
        fleet.engine(engine_id, slots=2, kv=1_000)
    fleet.arrive("t")
    for leg in (1, 2, 3):
        fleet.fail("t", leg=leg, fault=Fault.BUSY)
    fleet.arrive("much", predicted=90_000, prompt=100)
    fleet.arrive("little", predicted=500, prompt=100)
    assert fleet.home("t") == "C" and {fleet.home("much"), fleet.home("little")} == {"A", "B"}
    assert fleet.arrive("large", predicted=500_000, prompt=950) == []
    assert fleet.sent(fleet.tick(2.0)) == [("t", fleet.home("little")), ("large", "C")]


def test_time_does_not_run_backwards() -> None:
    """A driver may read its clock before it gets to post its event: an older time counts as now."""
    fleet = Fleet(limits=Limits(queue_timeout_s=10))
    fleet.at = 100.0
    fleet.tick()
    fleet.at = 50.0
    fleet.arrive("t")
    fleet.handle(Tick(109.0))
    assert fleet.scheduler.num_waiting == 1
