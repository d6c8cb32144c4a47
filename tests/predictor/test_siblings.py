"""The sibling predictor: what it assumes, learns and forgets."""

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from predictor.progress import Progress
from predictor.siblings import SiblingPredictor, SiblingSettings


def after(output_tokens: int, group_id: str = "g") -> Progress:
    """A trajectory of the group with this much output so far."""
    return Progress("t", group_id, output_tokens=output_tokens)


def test_without_data_the_prediction_is_the_prior() -> None:
    """Mean and 90th percentile of a log-normal with the assumed median and spread."""
    settings = SiblingSettings(typical_tokens=1_000, spread=1.0, within_share=0.5)
    prediction = SiblingPredictor(settings).predict(after(0, "g"))
    assert prediction.total_tokens == pytest.approx(1_000 * math.exp(0.5))
    assert prediction.p90_tokens == pytest.approx(1_000 * math.exp(1.2816), rel=1e-3)


def test_one_short_trajectory_does_not_overrule_the_prior() -> None:
    """Its own group follows it; another group hardly does."""
    predictor = SiblingPredictor()
    before = predictor.predict(after(0, "other")).total_tokens
    predictor.ended(after(12, "g"))
    assert predictor.predict(after(0, "other")).total_tokens > before / 2
    assert predictor.predict(after(0, "g")).total_tokens < predictor.predict(after(0, "other")).total_tokens / 3


def test_siblings_rank_groups_by_their_true_lengths() -> None:
    """If groups differ as in rollouts, three siblings of each are enough to order four in five pairs of groups
    correctly."""
    rng = random.Random(1)
    predictor = SiblingPredictor()
    groups = {f"g{n}": rng.gauss(8.0, 0.8) for n in range(60)}
    for group, mean in groups.items():
        for _ in range(3):
            predictor.ended(after(round(math.exp(rng.gauss(mean, 0.5))), group))
    predicted = {group: predictor.predict(after(0, group)).total_tokens for group in groups}
    names = list(groups)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    agreeing = sum((groups[a] > groups[b]) == (predicted[a] > predicted[b]) for a, b in pairs)
    assert agreeing / len(pairs) > 0.8


def test_predictions_follow_drift() -> None:
    """When trajectories grow from 500 to 8,000 tokens, a new group's prediction follows."""
    predictor = SiblingPredictor(SiblingSettings(memory=50))
    for n in range(200):
        predictor.ended(after(500, f"old{n}"))
    early = predictor.predict(after(0, "new")).total_tokens
    for n in range(200):
        predictor.ended(after(8_000, f"late{n}"))
    assert predictor.predict(after(0, "new")).total_tokens > 8 * early


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.lists(st.integers(1, 100_000), max_size=5))
@example(63_896, 1, [295, 633, 633, 29_736])
def test_the_predicted_total_never_falls_as_output_grows(made: int, more: int, siblings: list[int]) -> None:
    """The total is above the output so far, and its 90th percentile is not below its mean."""
    predictor = SiblingPredictor()
    for tokens in siblings:
        predictor.ended(after(tokens, "g"))
    first, second = (
        predictor.predict(after(made, "g")),
        predictor.predict(after(made + more, "g")),
    )
    assert first.total_tokens > made and first.p90_tokens >= first.total_tokens
    assert second.total_tokens >= first.total_tokens * (1 - 1e-9)


def test_a_dump_restores_every_prediction_and_memory_is_bounded() -> None:
    """A restored predictor predicts the same. Of too many groups, the least recently used is forgotten."""
    predictor = SiblingPredictor(SiblingSettings(max_groups=2))
    for group, tokens in (("a", 10), ("b", 90_000), ("a", 10), ("c", 90_000)):
        predictor.ended(after(tokens, group))
    restored = SiblingPredictor(SiblingSettings(max_groups=2))
    restored.restore(predictor.dump())
    for group in "abc":
        assert restored.predict(after(100, group)) == predictor.predict(after(100, group))
    assert (
        predictor.predict(after(0, "b"))
        == predictor.predict(after(0, "never seen"))
        != predictor.predict(after(0, "a"))
    )


@pytest.mark.parametrize("dumped", [b"nonsense", b"{}", b"[]", b'{"groups": 1, "global_log": 1, "num_seen": 1}'])
def test_a_dump_of_another_kind_changes_nothing(dumped: bytes) -> None:
    """It is refused, and what was learned stays."""
    predictor = SiblingPredictor()
    predictor.ended(after(10))
    before = predictor.predict(after(0))
    with pytest.raises(ValueError):
        predictor.restore(dumped)
    assert predictor.predict(after(0)) == before


def test_a_trajectory_without_output_teaches_nothing() -> None:
    """A trajectory that was declared and finished without a turn has no length to learn from."""
    predictor = SiblingPredictor()
    before = predictor.predict(after(0))
    predictor.ended(after(0))
    assert predictor.predict(after(0)) == before
