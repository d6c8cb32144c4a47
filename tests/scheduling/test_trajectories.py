"""Trajectories: declared, finished, aborted, expired, forgotten."""

import pytest

from scheduling.limits import Limits
from scheduling.policy import HEDDLE
from scheduling.types import (
    Abort,
    Dispatch,
    Fault,
    Forget,
    Prediction,
    Refusal,
    Reject,
    Save,
    TrajectoryDeclared,
    TrajectoryRecord,
    TrajectoryState,
)
from tests.scheduling.fleet import Fleet, record


def test_a_declared_trajectory_is_saved_and_its_first_turn_joins_it() -> None:
    """It has the group and rollout of the declaration. Declaring it again changes nothing."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.declare("t", predicted=700.0)
    expected = TrajectoryRecord("t", "g", "r", TrajectoryState.ACTIVE, None, 0, 0, 0, 700.0, 0.0, 0.0)
    assert fleet.actions == [Save(expected)]
    fleet.declare("t", predicted=1.0)
    assert fleet.actions == []
    fleet.arrive("t1", "t")
    assert fleet.scheduler.trajectories["t"].record().group_id == "g"
    assert [type(action) for action in fleet.actions] == [Save, Dispatch]


def test_a_turns_result_is_saved_at_its_end() -> None:
    """The context is the last turn's prompt and output; outputs and turns add up."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("t1", "t", prompt=10, predicted=900.0)
    fleet.finish("t1", prompt=12, output=5)
    fleet.at = 2.0
    fleet.arrive("t2", "t", prompt=30, predicted=800.0)
    fleet.at = 3.0
    fleet.finish("t2", prompt=33, output=7)
    assert fleet.actions == [
        Save(TrajectoryRecord("t", "", None, TrajectoryState.ACTIVE, "A", 40, 12, 2, 800.0, 0.0, 3.0))
    ]


def test_a_finished_trajectory_gives_up_its_claim_and_makes_room() -> None:
    """The next entrant enters at once."""
    fleet = Fleet()
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("a")
    fleet.finish("a", prompt=60)
    fleet.arrive("b", prompt=60)
    assert fleet.sent(fleet.close("a")) == [("b", "A")]
    assert fleet.scheduler.trajectories["a"].state is TrajectoryState.FINISHED


def test_finishing_a_trajectory_stops_no_turn() -> None:
    """Running and waiting turns are served to their end; then the claim is given up."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("t1", "t")
    fleet.arrive("t2", "t")
    assert fleet.close("t") == []
    assert fleet.sent(fleet.finish("t1")) == [("t2", "A")]
    fleet.finish("t2")
    assert fleet.claims("A") == {}


def test_a_later_turn_reopens_a_finished_trajectory() -> None:
    """An agent that reports its end too early loses nothing."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("t1", "t")
    fleet.finish("t1")
    fleet.close("t")
    assert fleet.sent(fleet.arrive("t2", "t")) == [("t2", "A")]
    assert fleet.scheduler.trajectories["t"].state is TrajectoryState.ACTIVE


def test_an_abort_stops_running_turns_and_rejects_the_others() -> None:
    """Waiting turns and later ones. When the running turn has ended, the claim is gone."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("t1", "t")
    fleet.arrive("t2", "t")
    assert fleet.close("t", abort=True) == [
        Abort("t1", 1, Fault.CLOSED),
        Reject("t2", Refusal.TRAJECTORY_ABORTED, None),
    ]
    assert fleet.arrive("t3", "t") == [Reject("t3", Refusal.TRAJECTORY_ABORTED, None)]
    assert fleet.fail("t1", fault=Fault.CLOSED) == []
    assert fleet.claims("A") == {} and fleet.scheduler.trajectories["t"].turns == {}


def test_aborting_a_waiting_turn_lets_the_next_one_run() -> None:
    """It no longer holds back the turns behind it."""
    fleet = Fleet()
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("a", prompt=50)
    fleet.arrive("big", prompt=80, predicted=9_000)
    fleet.arrive("small", prompt=10)
    refused, dispatch = fleet.close("big", abort=True)
    assert refused == Reject("big", Refusal.TRAJECTORY_ABORTED, None)
    assert fleet.sent([dispatch]) == [("small", "A")]


def test_an_aborted_trajectory_stays_aborted() -> None:
    """Finishing it afterwards does not reopen it, and aborting it twice has no further effect."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("t1", "t")
    fleet.close("t", abort=True)
    assert fleet.close("t", abort=True) == fleet.close("t") == fleet.actions == []
    assert fleet.scheduler.trajectories["t"].state is TrajectoryState.ABORTED


def test_closing_an_unknown_trajectory_is_ignored() -> None:
    """It may have been forgotten."""
    assert Fleet().close("nobody") == []


def test_an_idle_trajectory_is_finished_and_later_forgotten() -> None:
    """For agents that never report their end: the claim goes after the time to live, the record after the retention."""
    fleet = Fleet(limits=Limits(trajectory_ttl_s=10, retention_s=20))
    fleet.engine("A")
    fleet.arrive("t")
    fleet.finish("t")
    assert fleet.scheduler.next_wakeup() == 10.0
    assert fleet.tick(9.0) == []
    assert fleet.scheduler.trajectories["t"].state is TrajectoryState.ACTIVE
    fleet.tick(1.0)
    assert fleet.actions == [Save(fleet.scheduler.trajectories["t"].record())]
    assert fleet.scheduler.trajectories["t"].state is TrajectoryState.FINISHED and fleet.claims("A") == {}
    assert fleet.scheduler.next_wakeup() == 30.0
    assert fleet.tick(19.0) == []
    assert fleet.tick(1.0) == [Forget("t")]
    assert fleet.scheduler.next_wakeup() is None


