"""The presorted partition against brute force."""

import random
from dataclasses import replace
from itertools import pairwise, product
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining, estimate_finish_s
from scheduling.partition import Presorted, least_bound_s, partition
from scheduling.running_sums import LoadedEngine, Speculation
from tests.scheduling.plans import (
    PROFILES,
    all_cuts,
    coding_rollout,
    engines,
    engines_of,
    finish_of,
    profiles,
    remainings,
    work_of,
)

trajectories = st.lists(remainings, max_size=7)
fleets = st.lists(engines, min_size=1, max_size=3)


@given(trajectories, fleets)
def test_every_trajectory_is_in_exactly_one_contiguous_group(left: list[Remaining], fleet: list[LoadedEngine]) -> None:
    """None is lost. Of any two engines, one has nothing longer than the other's shortest trajectory."""
    found = partition(left, fleet)
    assert len(found.groups) == len(found.finish_s) == len(fleet)
    assert sorted(index for group in found.groups for index in group) == list(range(len(left)))
    lengths = [[left[index].output_tokens for index in group] for group in found.groups if group]
    for group in lengths:
        assert group == sorted(group, reverse=True)
    by_head = sorted(lengths, key=lambda group: (group[0], group[-1]), reverse=True)
    for longer, shorter in pairwise(by_head):
        assert longer[-1] >= shorter[0]


@given(trajectories, fleets)
def test_the_finish_of_each_group_is_the_shared_estimate(left: list[Remaining], fleet: list[LoadedEngine]) -> None:
    """The bisected running sums agree with the shared cost, fed one trajectory at a time."""
    found = partition(left, fleet)
    for engine, group, finish_s in zip(fleet, found.groups, found.finish_s, strict=True):
        assert finish_s == pytest.approx(finish_of(engine, [left[index] for index in group]), rel=1e-9, abs=1e-9)


@settings(max_examples=200)
@given(trajectories, fleets)
def test_no_cut_of_the_sorted_list_ends_sooner(left: list[Remaining], fleet: list[LoadedEngine]) -> None:
    """Brute force over all contiguous groups, with engines by speed. For like engines these are all contiguous
    partitions."""
    by_speed = sorted(fleet, key=lambda one: (one.profile.decode_base_ms, estimate_finish_s(one.profile, one.work)))
    ranked = [left[index] for index in Presorted(left).order]
    best_s = min(
        max(finish_of(engine, ranked[start:end]) for engine, (start, end) in zip(by_speed, cut, strict=True))
        for cut in all_cuts(len(ranked), len(fleet))
    )
    assert partition(left, fleet).makespan_s == pytest.approx(best_s, rel=3e-6, abs=1e-9)


@pytest.mark.parametrize("bound_s", [5e-324, 3e-323, 1e-310, 1e-6, 300.0])
def test_the_search_for_a_bound_ends_however_small_the_bound_is(bound_s: float) -> None:
    """The smallest floats are further apart than its precision; a makespan of 5e-324 s was bisected forever."""
    num_steps = 0

    def suffices(tried_s: float) -> bool:
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 2_000
        return tried_s >= bound_s

    assert least_bound_s(suffices, 2 * bound_s) == pytest.approx(bound_s, rel=3e-6, abs=1e-300)
    assert least_bound_s(suffices, bound_s) >= bound_s


def gap_to_all_assignments(seed: int) -> float:
    dice = random.Random(seed)
    left = [
        Remaining(min(40_000.0, dice.lognormvariate(8.0, 1.0)), dice.uniform(500, 1_500), 4_000.0) for _ in range(8)
    ]
    engine = LoadedEngine(replace(PROFILES[4], slots=2))
    best_s = min(
        max(
            finish_of(engine, [one for one, chosen in zip(left, homes, strict=True) if chosen == home])
            for home in range(3)
        )
        for homes in product(range(3), repeat=len(left))
    )
    return partition(left, [engine] * 3).makespan_s / best_s


def test_contiguous_groups_are_near_the_best_of_all_assignments() -> None:
    """Eight trajectories on three engines of 2 slots, where grains are coarsest: less than 2 % longer on average, never
    shorter."""
    gaps = [gap_to_all_assignments(seed) for seed in range(6)]
    assert min(gaps) >= 1 - 1e-6
    assert mean(gaps) < 1.02


