"""Legs that are sent before a slot is free: how many, and what that is worth."""

from dataclasses import replace
from math import inf
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.profiles import load_profile
from heddle.trial import simulated_makespan_s
from scheduling.cost import EngineProfile
from scheduling.leg_rate import LegRate
from scheduling.limits import Limits
from scheduling.policy import HEDDLE
from scheduling.types import EngineLoad, EngineReported
from simulator.conditions import Conditions
from tests.scheduling.fleet import Fleet
from workloads.laws import draw, law_named

NEAR = replace(load_profile("qwen3-8b-h100-tp1"), slots=4, kv_capacity_tokens=1_000_000)
FAR = replace(NEAR, request_ms=20.0)
EAGER = replace(FAR, prefill_least_tokens=1_000)


def rate_of(interval_s: float, num_legs: int = 40) -> LegRate:
    rate = LegRate()
    for number in range(num_legs):
        rate.note(number * interval_s)
    return rate


@given(st.lists(st.floats(0.0, 10.0), max_size=40), st.floats(0.0, 5.0), st.integers(1, 256))
def test_never_more_than_slots_are_ahead(gaps_s: list[float], transit_s: float, slots: int) -> None:
    """Whatever came, and none before a rate is known, or where legs take no time to arrive."""
    rate, at = LegRate(), 0.0
    for gap_s in gaps_s:
        at += gap_s
        rate.note(at)
    num_ahead = rate.num_ahead(transit_s, slots)
    assert 0 <= num_ahead <= slots
    if len(gaps_s) < 16 or not transit_s:
        assert num_ahead == 0


def test_the_rate_follows_the_last_legs() -> None:
    """One a second, and later ten."""
    rate = rate_of(1.0)
    assert rate.interval_s == pytest.approx(1.0)
    for number in range(100):
        rate.note(39.0 + number / 10)
    assert rate.interval_s == pytest.approx(0.1, rel=0.05)
    assert rate_of(1.0, num_legs=15).interval_s == inf


@pytest.mark.parametrize(("interval_s", "num_ahead"), [(10.0, 1), (0.1, 2), (0.016, 4), (0.006, 7), (0.0001, 64)])
def test_as_many_are_ahead_as_end_meanwhile(interval_s: float, num_ahead: int) -> None:
    """In 20 ms on average 0.002, 0.2, 1.25, 3.3 and 200 legs end; that and two standard deviations, up to the slots."""
    assert rate_of(interval_s).num_ahead(0.02, slots=64) == num_ahead


def play(fleet: Fleet, num_on_way: int = 0, num_turns: int = 200, slots: int = 4) -> int:
    """One turn ends every 25 ms, and some always wait; how many run then.

    Args:
        num_on_way: how many of them the engine does not have yet, whenever it is looked at.
    """
    engine = fleet.scheduler.engines["A"]
    first = len(fleet.scheduler.trajectories)
    for number in range(first, first + num_turns):
        fleet.at += 0.025
        fleet.arrive(f"t{number}", prompt=100)
        if fleet.scheduler.num_waiting < 10:
            fleet.arrive(f"u{number}", prompt=100)
        if number >= 4:
            fleet.finish(next(iter(engine.running)), prompt=100, output=10)
        if number % 40 == 39:
            num_there = len(engine.running) - num_on_way
            fleet.handle(
                EngineReported(fleet.at, engine.spec, EngineLoad(min(num_there, slots), max(num_there - slots, 0)))
            )
    return len(engine.running)


def fleet_of(profile: EngineProfile | None = None, sends_ahead: bool = True) -> Fleet:
    """One engine of four slots."""
    fleet = Fleet(HEDDLE, Limits(gather_max_s=0.0, sends_ahead=sends_ahead))
    fleet.engine("A", slots=4, kv=1_000_000, profile=profile)
    return fleet


def test_legs_are_ahead_where_a_profile_says_that_requests_take_time() -> None:
    """And their prefill costs others nothing; unless told not to."""
    assert play(fleet_of(FAR), num_turns=30) == 4 + 3
    assert play(fleet_of(FAR, sends_ahead=False)) == 4
    assert [play(fleet_of(profile)) for profile in (None, NEAR, EAGER)] == [4, 4, 4]


@pytest.mark.parametrize("profile", [None, NEAR])
def test_legs_are_ahead_of_an_engine_that_has_fewer_than_were_sent(profile: EngineProfile | None) -> None:
    """One is always on its way: that and two standard deviations more. When none is any longer, none is ahead."""
    fleet = fleet_of(profile)
    assert play(fleet, num_on_way=1) == 4 + 3
    assert play(fleet, num_turns=2_400) == 4 + 1
    assert play(fleet_of(profile, sends_ahead=False), num_on_way=1) == 4


def test_where_gathering_pays_nothing_is_learned() -> None:
    """Legs that gather are not on their way yet."""
    fleet = fleet_of(EAGER)
    assert play(fleet, num_on_way=2) == 4
    assert fleet.scheduler.engines["A"].transit.leg_s == EAGER.request_ms / 1000


def test_an_engine_that_runs_more_than_its_slots_gets_nothing_ahead() -> None:
    """Somebody set `slots` below its own limit: turns ahead would run, not wait."""
    fleet = fleet_of()
    assert play(fleet, num_on_way=1, num_turns=60) == 4 + 3
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
