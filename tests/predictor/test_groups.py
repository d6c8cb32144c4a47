"""Evidence from siblings, against Bayes' rule summed over every level that a group can have."""

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.groups import Groups
from predictor.lengths import Lengths

LENGTHS = Lengths(2_000.0, 1.2, 2.0, 4_000.0)
LEVELS = np.linspace(-150.0, 250.0, 40_001)
MESSAGES = st.tuples(st.floats(0.05, 5.0), st.floats(0.0, 71.0))


@given(
    finished=st.lists(st.integers(0, 71), max_size=6),
    first=st.lists(MESSAGES, min_size=1, max_size=6),
    second=st.lists(MESSAGES, min_size=6, max_size=6),
    gone=st.integers(0, 6),
)
def test_siblings_are_weighed_by_bayes_rule(
    finished: list[int], first: list[tuple[float, float]], second: list[tuple[float, float]], gone: int
) -> None:
    """Ended members count, and the last message of each running member except the one that asks. Members that left do
    not."""
    groups = Groups(LENGTHS, 4_000.0, 10)
    group = groups.get("g", "")
    group.num_running = len(first)
    for in_bin in finished:
        groups.ended(group, in_bin)
    messages = [groups.message(group, (0.0, 0.0), precision, precision * position) for precision, position in first]
    running = second[: len(first)]
    messages = [
        groups.message(group, old, precision, precision * position)
        for old, (precision, position) in zip(messages, running, strict=True)
    ]
    if gone + 1 < len(running):
        groups.message(group, messages[-1], 0.0, 0.0)
        groups.left(group, "")
        running, messages = running[:-1], messages[:-1]

    own = groups.own_variance
    logs = -((LEVELS - LENGTHS.mean) ** 2) / (LENGTHS.variance - own)
    for in_bin in finished:
        logs -= (LEVELS - in_bin) ** 2 / own
    for precision, position in running[1:]:
        logs -= (LEVELS - position) ** 2 / (own + 1 / precision)
    weights = np.exp(logs / 2 - logs.max() / 2)
    weights /= weights.sum()
    level = float(weights @ LEVELS)
    variance = float(weights @ (LEVELS - level) ** 2) + own
    assert groups.expectation(group, messages[0]) == pytest.approx((level, variance), rel=1e-6, abs=1e-6)


def play(groups: Groups, group_id: str, prompt_id: str, *bins: int) -> None:
    """A group whose members end in these bins."""
    group = groups.get(group_id, prompt_id)
    group.num_running = len(bins)
    for in_bin in bins:
        groups.ended(group, in_bin)
        groups.left(group, prompt_id)


def rollouts(moved_by: int) -> Groups:
    """Eight rollouts of twenty prompts, long ones and short ones, whose levels move by so many bins each time."""
    groups = Groups(LENGTHS, 4_000.0, 1_000)
    for rollout in range(8):
        for prompt in range(20):
            level = 30 + (8 if prompt % 2 else -8) + (moved_by if (rollout + prompt) % 4 < 2 else -moved_by) // 2
            play(groups, f"{rollout}-{prompt}", f"p{prompt}", *range(level - 3, level + 4))
    return groups


def expected_bin(groups: Groups, group_id: str, prompt_id: str = "") -> tuple[float, float]:
    return groups.expectation(groups.get(group_id, prompt_id), (0.0, 0.0))


def test_a_prompts_past_tells_less_where_levels_move_from_rollout_to_rollout() -> None:
    """How far they move is learned, and then believed of a prompt that was seen only once."""
    means = []
    for moved_by in (0, 12):
        groups = rollouts(moved_by)
        play(groups, "first", "once", *[50] * 7)
        means.append(expected_bin(groups, "second", "once")[0])
    assert LENGTHS.mean < means[1] < means[0] - 1 < 50


def test_what_groups_have_in_common_is_restored() -> None:
    """So a new process expects of every group, old or new, what the one before did."""
    groups, restored = rollouts(moved_by=6), Groups(LENGTHS, 4_000.0, 1_000)
    assert groups.own_variance < restored.own_variance / 2, "siblings were found to be alike"
    restored.restore(orjson.loads(orjson.dumps(groups.dump())))
    for group_id, prompt_id in (("7-3", "p3"), ("new", "p3"), ("strange", "")):
        assert expected_bin(restored, group_id, prompt_id) == expected_bin(groups, group_id, prompt_id)
