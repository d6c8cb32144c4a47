"""Legs that are sent before a slot is free: how many, and what that is worth."""

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.profiles import load_profile
from heddle.trial import simulated_makespan_s
from scheduling.cost import EngineProfile
from scheduling.limits import Limits
from scheduling.policy import HEDDLE
from scheduling.transit import Transit
from scheduling.types import Action, Dispatch, EngineLoad, EngineReported
from simulator.conditions import Conditions
from tests.scheduling.fleet import Fleet
from workloads.laws import draw, law_named

NEAR = replace(load_profile("qwen3-8b-h100-tp1"), slots=4, kv_capacity_tokens=1_000_000)
FAR = replace(NEAR, request_ms=20.0)
EAGER = replace(FAR, prefill_least_tokens=1_000)


def ended(legs_per_s: float, transit_s: float, num_looks: int = 40) -> Transit:
    """An engine where so many legs end in a second, and whose profile is right."""
    transit, num_legs = Transit(transit_s), 0.0
    for number in range(1, num_looks + 1):
        num_legs += legs_per_s
        while num_legs >= 1.0:
            transit.note_end()
            num_legs -= 1.0
        transit.look(float(number), None)
    return transit


@given(
    st.floats(0.0, 5.0),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 50), st.none() | st.integers(-300, 300)), max_size=30),
    st.integers(1, 256),
)
def test_never_more_than_slots_are_ahead(
    assumed_s: float, looks: list[tuple[float, int, int | None]], slots: int
) -> None:
    """Whatever came. None before legs have ended, or where they take no time; but two from the beginning if a profile
    says that they take some."""
    transit, at = Transit(assumed_s), 0.0
    for pause_s, num_ended, num_on_way in looks:
        at += pause_s
        for _ in range(num_ended):
            transit.note_end()
        transit.look(at, num_on_way)
        is_told = assumed_s > 0.0 and transit.leg_s > 0.0
        assert (min(2, slots) if is_told else 0) <= transit.num_ahead(slots) <= slots
        assert (transit.num_ahead(slots) > 0) == (is_told or transit.leg_s * transit.legs_per_s > 0.0)


@pytest.mark.parametrize(
    ("legs_per_s", "num_ahead"), [(0.0, 2), (0.1, 2), (10.0, 2), (62.5, 4), (167.0, 7), (9_999.0, 64)]
)
def test_as_many_are_ahead_as_end_meanwhile(legs_per_s: float, num_ahead: int) -> None:
    """In 20 ms on average 0, 0.002, 0.2, 1.25, 3.3 and 200 legs end; that and two standard deviations, from two up to
    the slots.
    """
    assert ended(legs_per_s, 0.02).num_ahead(64) == num_ahead


def test_it_follows_the_rate_of_the_last_seconds() -> None:
    """Legs that begin together when a rollout does are none that ended."""
    transit = ended(100.0, 0.05)
    assert transit.num_ahead(64) == 10
    for number in range(41, 46):
        transit.look(float(number), None)
    assert transit.num_ahead(64) == 2


def play(fleet: Fleet, num_on_way: int = 0, num_turns: int = 200, slots: int = 4, is_last: bool = False) -> int:
    """One turn ends every 25 ms, and some always wait; how many run then.

    Args:
        num_on_way: how many of them the engine does not have yet, whenever it is looked at.
        is_last: a trajectory ends with its turn; else it keeps its claim, which is checked after every event.
    """
    engine = fleet.scheduler.engines["A"]
    first = len(fleet.scheduler.trajectories)
    for number in range(first, first + num_turns):
        fleet.at += 0.025
        fleet.arrive(f"t{number}", prompt=100)
        if fleet.scheduler.num_waiting < 10:
            fleet.arrive(f"u{number}", prompt=100)
        if number >= 4:
            ended = next(iter(engine.running))
            fleet.finish(ended, prompt=100, output=10)
            if is_last:
                fleet.close(ended)
        if number % 40 == 39:
            num_there = len(engine.running) - num_on_way
            fleet.handle(
                EngineReported(fleet.at, engine.spec, EngineLoad(min(num_there, slots), max(num_there - slots, 0)))
            )
    return len(engine.running)


def fleet_of(profile: EngineProfile | None = None, sends_ahead: bool = True, gather_max_s: float = 0.0) -> Fleet:
    """One engine of four slots."""
    fleet = Fleet(HEDDLE, Limits(gather_max_s=gather_max_s, sends_ahead=sends_ahead))
    fleet.engine("A", slots=4, kv=1_000_000, profile=profile)
    return fleet


