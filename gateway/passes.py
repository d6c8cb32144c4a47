"""Passes over many trajectories: what lists, sums and reports read. Turns go first.

A pass is made in slices, one slice of all passes at a time, and after each the event loop is left to others for as long
as the slice took. Without that, five clients that asked for the demand of 10,000 trajectories every second kept each
turn waiting for five slices at every step.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


class Passes:
    """All passes of one gateway."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def over(self, items: Iterable[_Item], num_at_once: int, look: Callable[[Sequence[_Item]], None]) -> None:
        """Call `look` with slices of the items that there are now, in their order.

        Args:
            num_at_once: items of a slice, for which turns wait: some milliseconds.
        """
        all_items = list(items)
        time = asyncio.get_running_loop().time
        for start in range(0, len(all_items), num_at_once):
            async with self._one_at_a_time:
                began_at = time()
                look(all_items[start : start + num_at_once])
                if start + num_at_once < len(all_items):
                    await asyncio.sleep(time() - began_at)
