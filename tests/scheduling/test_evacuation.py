"""An engine that will be gone: trajectories leave it during a tool call, while their KV can still be moved."""

from dataclasses import replace

import pytest

from scheduling.limits import Limits
from scheduling.policy import HEDDLE, HEDDLE_PAPER, POLICIES, Policy
from scheduling.types import EngineLeaving, Fault, Move, Save
from tests.scheduling.fleet import Fleet


def fleet_of(*in_tool: tuple[str, int, float], policy: Policy = HEDDLE, limits: Limits | None = None) -> Fleet:
    """Engine A with trajectories in a tool call, each with its context and predicted total; other engines come
    later."""
    fleet = Fleet(policy, limits)
    fleet.engine("A", slots=8, kv=1000)
    for name, context, predicted in in_tool:
        fleet.arrive(name, prompt=context - 10, predicted=predicted)
        fleet.finish(name, prompt=context - 10, output=10)
    return fleet


def evacuate(fleet: Fleet) -> list[object]:
    fleet.engine("A", slots=8, kv=1000, accepting=False)
    return [action for action in fleet.handle(EngineLeaving(fleet.at, "A")) if isinstance(action, Move)]


@pytest.mark.parametrize(
    "policy", [policy for policy in POLICIES.values() if policy.is_sticky], ids=lambda one: one.name
)
def test_a_trajectory_in_a_tool_call_gets_a_new_home(policy: Policy) -> None:
    """The new home is claimed and saved, and the next turn goes there."""
    fleet = fleet_of(("t", 100, 1000.0), policy=replace(policy, move=None))
    fleet.engine("B", slots=8, kv=1000)
    assert evacuate(fleet) == [Move("t", "A", "B")]
    assert fleet.claims("A") == {} and fleet.claims("B") == {"t": 100}
    assert [action.record.home for action in fleet.actions if isinstance(action, Save)] == ["B"]
    assert fleet.sent(fleet.arrive("t2", "t", prompt=120)) == [("t2", "B")]


def test_most_remaining_work_moves_first_until_the_new_home_is_full() -> None:
    """An engine with 667 tokens of KV takes 600, up to the watermark of 0.9. The rest stays."""
    fleet = fleet_of(("long", 300, 9000.0), ("middle", 300, 200.0))
    fleet.arrive("nearly done", prompt=10, predicted=400.0)
    fleet.finish("nearly done", prompt=10, output=290)
    fleet.engine("B", slots=8, kv=667)
    assert evacuate(fleet) == [Move("long", "A", "B"), Move("middle", "A", "B")]
    assert fleet.home("nearly done") == "A" and fleet.claims("A") == {"nearly done": 300}


def test_a_shared_prompt_counts_once_at_the_new_home() -> None:
    """Four siblings with contexts of 300 tokens, 250 of them shared, fit into the 450 tokens under the watermark."""
    fleet = Fleet(HEDDLE)
    for name in ("A", "B"):
        fleet.engine(name, slots=8, kv=1000, accepting=name == "A")
    for number in range(4):
        fleet.arrive(f"s{number}", prompt=250, group="g")
        fleet.finish(f"s{number}", prompt=250, output=50)
    fleet.engine("B", slots=8, kv=500)
    assert [move.target for move in evacuate(fleet) if isinstance(move, Move)] == ["B"] * 4
    assert fleet.scheduler.engines["B"].kv_held == 450


def test_a_context_above_the_watermark_moves_to_an_engine_it_may_enter() -> None:
    """To an empty engine or one of unknown KV capacity: waiting for room would gain nothing."""
    fleet = fleet_of(("large", 950, 1000.0))
    fleet.engine("B", slots=8, kv=1000)
    fleet.arrive("b", prompt=10)
    assert fleet.home("b") == "B" and evacuate(fleet) == []
    fleet.close("b", abort=True)
    fleet.fail("b", fault=Fault.CLOSED)
    assert fleet.handle(EngineLeaving(fleet.at, "A")) == [Move("large", "A", "B")]
    fleet = fleet_of(("large", 950, 1000.0))
    fleet.engine("C", slots=8, kv=0)
    fleet.arrive("c", prompt=10)
    assert fleet.home("c") == "C" and evacuate(fleet) == [Move("large", "A", "C")]