def test_legs_are_ahead_where_a_profile_says_that_requests_take_time() -> None:
    """From the first look on, even if none is found on the way; unless told not to."""
    assert play(fleet_of(FAR), num_turns=50) == 4 + 2
    assert play(fleet_of(FAR, sends_ahead=False)) == 4
    assert [play(fleet_of(profile)) for profile in (None, NEAR)] == [4, 4]


@pytest.mark.parametrize("profile", [None, NEAR])
def test_legs_are_ahead_of_an_engine_that_has_fewer_than_were_sent(profile: EngineProfile | None) -> None:
    """One is always on its way: that and two standard deviations more. When none is any longer, one remains ahead."""
    fleet = fleet_of(profile)
    assert play(fleet, num_on_way=1) == 4 + 3
    assert play(fleet, num_turns=2_400, is_last=True) == 4 + 1
    assert play(fleet_of(profile, sends_ahead=False), num_on_way=1) == 4


def test_where_gathering_pays_nothing_is_learned() -> None:
    """Legs that gather are not on their way yet."""
    fleet = fleet_of(EAGER, gather_max_s=0.25)
    assert play(fleet, num_on_way=2) == 4
    assert fleet.scheduler.engines["A"].transit.leg_s == EAGER.request_ms / 1000


def test_legs_are_ahead_where_gathering_does_not_pay() -> None:
    """Seven legs lose 2 ms each by a step that prefills, and the next one comes after 25 ms."""
    fleet = fleet_of(replace(FAR, prefill_least_tokens=100), gather_max_s=0.25)
    assert play(fleet, num_turns=60, is_last=True) == 4 + 2


def test_an_engine_that_runs_more_than_its_slots_gets_nothing_ahead() -> None:
    """Somebody set `slots` below its own limit: turns ahead would run, not wait."""
    fleet = fleet_of()
    assert play(fleet, num_on_way=1) == 4 + 3
    assert play(fleet, num_on_way=1, slots=64) == 4
    engine = fleet.scheduler.engines["A"]
    assert engine.is_roomy
    fleet.engine("A", slots=4, kv=2_000_000)
    assert engine.is_roomy
    fleet.engine("A", slots=8, kv=2_000_000)
    assert not engine.is_roomy


def test_what_was_learned_stays_when_an_engine_gets_more_kv() -> None:
    """Until it is measured: then its profile is believed, until looks tell more."""
    fleet = fleet_of()
    play(fleet, num_on_way=1)
    engine = fleet.scheduler.engines["A"]
    learned_s = engine.transit.leg_s
    fleet.engine("A", slots=4, kv=2_000_000)
    assert engine.transit.leg_s == learned_s == pytest.approx(0.025, rel=0.2)
    assert play(fleet, num_on_way=1, num_turns=50) == 4 + 3
    fleet.engine("A", slots=4, kv=2_000_000, profile=FAR)
    assert engine.transit.leg_s == 0.02


@pytest.mark.parametrize("tells_profiles", [True, False])
@pytest.mark.parametrize("request_ms", [5.0, 20.0])
def test_short_turns_take_no_longer_than_in_an_engines_own_queue(request_ms: float, tells_profiles: bool) -> None:
    """Each slot was empty for the time of a request after each turn: rollouts took 1.04 and 1.13 times as long."""
    engine, conditions = replace(FAR, request_ms=request_ms), Conditions(tells_profiles=tells_profiles)
    workloads = [draw(law_named("coding"), 96, seed, scale=0.05) for seed in range(1, 6)]

    def mean_s(policy: str) -> float:
        return fmean(
            simulated_makespan_s(workload, [engine], policy, 0.003, conditions=conditions) for workload in workloads
        )

    assert mean_s("heddle") < 1.02 * mean_s("round-robin")


def dispatched_to(actions: list[Action]) -> str:
    [action] = actions
    assert isinstance(action, Dispatch)
    return action.engine_id


def test_nothing_is_sent_ahead_beside_a_free_slot() -> None:
    """A trajectory without a home takes a free slot even where more work is left; without one, the lesser work."""
    fleet = fleet_of()
    assert play(fleet, num_on_way=1) == 4 + 3
    a = fleet.scheduler.engines["A"]
    while fleet.scheduler.num_waiting or len(a.running) > 4:
        fleet.finish(next(iter(a.running)), prompt=100, output=10)
    fleet.engine("B", slots=2, kv=1_000_000)
    for number in range(2):
        # A, with much less work from the second one on, has room for three legs ahead.
        assert dispatched_to(fleet.arrive(f"long{number}", prompt=100, predicted=1_000_000)) == "B"
    assert dispatched_to(fleet.arrive("first", prompt=100)) == "A"
    fleet.finish("long0", prompt=100, output=10)
    assert dispatched_to(fleet.arrive("second", prompt=100)) == "B"
