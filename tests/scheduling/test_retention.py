"""How long ended trajectories are kept: until their rollout has been over for `retention_s`, within bounds."""

import pytest

from scheduling.idle import FORGOTTEN_AT_ONCE
from scheduling.limits import Limits
from scheduling.types import Fault, Forget, TrajectoryState
from tests.scheduling.fleet import Fleet, record

LIMITS = Limits(trajectory_ttl_s=1_000, retention_s=10, max_token_age_s=100)


@pytest.mark.parametrize("abort", [False, True], ids=["finished", "aborted"])
def test_an_ended_trajectory_is_kept_until_its_rollout_is_over(abort: bool) -> None:
    """Retention counts from the end of the rollout. It counted from a trajectory's own end, so that a rollout which
    took longer than that lost its short trajectories, which end first, before it could be exported."""
    fleet = Fleet(limits=LIMITS)
    for name in ("short", "long"):
        fleet.declare(name)
    fleet.close("short", abort)
    assert fleet.tick(50.0) == []
    fleet.close("long")
    assert fleet.scheduler.next_wakeup() == 60.0
    assert fleet.tick(9.0) == []
    assert fleet.tick(1.0) == [Forget("short"), Forget("long")]
    assert fleet.scheduler.next_wakeup() is None and fleet.scheduler.num_forgotten_early == 0


def test_other_rollouts_and_trajectories_without_one_are_not_waited_for() -> None:
    """Each rollout by itself; whoever is of none is kept from its own end."""
    fleet = Fleet(limits=LIMITS)
    for name, rollout in [("a", "r"), ("b", "s"), ("c", None), ("d", "r"), ("e", None)]:
        fleet.declare(name, rollout=rollout)
    for name in "abc":
        fleet.close(name)
    assert fleet.tick(10.0) == [Forget("b"), Forget("c")]


def test_a_rollout_goes_on_when_a_trajectory_is_reopened_or_joins() -> None:
    """A later turn of an ended member, or the first one of a trajectory that had no rollout."""
    fleet = Fleet(limits=LIMITS)
    fleet.engine("A", slots=4)
    for name, rollout in [("a", "r"), ("b", "r"), ("c", None)]:
        fleet.declare(name, rollout=rollout)
        fleet.close(name)
    fleet.tick(5.0)
    fleet.arrive("b1", "b")
    assert fleet.tick(20.0) == [Forget("c")]
    fleet.finish("b1")
    fleet.close("b")
    fleet.declare("d", rollout=None)
    fleet.arrive("d1", "d", rollout="r")
    fleet.finish("d1")
    assert fleet.tick(20.0) == []
    fleet.close("d")
    assert fleet.tick(9.0) == []
    assert fleet.tick(1.0) == [Forget("a"), Forget("b"), Forget("d")]


def test_a_rollout_ends_with_the_last_turn_of_an_aborted_trajectory() -> None:
    """Its tokens may still come. A turn that waits ends with the abort."""
    fleet = Fleet(limits=LIMITS)
    fleet.engine("A", slots=1)
    for name in ("runs", "waits"):
        fleet.arrive(name, rollout="r")
        fleet.close(name, abort=True)
    assert fleet.tick(20.0) == []
    fleet.fail("runs", fault=Fault.CLOSED)
    assert fleet.tick(9.0) == []
    assert fleet.tick(1.0) == [Forget("waits"), Forget("runs")]


def test_a_rollout_whose_agents_never_finish_ends_by_their_time_to_live() -> None:
    """So that it is forgotten at all."""
    fleet = Fleet(limits=Limits(trajectory_ttl_s=20, retention_s=10))
    fleet.declare("a")
    fleet.tick(15.0)
    fleet.declare("b")
    assert fleet.tick(19.0) == []
    assert fleet.scheduler.trajectories["a"].state is TrajectoryState.FINISHED
    fleet.tick(1.0)
    assert fleet.tick(10.0) == [Forget("a"), Forget("b")]


@pytest.mark.parametrize(("retention_s", "kept_s"), [(10, 100), (200, 200)])
def test_a_rollout_that_goes_on_for_ever_does_not_keep_its_trajectories(retention_s: float, kept_s: float) -> None:
    """A client may name one rollout all the time. Its trajectories go when their tokens do, and are counted."""
    fleet = Fleet(limits=Limits(trajectory_ttl_s=1_000, retention_s=retention_s, max_token_age_s=100))
    fleet.declare("always")
    fleet.declare("first")
    fleet.close("first")
    fleet.tick(1.0)
    fleet.declare("second")
    fleet.close("second")
    assert fleet.scheduler.next_wakeup() == kept_s
    assert fleet.tick(kept_s - 2) == []
    assert fleet.tick(1.0) == [Forget("first")]
    assert fleet.scheduler.num_forgotten("r") == fleet.scheduler.num_forgotten_early == 1
    assert fleet.tick(1.0) == [Forget("second")]
    assert fleet.scheduler.num_forgotten("r") == fleet.scheduler.num_forgotten_early == 2
    assert fleet.scheduler.num_forgotten("other") == 0


def test_what_is_forgotten_for_room_is_counted() -> None:
    """Also if it had not ended. When nothing is known of a rollout any more, its count is gone too."""
    fleet = Fleet(limits=Limits(retention_s=10, max_trajectories=2))
    for name in ("ended", "idle"):
        fleet.declare(name)
    fleet.close("ended")
    assert fleet.declare("third") == [Forget("ended")]
    assert fleet.scheduler.num_forgotten("r") == 1
    assert fleet.declare("other", rollout="s") == [Forget("idle")]
    assert fleet.scheduler.num_forgotten("r") == fleet.scheduler.num_forgotten_early == 2
    assert fleet.declare("another", rollout="s") == [Forget("third")]
    assert (fleet.scheduler.num_forgotten("r"), fleet.scheduler.num_forgotten_early) == (0, 3)


def test_records_of_an_earlier_process_are_kept_for_their_rollout() -> None:
    """The rollout goes on after a restart."""
    ended, active = TrajectoryState.FINISHED, TrajectoryState.ACTIVE
    records = [
        record(name, None, last_at, state=state, rollout_id=rollout)
        for name, last_at, state, rollout in [
            ("goes on", 30.0, active, "r"),
            ("early", 1.0, ended, "r"),
            ("alone", 2.0, ended, None),
            ("over", 3.0, ended, "s"),
            ("last of over", 25.0, TrajectoryState.ABORTED, "s"),
        ]
    ]
    fleet = Fleet(limits=LIMITS, records=records)
    assert fleet.tick(34.0) == [Forget("alone")]
    assert fleet.tick(1.0) == [Forget("over"), Forget("last of over")]
    fleet.close("goes on")
    assert fleet.tick(10.0) == [Forget("early"), Forget("goes on")]


def test_a_large_rollout_is_forgotten_in_parts() -> None:
    """All of it is due at once, and turns would wait meanwhile. The parts come a second apart."""
    fleet = Fleet(limits=LIMITS)
    names = [f"t{number}" for number in range(2 * FORGOTTEN_AT_ONCE + 1)]
    for name in names:
        fleet.declare(name)
    for name in names:
        fleet.close(name)
    forgotten = fleet.tick(10.0)
    while (due_at := fleet.scheduler.next_wakeup()) is not None:
        assert due_at == fleet.at + 1.0
        assert len(fleet.actions) == FORGOTTEN_AT_ONCE
        forgotten += fleet.tick(1.0)
    assert forgotten == [Forget(name) for name in names]
    assert fleet.scheduler.num_forgotten_early == 0
