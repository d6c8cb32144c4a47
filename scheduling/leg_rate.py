"""How often legs begin at an engine, and how many may be sent before a slot is free for them.

A leg is on its way for a while (transit.py). If it is only sent once another has ended, the slot is empty for so long,
and where turns are short that is much of the time. So some are sent *ahead*, and wait in the engine: as many as end
meanwhile. They end at random, so two standard deviations of a Poisson count are added: a leg too many waits where it
will run anyway, a leg too few leaves a slot empty.

Not where each prefill costs a launch that all who run must wait for, and gathering pays (gathering.py): legs that are
ahead begin one by one, each with its own.
"""

from math import ceil, inf, sqrt

# Legs over which the rate is averaged: enough for a rate, few enough to follow a rollout's tail.
_NUM_LEGS = 16


class LegRate:
    """The legs that begin at one engine.

    Args:
        interval_s: mean time between them; infinite until enough have begun.
    """

    __slots__ = ("_last_at", "_mean_s", "_num_legs", "interval_s")

    def __init__(self) -> None:
        self.interval_s = inf
        self._mean_s = 0.0
        self._last_at = 0.0
        self._num_legs = 0

    def note(self, at: float) -> None:
        """A leg begins."""
        if self._num_legs:
            self._mean_s += (at - self._last_at - self._mean_s) / min(self._num_legs, _NUM_LEGS)
        self._last_at = at
        self._num_legs += 1
        if self._num_legs >= _NUM_LEGS:
            self.interval_s = self._mean_s

    def num_ahead(self, transit_s: float, slots: int) -> int:
        """Legs that may be sent before a slot is free; at most as many as there are slots.

        Args:
            transit_s: for how long a leg is on its way.
        """
        if not transit_s or self.interval_s == inf:
            return 0
        if self.interval_s * slots <= transit_s:
            return slots
        meanwhile = transit_s / self.interval_s
        return min(ceil(meanwhile + 2.0 * sqrt(meanwhile)), slots)
