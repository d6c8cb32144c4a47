"""The gateway's clock: seconds since the epoch, so that records outlive the process; it never runs backwards."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""The current time."""


def started_clock() -> Clock:
    """A clock that starts at the wall clock's time and advances with the monotonic clock.

    It is a function because a turn reads the time five times, and calling an object costs twice as much.
    """
    monotonic = time.monotonic
    offset_s = time.time() - monotonic()
    return lambda: offset_s + monotonic()
