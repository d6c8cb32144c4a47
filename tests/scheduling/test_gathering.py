"""Legs that begin together: when it pays, for how long, and for whom."""

from dataclasses import replace
from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.profiles import load_profile
from scheduling.gathering import Gathering
from scheduling.limits import Limits
from scheduling.logged import logged
from scheduling.policy import HEDDLE, HEDDLE_PAPER, Policy
from scheduling.types import Dispatch
from tests.scheduling.fleet import Fleet

EAGER = replace(load_profile("qwen3-8b-h100-tp1"), prefill_least_tokens=1_000)
"""1,000 tokens are prefilled in 21.5 ms, and so is one."""


@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.sampled_from([0.0, 0.001, 0.02, 0.3]), st.integers(0, 64)), max_size=60),
    st.floats(0.001, 1.0),
)
def test_a_leg_waits_for_no_longer_than_the_bound_and_with_all_that_gather(
    legs: list[tuple[float, float, int]], max_s: float
) -> None:
    """Whatever comes: never into the past, never longer than the bound, and nobody who gains nothing by it. Legs that
    wait at the same time are sent at the same instant."""
    send, at, held = Gathering().send_at, 0.0, []
    for gap_s, launch_s, num_running in legs:
        at += gap_s
        send_at = send(at, launch_s, num_running, max_s)
        assert at <= send_at <= at + max_s
        if send_at > at:
            assert launch_s > 0.0
            held.append((at, send_at))
    for (_, first), (later, second) in pairwise(held):
        assert second == first or later >= first


def test_the_time_is_the_economic_order_quantity() -> None:
    """At 40 legs a second, steps that take 20 ms longer, and 25 that run. The sum of both losses is least there."""
    send = Gathering().send_at
    sent = [send(number / 40, 0.02, 25, 10.0) for number in range(17)]
    assert sent[:15] == [number / 40 for number in range(15)], "too few to know a rate"
    took_s = sent[15] - 15 / 40
    assert took_s == pytest.approx(sqrt(2 * 0.02 * 25 / 40))
    assert sent[16] == sent[15]

    def lost(gather_s: float) -> float:
        return 0.02 * 25 / gather_s + 40 * gather_s / 2

    assert lost(took_s) < min(lost(0.9 * took_s), lost(1.1 * took_s))


def test_the_rate_follows_the_last_legs() -> None:
    """With one leg a second, gathering does not pay half a second; with ten it does, for as long as ten ask for."""
    gathering = Gathering()
    assert [gathering.send_at(float(number), 0.02, 25, 10.0) for number in range(40)] == list(map(float, range(40)))
    at = 39.0
    for _ in range(100):
        at += 0.1
        send_at = gathering.send_at(at, 0.02, 0, 10.0)
    assert gathering.pays(0.02, 25) and not gathering.pays(0.02, 4)
    at = max(at, send_at) + 0.1
    assert gathering.send_at(at, 0.02, 25, 10.0) - at == pytest.approx(sqrt(2 * 0.02 * 25 * 0.1), rel=0.02)


@pytest.mark.parametrize(("launch_s", "num_running"), [(0.02, 0), (0.02, 1), (0.0, 25)])
def test_nobody_waits_where_the_next_leg_comes_too_late(launch_s: float, num_running: int) -> None:
    """The next leg comes after 25 ms, for which one would wait; nobody or one who runs would save at most 20 ms."""
    send = Gathering().send_at
    assert all(send(at / 40, launch_s, num_running, 10.0) == at / 40 for at in range(40))


def busy_fleet(policy: Policy, profile: object = EAGER, **limits: float) -> Fleet:
    """An engine on which 25 trajectories run, of which one ends a turn and begins the next every 10 ms."""
    fleet = Fleet(policy, Limits(**limits))  # type: ignore[arg-type]
    fleet.engine("A", slots=100, kv=1_000_000, profile=profile)  # type: ignore[arg-type]
    for number in range(25):
        fleet.arrive(f"t{number}/0", f"t{number}", prompt=100)
    for number in range(20):
        fleet.at += 0.01
        fleet.finish(f"t{number}/0", prompt=100, output=100)
        fleet.arrive(f"t{number}/1", f"t{number}", prompt=230)
    return fleet


def dispatched(fleet: Fleet) -> Dispatch:
    (dispatch,) = [action for action in fleet.actions if isinstance(action, Dispatch)]
    return dispatch


def test_short_turns_gather_at_a_busy_engine() -> None:
    """The last one joined those before it; one that comes then joins it, too, unless it fills a step by itself."""
    fleet = busy_fleet(HEDDLE)
    assert fleet.at < dispatched(fleet).send_at < fleet.at + 0.25
    send_at = dispatched(fleet).send_at
    fleet.arrive("short", prompt=230)
    assert dispatched(fleet).send_at == send_at
    assert dispatched(fleet).why == f"entered, gathered for {send_at - fleet.at:.3f} s"
    fleet.arrive("long", prompt=2_000)
    assert dispatched(fleet).send_at == 0.0


def test_what_is_cached_at_home_is_not_prefilled() -> None:
    """A long context that stayed there leaves 30 tokens to prefill, so its turn gathers."""
    fleet = busy_fleet(HEDDLE)
    fleet.finish("t24/0", prompt=4_900, output=100)
    fleet.arrive("t24/1", "t24", prompt=5_030)
    assert dispatched(fleet).send_at > fleet.at


def test_a_prompt_that_became_shorter_saves_no_more_than_an_empty_one() -> None:
    """An agent that summarised its context. Counted as less than nothing to prefill, it would gather for longer."""
    shorter, same = busy_fleet(HEDDLE), busy_fleet(HEDDLE)
    for fleet, prompt in ((shorter, 1_000), (same, 5_000)):
        fleet.at += 0.3  # what gathered is sent
        fleet.finish("t24/0", prompt=4_900, output=100)
        fleet.arrive("t24/1", "t24", prompt=prompt)
    assert dispatched(shorter).send_at == dispatched(same).send_at > shorter.at


@pytest.mark.parametrize(
    ("policy", "profile", "limits"),
    [
        (HEDDLE_PAPER, EAGER, {}),
        (HEDDLE, None, {}),
        (HEDDLE, load_profile("qwen3-8b-h100-tp1"), {}),
        (HEDDLE, EAGER, {"gather_max_s": 0.0}),
    ],
)
def test_turns_are_sent_at_once_otherwise(policy: Policy, profile: object, limits: dict[str, float]) -> None:
    """Under the paper's policy, at an engine that nobody measured or that has graphs for prefills, and if told so."""
    assert dispatched(busy_fleet(policy, profile, **limits)).send_at == 0.0


def test_a_log_has_the_time_of_those_that_are_held() -> None:
    """The others are written as before there were any, so older logs still replay."""
    held = dispatched(busy_fleet(HEDDLE))
    assert logged(1.0, "action", held)["send_at"] == held.send_at
    assert "send_at" not in logged(1.0, "action", replace(held, send_at=0.0))


def test_a_short_bound_holds() -> None:
    """The rule would take longer."""
    fleet = busy_fleet(HEDDLE, gather_max_s=0.02)
    assert 0.0 <= dispatched(fleet).send_at <= fleet.at + 0.02
