"""The gateway's clock: seconds since the epoch, so that records outlive the process, and never backwards."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Now."""


def started_clock() -> Clock:
    """Starts at the wall clock's time and goes on with the monotonic one.

    A function, for a turn asks five times what time it is, and to call an object costs twice as much.
    """
    monotonic = time.monotonic
    offset_s = time.time() - monotonic()
    return lambda: offset_s + monotonic()
