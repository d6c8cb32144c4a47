"""Engines join, change, are cordoned and get lost; homes of an earlier process hold again."""

from scheduling.limits import Limits
from scheduling.policy import VERL
from scheduling.types import Abort, Dispatch, Fault, Save, TrajectoryState
from tests.scheduling.fleet import Fleet, record


def test_turns_wait_while_there_is_no_engine() -> None:
    """The first engine that reports takes them in order, up to its slots."""
    fleet = Fleet()
    fleet.arrive("short", predicted=10)
    fleet.arrive("long", predicted=500)
    fleet.arrive("longer", predicted=5_000)
    assert fleet.sent(fleet.engine("A", slots=2)) == [("longer", "A"), ("long", "A")]


def test_a_turn_goes_only_to_an_engine_that_serves_its_model() -> None:
    """Several models share a fleet; a turn that waits for one does not hold back turns for another."""
    fleet = Fleet()
    fleet.engine("A", models=("x",))
    assert fleet.arrive("y1", model="y", predicted=90_000) == []
    assert fleet.sent(fleet.arrive("x1", model="x")) == [("x1", "A")]
    assert fleet.sent(fleet.engine("B", models=("y", "z"))) == [("y1", "B")]


def test_an_engine_with_several_models_takes_the_most_urgent_turn() -> None:
    """The queues of its models are merged by key."""
    fleet = Fleet()
    fleet.arrive("x1", model="x", predicted=10)
    fleet.arrive("y1", model="y", predicted=20)
    assert fleet.sent(fleet.engine("A", models=("x", "y"))) == [("y1", "A")]
    assert fleet.sent(fleet.finish("y1")) == [("x1", "A")]


def test_a_turn_for_another_model_moves_to_an_engine_that_serves_it() -> None:
    """That engine becomes the trajectory's home."""
    fleet = Fleet()
    fleet.engine("A", models=("x",))
    fleet.engine("B", models=("y",))
    fleet.arrive("t1", "t", model="x")
    fleet.finish("t1")
    assert fleet.sent(fleet.arrive("t2", "t", model="y")) == [("t2", "B")]
    assert fleet.claims("A") == {} and fleet.home("t") == "B"


def test_slots_follow_the_engines_latest_report() -> None:
    """New slots are filled at once; removed slots are not filled again."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a")
    fleet.arrive("b")
    fleet.arrive("c")
    assert fleet.sent(fleet.engine("A", slots=2)) == [("b", "A")]
    assert fleet.engine("A", slots=1) == []
    assert fleet.finish("a") == []
    assert fleet.sent(fleet.finish("b")) == [("c", "A")]


def test_a_cordoned_engine_only_finishes_its_running_turns() -> None:
    """Turns that wait for it go elsewhere at once."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a1", "a")
    fleet.arrive("a2", "a")
    fleet.engine("B")
    assert fleet.sent(fleet.engine("A", accepting=False)) == [("a2", "B")]
    assert fleet.finish("a1") == []
    fleet.finish("a2")
    assert fleet.sent(fleet.arrive("c")) == [("c", "B")]


def test_residents_of_a_cordoned_engine_wait_for_it_if_there_is_no_other() -> None:
    """Their turns go home when the engine accepts turns again."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a")
    fleet.finish("a")
    fleet.engine("A", accepting=False)
    assert fleet.arrive("a2", "a") == []
    (dispatch,) = fleet.engine("A")
    assert dispatch == Dispatch("a2", 1, "A", -1000, "home")


def test_waiting_turns_leave_an_engine_that_drops_their_model() -> None:
    """For example, after an adapter was unloaded."""
    fleet = Fleet()
    fleet.engine("A", models=("x", "y"))
    fleet.arrive("a1", "a", model="x")
    fleet.arrive("a2", "a", model="y")
    fleet.engine("B", models=("y",))
    assert fleet.sent(fleet.engine("A", models=("x",))) == [("a2", "B")]


def test_a_lost_engines_legs_are_aborted_and_its_turns_run_elsewhere() -> None:
    """The driver ends each aborted leg, and then its turn is retried. A turn that only waited runs elsewhere at
    once."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a1", "a")
    fleet.arrive("a2", "a")
    fleet.engine("B")
    abort, dispatch = fleet.lose("A")
    assert abort == Abort("a1", 1, Fault.ENGINE)
    assert fleet.sent([dispatch]) == [("a2", "B")]
    assert fleet.fail("a1") == []
    assert fleet.sent(fleet.finish("a2")) == [("a1", "B")]


