"""Turns: when they run, which are rejected, and which events come too late."""

import pytest

from scheduling.limits import Limits
from scheduling.policy import HEDDLE, HEDDLE_PAPER, ROUND_ROBIN, Policy
from scheduling.scheduler import Scheduler
from scheduling.state import TurnState
from scheduling.types import Abort, Dispatch, Fault, ModelGone, Refusal, Reject, Save, TrajectoryState, TurnFailed
from tests.scheduling.fleet import Fleet


def test_a_first_turn_is_saved_before_it_is_dispatched() -> None:
    """The record is saved when the trajectory begins and again with its home, before the turn goes there."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("t1", "t", predicted=500.9)
    first, second, dispatch = fleet.actions
    assert isinstance(first, Save) and first.record.home is None
    assert isinstance(second, Save) and second.record.home == "A"
    assert dispatch == Dispatch("t1", leg=1, engine_id="A", priority=-500, why="entered")


def test_a_turn_waits_for_a_slot_and_gets_the_next_one() -> None:
    """No engine runs more turns than it has slots; a turn that ends makes room for one."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a")
    assert fleet.arrive("b") == []
    assert fleet.sent(fleet.finish("a")) == [("b", "A")]


def test_the_longest_predicted_trajectory_goes_first() -> None:
    """The longest trajectory sets the makespan, so it must not wait."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("running")
    fleet.arrive("short", predicted=10)
    fleet.arrive("long", predicted=20_000)
    assert fleet.sent(fleet.finish("running")) == [("long", "A")]


def test_waiting_makes_a_short_turn_urgent() -> None:
    """Each second of waiting is worth `ageing_tokens_per_s` predicted tokens."""
    fleet = Fleet(limits=Limits(ageing_tokens_per_s=100))
    fleet.engine("A")
    fleet.arrive("running")
    fleet.arrive("short", predicted=10)
    fleet.at = 10.1
    fleet.arrive("long", predicted=1_000)
    assert fleet.sent(fleet.finish("running")) == [("short", "A")]


def test_a_clients_priority_outranks_predictions() -> None:
    """A lower priority goes before any prediction, both in the queue and at the engine."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("running")
    fleet.arrive("late", priority=1, predicted=90_000)
    fleet.arrive("plain", predicted=50_000)
    fleet.arrive("early", priority=-1, predicted=1)
    priorities = []
    for ended, next_one in [("running", "early"), ("early", "plain"), ("plain", "late")]:
        (dispatch,) = fleet.finish(ended)
        assert isinstance(dispatch, Dispatch) and dispatch.turn_id == next_one
        priorities.append(dispatch.priority)
    assert priorities == sorted(priorities)


def test_first_come_first_served_ignores_predictions() -> None:
    """The baseline runs turns in the order of arrival."""
    fleet = Fleet(ROUND_ROBIN)
    fleet.arrive("first", predicted=1)
    fleet.at = 1.0
    fleet.arrive("second", predicted=1_000)
    assert fleet.sent(fleet.engine("A")) == [("first", "A"), ("second", "A")]


