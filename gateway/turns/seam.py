"""Finds a stop string that begins before a seam between two legs, where the later engine does not see its beginning."""

from collections.abc import Sequence


class Seam:
    """Looks for a stop string that begins before a seam and ends after it.

    Args:
        text: all text before the seam; it ends with `held`, which was not told yet.
    """

    def __init__(self, text: str, held: str, stops: Sequence[str], includes_stop: bool) -> None:
        self._stops = stops
        self._includes_stop = includes_stop
        self._reach = max(map(len, stops)) - 1
        self._size = min(self._reach, len(text))
        self._buffer = text[len(text) - self._size :]
        self._held = held
        self._num_told = max(self._size - len(held), 0)
        self._stop_from = self._size  # its engine has looked for those that end before the seam
        self.is_passed = False

    def free_at_once(self) -> str:
        """The held text that is too far from the seam to be part of a stop string."""
        return self._held[: max(len(self._held) - self._size, 0)]

    def move(self, held: str, num_stoppable: int) -> None:
        """The leg after the seam has broken off, too: from here on, the seam is after all text that was not told. A
        stop string that ends before the last `num_stoppable` characters does not count."""
        self._buffer += held[len(self._buffer) - self._num_told :]
        self._size = len(self._buffer)
        self._stop_from = max(self._stop_from, self._size - num_stoppable)

    def feed(self, text: str, may_stop: bool, is_last: bool, left_out: str) -> tuple[str, str | None]:
        """The text that may be told now, and the stop string that ended it.

        Args:
            may_stop: a stop string that ends in this text counts.
            left_out: the stop string that the later engine found behind this text, which ends here; "" if none.
        """
        self._buffer += text + left_out
        if not may_stop:
            self._stop_from = len(self._buffer)
        firsts = [(stop, max(self._stop_from - len(stop) + 1, 0)) for stop in self._stops]
        found = [(at, stop) for stop, first in firsts if (at := self._buffer.find(stop, first)) >= 0]
        if found:
            at, stop = min(found, key=_end)  # of equals the first in the list, as engines do
            self.is_passed = True
            return self._buffer[self._num_told : at + (len(stop) if self._includes_stop else 0)], stop
        if not is_last and len(self._buffer) < self._size + self._reach:
            return "", None
        self.is_passed = True
        return self._buffer[self._num_told : len(self._buffer) - len(left_out)], None


def _end(found: tuple[int, str]) -> int:
    at, stop = found
    return at + len(stop)
