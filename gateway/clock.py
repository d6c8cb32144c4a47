"""The gateway's clock: seconds since the epoch, so that records outlive the process, and never backwards."""

import time


class Clock:
    """Starts at the wall clock's time and goes on with the monotonic one."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        """Now."""
        return self._offset_s + time.monotonic()
