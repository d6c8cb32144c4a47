"""SIGKILL of the controller at each point of each step: the next one adopts, finishes or undoes, and leaves nothing.

Every point is tried, with a launcher and a gateway in memory (ports.py); test_crashes.py does the same to a process, at
random points, with real engines and a real gateway.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.controller.ports import Fuse, Killed, answering_engines
from tests.controller.script import memory_folder, run_in

__all__ = ["memory_folder"]

# Pairs of kills that are drawn, the second in the life of the second controller; every single one is tried.
NUM_PAIRS = 40


# Whether servers are stopped and launched, or fall asleep and wake.
SLEEPERS = pytest.mark.parametrize("asleep", [None, set()], ids=["stopped", "asleep"])


async def play(folder: Path, port: int, points: Sequence[int | None], asleep: set[str] | None) -> int:
    """The whole script, by controllers that die at these points of their lives; how many points the last one passed.

    A controller that has no such point any more goes on to the end.
    """
    run = run_in(folder, port, asleep)
    for point in (*points, None):
        fuse = Fuse(point)
        try:
            made = await run.live(fuse)
            break
        except Killed:
            run.check_devices()
    run.check_end()
    assert made.journal.state.failures == (), "no server did anything wrong"
    return fuse.num_passed


@SLEEPERS
@pytest.mark.timeout(600)
async def test_every_point_of_every_step(asleep: set[str] | None, memory_folder: Path) -> None:
    """One kill at each point of the script, among them both sides of each record and the middle of launches and stops:
    no device is held twice, no server stopped with turns, no working one forgotten, and the script comes to its end.
    """
    async with answering_engines(asleep) as port:
        num_points = await play(memory_folder / "whole", port, (), asleep)
        assert num_points > 150, "the script is shorter than it was; so is what is tried"
        # Steps are taken at the same time, so a run may have some points more than another.
        for point in range(1, num_points + 1):
            await play(memory_folder / f"at-{point}", port, (point,), asleep)


@SLEEPERS
@pytest.mark.timeout(600)
async def test_a_controller_that_cleans_up_is_killed_too(asleep: set[str] | None, memory_folder: Path) -> None:
    """Pairs of points: the second kill meets the controller that finds what the first has left."""
    dice = random.Random(1)
    async with answering_engines(asleep) as port:
        for number in range(NUM_PAIRS):
            points = dice.randint(1, 200), dice.randint(1, 30)
            await play(memory_folder / str(number), port, points, asleep)
