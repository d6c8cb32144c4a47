"""What will happen, by virtual time; of what happens at one instant, first what was noted first."""

from collections.abc import Callable
from heapq import heappop, heappush


class Agenda:
    """A heap of things to do, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[str], None], str]] = []
        self._serial = 0

    def note(self, at: float, happens: Callable[[str], None], name: str = "") -> None:
        """At that time, call `happens(name)`."""
        self._serial += 1
        heappush(self._heap, (at, self._serial, happens, name))

    def go_on(self) -> None:
        """Do what comes next."""
        self.now, _, happens, name = heappop(self._heap)
        happens(name)
