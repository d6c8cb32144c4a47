"""Premises that a busy machine may break, such as "three turns are in flight now".

A process may stand still for ten seconds, and what an engine made meanwhile then comes in one lump: turns are over
before anyone saw them run. So a test plays a round with fresh turns, looks whether its premise came about, and if not
plays another one. What a round asserts must hold in every round, and is never tried again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

NUM_ROUNDS = 5
LOOK_EVERY_S = 0.02  # Asked without a pause, a server is busy with nothing else.
LOOK_TIMEOUT_S = 300.0  # Beyond all that a machine under load needs: then something hangs.


async def play_rounds(premise: str, play: Callable[[int], Awaitable[bool]]) -> None:
    """Play rounds until the premise came about in one of them.

    Args:
        premise: what a round needs, for the message: "a turn was in flight at the update".
        play: plays the round of this number, 0, 1, ..., with all that it asserts; gives whether the premise came about.
    """
    for number in range(NUM_ROUNDS):
        if await play(number):
            return
        print(f"round {number} did not count: it was not so that {premise}")
    pytest.fail(f"in none of {NUM_ROUNDS} rounds: {premise}")


async def came_about(holds: Callable[[], Awaitable[bool]], is_too_late: Callable[[], bool]) -> bool:
    """Wait until it holds; False as soon as it is too late for that, also if that was while it was asked."""
    async with asyncio.timeout(LOOK_TIMEOUT_S):
        while not is_too_late():
            if await holds():
                return not is_too_late()
            await asyncio.sleep(LOOK_EVERY_S)
    return False


def num_ended(turns: Iterable["asyncio.Task[Any]"]) -> int:
    """How many of these turns are over. Raises what one of them raised."""
    over = [turn for turn in turns if turn.done()]
    for turn in over:
        turn.result()
    return len(over)
