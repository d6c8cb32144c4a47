"""A script of changes that controllers carry out, on a launcher and a gateway in memory, over several of their
lives."""

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
from tests.controller.ports import (
    Cluster,
    Fuse,
    FusedJournal,
    MemoryDemand,
    MemoryGateway,
    MemoryLauncher,
    Points,
    Watched,
)

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Change:
    """The sizes that an operator asks for. Without `is_awaited`, the next change follows at the first drain."""

    tps: tuple[int, ...]
    is_awaited: bool = True


# The first fleet, another shape and back, and a change that is revoked half way.
SCRIPT = (Change((1, 1)), Change((2,)), Change((1, 1)), Change((2,), is_awaited=False), Change((1, 1)))


@dataclass
class Run:
    """The script's progress over the lives of several controllers."""

    fleet: FleetFile
    cluster: Cluster
    changes: list[Change] = field(default_factory=lambda: list(SCRIPT))

    async def run_controller(
        self, fuse: Fuse, to_gateway: Points | None = None, to_launcher: Points | None = None
    ) -> Controller:
        """Run one controller to the end of the script. Raises Killed.

        Args:
            to_gateway, to_launcher: called at points on the way there, in place of the fuse.
        """
        changed = self.cluster.changed
        journal = FusedJournal(self.fleet.state_dir / "journal.jsonl", Watched(fuse, changed))
        gateway = MemoryGateway(self.cluster, Watched(to_gateway or fuse, changed))
        launcher = MemoryLauncher(self.cluster, Watched(to_launcher or fuse, changed))
        demand = MemoryDemand(self.cluster)
        made = Controller(self.fleet, launcher, gateway, demand, journal)  # type: ignore[arg-type]
        running = asyncio.create_task(made.run())
        running.add_done_callback(lambda _: changed.set())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not made.has_observed:
                    await self._next_change(running)
                while self.changes:
                    await self._carry_out(self.changes[0], made, running)
                    self.changes.pop(0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            journal.close()
        return made

    async def _carry_out(self, change: Change, made: Controller, running: "asyncio.Task[None]") -> None:
        if sorted(one.tp for one in made.journal.state.wanted) != sorted(change.tps):
            made.ask(made.desired.scaled(change.tps, made.observed()))
        while not ((_is_quiet(made) and not self._is_draining()) if change.is_awaited else self._is_draining()):
            await self._next_change(running)

    def _is_draining(self) -> bool:
        return any(one.is_cordoned for one in self.cluster.members.values())

    async def _next_change(self, running: "asyncio.Task[None]") -> None:
        """Return in the first turn of the event loop after something changed. To look in every turn took most of the
        CPU time, and nine in ten found nothing new."""
        await self.cluster.changed.wait()
        self.cluster.changed.clear()
        if running.done():
            running.result()
        self.check_devices()

    def check_devices(self) -> None:
        held = [device for server in self.cluster.awake() for device in server.spec.devices]
        assert len(held) == len(set(held)), "a device is held twice"

    def check_end(self) -> None:
        """The gateway has exactly the servers that are awake, and they are the wanted ones; servers of other sizes that
        may sleep are asleep."""
        awake = self.cluster.awake()
        assert sorted(one.spec.tp for one in awake) == sorted(SCRIPT[-1].tps)
        assert set(self.cluster.members) == {one.url for one in awake}, "the gateway has others than those awake"
        asleep = [one.spec.tp for one in self.cluster.alive() if one not in awake]
        assert asleep == [tp for tp in self.fleet.sleep.tp_sizes if tp not in SCRIPT[-1].tps], "an orphan is left"
        assert not any(one.is_cordoned for one in self.cluster.members.values())
        self.check_devices()


def run_in(folder: Path, port: int, asleep: set[str] | None = None, changed: asyncio.Event | None = None) -> Run:
    """The whole script, with nothing done yet.

    Args:
        port: of `answering_engines`.
        asleep, changed: those given to `answering_engines`, for a fleet whose servers sleep.
    """
    limits = {"observe_interval_s": 0.001, "stop_grace_s": 0.0, "back_off_s": 0.0}
    sleep = {"tp_sizes": () if asleep is None else (1, 2)}
    fleet = fleet_file(folder, "http://127.0.0.1:9", first=SCRIPT[0].tps, limits=limits, sleep=sleep)
    sleeping = set() if asleep is None else asleep
    sleeping.clear()
    return Run(fleet, Cluster(("cpu0", "cpu1"), port, sleeping, changed or asyncio.Event()))


def _is_quiet(made: Controller) -> bool:
    """The fleet is as wanted, and nothing is left to forget."""
    state = made.journal.state
    is_kept = set(state.urls) == {one.server_id for one in state.wanted}
    return is_reached(state.wanted, made.seen) and state.wanted == state.proven and is_kept


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory if there is such a place: the tests do not concern the disk, and a busy one takes 0.1 s a record."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)
