"""Engines of unlike size: one that can never hold a turn's context does not get it, unless none can."""

import pytest

from scheduling.policy import POLICIES, Policy
from scheduling.types import EngineLeaving, EngineReported, EngineSpec, Fault
from tests.scheduling.fleet import MODEL, Fleet, without_saves


def unlike(policy: Policy | None = None, small: int = 100, large: int = 1_000) -> Fleet:
    """Engines `small` and `large` of that many KV tokens, with 8 slots each."""
    fleet = Fleet(policy) if policy is not None else Fleet()
    fleet.engine("small", slots=8, kv=small)
    fleet.engine("large", slots=8, kv=large)
    return fleet


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_a_long_turn_goes_to_a_large_engine(policy: Policy) -> None:
    """Though the small one is empty each time, as after an engine's 400."""
    fleet = unlike(policy)
    for number in range(5):
        assert fleet.sent(fleet.arrive(f"t{number}", prompt=150)) == [(f"t{number}", "large")]


@pytest.mark.parametrize("large", [200, 150])
def test_a_long_turn_waits_for_a_large_engine(large: int) -> None:
    """Even if it would fill that one to the last token. A turn behind it enters the small one."""
    fleet = unlike(large=large)
    fleet.arrive("first", prompt=150, predicted=3_000)
    assert fleet.arrive("second", prompt=150, predicted=2_000) == []
    assert fleet.sent(fleet.arrive("third", prompt=50)) == [("third", "small")]
    fleet.finish("first", prompt=140)
    assert fleet.sent(fleet.close("first")) == [("second", "large")]


def test_a_trajectory_that_outgrew_its_engine_moves() -> None:
    fleet = Fleet()
    fleet.engine("small", slots=8, kv=100)
    fleet.arrive("a/0", "a", prompt=80)
    fleet.engine("large", slots=8, kv=1_000)
    fleet.finish("a/0", prompt=80, output=10)
    assert fleet.sent(fleet.arrive("a/1", "a", prompt=150)) == [("a/1", "large")]
    assert fleet.home("a") == "large" and not fleet.claims("small")


@pytest.mark.parametrize("end", ["lost", "cordoned", "shrunk"])
def test_without_a_large_engine_any_will_do(end: str) -> None:
    """The engine may hold more than it reported, and its own answer tells what is wrong."""
    fleet = unlike()
    fleet.arrive("other", prompt=900)
    assert fleet.arrive("long", prompt=150) == []
    if end == "lost":
        actions = fleet.lose("large")
    elif end == "cordoned":
        actions = fleet.engine("large", slots=8, kv=1_000, accepting=False)
    else:
        actions = fleet.engine("large", slots=8, kv=120)
    assert ("long", "small") in fleet.sent(actions)


def test_a_turn_that_waits_at_its_small_home_goes_to_a_large_engine_that_comes() -> None:
    """Both of its trajectory's turns: the first had entered for want of a better engine."""
    fleet = Fleet()
    fleet.engine("small", slots=1, kv=100)
    fleet.arrive("a/0", "a", prompt=150)
    assert fleet.arrive("a/1", "a", prompt=160) == []
    assert fleet.sent(fleet.engine("large", slots=8, kv=1_000)) == [("a/1", "large")]


def test_a_turn_leaves_its_home_if_that_has_become_too_small() -> None:
    """Its engine came back with less KV, while another one is the largest as before."""
    fleet = Fleet()
    fleet.engine("home", slots=1, kv=200)
    fleet.arrive("a/0", "a", prompt=100)
    fleet.finish("a/0", prompt=100)
    fleet.arrive("runs")
    assert fleet.arrive("a/1", "a", prompt=150) == []
    assert fleet.engine("large", slots=8, kv=1_000) == []
    assert fleet.sent(fleet.engine("home", slots=1, kv=120)) == [("a/1", "large")]


def test_a_retried_turn_waits_for_the_large_engine() -> None:
    """It has just failed there."""
    fleet = unlike()
    fleet.arrive("a", prompt=150)
    assert fleet.fail("a", fault=Fault.BUSY) == []
    assert fleet.sent(fleet.tick(later_s=20)) == [("a", "large")]


def test_an_engine_accepts_no_context_beyond_its_own_limit() -> None:
    """Whatever its KV holds."""
    fleet = Fleet()
    for name, longest in (("short", 100), ("long", 400)):
        spec = EngineSpec(name, frozenset({MODEL}), 8, 10_000, max_context_tokens=longest)
        fleet.handle(EngineReported(fleet.at, spec))
    assert fleet.sent(fleet.arrive("a", prompt=150)) == [("a", "long")]
    assert fleet.sent(fleet.arrive("b", prompt=500)) != []


def test_an_engine_of_unknown_size_is_large() -> None:
    fleet = Fleet()
    fleet.engine("small", slots=8, kv=100)
    fleet.engine("unknown", slots=8, kv=0)
    assert fleet.sent(fleet.arrive("a", prompt=150)) == [("a", "unknown")]


def test_a_model_of_its_own_counts_only_its_engines() -> None:
    fleet = Fleet()
    fleet.engine("small", slots=8, kv=100, models=("x",))
    fleet.engine("large", slots=8, kv=1_000, models=("y",))
    assert fleet.sent(fleet.arrive("a", prompt=150, model="x")) == [("a", "small")]


def test_a_trajectory_is_not_moved_to_an_engine_that_cannot_hold_it() -> None:
    """Off an engine that will soon be gone, it stays for want of a better one."""
    fleet = unlike()
    fleet.arrive("a/0", "a", prompt=150)
    fleet.finish("a/0", prompt=150, output=10)
    fleet.engine("large", slots=8, kv=1_000, accepting=False)
    assert without_saves(fleet.scheduler.handle(EngineLeaving(fleet.at, "large"))) == []
    assert fleet.home("a") == "large"
