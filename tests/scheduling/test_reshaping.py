"""When a fleet is reshaped."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.estimate import Remaining
from scheduling.fleets import largest_first, on_nodes
from scheduling.reshaping import (
    BETWEEN_ROLLOUTS,
    COLD_RELAUNCH_S,
    ReshapeRule,
    has_drifted,
    nodes_to_relaunch,
    renumbered,
    still_needed,
    worth_reshaping,
)
from scheduling.scaling import FleetPlan, PlannedEngine, Role
from scheduling.types import TrajectoryRecord, TrajectoryState

seconds = st.floats(1, 10_000)
relaunches = st.sampled_from([0.0, 3.0, COLD_RELAUNCH_S])
rules = st.builds(ReshapeRule, st.floats(0, 0.3), st.integers(1, 10))


@pytest.mark.parametrize(
    ("num_turns", "context_tokens", "output_tokens", "needed"),
    [
        (3, 4_000, 1_000, Remaining(2_000.0, 4_000, 6_000.0)),  # three from tools for each of its own
        (3, 90_000, 1_000, Remaining(2_000.0, 90_000, 20_000.0)),  # ten at most
        (1, 4_000, 1_000, Remaining(2_000.0, 4_000, 0.0)),  # all of the context but the output is the prompt
        (0, 0, 0, Remaining(3_000.0, 0, 0.0)),
        (5, 9_000, 4_500, Remaining(1.0, 9_000, 1.0)),  # it exceeded its prediction
    ],
)
def test_tools_are_expected_to_add_tokens_as_before(
    num_turns: int, context_tokens: int, output_tokens: int, needed: Remaining
) -> None:
    """What is left of a predicted total of 3,000 tokens, and the tokens that tools will add to it."""
    state = TrajectoryState.ACTIVE
    record = TrajectoryRecord(
        "t",
        "g",
        None,
        state,
        "e",
        context_tokens,
        output_tokens,
        num_turns,
        predicted_tokens=3_000.0,
        created_at=0.0,
        last_at=0.0,
    )
    assert still_needed(record) == needed


@given(seconds, seconds, relaunches, rules)
def test_a_change_is_never_worth_undoing(here_s: float, there_s: float, relaunch_s: float, rule: ReshapeRule) -> None:
    """Hysteresis: of two fleets at most one is worth changing to, so nearly equal estimates change nothing."""
    there = worth_reshaping(here_s, there_s, relaunch_s, rule)
    back = worth_reshaping(there_s, here_s, relaunch_s, rule)
    assert not (there and back)


@given(seconds, seconds, relaunches, rules)
def test_a_worthwhile_change_pays_for_its_relaunch(
    here_s: float, there_s: float, relaunch_s: float, rule: ReshapeRule
) -> None:
    """Over the rollouts that count, relaunch included, it saves time. If it is not worth its relaunch, it is not worth
    a dearer one."""
    worth = worth_reshaping(here_s, there_s, relaunch_s, rule)
    if worth:
        assert relaunch_s + rule.num_rollouts * there_s < rule.num_rollouts * here_s
    assert worth or not worth_reshaping(here_s, there_s, relaunch_s + 1, rule)


def test_a_gain_may_be_worth_a_warm_relaunch_but_not_a_cold_one() -> None:
    """Saving 60 s of 300 is worth 3 s within a rollout, not 45 s. Between rollouts the cost is spread."""
    within = [worth_reshaping(300.0, 240.0, cost_s, ReshapeRule(0.15)) for cost_s in (3.0, COLD_RELAUNCH_S)]
    assert within == [True, False]
    assert worth_reshaping(300.0, 240.0, COLD_RELAUNCH_S, BETWEEN_ROLLOUTS)


def lengths(seed: int, scale: float = 1.0, num_groups: int = 100) -> list[float]:
    """Log-normal, with 16 siblings to a group and correlation 0.65."""
    dice = random.Random(seed)
    groups = [dice.gauss(8.0, 0.65**0.5) for _ in range(num_groups)]
    return [scale * math.exp(dice.gauss(group, 0.35**0.5)) for group in groups for _ in range(16)]


def test_drift_is_more_than_chance() -> None:
    """Rollouts of one law differ by chance, which counts as drift once in twenty times. Doubled lengths are drift."""
    false_alarms = sum(has_drifted(lengths(seed), lengths(seed + 1)) for seed in range(0, 80, 2))
    assert false_alarms <= 4
    assert all(has_drifted(lengths(seed), lengths(seed + 1, scale=2.0)) for seed in range(0, 20, 2))


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=200))
def test_a_rollout_has_not_drifted_from_itself(sample: list[float]) -> None:
    """The order of lengths does not matter."""
    assert not has_drifted(sample, random.Random(1).sample(sample, len(sample)))


def test_correlated_siblings_are_weaker_evidence_of_drift() -> None:
    """A difference that is drift among independent lengths may be one group's chance."""
    before, now = lengths(1, num_groups=20), lengths(1, scale=1.3, num_groups=20)
    assert has_drifted(before, now, sibling_correlation=0.0)
    assert not has_drifted(before, now, sibling_correlation=1.0)


def fleet_plan(nodes: list[list[int]], role: Role = Role.BULK) -> FleetPlan:
    fleet = largest_first(chain.from_iterable(nodes))
    engines = tuple(PlannedEngine(tp, node, role) for tp, node in on_nodes(fleet, 8))
    return FleetPlan(engines, 100.0, "enumerated", "")


def on_other_nodes(found: FleetPlan, places: list[int]) -> FleetPlan:
    return replace(found, engines=tuple(replace(one, node=places[one.node]) for one in found.engines))


nodes = st.lists(st.sampled_from([[8], [4] * 2, [2] * 4, [1] * 8]), min_size=4, max_size=4)


@given(nodes, nodes, st.permutations(range(4)))
def test_nodes_that_have_a_planned_shape_are_not_relaunched(
    planned: list[list[int]], present: list[list[int]], places: list[int]
) -> None:
    """Only as many nodes are relaunched as shapes differ, wherever they stand. The engines are those of the plan."""
    wanted, current = fleet_plan(planned), on_other_nodes(fleet_plan(present), places)
    found = renumbered(wanted, current)
    assert found.tps == wanted.tps
    assert {one.node for one in found.engines} == {0, 1, 2, 3}
    staying = (Counter(map(tuple, planned)) & Counter(map(tuple, present))).total()
    assert len(nodes_to_relaunch(found, current)) == 4 - staying


def test_a_changed_role_or_an_added_or_removed_node_is_a_relaunch() -> None:
    """Speculative decoding is set when an engine starts."""
    two, three = fleet_plan([[8], [8]]), fleet_plan([[8], [8], [8]])
    assert nodes_to_relaunch(fleet_plan([[8], [8]], Role.TAIL), two) == [0, 1]
    assert nodes_to_relaunch(three, two) == nodes_to_relaunch(two, three) == [2]
    assert renumbered(two, three) == two
