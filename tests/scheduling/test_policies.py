"""Each policy by its name, on one fleet of two engines with one slot each."""

from dataclasses import replace

import pytest

from scheduling.limits import Limits
from scheduling.order import TurnFacts
from scheduling.policy import HEDDLE, POLICIES, ROUND_ROBIN, SLIME, VERL, Policy
from scheduling.types import Prediction
from tests.scheduling.fleet import Fleet


def two_engines(policy: Policy) -> Fleet:
    fleet = Fleet(policy)
    fleet.engine("A")
    fleet.engine("B")
    return fleet


def test_policies_are_found_by_their_name() -> None:
    """Settings and results refer to policies by name."""
    assert {name: policy.name for name, policy in POLICIES.items()} == {name: name for name in POLICIES}
    assert " ".join(sorted(POLICIES)) == (
        "attained-service cache-aware cmlfq fcfs heddle heddle-buckets heddle-paper load-stealing longest-first "
        "oldest-first power-of-two rank-following remaining-first round-robin shortest-first slime thunderagent verl "
        "verl-hybrid vllm-router"
    )


def test_a_policy_sees_the_facts_of_a_turn() -> None:
    """Including its trajectory's output, last context and home. A group that was named once stays known."""
    seen: list[TurnFacts] = []

    def note(turn: TurnFacts, limits: Limits) -> float:
        seen.append(turn)
        return 0.0

    fleet = Fleet(replace(HEDDLE, order=note))
    fleet.engine("A")
    fleet.arrive("other")
    fleet.finish("other")
    fleet.arrive("t1", "t", prompt=30, predicted=500, group="g")
    fleet.finish("t1", prompt=31, output=12)
    fleet.at = 5.0
    fleet.arrive("t2", "t", prompt=50, predicted=600)
    assert seen[1:] == [
        TurnFacts(1, 1, 0.0, 30, 0, Prediction(500, 500), "g", 0, 0, None),
        TurnFacts(2, 1, 5.0, 50, 12, Prediction(600, 600), "g", 1, 43, "A"),
    ]


def test_round_robin_sends_each_turn_to_the_next_engine() -> None:
    """Wherever its KV is, and however many turns run there."""
    fleet = two_engines(ROUND_ROBIN)
    sent = [fleet.sent(fleet.arrive(f"t{turn}", "t"))[0][1] for turn in range(4)]
    assert sent == ["A", "B", "A", "B"]
    assert fleet.home("t") == "B"


def test_verl_keeps_each_trajectory_on_its_first_engine() -> None:
    """New trajectories go round robin."""
    fleet = two_engines(VERL)
    order = [("a1", "a"), ("b1", "b"), ("a2", "a"), ("c1", "c"), ("b2", "b")]
    sent = [fleet.sent(fleet.arrive(*names))[0][1] for names in order]
    assert sent == ["A", "B", "A", "A", "B"]


def test_slime_sends_each_turn_to_the_engine_with_the_fewest_turns() -> None:
    """Turns in flight count, not trajectories."""
    fleet = two_engines(SLIME)
    assert fleet.sent(fleet.arrive("a")) == [("a", "A")]
    assert fleet.sent(fleet.arrive("b")) == [("b", "B")]
    fleet.finish("b")
    assert fleet.sent(fleet.arrive("a2", "a")) == [("a2", "B")]


def test_heddle_sends_a_new_trajectory_where_it_ends_soonest() -> None:
    """Work counts, not turns: two short trajectories weigh less than a long one."""
    fleet = Fleet(HEDDLE)
    fleet.engine("A", slots=3)
    fleet.engine("B", slots=3)
    assert fleet.sent(fleet.arrive("long", predicted=50_000)) == [("long", "A")]
    assert fleet.sent(fleet.arrive("short", predicted=500)) == [("short", "B")]
    assert fleet.sent(fleet.arrive("shorter", predicted=400)) == [("shorter", "B")]


@pytest.mark.parametrize("policy", [ROUND_ROBIN, VERL, SLIME], ids=lambda policy: policy.name)
def test_baselines_let_engines_queue(policy: Policy) -> None:
    """Slots and KV hold back no turn; turns wait only while there is no engine at all."""
    fleet = Fleet(policy)
    fleet.arrive("early")
    assert fleet.sent(fleet.engine("A", kv=100)) == [("early", "A")]
    for turn in range(5):
        assert fleet.sent(fleet.arrive(f"t{turn}", prompt=90)) == [(f"t{turn}", "A")]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_no_policy_uses_an_engine_that_may_not_serve_the_turn(policy: Policy) -> None:
    """Cordoned engines, engines with other models and engines that just failed the turn are excluded."""
    fleet = two_engines(policy)
    fleet.engine("C", models=("other",))
    fleet.engine("A", accepting=False)
    assert fleet.sent(fleet.arrive("t1", "t")) == [("t1", "B")]
    assert fleet.fail("t1") == []
    assert fleet.sent(fleet.engine("A")) == [("t1", "A")]
