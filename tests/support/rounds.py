"""Premises that a busy machine may break, such as "three turns are in flight now".

A process may stall for ten seconds, and the output of an engine then arrives all at once: turns are over before anyone
saw them run. A test therefore plays a round with fresh turns, checks whether its premise came about, and if not, plays
another one. Assertions of a round must hold in every round and are never retried.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

NUM_ROUNDS = 5
LOOK_EVERY_S = 0.02  # Polled without a pause, a server does nothing else.
LOOK_TIMEOUT_S = 300.0  # More than a machine under load ever needs: beyond it, something hangs.


async def play_rounds(premise: str, play: Callable[[int], Awaitable[bool]]) -> None:
    """Play rounds until the premise came about in one of them.

    Args:
        premise: what a round needs, for the message: "a turn was in flight at the update".
        play: plays the round with this number (0, 1, ...) and its assertions; returns whether the premise came about.
            If a busy machine may miss the moment, a later round is slower.
    """
    for number in range(NUM_ROUNDS):
        if await play(number):
            return
        print(f"round {number} did not count, because its premise failed: {premise}")
    pytest.fail(f"in none of {NUM_ROUNDS} rounds: {premise}")


async def came_about(holds: Callable[[], Awaitable[bool]], is_too_late: Callable[[], bool]) -> bool:
    """Wait until `holds`; False as soon as `is_too_late`, also if that happened during the check."""
    async with asyncio.timeout(LOOK_TIMEOUT_S):
        while not is_too_late():
            if await holds():
                return not is_too_late()
            await asyncio.sleep(LOOK_EVERY_S)
    return False


def num_ended(turns: Iterable["asyncio.Task[Any]"]) -> int:
    """How many of these turns have ended. Raises what one of them raised."""
    over = [turn for turn in turns if turn.done()]
    for turn in over:
        turn.result()
    return len(over)