def test_no_trajectory_moves_to_an_engine_that_does_not_accept() -> None:
    """Because that engine will be gone, too, or for another reason."""
    fleet = fleet_of(("t", 100, 1000.0))
    fleet.engine("B", slots=8, kv=1000, accepting=False)
    assert evacuate(fleet) == []


def test_the_policy_spreads_evacuated_trajectories() -> None:
    """Each move counts before the next one is decided."""
    fleet = fleet_of(*((f"t{number}", 100, 5000.0) for number in range(4)))
    fleet.engine("B", slots=8, kv=1000)
    fleet.engine("C", slots=8, kv=1000)
    targets = [move.target for move in evacuate(fleet) if isinstance(move, Move)]
    assert sorted(targets) == ["B", "B", "C", "C"]


def test_a_running_trajectory_moves_only_at_its_tool_call() -> None:
    """Its turn finishes where it is; then the trajectory moves like the others."""
    fleet = fleet_of(("t", 100, 1000.0))
    fleet.arrive("t2", "t", prompt=120)
    fleet.engine("B", slots=8, kv=1000)
    assert evacuate(fleet) == []
    fleet.finish("t2", prompt=120, output=10)
    assert fleet.handle(EngineLeaving(fleet.at, "A")) == [Move("t", "A", "B")]


def test_an_engine_that_accepts_turns_is_not_evacuated() -> None:
    """It was uncordoned before the event came. An unknown engine is ignored."""
    fleet = fleet_of(("t", 100, 1000.0))
    fleet.engine("B", slots=8, kv=1000)
    assert fleet.handle(EngineLeaving(fleet.at, "A")) == []
    assert fleet.handle(EngineLeaving(fleet.at, "Z")) == []


def test_no_trajectory_moves_to_another_model_or_a_reserved_engine() -> None:
    """Another model cannot continue it, and the room on a reserved engine belongs to the waiting turn."""
    fleet = fleet_of(("t", 100, 1000.0), policy=HEDDLE)
    fleet.engine("B", slots=8, kv=1000, models=("other",))
    assert evacuate(fleet) == []
    fleet.engine("C", slots=8, kv=300)
    fleet.arrive("runs", prompt=150)
    assert fleet.home("runs") == "C"
    fleet.arrive("large", prompt=160)
    assert fleet.scheduler.engines["C"].reserved_for is not None
    assert fleet.handle(EngineLeaving(fleet.at, "A")) == []
    fleet.fail("large", leg=0, fault=Fault.CLIENT_LEFT)
    assert fleet.handle(EngineLeaving(fleet.at, "A")) == [Move("t", "A", "C")]


def test_a_policy_by_rank_without_residency_evacuates_too() -> None:
    """It has no KV limits, but the trajectory still comes with the facts that placement by rank needs."""
    fleet = fleet_of(("t", 100, 1000.0), policy=HEDDLE_PAPER)
    fleet.engine("B", slots=8, kv=1000)
    assert evacuate(fleet) == [Move("t", "A", "B")]


def test_a_turn_of_a_moved_trajectory_waits_at_its_new_home() -> None:
    """It does not wait among the homeless turns, because its claim is at the new home."""
    fleet = fleet_of(("t", 100, 1000.0), policy=replace(HEDDLE, move=None))
    fleet.engine("B", slots=1, kv=1000)
    fleet.arrive("b", prompt=50)
    evacuate(fleet)
    assert fleet.sent(fleet.arrive("t2", "t", prompt=120)) == []
    assert fleet.sent(fleet.finish("b", prompt=50)) == [("t2", "B")]