def test_a_turn_id_that_is_in_use_is_refused() -> None:
    """Two live turns cannot share an id; a turn that ends frees its id."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("t1", "t")
    assert fleet.arrive("t1", "other") == [Reject("t1", Refusal.DUPLICATE_TURN, None)]
    assert "other" not in fleet.scheduler.trajectories
    fleet.finish("t1")
    assert fleet.sent(fleet.arrive("t1", "t")) == [("t1", "A")]


def test_a_full_queue_rejects_a_turn_with_a_retry_delay() -> None:
    """The queue has a limit. A rejected turn leaves no trace."""
    fleet = Fleet(limits=Limits(max_waiting_turns=1))
    fleet.arrive("a")
    assert fleet.arrive("b") == [Reject("b", Refusal.QUEUE_FULL, 5.0)]
    assert "b" not in fleet.scheduler.trajectories


@pytest.mark.parametrize("policy", [HEDDLE, ROUND_ROBIN], ids=lambda policy: policy.name)
def test_a_full_queue_does_not_refuse_a_turn_that_can_run_at_once(policy: Policy) -> None:
    """Even with no queue at all, new trajectories and residents use free slots."""
    fleet = Fleet(policy, Limits(max_waiting_turns=0))
    assert fleet.arrive("early") == [Reject("early", Refusal.QUEUE_FULL, 5.0)]
    fleet.engine("A")
    assert fleet.sent(fleet.arrive("a1", "a")) == [("a1", "A")]
    if policy.holds_turns:
        assert fleet.arrive("b") == [Reject("b", Refusal.QUEUE_FULL, 5.0)]
        assert "b" not in fleet.scheduler.trajectories
        assert fleet.arrive("a2", "a") == [Reject("a2", Refusal.QUEUE_FULL, 5.0)]
    fleet.finish("a1")
    assert fleet.sent(fleet.arrive("a3", "a")) == [("a3", "A")]


def test_a_full_queue_rejects_a_resident_of_a_cordoned_engine() -> None:
    """Its home has a free slot, but takes no more turns."""
    fleet = Fleet(limits=Limits(max_waiting_turns=0))
    fleet.engine("A")
    fleet.arrive("a1", "a")
    fleet.finish("a1")
    fleet.engine("A", accepting=False)
    assert fleet.arrive("a2", "a") == [Reject("a2", Refusal.QUEUE_FULL, 5.0)]


def test_a_full_queue_rejects_turns_if_trajectories_are_assigned() -> None:
    """The free slot may not be on the engine that the turn would wait for."""
    fleet = Fleet(HEDDLE_PAPER, Limits(max_waiting_turns=0))
    fleet.engine("A")
    assert fleet.arrive("a") == [Reject("a", Refusal.QUEUE_FULL, 5.0)]


def test_a_turn_that_waits_too_long_is_refused() -> None:
    """No turn waits longer than `queue_timeout_s`, and a rejected turn does not run afterwards."""
    fleet = Fleet(limits=Limits(queue_timeout_s=10))
    fleet.arrive("a")
    assert fleet.tick(9.9) == []
    assert fleet.tick(0.1) == [Reject("a", Refusal.QUEUE_TIMEOUT, 5.0)]
    assert fleet.engine("A") == []


def test_time_spent_running_does_not_count_as_waiting() -> None:
    """A turn whose engine failed after a long run has its whole time in the queue again."""
    fleet = Fleet(limits=Limits(queue_timeout_s=10))
    fleet.engine("A")
    fleet.arrive("a")
    fleet.at = 100.0
    fleet.fail("a")
    assert fleet.sent(fleet.tick(2.0)) == [("a", "A")]


def test_events_of_unknown_turns_and_earlier_legs_are_dropped() -> None:
    """Only the running leg can progress, finish or fail its turn."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.engine("B")
    fleet.arrive("a")
    assert fleet.sent(fleet.fail("a")) == [("a", "B")]
    assert fleet.progress("nobody", 1, 5) == fleet.finish("nobody") == fleet.fail("nobody") == []
    assert fleet.progress("a", 1, 5_000) == fleet.finish("a", leg=1) == fleet.fail("a", leg=1) == []
    assert fleet.actions == [] and fleet.claims("B") == {"a": 10}
    assert fleet.finish("a", leg=2) == [] and fleet.home("a") == "B"


def test_a_fault_reported_twice_counts_once() -> None:
    """A leg can fail by its abort and by its engine; the second report finds the turn waiting and is dropped."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a", "t")
    fleet.finish("a")
    fleet.arrive("b", "t")
    assert fleet.fail("b") == fleet.fail("b") == fleet.fail("b", fault=Fault.REQUEST) == []
    assert fleet.scheduler.num_waiting == 1
    assert fleet.sent(fleet.tick(2.0)) == [("b", "A")]


def test_a_turn_that_fails_for_good_frees_its_slot() -> None:
    """Its trajectory has finished a turn before, so it keeps its claim. A waiting turn takes the slot at once."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a1", "a")
    fleet.finish("a1")
    fleet.arrive("a2", "a")
    assert fleet.arrive("b") == []
    assert fleet.sent(fleet.fail("a2", fault=Fault.REQUEST)) == [("b", "A")]
    assert set(fleet.claims("A")) == {"a", "b"}


def test_a_failed_turn_goes_to_another_engine() -> None:
    """As long as nothing was sent to the client, an engine's fault does not concern it."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.engine("B")
    fleet.arrive("a")
    assert fleet.fail("a") == [Dispatch("a", leg=2, engine_id="B", priority=-1000, why="retried, leg 2")]
    assert fleet.claims("A") == {}


def test_a_turn_that_an_engine_failed_avoids_its_whole_server() -> None:
    """Its process may be dying, and then three of its ranks would use up the turn's attempts. A busy one does not."""
    fleet = Fleet(limits=Limits(retry_pause_s=2))
    for engine_id, server in (("A", "S"), ("A@1", "S"), ("A@2", "S"), ("B", "")):
        fleet.engine(engine_id, server=server)
    fleet.arrive("busy")
    assert fleet.sent(fleet.fail("busy", fault=Fault.BUSY)) == [("busy", "A@1")]
    assert fleet.sent(fleet.fail("busy", leg=2)) == [("busy", "B")]
    fleet.arrive("a")
    assert fleet.fail("a") == [], "it waits beside two empty ranks"
    [(_, engine_id)] = fleet.sent(fleet.tick(2.0))
    assert engine_id in {"A", "A@1", "A@2"}


