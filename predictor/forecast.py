"""The distribution of one trajectory's total output, as shares on the lattice."""

import math
from operator import length_hint

import numpy as np

from predictor.lattice import BINS, CENTRES, EDGES, NUM_BINS, PerBin

# Columns with which weights are multiplied and summed, one row per bin; then these rows from each bin on.
_SUMMED = np.stack([BINS**0, BINS, BINS**2, np.array(CENTRES)], axis=1)
_SUMMED_FROM = [_SUMMED[first:] for first in range(NUM_BINS)]


class Forecast:
    """Total output of a trajectory that has made `made_tokens`, which lie in bin `from_bin`.

    Args:
        weights: one number per bin from `from_bin` to the last, in proportion to its probability.

    Attributes:
        sums: of the weights, and of the weights times bin, squared bin, and length.
    """

    __slots__ = ("from_bin", "made_tokens", "sums", "weights")

    def __init__(self, made_tokens: int, from_bin: int, weights: PerBin) -> None:
        self.made_tokens = made_tokens
        self.from_bin = from_bin
        self.weights = weights
        self.sums: list[float] = weights.dot(_SUMMED_FROM[from_bin]).tolist()

    def mean(self) -> float:
        """Expected total; more than the output already made."""
        total, _, _, lengths = self.sums
        # Part of the first bin lies below the output already made.
        begins, ends = EDGES[self.from_bin], EDGES[self.from_bin + 1]
        behind = self.made_tokens - begins if self.made_tokens > begins else 0.0
        middle = (begins + behind + ends) / 2
        lengths += (middle - CENTRES[self.from_bin]) * self.weights.item(0)
        mean, least = lengths / total, self.made_tokens + 1.0
        return mean if mean > least else least

    def quantile(self, share: float) -> float:
        """The total that is not exceeded with this probability, in (0, 1)."""
        wanted = share * self.sums[0]
        weights = iter(self.weights.tolist())
        for weight in weights:
            if weight >= wanted:
                index = NUM_BINS - 1 - length_hint(weights)  # to count the bins takes a third of the time
                low, least, high = EDGES[index], self.made_tokens + 1.0, EDGES[index + 1]
                if low < least:
                    low = least
                return low * math.pow(high / low, wanted / weight) if high > low else low
            wanted -= weight
        return EDGES[NUM_BINS]