@given(trajectories, profiles, remainings, st.integers(1, 4))
def test_more_work_never_shortens_the_makespan(
    left: list[Remaining], profile: EngineProfile, more: Remaining, num_engines: int
) -> None:
    """One more trajectory cannot shorten it, and one more engine cannot lengthen it."""
    fleet = [LoadedEngine(profile)] * num_engines
    makespan_s = partition(left, fleet).makespan_s
    assert partition([*left, more], fleet).makespan_s >= makespan_s * (1 - 3e-6)
    assert partition(left, [*fleet, LoadedEngine(profile)]).makespan_s <= makespan_s * (1 + 3e-6)


def test_an_engine_with_work_gets_fewer_trajectories() -> None:
    """Only as many as fit beside its own work, so that it and a like idle engine finish at the same time."""
    left = [Remaining(2_000.0 - index, 1_000.0) for index in range(300)]
    busy = LoadedEngine(PROFILES[4], work_of([Remaining(1_500.0, 8_000.0)] * 100))
    found = partition(left, [busy, LoadedEngine(PROFILES[4])])
    assert 0 < len(found.groups[0]) < len(found.groups[1])
    assert found.finish_s[0] == pytest.approx(found.finish_s[1], rel=0.02)


def test_one_very_long_trajectory_leaves_no_engine_idle() -> None:
    """It sets the makespan; the others are spread evenly over the remaining engines."""
    left = [Remaining(40_000.0, 1_000.0)] + [Remaining(1_000.0, 1_000.0)] * 800
    found = partition(left, engines_of([4] * 5))
    assert found.groups[0] == (0,)
    others = found.finish_s[1:]
    assert max(others) < found.finish_s[0] / 4
    assert min(others) > 0.85 * max(others)


def test_more_engines_than_trajectories_leave_some_empty() -> None:
    """Each trajectory has an engine to itself; an empty group ends at once."""
    found = partition([Remaining(1_000.0), Remaining(900.0)], engines_of([8, 8, 8, 8]))
    assert sorted(map(len, found.groups)) == [0, 0, 1, 1]
    assert sorted(found.finish_s)[:2] == [0.0, 0.0]


def test_the_longest_trajectory_goes_to_the_fastest_engine() -> None:
    """Groups keep the order of the engines as given."""
    left = coding_rollout(200, seed=1)
    found = partition(left, engines_of([1, 8, 2]))
    longest = max(range(len(left)), key=lambda index: left[index].output_tokens)
    shortest = min(range(len(left)), key=lambda index: left[index].output_tokens)
    assert longest in found.groups[1]
    assert shortest in found.groups[0]


def test_speculation_shortens_the_end_of_a_group() -> None:
    """A batch of one runs at the speed-up; in a larger batch only the end does, when few are left."""
    twice = Speculation(2.0, 1)
    plain, fast = LoadedEngine(PROFILES[8]), LoadedEngine(PROFILES[8], speculation=twice)
    one, other = Remaining(10_000.0), Remaining(6_000.0)
    base_s = PROFILES[8].decode_base_ms / 1000
    for left, steps_saved in (([one], 5_000), ([one, other], 2_000)):
        saved_s = partition(left, [plain]).makespan_s - partition(left, [fast]).makespan_s
        assert saved_s == pytest.approx(steps_saved * base_s)


def test_speculation_is_not_counted_beside_other_work() -> None:
    """The number of trajectories behind that work is unknown."""
    before = work_of([Remaining(100.0)])
    fast = LoadedEngine(PROFILES[8], before, Speculation(2.0, 8))
    left = [Remaining(10_000.0)]
    assert partition(left, [fast]) == partition(left, [replace(fast, speculation=None)])


def test_a_slow_tool_counts_wherever_it_is_in_the_group() -> None:
    """A short trajectory with a slow tool sets its engine's finish, however long the others are."""
    left = [Remaining(1_000.0), Remaining(900.0), Remaining(10.0, tool_s=300.0)]
    found = partition(left, engines_of([4, 4]))
    assert found.makespan_s == pytest.approx(300.0, abs=1.0)
    assert partition(left, engines_of([4])).makespan_s > found.makespan_s
