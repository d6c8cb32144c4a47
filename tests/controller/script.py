"""A script of wishes that a controller goes through, above a launcher and a gateway in memory, over several lives."""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from controller.fleet_file import FleetFile
from controller.loop import Controller
from controller.steps import is_reached
from tests.controller.fleet_site import fleet_file
from tests.controller.ports import Floor, Fuse, FusedJournal, MemoryDemand, MemoryGateway, MemoryLauncher, Points

TIMEOUT_S = 60.0


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

    async def live(self, fuse: Fuse, to_gateway: Points | None = None, to_launcher: Points | None = None) -> Controller:
        """One controller's life, to the end of the script. Raises Killed.

        Args:
            to_gateway, to_launcher: told of points on the way there, in place of the fuse.
        """
        journal = FusedJournal(self.fleet.state_dir / "journal.jsonl", fuse)
        gateway = MemoryGateway(self.floor, to_gateway or fuse)
        launcher = MemoryLauncher(self.floor, to_launcher or fuse)
        demand = MemoryDemand(self.floor)
        made = Controller(self.fleet, launcher, gateway, demand, journal, gateway.move)  # type: ignore[arg-type]
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
        return made

    async def _come_true(self, wish: Wish, made: Controller, running: "asyncio.Task[None]") -> None:
        if sorted(one.tp for one in made.journal.state.wanted) != sorted(wish.tps):
            made.ask(made.desired.scaled(wish.tps, made.observed()))
        while not ((_is_quiet(made) and not self._has_begun()) if wish.is_awaited else self._has_begun()):
            await self._go_on(running)
            self.check_devices()

    def _has_begun(self) -> bool:
        return any(one.is_cordoned for one in self.floor.members.values())

    async def _go_on(self, running: "asyncio.Task[None]") -> None:
        await asyncio.sleep(0)
        if running.done():
            running.result()

    def check_devices(self) -> None:
        held = [device for server in self.floor.awake() for device in server.spec.devices]
        assert len(held) == len(set(held)), "a device is held twice"

    def check_end(self) -> None:
        """What is awake is wanted, and the gateway has just that; of sizes that may sleep the rest sleeps."""
        awake = self.floor.awake()
        assert sorted(one.spec.tp for one in awake) == sorted(SCRIPT[-1].tps)
        assert set(self.floor.members) == {one.url for one in awake}, "the gateway has others than those awake"
        asleep = [one.spec.tp for one in self.floor.alive() if one not in awake]
        assert asleep == [tp for tp in self.fleet.sleep.tp_sizes if tp not in SCRIPT[-1].tps], "an orphan is left"
        assert not any(one.is_cordoned for one in self.floor.members.values())
        self.check_devices()


def run_in(folder: Path, port: int, asleep: set[str] | None = None) -> Run:
    """The whole script, nothing of it done.

    Args:
        port: that of `answering_engines`.
        asleep: what that was given, for a fleet whose servers sleep.
    """
    limits = {"observe_interval_s": 0.001, "stop_grace_s": 0.0}
    sleep = {"tp_sizes": () if asleep is None else (1, 2)}
    fleet = fleet_file(folder, "http://127.0.0.1:9", first=SCRIPT[0].tps, limits=limits, sleep=sleep)
    sleeping = set() if asleep is None else asleep
    sleeping.clear()
    return Run(fleet, Floor(("cpu0", "cpu1"), port, sleeping))


def _is_quiet(made: Controller) -> bool:
    """As wanted, and nothing is left to be forgotten."""
    state = made.journal.state
    is_kept = set(state.urls) == {one.server_id for one in state.wanted}
    return is_reached(state.wanted, made.seen) and state.wanted == state.proven and is_kept


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: the disk is no part of this, and a busy one takes 0.1 s a record."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)
