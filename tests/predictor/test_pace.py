"""What a trajectory's prompt and progress predict of its length, as learned from trajectories that have ended."""

import math
import random

import orjson
import pytest

from predictor.lattice import EDGES, bin_of
from predictor.progress import Progress
from predictor.tabular import TabularPredictor


def learned(feature: str, num: int = 300) -> TabularPredictor:
    """A predictor that saw trajectories, each a group of its own, of which one feature correlates with their length.

    Args:
        feature: `turn`, the output of each turn; `tools`, what tools add; `prompt`, its tokens; or "", none.
    """
    predictor, dice = TabularPredictor(), random.Random(7)
    for number in range(num):
        total = round(math.exp(dice.gauss(8.0, 1.0)))
        size = max(1, round(total / 10 * dice.uniform(0.7, 1.4)))
        name, other = f"t{number}", round(math.exp(dice.gauss(5.7, 0.3)))
        prompt, turn, tools = (size if what == feature else other for what in ("prompt", "turn", "tools"))
        predictor.predict(Progress(name, name, "", prompt, prompt))
        predictor.predict(Progress(name, name, "", prompt, prompt + turn + tools, turn, turn, 1))
        predictor.ended(Progress(name, name, "", prompt, prompt + total + 10 * tools, total, turn, 10))
    return predictor


def expected(
    predictor: TabularPredictor, prompt: int = 300, turn: int = 300, tools: int = 300, turns: int = 1
) -> float:
    """The predicted total of a new trajectory, after a turn or before it; the trajectory is then dropped."""
    made = (prompt + turn + tools, turn, turn, 1) if turns else (prompt,)
    total = predictor.predict(Progress("new", "new", "", prompt, *made)).total_tokens
    predictor.dropped("new")
    return total


@pytest.mark.parametrize("feature", ["turn", "tools", "prompt"])
@pytest.mark.parametrize("is_restarted", [False, True], ids=["live", "restored"])
def test_a_feature_that_predicts_length_is_learned_and_restored(feature: str, is_restarted: bool) -> None:
    """A large value predicts the length of the trajectories that had it; a feature without correlation changes
    little."""
    predictor = learned(feature)
    if is_restarted:
        dumped, predictor = predictor.dump(), TabularPredictor()
        predictor.restore(dumped)
    turns = 0 if feature == "prompt" else 1
    small, large = (expected(predictor, **{feature: size}, turns=turns) for size in (150, 2_000))
    assert large > 2.5 * small and large == pytest.approx(20_000, rel=0.5)
    for other in {"tools", "prompt"} - {feature}:
        unmoved, moved = (expected(predictor, **{other: size}, turns=turns) for size in (300, 450))
        assert moved == pytest.approx(unmoved, rel=0.35), other


def test_the_prompts_length_is_ignored_until_enough_have_ended() -> None:
    """With too few trajectories to learn from, the assumed distribution stands."""
    few = learned("prompt", num=20)
    small, large = (expected(few, prompt=size, turns=0) for size in (150, 2_000))
    assert large == pytest.approx(small, rel=1e-6)


def test_an_end_in_a_bin_becomes_less_likely_as_its_lengths_are_passed() -> None:
    """A trajectory whose output is near the bin's upper edge is unlikely to end in the bin; one that has just entered
    it may."""
    begin, end = EDGES[bin_of(2_000)], EDGES[bin_of(2_000) + 1]
    shares = []
    for made in (math.ceil(begin), round((begin + end) / 2), math.floor(end) - 5):
        forecast = TabularPredictor().forecast(Progress("t", output_tokens=made, last_output_tokens=100, num_turns=9))
        shares.append(forecast.weights[0] / forecast.weights.sum())
    assert shares[1] == pytest.approx(shares[0] / 2, rel=0.1)
    assert 0 < shares[2] < shares[0] / 10


def test_a_dump_of_another_predictor_kind_is_refused() -> None:
    """It is refused even though it has the same parts."""
    dumped = learned("", num=40).dump()
    predictor = TabularPredictor()
    before = predictor.dump()
    with pytest.raises(ValueError, match="tabular-1"):
        predictor.restore(orjson.dumps(orjson.loads(dumped) | {"kind": "tabular-0"}))
    assert predictor.dump() == before
