"""The best fleet in hindsight: cut by predictions, judged by what came true."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.estimate import Remaining
from scheduling.fleets import GpuBudget
from scheduling.partition import partition
from scheduling.rehearsal import rehearse
from scheduling.scaling import TAIL_SPECULATION, Role, enumerated, plan
from tests.scheduling.plans import PROFILES, coding_rollout, engines_of, finish_of, remainings


def realised_s(predicted: Sequence[Remaining], realised: Sequence[Remaining], tps: tuple[int, ...]) -> float:
    engines = engines_of(tps)
    groups = partition(predicted, engines).groups
    return max(
        finish_of(engine, [realised[index] for index in group]) for engine, group in zip(engines, groups, strict=True)
    )


def all_alike(left: Sequence[Remaining]) -> list[Remaining]:
    """What a predictor says that knows only the mean."""
    tokens = mean(one.output_tokens for one in left)
    return [replace(one, output_tokens=tokens) for one in left]


@settings(max_examples=40)
@given(st.lists(st.tuples(remainings, remainings), min_size=1, max_size=8), st.integers(1, 12))
def test_no_fleet_would_have_done_better(pairs: list[tuple[Remaining, Remaining]], gpus: int) -> None:
    """Against the partition by predictions on every fleet, its groups told by what came true."""
    predicted, realised = map(list, zip(*pairs, strict=True))
    budget = GpuBudget(gpus)
    found = rehearse(predicted, realised, PROFILES, budget, min_gain_share=0.0)
    sizes = tuple(tp for tp in (8, 4, 2, 1) if tp <= gpus)
    fleets = {*budget.fleets(sizes), *budget.uniform_fleets(sizes)}
    best_s = min(realised_s(predicted, realised, fleet) for fleet in fleets)
    assert found.makespan_s == pytest.approx(best_s)
    assert found.makespan_s == pytest.approx(realised_s(predicted, realised, found.tps))


def test_with_true_predictions_it_is_the_plan() -> None:
    """Then there is nothing to learn from hindsight."""
    left = coding_rollout(320, seed=1)
    rehearsed = rehearse(left, left, PROFILES, GpuBudget(32), min_gain_share=0.0)
    planned = plan(left, PROFILES, GpuBudget(32), enumerated, min_gain_share=0.0)
    assert rehearsed.makespan_s == pytest.approx(planned.makespan_s, rel=3e-6)
    assert rehearsed.method == "rehearsed"


def test_means_hide_the_tail_and_a_rehearsal_shows_it() -> None:
    """Predicted all alike, small TP sizes look best; in truth somebody is long, and larger ones are much sooner."""
    left = coding_rollout(1_600, seed=1)
    predicted = all_alike(left)
    believed = plan(predicted, PROFILES, GpuBudget(32))
    rehearsed = rehearse(predicted, left, PROFILES, GpuBudget(32))
    assert max(believed.tps) < min(rehearsed.tps)
    assert rehearsed.makespan_s < 0.9 * realised_s(predicted, left, believed.tps)


def test_a_rehearsal_knows_tail_engines() -> None:
    """Speculation is asked for where it would have helped."""
    left = [Remaining(40_000.0, 1_000.0)] * 4 + [Remaining(1_000.0, 1_000.0)] * 1_000
    found = rehearse(left, left, PROFILES, GpuBudget(16), speculation=TAIL_SPECULATION)
    assert found.engines[0].role is Role.TAIL
