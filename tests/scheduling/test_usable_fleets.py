"""Which TP sizes a plan may use, whether the fleets that searches find can be built, and how a fleet is written."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.estimate import USABLE_KV_SHARE, Remaining
from scheduling.fleets import GpuBudget, in_words
from scheduling.partition import Presorted
from scheduling.running_sums import LoadedEngine
from scheduling.scaling import Search, enumerated, homogeneous, longest_reach, usable_kinds
from tests.scheduling.plans import PROFILES, remainings
from tests.scheduling.test_scaling import every_fleet

NODE = GpuBudget(8)


def sizes_for(longest_tokens: float, **kv_capacity_tokens: int) -> set[int]:
    """The TP sizes used if the longest context has this many tokens, given the KV capacity of each size."""
    profiles = {
        tp: replace(PROFILES[tp], kv_capacity_tokens=kv_capacity_tokens[f"tp{tp}"])
        for tp in PROFILES
        if f"tp{tp}" in kv_capacity_tokens
    }
    left = [Remaining(longest_tokens / 2, longest_tokens / 4, longest_tokens / 4), Remaining(1.0)]
    return set(usable_kinds(left, profiles, NODE, None))


def test_sizes_that_hold_the_longest_context_are_used() -> None:
    """As far as their KV is usable. A size whose capacity is unknown may hold anything."""
    just = 10_000 / USABLE_KV_SHARE
    assert sizes_for(10_000, tp1=round(just * 1.01), tp2=round(just * 2)) == {1, 2}
    assert sizes_for(10_000, tp1=round(just * 0.99), tp2=round(just * 2)) == {2}
    assert sizes_for(10_000, tp1=0, tp2=round(just * 0.99)) == {1}


def test_if_no_size_holds_the_longest_context_the_roomiest_is_used() -> None:
    """Its engines evict, and every other size's would evict more."""
    assert sizes_for(1e6, tp1=100_000, tp4=400_000, tp2=200_000) == {4}


@settings(max_examples=60)
@given(
    left=st.lists(remainings, min_size=1, max_size=8),
    budget=st.builds(GpuBudget, st.integers(1, 20), st.just(8)),
    search=st.sampled_from([homogeneous, enumerated, longest_reach]),
)
def test_every_search_finds_a_fleet_that_can_be_built(left: list[Remaining], budget: GpuBudget, search: Search) -> None:
    """Each node, also a partial last one, has engines of one size. One size for all may leave GPUs idle."""
    profiles = {tp: replace(PROFILES[tp], slots=tp, kv_capacity_tokens=150_000 * tp) for tp in PROFILES}
    kinds = {tp: LoadedEngine(profile) for tp, profile in profiles.items() if tp <= min(budget.gpus, 8)}
    fleet = search(Presorted(left), kinds, budget)
    assert fleet in every_fleet(budget) or fleet in budget.uniform_fleets(tuple(kinds))


@pytest.mark.parametrize(
    ("fleet", "words"),
    [((8,), "1 x TP 8"), ((4, 4, 2, 1, 1, 1), "2 x TP 4 + 1 x TP 2 + 3 x TP 1"), ((1, 4, 1), "1 x TP 4 + 2 x TP 1")],
)
def test_a_fleet_is_written_largest_engines_first(fleet: tuple[int, ...], words: str) -> None:
    """As commands and plans show it."""
    assert in_words(fleet) == words
