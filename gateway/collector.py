"""Collects garbage by the clock, a little at a time.

Python's own collector counts allocations minus deallocations. A turn replaces as many of its trajectory's objects as it
frees, so that count hardly moves while new objects pile up. With 10,000 live trajectories, a collection of the youngest
generation came every 5,000 turns and stopped the event loop for 59 ms. Turns leave no cycles (docs/data-path.md), so
those collections found nothing.
"""

import asyncio
import gc

# Collections of the youngest generation from one of the middle generation to the next: most cycles of requests that
# failed are garbage by then.
_MIDDLE_EVERY = 5
# A full collection takes 0.1 s with 10,000 live trajectories. It finds the cycles that lived longer, such as those of
# turns that failed after minutes.
_FULL_EVERY_S = 600.0


class Collector:
    """Runs all collections of this process, from an event loop.

    Args:
        young_every_s: seconds between collections of the youngest generation.
        middle_every: after this many of them, the middle generation is collected too.
        full_every_s: seconds between full collections.
    """

    def __init__(
        self,
        young_every_s: float,
        middle_every: int = _MIDDLE_EVERY,
        full_every_s: float = _FULL_EVERY_S,
    ) -> None:
        self._young_every_s = young_every_s
        self._middle_every = middle_every
        self._full_every_s = full_every_s
        self._loop = asyncio.get_running_loop()
        self._num_collections = 0
        self._full_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Exempt all present objects from collection, and begin."""
        gc.freeze()
        gc.disable()
        self._full_at = self._loop.time() + self._full_every_s
        self._timer = self._loop.call_later(self._young_every_s, self._collect)

    def stop(self) -> None:
        """Leave collections to Python again."""
        if self._timer is not None:
            self._timer.cancel()
        gc.enable()

    def _collect(self) -> None:
        self._num_collections += 1
        if self._loop.time() >= self._full_at:
            gc.collect()
            self._full_at = self._loop.time() + self._full_every_s
        else:
            gc.collect(1 if self._num_collections % self._middle_every == 0 else 0)
        self._timer = self._loop.call_later(self._young_every_s, self._collect)
