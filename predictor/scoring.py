"""How good predictions were: correlation, order, recall of the longest, and whether quantiles hold."""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from predictor.replay import ReplayedPrediction


@dataclass(frozen=True, slots=True)
class Score:
    """Predictions after a given number of turns, over the trajectories that had more.

    Args:
        pearson: correlation of the logs of predicted and true total output.
        remaining_pearson: the same for the output left.
        kendall: tau-b of totals; 1 if every pair is in order.
        recall_20, recall_1: share of the longest 20 % and 1 % that are among as many predicted longest.
        in_top_10: share of the longest 1 % that are among the predicted longest 10 %.
        under_p50, under_p90: share of totals not above that percentile; None if the predictor gives none.
    """

    num: int
    pearson: float
    remaining_pearson: float
    kendall: float
    recall_20: float
    recall_1: float
    in_top_10: float
    under_p50: float | None
    under_p90: float | None


def score(said: Sequence[ReplayedPrediction], *, is_total: bool = True) -> Score:
    """The figures for predictions of one step.

    Args:
        is_total: predictions are of the total, so the output made is subtracted for the remaining output; a mere
            feature is not.
    """
    truth = [float(one.total_tokens) for one in said]
    predicted = [one.predicted_tokens for one in said]
    quantiles = [(one.total_tokens, one.quantiles) for one in said if one.quantiles is not None]
    return Score(
        num=len(said),
        pearson=log_pearson(predicted, truth),
        remaining_pearson=log_pearson(
            [one.predicted_tokens - (one.made_tokens if is_total else 0) for one in said],
            [float(one.total_tokens - one.made_tokens) for one in said],
        ),
        kendall=kendall(predicted, truth),
        recall_20=recall(predicted, truth, 0.2, 0.2),
        recall_1=recall(predicted, truth, 0.01, 0.01),
        in_top_10=recall(predicted, truth, 0.01, 0.1),
        under_p50=sum(total <= p50 for total, (p50, _) in quantiles) / len(said) if quantiles else None,
        under_p90=sum(total <= p90 for total, (_, p90) in quantiles) / len(said) if quantiles else None,
    )


def log_pearson(predicted: Sequence[float], truth: Sequence[float]) -> float:
    """Correlation of logs; 0 if one of them is constant."""
    xs = [math.log(max(x, 1.0)) for x in predicted]
    ys = [math.log(max(y, 1.0)) for y in truth]
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    both = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    x_squares, y_squares = math.fsum((x - mean_x) ** 2 for x in xs), math.fsum((y - mean_y) ** 2 for y in ys)
    return both / math.sqrt(x_squares * y_squares) if min(x_squares, y_squares) > 1e-12 else 0.0


def kendall(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Kendall's tau-b: ties count neither way. 0 if one of them is constant."""
    before: list[float] = []
    balance = 0
    ties = _ties(xs)
    for tied in ties:
        for index in tied:
            balance += bisect_left(before, ys[index]) - (len(before) - bisect_right(before, ys[index]))
        for index in tied:
            insort(before, ys[index])
    pairs = math.comb(len(xs), 2)
    untied_x = pairs - sum(math.comb(len(tied), 2) for tied in ties)
    untied_y = pairs - sum(math.comb(len(tied), 2) for tied in _ties(ys))
    return balance / math.sqrt(untied_x * untied_y) if untied_x and untied_y else 0.0


def recall(predicted: Sequence[float], truth: Sequence[float], longest: float, among: float) -> float:
    """Share of the `longest` part by truth that is in the `among` part by prediction.

    Trajectories exactly as long as the last of the longest also count (a limit on output produces such ties); predicted
    ties are shared out evenly.
    """
    shortest = sorted(truth, reverse=True)[math.ceil(longest * len(truth)) - 1]
    wanted = [index for index, value in enumerate(truth) if value >= shortest]
    num_among = max(math.ceil(among * len(truth)), len(wanted))
    limit = sorted(predicted, reverse=True)[num_among - 1]
    above = sum(value > limit for value in predicted)
    share_of_ties = (num_among - above) / sum(value == limit for value in predicted)
    found = sum(1.0 if predicted[i] > limit else share_of_ties if predicted[i] == limit else 0.0 for i in wanted)
    return found / len(wanted)


def _ties(values: Sequence[float]) -> list[list[int]]:
    """The places of equal values together, the smallest value first."""
    in_order = sorted(range(len(values)), key=values.__getitem__)
    return [list(tied) for _, tied in groupby(in_order, key=values.__getitem__)]
