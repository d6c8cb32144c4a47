"""Placement as in the Heddle paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining
from scheduling.heddle_groups import heddle_groups
from scheduling.partition import Presorted
from tests.scheduling.plans import PROFILES, all_cuts, coding_rollout, remainings

fleets = st.lists(st.sampled_from(list(PROFILES.values())), min_size=1, max_size=3)


def heddle_cost_s(left: list[Remaining], group: list[int], profile: EngineProfile) -> float:
    mean_context = sum(one.mean_context_tokens for one in left) / len(left)
    longest = max((left[index].output_tokens for index in group), default=0.0)
    return profile.decode_step_s(len(group), len(group) * mean_context) * longest


@given(st.lists(remainings, min_size=1, max_size=8), fleets)
def test_the_dynamic_program_finds_the_best_cut(left: list[Remaining], fleet: list[EngineProfile]) -> None:
    """Brute force over all contiguous groups, under the paper's cost."""
    groups = heddle_groups(left, fleet)
    assert sorted(index for group in groups for index in group) == list(range(len(left)))

    def makespan_s(found: list[list[int]]) -> float:
        return max(heddle_cost_s(left, group, profile) for group, profile in zip(found, fleet, strict=True))

    order = Presorted(left).order
    best_s = min(makespan_s([order[start:end] for start, end in cut]) for cut in all_cuts(len(left), len(fleet)))
    assert makespan_s(groups) == pytest.approx(best_s)


def test_no_trajectories_make_empty_groups() -> None:
    """A rollout that has ended needs no engine."""
    assert heddle_groups([], [PROFILES[1]] * 2) == [[], []]


def test_groups_grow_as_trajectories_get_shorter() -> None:
    """Under the paper's cost, the longest trajectories share an engine with the fewest others."""
    sizes = [len(group) for group in heddle_groups(coding_rollout(640, seed=1), [PROFILES[4]] * 4)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] / 4