def test_nothing_goes_to_the_ranks_of_a_server_that_is_being_lost() -> None:
    """They are lost one after the other: a turn would follow them, and lose an attempt to each."""
    fleet = Fleet()
    fleet.engine("A", server="S")
    fleet.engine("A@1", server="S")
    fleet.arrive("a")
    fleet.arrive("b", trajectory_id="a")
    assert fleet.lose("A") == [Abort("a", 1, Fault.ENGINE)]
    assert fleet.lose("A@1") == []
    assert fleet.sent(fleet.engine("A", server="S")) == [("b", "A")]


def test_a_turn_for_which_a_lost_rank_was_kept_free_waits_for_another() -> None:
    """It was routed past the other ranks first, and then the lost one was to be filled."""
    fleet = Fleet()
    fleet.engine("A", slots=2, kv=100, models=("large", "small"), server="S")
    fleet.engine("A@1", kv=100, models=("small",), server="S")
    fleet.arrive("a", model="small", prompt=1)
    fleet.arrive("b", model="large", prompt=101)
    assert fleet.lose("A") == [Abort("a", 1, Fault.ENGINE)]
    assert fleet.lose("A@1") == []
    assert fleet.sent(fleet.engine("B", kv=100, models=("large",))) == [("b", "B")]


def test_nothing_goes_to_the_ranks_of_a_server_that_is_cordoned() -> None:
    """Turns that wait at one go to another server, not to the rank that is cordoned next, to be paused there."""
    fleet = Fleet()
    for engine_id in ("A", "A@1", "A@2"):
        fleet.engine(engine_id, server="S")
    fleet.arrive("a")
    fleet.arrive("b", trajectory_id="a")
    for engine_id in ("A", "A@1", "A@2"):
        assert fleet.engine(engine_id, server="S", accepting=False) == []
    assert fleet.sent(fleet.engine("B")) == [("b", "B")]


def test_turns_wait_at_no_rank_whose_server_is_closed() -> None:
    """Not at one that was not told of itself either."""
    fleet = Fleet()
    fleet.engine("A", server="S")
    fleet.engine("A@1", server="S")
    for turn in ("a", "b"):
        fleet.arrive(turn)
    fleet.arrive("b2", trajectory_id="b")
    fleet.engine("A", server="S", accepting=False)
    assert fleet.sent(fleet.engine("B")) == [("b2", "B")]


def test_a_rank_that_stays_takes_turns_again_at_its_next_report() -> None:
    """A server may have fewer ranks than before."""
    fleet = Fleet()
    fleet.engine("A", server="S")
    fleet.engine("A@1", server="S")
    fleet.lose("A@1")
    fleet.arrive("a")
    assert fleet.sent(fleet.engine("A", server="S")) == [("a", "A")]


@pytest.mark.parametrize("fault", [Fault.ENGINE, Fault.BUSY])
def test_the_only_engine_is_tried_again_after_a_pause(fault: Fault) -> None:
    """The pause gives a busy engine time and keeps a dying one from using up all attempts at once."""
    fleet = Fleet(limits=Limits(retry_pause_s=2))
    fleet.engine("A")
    fleet.arrive("a")
    assert fleet.fail("a", fault=fault) == []
    assert fleet.tick(1.9) == []
    assert fleet.sent(fleet.tick(0.1)) == [("a", "A")]


def test_a_busy_engine_uses_up_no_attempt() -> None:
    """It may be busy many times during a weight update. The turn waits, asks at most once a second, and is served."""
    fleet = Fleet(limits=Limits(max_attempts=2, retry_pause_s=0))
    fleet.engine("A")
    fleet.arrive("a")
    for leg in range(1, 6):
        assert fleet.fail("a", leg=leg, fault=Fault.BUSY) == []
        assert fleet.sent(fleet.tick(1.0)) == [("a", "A")]
    assert fleet.sent(fleet.fail("a", leg=6, fault=Fault.ENGINE)) == [("a", "A")]
    assert fleet.fail("a", leg=7, fault=Fault.ENGINE) == [Reject("a", Refusal.ENGINE_FAILED, 5.0)]


