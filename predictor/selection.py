"""Decides from an evaluation whether a challenger is worth having beside the predictor in use."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from predictor.scoring import log_pearson, recall


@dataclass(frozen=True, slots=True)
class PredictionPair:
    """One held-out prediction of each predictor, and the true value; tokens of total output."""

    group_id: str
    total_tokens: float
    challenger_tokens: float
    incumbent_tokens: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The verdict and its grounds.

    Args:
        gain: log-Pearson of the challenger less the incumbent's.
        gain_low: the gain that 97.5 % of draws of groups exceed.
        recall_gain: the same difference in recall of the longest 20 %.
    """

    takes_challenger: bool
    gain: float
    gain_low: float
    recall_gain: float


def choose(judged: Sequence[PredictionPair], *, min_gain: float = 0.02, num_draws: int = 200, seed: int = 0) -> Choice:
    """Take the challenger if it orders trajectories better, beyond chance and by enough to matter, and finds the
    longest ones at least as well.

    Whole groups are drawn, because siblings are not independent. Fewer than 20 groups decide nothing.
    """
    groups: dict[str, list[PredictionPair]] = {}
    for one in judged:
        groups.setdefault(one.group_id, []).append(one)
    if len(groups) < 20:
        return Choice(False, 0.0, 0.0, 0.0)
    rng = random.Random(seed)
    members = list(groups.values())
    draws = sorted(
        _gain([one for group in rng.choices(members, k=len(members)) for one in group]) for _ in range(num_draws)
    )
    gain, gain_low, recall_gain = _gain(judged), draws[int(0.025 * num_draws)], _recall_gain(judged)
    return Choice(gain_low > 0 and gain >= min_gain and recall_gain >= 0, gain, gain_low, recall_gain)


def _gain(judged: Sequence[PredictionPair]) -> float:
    truth = [one.total_tokens for one in judged]
    challenger = log_pearson([one.challenger_tokens for one in judged], truth)
    return challenger - log_pearson([one.incumbent_tokens for one in judged], truth)


def _recall_gain(judged: Sequence[PredictionPair]) -> float:
    truth = [one.total_tokens for one in judged]
    challenger = recall([one.challenger_tokens for one in judged], truth, 0.2, 0.2)
    return challenger - recall([one.incumbent_tokens for one in judged], truth, 0.2, 0.2)
