"""When a trajectory moves from its home, and how its waiting turns follow it."""

from dataclasses import replace

from scheduling.limits import Limits
from scheduling.placement import UNMEASURED
from scheduling.policy import HEDDLE, VERL
from scheduling.types import Dispatch, Fault
from tests.scheduling.fleet import Fleet


def busy_home() -> Fleet:
    """Trajectory `m` is in a tool call at A, where `hog` has the only slot."""
    fleet = Fleet(HEDDLE)
    fleet.engine("A")
    fleet.arrive("m", predicted=20_000)
    fleet.finish("m", prompt=900, output=100)
    fleet.arrive("hog", predicted=50_000)
    return fleet


def test_a_trajectory_moves_from_a_late_engine_to_an_idle_one() -> None:
    """At its tool return its home is full and sets the makespan, so it goes where it ends sooner."""
    fleet = busy_home()
    fleet.engine("B")
    (dispatch,) = fleet.arrive("m2", "m", prompt=1_000, predicted=20_000)
    assert isinstance(dispatch, Dispatch) and (dispatch.engine_id, dispatch.why) == ("B", "moved from A")
    assert set(fleet.claims("A")) == {"hog"} and set(fleet.claims("B")) == {"m"}


def test_a_trajectory_stays_when_a_later_engine_sets_the_makespan() -> None:
    """Relieving an engine that does not set the makespan is not worth a prefill, even if it is full."""
    fleet = busy_home()
    fleet.engine("Z")
    fleet.arrive("longest", predicted=500_000)
    assert fleet.home("longest") == "Z"
    fleet.engine("B")
    assert fleet.arrive("m2", "m", prompt=1_000, predicted=20_000) == []


def test_an_engine_whose_longest_trajectory_has_ended_sets_the_makespan_no_more() -> None:
    """Its other trajectory is short. What was seen of the fleet a second ago counts no longer."""
    fleet = busy_home()
    fleet.engine("Z", slots=2)
    fleet.arrive("longest", predicted=500_000)
    fleet.arrive("short", predicted=100)
    assert fleet.home("longest") == fleet.home("short") == "Z"
    assert fleet.arrive("m2", "m", prompt=1_000, predicted=20_000) == []
    fleet.fail("m2", leg=0, fault=Fault.CLIENT_LEFT)
    fleet.finish("longest")
    fleet.close("longest")
    fleet.at = 1.0
    assert fleet.sent(fleet.arrive("m3", "m", prompt=1_000, predicted=20_000)) == [("m3", "Z")]


def test_a_lost_engine_sets_the_makespan_no_more_and_a_new_one_counts_at_once() -> None:
    """Whatever was seen of the fleet in the same second."""
    fleet = busy_home()
    fleet.engine("Z")
    fleet.arrive("longest", predicted=500_000)
    assert fleet.arrive("m2", "m", prompt=1_000, predicted=20_000) == []
    fleet.fail("m2", leg=0, fault=Fault.CLIENT_LEFT)
    fleet.lose("Z")
    fleet.engine("B")
    assert fleet.sent(fleet.fail("longest", can_retry=False)) == []
    assert fleet.sent(fleet.arrive("m3", "m", prompt=1_000, predicted=20_000)) == [("m3", "B")]


def test_the_longest_trajectory_moves_to_a_faster_engine() -> None:
    """The fleet ends when this one does, and its old home then has nothing left to do."""
    fleet = Fleet(HEDDLE)
    fleet.engine("slow", slots=8, profile=UNMEASURED)
    fleet.arrive("m1", "m", predicted=20_000)
    fleet.finish("m1", prompt=900, output=100)
    fleet.engine("fast", slots=8, profile=replace(UNMEASURED, decode_base_ms=0.95 * UNMEASURED.decode_base_ms))
    assert fleet.sent(fleet.arrive("m2", "m", prompt=1_000, predicted=20_000)) == [("m2", "fast")]


def test_a_trajectory_with_a_running_turn_does_not_move() -> None:
    """Its KV is in use at home, however late the home is. A turn that comes after both have ended moves."""
    fleet = Fleet()
    fleet.engine("A", slots=2)
    fleet.arrive("m1", "m", predicted=20_000)
    fleet.arrive("hog", predicted=50_000)
    fleet.engine("B", slots=2)
    assert fleet.arrive("m2", "m", predicted=20_000) == []
    assert fleet.sent(fleet.finish("m1")) == [("m2", "A")]
    fleet.finish("m2")
    assert fleet.sent(fleet.arrive("m3", "m", predicted=20_000)) == [("m3", "B")]


def test_a_sticky_policy_never_moves_a_trajectory() -> None:
    """However full its home is."""
    fleet = Fleet(VERL)
    fleet.engine("A")
    fleet.arrive("m1", "m")
    fleet.engine("B")
    assert fleet.sent(fleet.arrive("m2", "m")) == [("m2", "A")]


def test_waiting_turns_follow_their_trajectory_to_its_first_home() -> None:
    """Two first turns of one trajectory run on one engine."""
    fleet = Fleet()
    fleet.arrive("m1", "m")
    fleet.arrive("m2", "m")
    assert fleet.sent(fleet.engine("A")) == [("m1", "A")]
    assert fleet.engine("B") == []
    assert fleet.sent(fleet.finish("m1")) == [("m2", "A")]


def test_waiting_turns_follow_their_trajectory_to_a_new_home() -> None:
    """When a retry takes a trajectory elsewhere, its other turn neither drags it back nor enters without a claim."""
    fleet = Fleet(limits=Limits(retry_pause_s=1_000))
    fleet.engine("A", slots=2)
    fleet.arrive("m1", "m")
    fleet.arrive("x")
    assert fleet.arrive("m2", "m") == []
    fleet.engine("B")
    assert fleet.sent(fleet.fail("m1")) == [("m1", "B")]
    assert fleet.sent(fleet.finish("m1", leg=2)) == [("m2", "B")]


def test_a_trajectory_that_leaves_makes_room_at_its_old_home() -> None:
    """A turn that waited for this room is dispatched at once (found by the machine of test_any_order)."""
    fleet = Fleet()
    fleet.engine("A", kv=100)
    fleet.arrive("a", prompt=90)
    fleet.fail("a")
    assert fleet.arrive("b", prompt=1) == []
    assert fleet.sent(fleet.engine("B", kv=100)) == [("a", "B"), ("b", "A")]


def test_a_following_turn_claims_its_prompt_before_others_enter() -> None:
    """Its KV is as certain to come as that of the turn that went first (found by the machine of test_any_order)."""
    fleet = Fleet()
    fleet.arrive("t1", "t", prompt=90, predicted=1)
    fleet.arrive("t2", "t", prompt=1, predicted=300)
    fleet.arrive("u", prompt=1, predicted=300)
    assert fleet.sent(fleet.engine("A", slots=3, kv=100)) == [("t2", "A"), ("t1", "A")]


def test_a_trajectory_moves_from_a_free_slot_to_lower_the_latest_finish() -> None:
    """The default policy: another trajectory at its home, in a tool call now, has far more work left than any
    elsewhere."""
    fleet = busy_home()
    fleet.engine("B")
    fleet.finish("hog")
    assert fleet.sent(fleet.arrive("m2", "m", prompt=1_000, predicted=20_000)) == [("m2", "B")]