def test_a_busy_engines_retry_after_is_respected() -> None:
    """The turn does not go back before that time."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a")
    assert fleet.handle(TurnFailed(fleet.at, "a", 1, Fault.BUSY, True, retry_after_s=30.0)) == []
    assert fleet.tick(29.0) == []
    assert fleet.sent(fleet.tick(1.0)) == [("a", "A")]


def test_a_turn_does_not_wait_for_a_busy_engine_forever() -> None:
    """A leg at a busy engine counts as time in the queue."""
    fleet = Fleet(limits=Limits(queue_timeout_s=10, retry_pause_s=4))
    fleet.engine("A")
    fleet.arrive("a")
    fleet.fail("a", fault=Fault.BUSY)
    assert fleet.sent(fleet.tick(4.0)) == [("a", "A")]
    fleet.fail("a", leg=2, fault=Fault.BUSY)
    assert fleet.tick(6.0) == [Reject("a", Refusal.QUEUE_TIMEOUT, 5.0)]


def test_a_leg_that_made_tokens_did_not_wait_while_it_ran() -> None:
    """Also if its engine broke it off to be busy with something else: only what it waits from then on counts."""
    fleet = Fleet(limits=Limits(queue_timeout_s=10, retry_pause_s=4))
    fleet.engine("A")
    fleet.arrive("a")
    fleet.at = 100.0
    fleet.handle(TurnFailed(fleet.at, "a", 1, Fault.BUSY, True, has_made=True))
    assert fleet.sent(fleet.tick(4.0)) == [("a", "A")]
    fleet.fail("a", leg=2, fault=Fault.BUSY)
    assert fleet.tick(6.0) == [Reject("a", Refusal.QUEUE_TIMEOUT, 5.0)]


def test_a_turn_that_its_engine_failed_does_not_hold_back_others() -> None:
    """While it may not return there, turns behind it may run."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a", predicted=9_000)
    fleet.fail("a")
    assert fleet.sent(fleet.arrive("b")) == [("b", "A")]


def test_a_failed_turn_returns_if_the_other_engines_are_lost() -> None:
    """A turn avoids an engine for a while, not forever."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.engine("B")
    fleet.arrive("a")
    fleet.arrive("b")
    assert fleet.fail("a") == []
    fleet.lose("B")
    assert fleet.sent(fleet.tick(2.0)) == [("a", "A")]


def test_attempts_are_bounded() -> None:
    """After `max_attempts` failed legs the turn is rejected."""
    fleet = Fleet(limits=Limits(max_attempts=2))
    fleet.engine("A")
    fleet.engine("B")
    fleet.arrive("a")
    fleet.fail("a", leg=1)
    assert fleet.fail("a", leg=2) == [Reject("a", Refusal.ENGINE_FAILED, 5.0)]
    assert fleet.tick(10.0) == []


def test_a_turn_under_which_two_engines_died_goes_to_no_third() -> None:
    """The first is known to be lost when the second breaks off. A failure of another kind does not count."""
    fleet = Fleet(limits=Limits(max_attempts=9))
    for engine_id in "ABCD":
        fleet.engine(engine_id)
    fleet.arrive("a")
    assert fleet.sent(fleet.fail("a", leg=1, broke_off=True)) == [("a", "B")]
    fleet.lose("A")
    assert fleet.sent(fleet.fail("a", leg=2)) == [("a", "C")]
    assert fleet.fail("a", leg=3, broke_off=True) == [Reject("a", Refusal.ENGINES_KILLED, None)]


def test_an_engine_that_broke_off_twice_and_then_died_counts_once() -> None:
    """It broke off, lived, got the turn again, and died. So one engine is lost, and the turn goes to another one."""
    fleet = Fleet(limits=Limits(max_attempts=9, retry_pause_s=0))
    fleet.engine("A")
    fleet.arrive("a")
    assert fleet.sent(fleet.fail("a", leg=1, broke_off=True)) == [("a", "A")]
    fleet.engine("B")
    fleet.lose("A")
    assert fleet.sent(fleet.fail("a", leg=2, broke_off=True)) == [("a", "B")]
    assert fleet.fail("a", leg=3, broke_off=True) == [Reject("a", Refusal.ENGINES_KILLED, None)]


def test_engines_that_break_off_and_live_are_tried_as_often_as_others() -> None:
    """Their turn did not kill them."""
    fleet = Fleet(limits=Limits(max_attempts=4, retry_pause_s=0))
    for engine_id in "AB":
        fleet.engine(engine_id)
    fleet.arrive("a")
    for leg in range(1, 4):
        assert fleet.sent(fleet.fail("a", leg=leg, broke_off=True))
    assert fleet.fail("a", leg=4, broke_off=True) == [Reject("a", Refusal.ENGINE_FAILED, 5.0)]


def test_two_engines_that_broke_off_and_live_are_tried_again() -> None:
    """After the pause, like engines that failed in another way."""
    fleet = Fleet()
    for engine_id in "AB":
        fleet.engine(engine_id)
    fleet.arrive("a")
    assert fleet.sent(fleet.fail("a", leg=1, broke_off=True)) == [("a", "B")]
    assert fleet.fail("a", leg=2, broke_off=True) == []
    assert len(fleet.sent(fleet.tick(2.0))) == 1


@pytest.mark.parametrize("fault", [Fault.REQUEST, Fault.CLIENT_LEFT, Fault.CLOSED])
def test_only_an_engines_fault_is_retried(fault: Fault) -> None:
    """Any other fault ends the turn without a rejection: the driver knows what to answer."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a")
    fleet.arrive("b")
    assert fleet.sent(fleet.fail("a", fault=fault)) == [("b", "A")]


