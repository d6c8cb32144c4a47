"""Lengths on a logarithmic lattice: four bins per octave, from 4 tokens to a million, so each bin is a fifth longer.

Distributions of lengths are kept as one number per bin. A bin is narrow compared to the spread of siblings (a factor of
1.8), so nothing is lost, and any distribution fits: no form of the tail is assumed.
"""

import math
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

PerBin = NDArray[np.float64]
"""One number per bin, or per bin from some bin to the last."""

_PER_OCTAVE = 4
_FIRST_OCTAVE = 2
NUM_BINS = 72


def bin_of(tokens: float) -> int:
    """The bin of a length; lengths outside the lattice go to the first or the last bin."""
    if tokens < 4.0:
        return 0
    found = int((math.log2(tokens) - _FIRST_OCTAVE) * _PER_OCTAVE)
    return found if found < NUM_BINS else NUM_BINS - 1


def dumped_bin(number: Any) -> int:
    """The bin of that number in a dump. Raises TypeError, ValueError or OverflowError if there is none."""
    found = int(number)
    if not 0 <= found < NUM_BINS:
        raise ValueError("another lattice")
    return found


EDGES: list[float] = [2.0 ** (_FIRST_OCTAVE + n / _PER_OCTAVE) for n in range(NUM_BINS + 1)]
"""The lengths at which bins begin, and the one at which the last bin ends."""

CENTRES = [math.sqrt(low * high) for low, high in pairwise(EDGES)]
"""The geometric middle of each bin."""

BINS: PerBin = np.arange(NUM_BINS, dtype=float)
"""The number of each bin."""

BINS_FROM: list[PerBin] = [BINS[first:] for first in range(NUM_BINS)]
"""The bin numbers from each bin on: making a view takes as long as a subtraction, and every turn needs one."""
