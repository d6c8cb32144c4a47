"""The distribution of total lengths, learned from running trajectories as well as from those that ended.

A rollout's short trajectories end first, so a mean over those that ended is too low at first and too high in the end.
Here each bin of the lattice has a hazard: of the trajectories that came this far, the share that ended there. A running
trajectory counts in every bin that it has passed (the Kaplan-Meier estimate of survival). An end is known at once, but
that others went on is known only after their turns. So an end is held back until the others have had time to report.

Nothing is assumed of the tail except by the prior, used until there are data: a log-normal that turns into a Pareto
tail where its hazard is high.
"""

import math
from collections import deque
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np

from predictor.lattice import EDGES, NUM_BINS, PerBin, dumped_bin

_REFRESH_AFTER = 64
# Half of a bin's trajectories end there: a Pareto tail of index 4. A log-normal's own hazard grows without limit.
_MAX_PRIOR_HAZARD = 0.5


class Lengths:
    """The distribution of total lengths: the `shares` of bins, and their `mean` and `variance` in bins.

    `surviving` is the share of trajectories that reach each bin: the sum of shares from there on.

    Args:
        typical_tokens, spread: the log-normal used as a prior.
        prior_weight: trajectories that the prior counts as in each bin.
        memory: trajectories that count in each bin; older ones fade, so that the distribution follows drift.
    """

    def __init__(self, typical_tokens: float, spread: float, prior_weight: float, memory: float) -> None:
        self._memory = memory
        self._passed = [prior_weight] * NUM_BINS
        self._ended = [prior_weight * hazard for hazard in _log_normal_hazards(typical_tokens, spread)]
        # Ends that are not counted yet, each with the number of reports after which it will be.
        self._held: deque[tuple[int, int]] = deque()
        self._num_reports = 0
        self.shares: PerBin
        self.surviving: list[float]
        self.mean = self.variance = 0.0
        self._tabulate()

    def came(self, from_bin: int, to_bin: int) -> None:
        """A trajectory that was in `from_bin` reports that it is in `to_bin` now."""
        self._num_reports += 1
        if from_bin < to_bin:
            self._count(from_bin, to_bin, 0.0)
        held = self._held
        while held and held[0][0] <= self._num_reports:
            in_bin = held.popleft()[1]
            self._count(in_bin, in_bin + 1, 1.0)

    def ended(self, in_bin: int, num_running: int) -> None:
        """A trajectory ended in this bin while `num_running` others ran."""
        self._held.append((self._num_reports + num_running, in_bin))

    def refresh(self) -> bool:
        """Update `shares`, `mean` and `variance` if enough is new to be worth the time. Returns whether it did."""
        if self._num_news < _REFRESH_AFTER:
            return False
        self._tabulate()
        return True

    def dump(self) -> dict[str, Any]:
        """What was learned."""
        held = [in_bin for _, in_bin in self._held]
        due = [due - self._num_reports for due, _ in self._held]
        return {"passed": self._passed, "ended": self._ended, "held": held, "due": due}

    def restore(self, dumped: dict[str, Any], goes_on: bool = False) -> None:
        """Restore a dump. Raises ArithmeticError, LookupError, TypeError or ValueError.

        Args:
            goes_on: trajectories that ran then will report again, so ends stay held back until they do.
        """
        passed, ended = [float(x) for x in dumped["passed"]], [float(x) for x in dumped["ended"]]
        if len(passed) != NUM_BINS or len(ended) != NUM_BINS:
            raise ValueError("another lattice")
        held = [dumped_bin(in_bin) for in_bin in dumped["held"]]
        due = [int(reports) for reports in dumped.get("due", ())]  # an older dump has none
        self._passed, self._ended = passed, ended
        self._num_reports = 0
        self._held = deque(zip(due, held, strict=True)) if goes_on and due else deque()
        if not self._held:
            for in_bin in held:
                self._count(in_bin, in_bin + 1, 1.0)
        self._tabulate()

    def _count(self, from_bin: int, to_bin: int, num_ended: float) -> None:
        """Count a trajectory in each of these bins, `to_bin` excluded; `num_ended` ended there."""
        self._num_news += to_bin - from_bin
        all_passed, all_ended, memory = self._passed, self._ended, self._memory
        for index in range(from_bin, to_bin):
            passed, ended = all_passed[index] + 1.0, all_ended[index] + num_ended
            if passed > memory:
                fade = memory / passed
                passed, ended = passed * fade, ended * fade
            all_passed[index], all_ended[index] = passed, ended

    def _tabulate(self) -> None:
        self._num_news = 0
        surviving, shares, self.surviving = 1.0, [], []
        for passed, ended in zip(self._passed, self._ended, strict=True):
            self.surviving.append(surviving)
            shares.append(surviving * ended / passed)
            surviving -= shares[-1]
        shares[-1] += surviving
        self.shares = np.array(shares)
        self.mean = mean = sum([index * share for index, share in enumerate(shares)])
        self.variance = sum([(index - mean) ** 2 * share for index, share in enumerate(shares)])


def _log_normal_hazards(median: float, spread: float) -> list[float]:
    law = NormalDist(math.log(median), spread)
    alive = [max(law.cdf(2 * law.mean - math.log(edge)), 1e-12) for edge in EDGES]
    return [min(1 - after / before, _MAX_PRIOR_HAZARD) for before, after in pairwise(alive)]
