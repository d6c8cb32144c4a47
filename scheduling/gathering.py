"""When a leg that an engine may run is sent there: at once, or together with the next ones.

A step that prefills takes longer by the engine's `prefill_launch_s`, for everyone who decodes there, whether it
prefills one short prompt or ten. Where turns are short, most steps prefill, and legs that are sent together pay once.
If legs begin at a rate and are gathered for T seconds each time, those that run lose `launch_s * num_running / T` per
second, and those that gather `rate * T / 2`. The sum is least at `T = sqrt(2 * launch_s * num_running / rate)`, the
economic order quantity (Harris 1913). A leg is sent at once if waiting for one more costs it more than that would save.
"""

from math import sqrt


class Gathering:
    """The legs of one engine."""

    __slots__ = ("_sends_at",)

    def __init__(self) -> None:
        self._sends_at = 0.0  # when those that gather now are sent, or the last ones were

    def send_at(self, at: float, launch_s: float, num_running: int, interval_s: float, max_s: float) -> float:
        """When to send a leg that may begin now.

        Args:
            launch_s: by how much the step that prefills it takes longer, beside its own tokens; 0: it fills a step.
            num_running: legs that would wait for that step.
            interval_s: between legs that begin here; infinite: unknown.
            max_s: for no longer than this.
        """
        if at < self._sends_at:
            return self._sends_at if launch_s else at
        saved_s = launch_s * num_running
        if saved_s <= interval_s:
            return at
        self._sends_at = at + min(sqrt(2.0 * saved_s * interval_s), max_s)
        return self._sends_at
