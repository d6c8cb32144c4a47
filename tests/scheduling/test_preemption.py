"""A much more urgent turn takes the slot of a running one, whose tokens are kept."""

from dataclasses import replace

import pytest

from scheduling.limits import Limits
from scheduling.policy import LONGEST_FIRST, Policy
from scheduling.types import Abort, Dispatch, Fault, Preempt, Refusal, Reject, TurnFinished
from tests.scheduling.fleet import Fleet

PREEMPTING = replace(LONGEST_FIRST, preempts=True)


def busy_fleet(policy: Policy = PREEMPTING, can_preempt: bool = True, kv: int = 0, **limits: float) -> Fleet:
    """Engine A with one slot, where `short` has run for ten seconds."""
    fleet = Fleet(policy, Limits(preempt_margin_tokens=4_000, preempt_after_s=5, **limits), can_preempt=can_preempt)
    fleet.engine("A", kv=kv)
    fleet.arrive("short", predicted=1_000, prompt=30)
    fleet.at = 10.0
    return fleet


def test_a_much_more_urgent_entrant_takes_a_slot() -> None:
    """The running leg is asked to stop. Then the urgent turn runs, and after it the other one with a new leg."""
    fleet = busy_fleet()
    assert fleet.arrive("long", predicted=20_000) == [Preempt("short", 1)]
    assert fleet.sent(fleet.pause("short", output=7)) == [("long", "A")]
    (dispatch,) = fleet.finish("long")
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.turn_id, dispatch.leg, dispatch.why) == ("short", 2, "home")
    assert fleet.claims("A")["short"] == 37
    fleet.finish("short", leg=2, prompt=30, output=50)
    assert fleet.scheduler.trajectories["short"].output_tokens == 50


def test_a_much_more_urgent_resident_takes_a_slot() -> None:
    """At its home it lacks only a slot."""
    fleet = Fleet(PREEMPTING, can_preempt=True)
    fleet.engine("A")
    fleet.arrive("m1", "m", predicted=20_000)
    fleet.finish("m1")
    fleet.arrive("short")
    fleet.at = 10.0
    assert fleet.arrive("m2", "m", predicted=20_000) == [Preempt("short", 1)]
    assert fleet.sent(fleet.pause("short")) == [("m2", "A")]


def test_a_slightly_more_urgent_turn_waits() -> None:
    """Below the margin a swap is not worth its cost. Ageing counts, too."""
    fleet = busy_fleet()
    assert fleet.arrive("longer", predicted=5_900) == []


def test_a_leg_that_just_began_is_left_alone_until_a_tick() -> None:
    """Otherwise turns would take slots from each other all the time."""
    fleet = busy_fleet()
    fleet.finish("short")
    fleet.arrive("fresh", predicted=1_000)
    assert fleet.arrive("long", predicted=20_000) == []
    assert fleet.tick(4.0) == []
    assert fleet.tick(1.0) == [Preempt("fresh", 1)]


def test_a_turn_that_cannot_be_stopped_does_not_keep_others_from_giving_way() -> None:
    """A leg that passes through runs on when it is asked to stop. After a while the next least urgent one is asked, and
    the first not again before its next leg."""
    fleet = Fleet(PREEMPTING, Limits(preempt_margin_tokens=4_000, preempt_after_s=5), can_preempt=True)
    fleet.engine("A", slots=2)
    fleet.arrive("shortest", predicted=1_000)
    fleet.arrive("short", predicted=2_000)
    fleet.at = 10.0
    assert fleet.arrive("long", predicted=20_000) == [Preempt("shortest", 1)]
    assert fleet.tick(4.0) == []
    assert fleet.tick(1.0) == [Preempt("short", 1)]
    assert fleet.tick(9.0) == []
    assert fleet.sent(fleet.pause("short")) == [("long", "A")]


def test_a_resident_that_waits_takes_a_slot_at_a_tick() -> None:
    """When it returned, the running turn had just begun."""
    fleet = Fleet(PREEMPTING, Limits(preempt_after_s=5), can_preempt=True)
    fleet.engine("A")
    fleet.arrive("m1", "m", predicted=20_000)
    fleet.finish("m1")
    fleet.arrive("short")
    assert fleet.arrive("m2", "m", predicted=20_000) == []
    assert fleet.tick(4.0) == []
    assert fleet.tick(1.0) == [Preempt("short", 1)]


def test_a_turn_paused_twice_claims_its_output_once() -> None:
    """Each pause reports all of its output so far."""
    fleet = busy_fleet()
    fleet.arrive("long", predicted=20_000)
    fleet.pause("short", output=7)
    fleet.finish("long")
    fleet.at += 10.0
    assert fleet.arrive("long2", "long", predicted=20_000) == [Preempt("short", 2)]
    fleet.pause("short", leg=2, output=12)
    fleet.finish("long2")
    assert fleet.claims("A")["short"] == 30 + 12


