"""SIGKILL of the controller at each point of each step: the next one adopts, finishes or undoes, and leaves nothing.

Every point is tried, with a launcher and a gateway in memory (ports.py); test_crashes.py does the same to a process, at
random points, with real engines and a real gateway.
"""

import asyncio
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from controller.fleet_file import FleetFile
from controller.loop import Controller
from controller.steps import is_reached
from tests.controller.fleet_site import fleet_file
from tests.controller.ports import Floor, Fuse, FusedJournal, Killed, MemoryGateway, MemoryLauncher, answering_engines

TIMEOUT_S = 60.0
# Pairs of kills that are drawn, the second in the life of the second controller; every single one is tried.
NUM_PAIRS = 40


@dataclass(frozen=True)
class Wish:
    """What an operator asks for; without `is_awaited`, only until the first drain, and then for the next."""

    tps: tuple[int, ...]
    is_awaited: bool = True


# The first fleet, another shape and back, and a change that is taken back half way.
SCRIPT = (Wish((1, 1)), Wish((2,)), Wish((1, 1)), Wish((2,), is_awaited=False), Wish((1, 1)))


@dataclass
class Run:
    """A script as far as it has come, over the lives of several controllers."""

    fleet: FleetFile
    floor: Floor
    wishes: list[Wish] = field(default_factory=lambda: list(SCRIPT))

    async def live(self, fuse: Fuse) -> None:
        """One controller's life. Raises Killed."""
        journal = FusedJournal(self.fleet.state_dir / "journal.jsonl", fuse)
        gateway = MemoryGateway(self.floor, fuse)
        launcher = MemoryLauncher(self.floor, fuse)
        made = Controller(self.fleet, launcher, gateway, journal, gateway.move)  # type: ignore[arg-type]
        running = asyncio.create_task(made.run())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not made.has_looked:
                    await self._go_on(running)
                while self.wishes:
                    await self._come_true(self.wishes[0], made, running)
                    self.wishes.pop(0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            journal.close()

    async def _come_true(self, wish: Wish, made: Controller, running: "asyncio.Task[None]") -> None:
        if sorted(one.tp for one in made.journal.state.wanted) != sorted(wish.tps):
            made.ask(made.will.scaled(wish.tps, made.in_sight()))
        while not ((_is_quiet(made) and not self._has_begun()) if wish.is_awaited else self._has_begun()):
            await self._go_on(running)
            self._check_devices()

    def _has_begun(self) -> bool:
        return any(one.is_cordoned for one in self.floor.members.values())

    async def _go_on(self, running: "asyncio.Task[None]") -> None:
        await asyncio.sleep(0)
        if running.done():
            running.result()

    def _check_devices(self) -> None:
        held = [device for server in self.floor.alive() for device in server.spec.devices]
        assert len(held) == len(set(held)), "a device is held twice"

    def check_end(self) -> None:
        """What is alive is what is wanted, and the gateway has just that."""
        alive = self.floor.alive()
        assert sorted(one.spec.tp for one in alive) == sorted(SCRIPT[-1].tps)
        assert set(self.floor.members) == {one.url for one in alive}, "the gateway has others than those alive"
        assert not any(one.is_cordoned for one in self.floor.members.values())
        self._check_devices()


def _is_quiet(made: Controller) -> bool:
    """As wanted, and nothing is left to be forgotten."""
    state = made.journal.state
    is_kept = set(state.urls) == {one.server_id for one in state.wanted}
    return is_reached(state.wanted, made.seen) and state.wanted == state.proven and is_kept


async def play(folder: Path, port: int, points: Sequence[int | None]) -> int:
    """The whole script, by controllers that die at these points of their lives; how many points the last one passed.

    A controller that has no such point any more goes on to the end.
    """
    limits = {"observe_interval_s": 0.001, "stop_grace_s": 0.0}
    fleet = fleet_file(folder, "http://127.0.0.1:9", first=SCRIPT[0].tps, limits=limits)
    run = Run(fleet, Floor(("cpu0", "cpu1"), port))
    for point in (*points, None):
        fuse = Fuse(point)
        try:
            await run.live(fuse)
            break
        except Killed:
            run._check_devices()
    run.check_end()
    return fuse.num_passed


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: the disk is no part of this, and a busy one takes 0.1 s a record."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.mark.timeout(600)
async def test_every_point_of_every_step(folder: Path) -> None:
    """One kill at each point of the script, among them both sides of each record and the middle of launches and stops:
    no device is held twice, no server stopped with turns, no working one forgotten, and the script comes to its end.
    """
    async with answering_engines() as port:
        num_points = await play(folder / "whole", port, ())
        assert num_points > 150, "the script is shorter than it was; so is what is tried"
        # Steps are taken at the same time, so a run may have some points more than another.
        for point in range(1, num_points + 1):
            await play(folder / f"at-{point}", port, (point,))


@pytest.mark.timeout(600)
async def test_a_controller_that_cleans_up_is_killed_too(folder: Path) -> None:
    """Pairs of points: the second kill meets the controller that finds what the first has left."""
    dice = random.Random(1)
    async with answering_engines() as port:
        for number in range(NUM_PAIRS):
            points = dice.randint(1, 200), dice.randint(1, 30)
            await play(folder / str(number), port, points)
