"""Evidence from a trajectory's own progress: for each bin of lengths, how trajectories of that length looked.

Learned in the direction length -> features, because that is not biased by which trajectories ended first; Bayes' rule
inverts it. The features are a few numbers. They are reduced to the one combination that follows length best. The
distribution of that combination is kept bin by bin, so it may rise, fall or stay as length grows (inverse regression).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.lattice import NUM_BINS, PerBin
from predictor.lengths import Lengths
from predictor.progress import Progress

# Stages are 1, 2-3, 4-7, 8-15, 16-31, and 32 or more finished turns: early features tell less.
NUM_STAGES = 6
NUM_FEATURES = 4
_KERNEL = ((-2, 0.3), (-1, 0.8), (0, 1.0), (1, 0.8), (2, 0.3))
# Weight of the fitted line in a bin, in trajectories.
_LINE_WEIGHT = 3.0
_MIN_LEARNED = 24.0
# The share of all lengths that ended trajectories must cover. While only short ones have ended, features unlike theirs
# are merely unknown, and tell nothing of the length.
_MIN_KNOWN = 0.8
_REFRESH_AFTER = 32
# Keeps a feature that hardly varies from deciding.
_RIDGE = 0.01


def stage_of(num_turns: int) -> int:
    """The stage of a trajectory with `num_turns` finished turns, at least 1."""
    stage = num_turns.bit_length() - 1
    return stage if stage < NUM_STAGES else NUM_STAGES - 1


Look = tuple[int, int, int, int, int]
"""A trajectory after at least one turn: finished turns, output, output of the last turn, tool output, failures."""


def look_of(progress: Progress) -> Look:
    """How a trajectory looks now."""
    turns, made, last = progress.num_turns, progress.output_tokens, progress.last_output_tokens
    given = progress.context_tokens - progress.prompt_tokens - made
    failed = sum([not outcome.endswith(":success") for outcome in progress.outcomes]) if progress.outcomes else 0
    return turns, made, last, given, failed


def dumped_look(numbers: Any) -> Look:
    """The look with these numbers in a dump. Raises TypeError, ValueError or OverflowError if they are none."""
    turns, made, last, given, failed = map(int, numbers)
    if turns < 1:
        raise ValueError("no turn")
    return turns, made, last, given, max(failed, 0)


def features_of(look: Look) -> list[float]:
    """The features of a trajectory: its pace, last turn, tool output and failures, as logs."""
    turns, made, last, given, failed = look
    return [
        math.log((made if made > 1 else 1) / turns),
        math.log(last if last > 1 else 1),
        math.log((given if given > 1 else 1) / turns + 1.0),
        math.log(1.0 + failed),
    ]


class FeatureLaw:
    """The distribution of features at one stage, by bin of total length.

    Args:
        lengths: the distribution of all lengths.
        num_features: features of a trajectory.
        memory: trajectories that count in each bin; older ones fade.
    """

    def __init__(self, lengths: Lengths, num_features: int, memory: float) -> None:
        self._lengths = lengths
        self._memory = memory
        self._size = num_features
        # Kernel-smoothed, per bin: trajectories that ended there, those of them that reached this stage, and the sum of
        # their features.
        self._ended = [0.0] * NUM_BINS
        self._reached = [0.0] * NUM_BINS
        self._sums = [[0.0] * num_features for _ in range(NUM_BINS)]
        # Over all bins: sums of 1, bin and squared bin; of each feature; and of each feature times bin.
        self._bins = [0.0, 0.0, 0.0]
        self._feature_sums = [0.0] * num_features
        self._by_bin = [0.0] * num_features
        # Products of two features' distances from their bin's mean, and the number of trajectories summed over.
        self._products = [[0.0] * num_features for _ in range(num_features)]
        self._num_products = 0.0
        self._num_news = 0
        self._means: list[list[float]] = []
        self._law: _Law | None = None

    def learn(self, features: list[float] | None, in_bin: int) -> None:
        """Learn from a trajectory that ended in this bin with these features; None: it did not reach this stage."""
        self._num_news += 1
        if features is not None:
            self._learn_line(features, in_bin)
        for step, weight in _KERNEL:
            index = in_bin + step
            if not 0 <= index < NUM_BINS:
                continue
            fade = min(1.0, self._memory / (self._ended[index] + weight))
            self._ended[index] = (self._ended[index] + weight) * fade
            if features is not None:
                self._reached[index] += weight
                self._sums[index] = [
                    total + weight * value for total, value in zip(self._sums[index], features, strict=True)
                ]
            if fade < 1.0:
                self._reached[index] *= fade
                self._sums[index] = [total * fade for total in self._sums[index]]
        if self._num_news >= _REFRESH_AFTER and self._bins[0] >= _MIN_LEARNED:
            self._tabulate()

    def likelihood(self, features: list[float], from_bin: int = 0) -> PerBin | None:
        """The likelihood of reaching this stage with these features, for each bin from `from_bin`, up to a factor.

        Returns: None while too little is known.
        """
        law = self._law
        if law is None:
            return None
        score = sum(map(float.__mul__, law.direction, features))
        off = law.means[from_bin:] - score
        # Student's t-distribution with five degrees of freedom: one odd turn must not decide.
        spread = off * off * law.scales[from_bin:] + 1.0
        likelihood: PerBin = law.heights[from_bin:] / (spread * spread * spread)
        return likelihood

    def dump(self) -> list[Any]:
        """What was learned."""
        parts = (self._ended, self._reached, self._sums, self._bins, self._feature_sums, self._by_bin, self._products)
        return [*parts, self._num_products]

    def restore(self, dumped: list[Any]) -> None:
        """Restore a dump. Raises ArithmeticError, LookupError, TypeError or ValueError."""
        ended, reached, sums, bins, features, by_bin, products, num_products = dumped
        if {len(ended), len(reached), len(sums)} != {NUM_BINS} or len(features) != self._size:
            raise ValueError("another lattice")
        self._ended, self._reached, self._sums = list(ended), list(reached), [list(row) for row in sums]
        self._bins, self._feature_sums, self._by_bin = list(bins), list(features), list(by_bin)
        self._products, self._num_products = [list(row) for row in products], float(num_products)
        if self._bins[0] >= _MIN_LEARNED:
            self._tabulate()

    def _learn_line(self, features: list[float], in_bin: int) -> None:
        fade = min(1.0, 4 * self._memory / (self._bins[0] + 1.0))
        self._bins = [(old + in_bin**power) * fade for power, old in enumerate(self._bins)]
        self._feature_sums = [(old + value) * fade for old, value in zip(self._feature_sums, features, strict=True)]
        self._by_bin = [(old + value * in_bin) * fade for old, value in zip(self._by_bin, features, strict=True)]
        if self._means:
            off = [value - mean for value, mean in zip(features, self._means[in_bin], strict=True)]
            fade = min(1.0, self._memory / (self._num_products + 1.0))
            self._num_products = (self._num_products + 1.0) * fade
            self._products = [
                [(old + one * other) * fade for old, other in zip(row, off, strict=True)]
                for row, one in zip(self._products, off, strict=True)
            ]

    def _tabulate(self) -> None:
        self._num_news = 0
        weight, bins, squares = self._bins
        mean_bin = bins / weight
        variance = squares / weight - mean_bin**2 + 1.0
        means = [total / weight for total in self._feature_sums]
        slopes = [(both / weight - mean * mean_bin) / variance for both, mean in zip(self._by_bin, means, strict=True)]
        self._means = [
            [
                (total + _LINE_WEIGHT * (mean + slope * (index - mean_bin))) / (reached + _LINE_WEIGHT)
                for total, mean, slope in zip(sums, means, slopes, strict=True)
            ]
            for index, (reached, sums) in enumerate(zip(self._reached, self._sums, strict=True))
        ]
        known = sum(
            share * ended / (ended + _LINE_WEIGHT)
            for share, ended in zip(self._lengths.shares.tolist(), self._ended, strict=True)
        )
        if self._num_products < _MIN_LEARNED or known < _MIN_KNOWN:
            return
        within = [[total / self._num_products for total in row] for row in self._products]
        for index, row in enumerate(within):
            row[index] += _RIDGE
        direction = _solve(within, slopes)
        left = sum(one * sum(map(float.__mul__, row, direction)) for one, row in zip(direction, within, strict=True))
        # Where few trajectories were seen, the line is only a guess: it may as well be flat from here on.
        slope = sum(map(float.__mul__, direction, slopes))
        scales = []
        for index, came in enumerate(self._reached):
            guess = left + slope**2 * (variance + (index - mean_bin) ** 2)
            scales.append(1.0 / (5.0 * (left + guess * _LINE_WEIGHT / (came + _LINE_WEIGHT)) + 1e-9))
        heights, share = [], 0.5
        for came, ended, scale in zip(self._reached, self._ended, scales, strict=True):
            # Where few ended, the share of the next shorter bin is used: a longer trajectory reaches this stage at
            # least as often.
            share = (came + 0.5 * share) / (ended + 0.5)
            heights.append(share * math.sqrt(scale))
        self._law = _Law(
            direction,
            np.array([sum(map(float.__mul__, direction, mean)) for mean in self._means]),
            np.array(scales),
            np.array(heights),
        )


@dataclass(frozen=True, slots=True)
class _Law:
    """The distribution of features at a stage, ready for use.

    Args:
        direction: weights of the features in the combination that follows length best.
        means: its mean in each bin.
        scales: 1 / (its variance there * the degrees of freedom).
        heights: of the distribution at its mean, up to a factor, times the share of trajectories that reach this stage.
    """

    direction: list[float]
    means: PerBin
    scales: PerBin
    heights: PerBin


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a linear system with a symmetric positive definite matrix (Gauss-Jordan)."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        pivot[:] = [value / pivot[i] for value in pivot]
        for j, row in enumerate(rows):
            if j != i and row[i]:
                factor = row[i]
                row[:] = [value - factor * other for value, other in zip(row, pivot, strict=True)]
    return [row[-1] for row in rows]