@pytest.mark.parametrize(("ttl_s", "due_at"), [(10, 13.0), (30, 20.0)])
def test_the_next_tick_is_due_at_the_earliest_deadline(ttl_s: float, due_at: float) -> None:
    """The expiry of an active trajectory, idle since 3, or the retention of one that ended at 0."""
    fleet = Fleet(limits=Limits(trajectory_ttl_s=ttl_s, retention_s=20))
    fleet.declare("ended", rollout="r")
    fleet.close("ended")
    fleet.at = 3.0
    fleet.declare("active", rollout="s")
    assert fleet.scheduler.next_wakeup() == due_at


def test_a_trajectory_with_a_live_turn_is_not_idle() -> None:
    """A long turn or a long wait does not end it; its time to live starts when the turn ends."""
    fleet = Fleet(limits=Limits(trajectory_ttl_s=10))
    fleet.engine("A")
    fleet.arrive("t")
    assert fleet.scheduler.next_wakeup() is None
    fleet.tick(50.0)
    fleet.finish("t")
    fleet.tick(9.0)
    assert fleet.actions == [] and fleet.scheduler.next_wakeup() == 60.0


def test_an_aborted_trajectory_is_kept_until_its_last_turn_has_ended() -> None:
    """Forgetting it sooner would lose the turn that still runs."""
    fleet = Fleet(limits=Limits(retention_s=5))
    fleet.engine("A")
    fleet.arrive("t")
    fleet.close("t", abort=True)
    assert fleet.tick(100.0) == []
    fleet.fail("t", fault=Fault.CLOSED)
    assert fleet.tick(5.0) == [Forget("t")]


def test_beyond_the_limit_the_longest_idle_trajectory_is_forgotten() -> None:
    """An ended one first, then the longest idle one, whatever its age; live ones never."""
    fleet = Fleet(limits=Limits(max_trajectories=3))
    fleet.engine("A", slots=4)
    for at, name in enumerate(["old-but-used", "idle", "ended"]):
        fleet.at = float(at)
        fleet.arrive(f"{name}1", name)
        fleet.finish(f"{name}1")
    fleet.close("ended")
    fleet.at = 9.0
    fleet.arrive("old-but-used2", "old-but-used")
    fleet.finish("old-but-used2")
    assert fleet.arrive("new1")[0] == Forget("ended")
    assert fleet.arrive("new2")[0] == Forget("idle")
    assert set(fleet.claims("A")) == {"old-but-used", "new1", "new2"}


def test_live_trajectories_are_kept_beyond_the_limit() -> None:
    """The queue limits their turns. The surplus is forgotten when it becomes idle, at a tick."""
    fleet = Fleet(limits=Limits(max_trajectories=1))
    fleet.engine("A", slots=2)
    fleet.arrive("a")
    assert fleet.sent(fleet.arrive("b")) == [("b", "A")]
    fleet.finish("b")
    assert fleet.tick(1.0) == [Forget("b")]


def test_records_of_an_earlier_process_expire_by_their_last_use() -> None:
    """A store returns them in any order."""
    records = [record("young", None, last_at=8.0), record("old", None, last_at=1.0)]
    fleet = Fleet(HEDDLE, Limits(trajectory_ttl_s=10), records)
    assert fleet.scheduler.next_wakeup() == 11.0
    fleet.tick(11.0)
    assert [action.record.trajectory_id for action in fleet.actions if isinstance(action, Save)] == ["old"]
    assert fleet.scheduler.trajectories["young"].prediction == Prediction(1000.0, 1000.0)


def test_a_tick_is_due_every_second_while_a_turn_waits() -> None:
    """Leases, patience and timeouts are checked then."""
    fleet = Fleet()
    fleet.arrive("a")
    assert fleet.scheduler.next_wakeup() == 1.0
    fleet.tick(5.0)
    assert fleet.scheduler.next_wakeup() == 6.0


def test_a_declaration_without_a_group_takes_it_from_the_first_turn() -> None:
    """Its rollout likewise. If it was declared with them, it keeps them."""
    fleet = Fleet()
    fleet.handle(TrajectoryDeclared(0.0, "bare", Prediction(10, 10)))
    fleet.declare("full")
    for name, saved in (("bare", ["step-7"]), ("full", [])):
        fleet.arrive(f"{name}-1", name, group="siblings", rollout="step-7")
        assert [action.record.rollout_id for action in fleet.actions if isinstance(action, Save)] == saved
    records = {name: fleet.scheduler.trajectories[name].record() for name in ("bare", "full")}
    assert (records["bare"].group_id, records["bare"].rollout_id) == ("siblings", "step-7")
    assert (records["full"].group_id, records["full"].rollout_id) == ("g", "r")


def test_a_reopened_trajectory_is_saved_and_can_be_aborted() -> None:
    """An abort stops the turn that reopened it. A finished trajectory can be aborted, too."""
    fleet = Fleet()
    fleet.engine("A", slots=2)
    fleet.arrive("t1", "t")
    fleet.finish("t1")
    fleet.close("t")
    fleet.arrive("t2", "t")
    assert fleet.scheduler.trajectories["t"].record() in [
        action.record for action in fleet.actions if isinstance(action, Save)
    ]
    assert fleet.close("t", abort=True) == [Abort("t2", 1, Fault.CLOSED)]
    fleet.arrive("u1", "u")
    fleet.finish("u1")
    fleet.close("u")
    assert fleet.close("u") == [] and fleet.actions == []
    fleet.close("u", abort=True)
    assert fleet.arrive("u2", "u") == [Reject("u2", Refusal.TRAJECTORY_ABORTED, None)]