def test_an_engine_stops_one_leg_at_a_time() -> None:
    """Its slot goes to the most urgent turn; a second urgent turn waits for another slot."""
    fleet = busy_fleet()
    fleet.engine("A", slots=2)
    fleet.arrive("shorter", predicted=900)
    fleet.at = 20.0
    assert fleet.arrive("long", predicted=20_000) == [Preempt("shorter", 1)]
    assert fleet.arrive("longer", predicted=30_000) == [], "though there is another one to stop"
    assert fleet.sent(fleet.pause("shorter")) == [("longer", "A")]
    assert fleet.tick(1.0) == [Preempt("short", 1)]


def test_the_least_urgent_turn_of_all_engines_yields() -> None:
    """Of all engines that could serve the entrant."""
    fleet = busy_fleet()
    fleet.engine("B")
    fleet.engine("C", models=("other",))
    fleet.arrive("shorter", predicted=500)
    fleet.arrive("foreign", predicted=1, model="other")
    fleet.at = 20.0
    assert fleet.arrive("long", predicted=20_000) == [Preempt("shorter", 1)]


def test_no_leg_is_stopped_for_an_entrant_without_room_for_its_kv() -> None:
    """The stopped turn keeps its claim, so a slot alone would not help."""
    fleet = busy_fleet(kv=100)
    assert fleet.arrive("long", predicted=20_000, prompt=61) == []
    assert fleet.arrive("longer", predicted=30_000, prompt=60) == [Preempt("short", 1)]


def test_a_clients_priority_needs_no_margin() -> None:
    """A turn that the client calls urgent outranks every prediction; one that it calls late preempts nothing."""
    fleet = busy_fleet()
    assert fleet.arrive("late", predicted=90_000, priority=1) == []
    assert fleet.arrive("early", predicted=1, priority=-1) == [Preempt("short", 1)]


@pytest.mark.parametrize(("policy", "can_preempt"), [(PREEMPTING, False), (LONGEST_FIRST, True)])
def test_policy_and_driver_must_both_allow_preemption(policy: Policy, can_preempt: bool) -> None:
    """A gateway that cannot keep tokens would generate them twice."""
    fleet = busy_fleet(policy, can_preempt)
    assert fleet.arrive("long", predicted=20_000) == []


def test_a_turn_may_finish_before_its_preemption() -> None:
    """Its result counts, and a pause that comes later is dropped."""
    fleet = busy_fleet()
    fleet.arrive("long", predicted=20_000)
    assert fleet.sent(fleet.handle(TurnFinished(fleet.at, "short", 1, 30, 40))) == [("long", "A")]
    assert fleet.pause("short") == []


def test_a_pause_does_not_count_as_an_attempt() -> None:
    """A turn may be stopped more often than engines may fail it."""
    fleet = busy_fleet(max_attempts=2)
    for leg in (1, 2, 3):
        assert fleet.arrive(f"long{leg}", predicted=20_000) == [Preempt("short", leg)]
        fleet.pause("short", leg=leg)
        assert fleet.sent(fleet.finish(f"long{leg}")) == [("short", "A")]
        fleet.close(f"long{leg}")
        fleet.at += 10.0
    assert fleet.fail("short", leg=4) == []
    assert fleet.sent(fleet.tick(2.0)) == [("short", "A")]


def test_a_paused_turn_does_not_move() -> None:
    """Its KV is at home and its answer is incomplete. A trajectory moves only in a tool call; there, this one would."""
    for is_paused in (True, False):
        fleet = Fleet(PREEMPTING, Limits(preempt_after_s=5), can_preempt=True)
        fleet.engine("A")
        fleet.arrive("hog", predicted=90_000)
        fleet.finish("hog")
        fleet.arrive("short", predicted=20_000)
        fleet.at = 10.0
        assert fleet.arrive("long", predicted=90_000) == [Preempt("short", 1)]
        fleet.engine("B")
        fleet.engine("C")
        assert fleet.home("long") == "B"
        if is_paused:
            assert fleet.sent(fleet.pause("short")) == [("short", "A")]
        else:
            fleet.finish("short")
            assert fleet.sent(fleet.arrive("short-2", "short", predicted=20_000)) == [("short-2", "C")]


def test_a_pause_after_an_abort_rejects_the_turn() -> None:
    """The pause came before the abort's answer; the client still gets an answer."""
    fleet = busy_fleet()
    fleet.arrive("long", predicted=20_000)
    assert fleet.close("short", abort=True) == [Abort("short", 1, Fault.CLOSED)]
    refused, dispatch = fleet.pause("short")
    assert refused == Reject("short", Refusal.TRAJECTORY_ABORTED, None)
    assert fleet.sent([dispatch]) == [("long", "A")]
