"""An engine that will be gone: who lives there moves in its tool call, while its KV can be brought along."""

from dataclasses import replace

import pytest

from scheduling.limits import Limits
from scheduling.policy import HEDDLE, HEDDLE_PAPER, POLICIES, Policy
from scheduling.types import EngineLeaving, Fault, Move, Save
from tests.scheduling.fleet import Fleet


def fleet_of(*in_tool: tuple[str, int, float], policy: Policy = HEDDLE, limits: Limits | None = None) -> Fleet:
    """Trajectories in a tool call on A, each with its context and predicted work; nothing else is there yet."""
    fleet = Fleet(policy, limits)
    fleet.engine("A", slots=8, kv=1000)
    for name, context, predicted in in_tool:
        fleet.arrive(name, prompt=context - 10, predicted=predicted)
        fleet.finish(name, prompt=context - 10, output=10)
    return fleet


def leave(fleet: Fleet) -> list[object]:
    fleet.engine("A", slots=8, kv=1000, accepting=False)
    return [action for action in fleet.handle(EngineLeaving(fleet.at, "A")) if isinstance(action, Move)]


@pytest.mark.parametrize(
    "policy", [policy for policy in POLICIES.values() if policy.is_sticky], ids=lambda one: one.name
)
def test_who_is_in_a_tool_call_gets_a_home_that_stays(policy: Policy) -> None:
    """It is claimed and written down there, and the next turn goes there."""
    fleet = fleet_of(("t", 100, 1000.0), policy=replace(policy, move=None))
    fleet.engine("B", slots=8, kv=1000)
    assert leave(fleet) == [Move("t", "A", "B")]
    assert fleet.claims("A") == {} and fleet.claims("B") == {"t": 100}
    assert [action.record.home for action in fleet.actions if isinstance(action, Save)] == ["B"]
    assert fleet.sent(fleet.arrive("t2", "t", prompt=120)) == [("t2", "B")]


def test_those_with_most_work_left_go_first_and_the_others_stay_when_it_is_full() -> None:
    """Up to the watermark of 0.9: 900 tokens of KV."""
    fleet = fleet_of(("long", 300, 9000.0), ("middle", 300, 200.0))
    fleet.arrive("nearly done", prompt=10, predicted=400.0)
    fleet.finish("nearly done", prompt=10, output=290)
    fleet.engine("B", slots=8, kv=667)
    assert leave(fleet) == [Move("long", "A", "B"), Move("middle", "A", "B")]
    assert fleet.home("nearly done") == "A" and fleet.claims("A") == {"nearly done": 300}


def test_a_prompt_that_siblings_share_moves_once() -> None:
    """Four siblings with contexts of 300, of which 250 are the same, fit where 450 tokens are free under the watermark;
    and where one of them lives already, a fifth of 300 needs but 50."""
    fleet = Fleet(HEDDLE)
    for name in ("A", "B"):
        fleet.engine(name, slots=8, kv=1000, accepting=name == "A")
    for number in range(4):
        fleet.arrive(f"s{number}", prompt=250, group="g")
        fleet.finish(f"s{number}", prompt=250, output=50)
    fleet.engine("B", slots=8, kv=500)
    assert [move.target for move in leave(fleet) if isinstance(move, Move)] == ["B"] * 4
    assert fleet.scheduler.engines["B"].kv_held == 450


def test_a_context_above_the_watermark_moves_to_an_empty_engine_or_one_that_does_not_say_its_kv() -> None:
    """As it may enter there: nothing is gained by waiting for room that cannot be."""
    fleet = fleet_of(("large", 950, 1000.0))
    fleet.engine("B", slots=8, kv=1000)
    fleet.arrive("b", prompt=10)
    assert fleet.home("b") == "B" and leave(fleet) == []
    fleet.close("b", abort=True)
    fleet.fail("b", fault=Fault.CLOSED)
    assert fleet.handle(EngineLeaving(fleet.at, "A")) == [Move("large", "A", "B")]
    fleet = fleet_of(("large", 950, 1000.0))
    fleet.engine("C", slots=8, kv=0)
    fleet.arrive("c", prompt=10)
    assert fleet.home("c") == "C" and leave(fleet) == [Move("large", "A", "C")]


def test_nobody_moves_to_an_engine_that_will_be_gone_too() -> None:
    """Or that takes no turns for another reason."""
    fleet = fleet_of(("t", 100, 1000.0))
    fleet.engine("B", slots=8, kv=1000, accepting=False)
    assert leave(fleet) == []


def test_they_are_spread_by_the_policy() -> None:
    """Each move counts before the next is decided."""
    fleet = fleet_of(*((f"t{number}", 100, 5000.0) for number in range(4)))
    fleet.engine("B", slots=8, kv=1000)
    fleet.engine("C", slots=8, kv=1000)
    targets = [move.target for move in leave(fleet) if isinstance(move, Move)]
    assert sorted(targets) == ["B", "B", "C", "C"]


def test_who_runs_stays_until_it_is_in_a_tool_call() -> None:
    """A turn that runs ends where it is; then its trajectory moves like the others."""
    fleet = fleet_of(("t", 100, 1000.0))
    fleet.arrive("t2", "t", prompt=120)
    fleet.engine("B", slots=8, kv=1000)
    assert leave(fleet) == []
    fleet.finish("t2", prompt=120, output=10)
    assert fleet.handle(EngineLeaving(fleet.at, "A")) == [Move("t", "A", "B")]


def test_an_engine_that_takes_turns_keeps_its_trajectories() -> None:
    """It was opened again before the word came; and of an unknown engine nothing is to be done."""
    fleet = fleet_of(("t", 100, 1000.0))
    fleet.engine("B", slots=8, kv=1000)
    assert fleet.handle(EngineLeaving(fleet.at, "A")) == []
    assert fleet.handle(EngineLeaving(fleet.at, "Z")) == []


def test_nobody_moves_to_an_engine_of_another_model_or_one_that_gathers_room() -> None:
    """Another model cannot go on; and room that is gathered for a waiting turn is that turn's."""
    fleet = fleet_of(("t", 100, 1000.0), policy=HEDDLE)
    fleet.engine("B", slots=8, kv=1000, models=("other",))
    assert leave(fleet) == []
    fleet.engine("C", slots=8, kv=300)
    fleet.arrive("runs", prompt=150)
    assert fleet.home("runs") == "C"
    fleet.arrive("large", prompt=160)
    assert fleet.scheduler.engines["C"].reserved_for is not None
    assert fleet.handle(EngineLeaving(fleet.at, "A")) == []
    fleet.fail("large", leg=0, fault=Fault.CLIENT_LEFT)
    assert fleet.handle(EngineLeaving(fleet.at, "A")) == [Move("t", "A", "C")]


def test_ranks_choose_for_policies_that_go_by_rank() -> None:
    """A policy without residency has no KV limits either; it still gets a trajectory with facts to place by."""
    fleet = fleet_of(("t", 100, 1000.0), policy=HEDDLE_PAPER)
    fleet.engine("B", slots=8, kv=1000)
    assert leave(fleet) == [Move("t", "A", "B")]


def test_a_turn_of_a_moved_trajectory_waits_at_its_new_home() -> None:
    """Not among the homeless: its claim is there."""
    fleet = fleet_of(("t", 100, 1000.0), policy=replace(HEDDLE, move=None))
    fleet.engine("B", slots=1, kv=1000)
    fleet.arrive("b", prompt=50)
    leave(fleet)
    assert fleet.sent(fleet.arrive("t2", "t", prompt=120)) == []
    assert fleet.sent(fleet.finish("b", prompt=50)) == [("t2", "B")]