def test_a_turn_whose_client_has_seen_bytes_is_not_retried() -> None:
    """No token is sent twice."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.engine("B")
    fleet.arrive("a")
    assert fleet.fail("a", can_retry=False) == []
    assert fleet.scheduler.trajectories["a"].turns == {}


def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    """Its turn never runs, and a turn that it held back goes at once."""
    fleet = Fleet()
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("a", prompt=50)
    fleet.arrive("big", prompt=80, predicted=9_000)
    assert fleet.arrive("small", prompt=10) == []
    assert fleet.sent(fleet.fail("big", leg=0, fault=Fault.CLIENT_LEFT)) == [("small", "A")]


def test_a_running_turn_of_a_finished_trajectory_is_still_retried() -> None:
    """Finishing stops no turn: its client still waits for an answer."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.engine("B")
    fleet.arrive("a")
    fleet.close("a")
    assert fleet.sent(fleet.fail("a")) == [("a", "B")]
    fleet.finish("a", leg=2)
    assert fleet.claims("B") == {} and fleet.scheduler.trajectories["a"].state is TrajectoryState.FINISHED


def test_a_fault_after_an_abort_rejects_the_turn() -> None:
    """The engine's fault came before the abort's answer; the client still gets an answer."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a")
    assert fleet.close("a", abort=True) == [Abort("a", 1, Fault.CLOSED)]
    assert fleet.fail("a", fault=Fault.ENGINE) == [Reject("a", Refusal.TRAJECTORY_ABORTED, None)]


def test_a_forbidden_state_transition_fails() -> None:
    """The transition table is enforced."""
    fleet = Fleet()
    fleet.arrive("a")
    turn = fleet.scheduler.trajectories["a"].turns["a"]
    with pytest.raises(AssertionError, match="waiting -> waiting"):
        turn.become(TurnState.WAITING)


def test_an_unknown_event_fails_an_assertion() -> None:
    """A programmer's error must not be ignored."""

    class Nonsense:
        at = 0.0

    with pytest.raises(AssertionError):
        Scheduler(HEDDLE, Limits()).handle(Nonsense())  # type: ignore[arg-type]


def test_turns_of_a_model_that_is_gone_are_refused() -> None:
    """Those that wait, at once; one that runs may end, and turns of other models wait on."""
    fleet = Fleet()
    fleet.engine("A", models=("gone", "there"))
    fleet.arrive("runs", model="gone")
    fleet.arrive("waits", model="gone")
    fleet.arrive("other", model="there")
    assert fleet.handle(ModelGone(fleet.at, "gone")) == [Reject("waits", Refusal.MODEL_GONE, None)]
    assert fleet.sent(fleet.finish("runs")) == [("other", "A")]


@pytest.mark.parametrize("is_back", [False, True])
def test_a_turn_that_must_wait_again_is_refused_if_its_model_is_gone(is_back: bool) -> None:
    """Unless an engine has the model again."""
    fleet = Fleet()
    fleet.engine("A", models=("gone", "there"))
    fleet.arrive("runs", model="gone")
    fleet.handle(ModelGone(fleet.at, "gone"))
    fleet.engine("A", models=("gone", "there") if is_back else ("there",))
    actions = fleet.fail("runs")
    assert (Reject("runs", Refusal.MODEL_GONE, None) in actions) is not is_back
