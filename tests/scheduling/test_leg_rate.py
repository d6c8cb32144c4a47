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


@given(
    st.lists(st.floats(0.0, 10.0), max_size=40),
    st.floats(0.0, 5.0),
    st.sampled_from([0.0, 0.001, 0.1, 10.0]),
    st.integers(0, 300),
    st.integers(1, 256),
)
def test_never_more_than_slots_are_ahead(
    gaps_s: list[float], request_s: float, launch_s: float, num_running: int, slots: int
) -> None:
    """Whatever came, and none before a rate is known, where requests take no time, or where gathering pays."""
    rate, at = LegRate(), 0.0
    for gap_s in gaps_s:
        at += gap_s
        rate.note(at)
    num_ahead = rate.num_ahead(request_s, launch_s, num_running, slots)
    assert 0 <= num_ahead <= slots
    if len(gaps_s) < 16 or not request_s or launch_s * num_running > rate.interval_s:
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
    assert rate_of(interval_s).num_ahead(0.02, 0.0, 64, slots=64) == num_ahead


def num_running(profile: EngineProfile | None, sends_ahead: bool = True) -> int:
    """Turns on an engine of four slots where one ends every 25 ms and two come."""
    fleet = Fleet(HEDDLE, Limits(gather_max_s=0.0, sends_ahead=sends_ahead))
    fleet.engine("A", slots=4, kv=1_000_000, profile=profile)
    for number in range(30):
        fleet.at += 0.025
        fleet.arrive(f"t{number}", prompt=100)
        fleet.arrive(f"u{number}", prompt=100)
        if number >= 4:
            fleet.finish(next(iter(fleet.scheduler.engines["A"].running)), prompt=100, output=10)
    return len(fleet.scheduler.engines["A"].running)


def test_only_a_measured_engine_gets_legs_ahead() -> None:
    """And only one where a request takes time to arrive, and its prefill costs others nothing; unless told not to."""
    assert num_running(FAR) == 4 + 3
    assert num_running(FAR, sends_ahead=False) == 4
    assert [num_running(profile) for profile in (None, NEAR, EAGER)] == [4, 4, 4]


@pytest.mark.parametrize("request_ms", [5.0, 20.0])
def test_short_turns_take_no_longer_than_in_an_engines_own_queue(request_ms: float) -> None:
    """Each slot was empty for the time of a request after each turn: rollouts took 1.04 and 1.13 times as long."""
    engine = replace(FAR, request_ms=request_ms)
    workloads = [draw(law_named("coding"), 96, seed, scale=0.05) for seed in range(1, 6)]

    def mean_s(policy: str) -> float:
        return fmean(simulated_makespan_s(workload, [engine], policy, 0.003) for workload in workloads)

    assert mean_s("heddle") < 1.02 * mean_s("round-robin")
