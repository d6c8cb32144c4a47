"""Evidence from siblings, against Bayes' rule summed over every level that a group can have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.groups import Groups
from predictor.lengths import Lengths

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
    lengths = Lengths(2_000.0, 1.2, 2.0, 4_000.0)
    groups = Groups(lengths, 4_000.0, 10)
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
    logs = -((LEVELS - lengths.mean) ** 2) / (lengths.variance - own)
    for in_bin in finished:
        logs -= (LEVELS - in_bin) ** 2 / own
    for precision, position in running[1:]:
        logs -= (LEVELS - position) ** 2 / (own + 1 / precision)
    weights = np.exp(logs / 2 - logs.max() / 2)
    weights /= weights.sum()
    level = float(weights @ LEVELS)
    variance = float(weights @ (LEVELS - level) ** 2) + own
    assert groups.expectation(group, messages[0]) == pytest.approx((level, variance), rel=1e-6, abs=1e-6)
