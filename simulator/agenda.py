"""Coming events in virtual time; events at the same instant happen in the order in which they were noted."""

from collections.abc import Callable
from heapq import heappop, heappush


class Agenda:
    """A heap of coming events, and the current time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[str], None], str]] = []
        self._serial = 0

    def note(self, at: float, happens: Callable[[str], None], name: str = "") -> None:
        """At time `at`, call `happens(name)`."""
        self._serial += 1
        heappush(self._heap, (at, self._serial, happens, name))

    def go_on(self) -> None:
        """Advance to the next event and run it."""
        self.now, _, happens, name = heappop(self._heap)
        happens(name)
