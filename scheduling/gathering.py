"""When a leg that an engine may run is sent there: at once, or together with the next ones.

A step that prefills takes longer by the engine's `prefill_launch_s`, for everyone who decodes there, whether it
prefills one short prompt or ten. Where turns are short, most steps prefill, and legs that are sent together pay once.
If legs begin at a rate and are gathered for T seconds each time, those that run lose `launch_s * num_running / T` per
second, and those that gather `rate * T / 2`. The sum is least at `T = sqrt(2 * launch_s * num_running / rate)`, the
economic order quantity (Harris 1913). A leg is sent at once if waiting for one more costs it more than that would save.
"""

from math import inf, sqrt

# Legs over which the rate at an engine is averaged: enough for a rate, few enough to follow a rollout's tail.
_NUM_LEGS = 16


class Gathering:
    """The legs of one engine."""

    __slots__ = ("_interval_s", "_last_at", "_mean_s", "_num_legs", "_sends_at")

    def __init__(self) -> None:
        self._sends_at = 0.0  # when those that gather now are sent, or the last ones were
        self._interval_s = inf  # between legs that begin; infinite until enough have
        self._mean_s = 0.0
        self._last_at = 0.0
        self._num_legs = 0

    def pays(self, launch_s: float, num_running: int) -> bool:
        """Whether so many legs lose more by a step that takes longer than one leg loses that waits for the next."""
        return launch_s * num_running > self._interval_s

    def send_at(self, at: float, launch_s: float, num_running: int, max_s: float) -> float:
        """When to send a leg that may begin now.

        Args:
            launch_s: by how much the step that prefills it takes longer, beside its own tokens; 0: it fills a step.
            num_running: legs that would wait for that step.
            max_s: for no longer than this.
        """
        self._note(at)
        if at < self._sends_at:
            return self._sends_at if launch_s else at
        if not self.pays(launch_s, num_running):
            return at
        self._sends_at = at + min(sqrt(2.0 * launch_s * num_running * self._interval_s), max_s)
        return self._sends_at

    def _note(self, at: float) -> None:
        if self._num_legs:
            self._mean_s += (at - self._last_at - self._mean_s) / min(self._num_legs, _NUM_LEGS)
        self._last_at = at
        self._num_legs += 1
        if self._num_legs >= _NUM_LEGS:
            self._interval_s = self._mean_s
