"""SIGKILL of the controller at each point of each step: the next one adopts, finishes or undoes, and leaves nothing.

Every point is tried, with a launcher and a gateway in memory (ports.py). test_crashes.py kills a process at random
points, with real processes of engines and a real gateway.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.controller.ports import Fuse, Killed, answering_engines
from tests.controller.script import memory_folder, run_in

__all__ = ["memory_folder"]

# Random pairs of kills, the second one of the second controller; every single kill is tried.
NUM_PAIRS = 40


# Servers are stopped and launched, or fall asleep and wake.
SLEEPERS = pytest.mark.parametrize("asleep", [None, set()], ids=["stopped", "asleep"])


async def play(
    folder: Path, port: int, points: Sequence[int | None], asleep: set[str] | None, changed: asyncio.Event
) -> int:
    """Play the whole script with controllers that die at these points of their lives; gives the last one's number of
    points.

    A controller that never gets to its point runs to the end.
    """
    run = run_in(folder, port, asleep, changed)
    for point in (*points, None):
        fuse = Fuse(point)
        try:
            made = await run.run_controller(fuse)
            break
        except Killed:
            run.check_devices()
    run.check_end()
    assert made.journal.state.failures == (), "no server did anything wrong"
    return fuse.num_passed


@SLEEPERS
@pytest.mark.timeout(600)
async def test_a_kill_at_any_point_is_recovered_from(asleep: set[str] | None, memory_folder: Path) -> None:
    """One kill at each point of the script, including both sides of each record and the middle of launches and stops:
    no device is held twice, no server stopped with turns, no working one forgotten, and the script is finished."""
    changed = asyncio.Event()
    async with answering_engines(asleep, changed) as port:
        num_points = await play(memory_folder / "whole", port, (), asleep, changed)
        assert num_points > 150, "the script is shorter than it was, and so is the test"
        # Steps run concurrently, so one run may have some points more than another.
        for point in range(1, num_points + 1):
            await play(memory_folder / f"at-{point}", port, (point,), asleep, changed)


@SLEEPERS
@pytest.mark.timeout(600)
async def test_a_second_kill_during_the_recovery_is_recovered_from(
    asleep: set[str] | None, memory_folder: Path
) -> None:
    """The second kill ends the controller that finds what the first one left."""
    dice = random.Random(1)
    changed = asyncio.Event()
    async with answering_engines(asleep, changed) as port:
        for number in range(NUM_PAIRS):
            points = dice.randint(1, 200), dice.randint(1, 30)
            await play(memory_folder / str(number), port, points, asleep, changed)