def test_a_turn_may_finish_after_its_engine_is_lost() -> None:
    """Its result counts, but its trajectory has no home."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a")
    fleet.lose("A")
    assert fleet.progress("a", 1, 5) == fleet.finish("a") == []
    assert fleet.home("a") is None and fleet.scheduler.trajectories["a"].num_turns == 1


def test_a_leg_that_grows_on_a_lost_engine_moves_no_turn() -> None:
    """Nor those of a trajectory that had a claim there and now waits at its next home."""
    fleet = Fleet()
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("a", prompt=40)
    fleet.arrive("b1", "b", prompt=40)
    fleet.finish("b1", prompt=40)
    fleet.engine("B", kv=200)
    fleet.lose("A")
    fleet.arrive("b2", "b", prompt=60)
    fleet.finish("b2", prompt=60)
    fleet.arrive("c", prompt=20)
    assert fleet.arrive("b3", "b", prompt=80) == fleet.progress("a", 1, 100) == []
    assert fleet.sent(fleet.finish("c")) == [("b3", "B")]


def test_the_loss_of_an_unknown_engine_is_ignored() -> None:
    """A driver and a controller may both report the same loss."""
    assert Fleet().lose("A") == []


def test_a_lost_engine_comes_back_without_residents() -> None:
    """All its KV is gone, also that of trajectories that had already lost their claims. A next process knows, too."""
    fleet = Fleet(limits=Limits(in_tool_lease_s=1))
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("gave-way", prompt=80)
    fleet.finish("gave-way", prompt=80)
    fleet.at = 1.0
    fleet.arrive("in-tool", prompt=80)
    fleet.finish("in-tool", prompt=80)
    fleet.lose("A")
    assert {one.record.trajectory_id: one.record.home for one in fleet.actions if isinstance(one, Save)} == {
        "gave-way": None,
        "in-tool": None,
    }
    fleet.engine("A", slots=2, kv=100)
    assert fleet.claims("A") == {}


def test_a_trajectory_keeps_its_home_when_another_engine_is_lost() -> None:
    """One of its turns ran on the lost engine, but its home is another one."""
    fleet = Fleet()
    fleet.engine("A", slots=2)
    fleet.arrive("m1", "m")
    fleet.arrive("m2", "m")
    fleet.engine("B", slots=2)
    fleet.fail("m2")
    assert fleet.lose("A") == [Abort("m1", 1, Fault.ENGINE)]
    assert fleet.home("m") == "B" and set(fleet.claims("B")) == {"m"}


def test_homes_of_an_earlier_process_hold_when_their_engines_report() -> None:
    """A restart loses no KV: claims are restored, and turns go home."""
    records = [
        record("a", "A", context_tokens=70),
        record("b", "B"),
        record("done", "A", state=TrajectoryState.FINISHED),
    ]
    fleet = Fleet(records=records)
    fleet.engine("B", slots=2)
    fleet.engine("A", slots=2)
    assert fleet.claims("A") == {"a": 70} and fleet.claims("B") == {"b": 100}
    assert fleet.sent(fleet.arrive("a2", "a")) == [("a2", "A")]
    assert fleet.sent(fleet.arrive("b2", "b")) == [("b2", "B")]


def test_contexts_of_an_earlier_process_are_not_prefilled_again() -> None:
    """They are where they were, so they do not delay a new trajectory on the engine that ends sooner."""
    fleet = Fleet(records=[record("a", "A", context_tokens=200_000, predicted_tokens=60.0)])
    fleet.engine("B", slots=4)
    fleet.arrive("long", predicted=500)
    fleet.engine("A", slots=4)
    assert fleet.sent(fleet.arrive("new", predicted=100)) == [("new", "A")]


def test_a_trajectory_whose_first_turn_a_restart_ended_enters_again() -> None:
    """Its record names a home, but it has no context there. Its prompt counts once for it and its siblings."""
    fleet = Fleet(records=[record("a", "A", context_tokens=0, output_tokens=0, num_turns=0)])
    fleet.arrive("a1", "a", prompt=60, group="g")
    assert fleet.sent(fleet.engine("A", slots=2, kv=100)) == [("a1", "A")]
    assert fleet.sent(fleet.arrive("sibling", prompt=60, group="g")) == [("sibling", "A")]
    assert fleet.scheduler.engines["A"].kv_held == 60


def test_a_turn_that_arrived_before_its_home_goes_there() -> None:
    """It waited because there was no engine. When its home reports, it goes before entrants with later keys."""
    fleet = Fleet(records=[record("a", "A")])
    fleet.arrive("a2", "a")
    fleet.arrive("b", predicted=10)
    (dispatch,) = fleet.engine("A")
    assert dispatch == Dispatch("a2", 1, "A", -1000, "home")


def test_the_most_urgent_returning_turn_goes_first() -> None:
    """Whatever its model."""
    fleet = Fleet(records=[record("t", "A"), record("u", "A")])
    fleet.arrive("t1", "t", model="x", predicted=10)
    fleet.arrive("u1", "u", model="y", predicted=5_000)
    assert fleet.sent(fleet.engine("A", models=("x", "y"))) == [("u1", "A")]


def test_an_engine_that_reports_as_cordoned_gets_no_turn() -> None:
    """Not even a turn of a resident that an earlier process left there."""
    fleet = Fleet(records=[record("a", "A")])
    fleet.arrive("a2", "a")
    assert fleet.engine("A", accepting=False) == []


def test_a_sticky_policy_without_slots_sends_every_turn_home() -> None:
    """Under the baselines, engines queue by themselves, so slots do not count."""
    fleet = Fleet(VERL, None, [record("a", "A")])
    fleet.arrive("a2", "a")
    fleet.arrive("a3", "a")
    assert fleet.sent(fleet.engine("A", slots=1)) == [("a2", "A"), ("a3", "A")]
