"""The overview: it takes a bounded share of the gateway's time, and lets turns through meanwhile."""

import asyncio

import pytest

from gateway.dashboard.overview import Overview
from gateway.metrics import Metrics
from gateway.passes import Passes
from gateway.state.driver import Driver
from gateway.state.eventlog import EventLog
from gateway.state.ledger import Ledger
from scheduling.limits import Limits
from scheduling.policy import HEDDLE
from scheduling.scheduler import Scheduler
from store.memory import MemoryStore
from store.settings import StoreSettings
from tests.scheduling.fleet import record


class Steps:
    """A clock that goes on by `step_s` whenever it is read."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 1000.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def overview(clock: Steps, num_trajectories: int) -> Overview:
    ledger = Ledger(MemoryStore(StoreSettings()), max_turns_kept=10)
    for number in range(num_trajectories):
        ledger.save(record(f"t-{number}", "A", created_at=clock.now))
    driver = Driver(
        Scheduler(HEDDLE, Limits(), at=clock.now), clock, ledger, EventLog(None, 1), lambda _: None, lambda _: None,
        lambda _: None,
    )  # fmt: skip
    return Overview(clock, driver, ledger, Metrics(), Passes())


@pytest.mark.parametrize(
    ("step_s", "num_trajectories", "valid_s"), [(0.0, 10, 1.0), (0.1, 2_000, 40.0)], ids=["short", "long"]
)
async def test_a_look_is_shown_for_a_second_or_longer_if_it_took_long(
    step_s: float, num_trajectories: int, valid_s: float
) -> None:
    """2,000 trajectories come in five slices, and there are three more steps of 0.1 s: 40 s, at 2 % of the time."""
    clock = Steps(step_s)
    looked = overview(clock, num_trajectories)
    first = await looked.look()
    clock.now += 0.9 * valid_s
    assert await looked.look() is first
    clock.now += 0.2 * valid_s
    assert (await looked.look())["at"] > first["at"] + valid_s


async def test_others_run_during_a_look() -> None:
    """Once for each 400 trajectories."""
    looked = overview(Steps(0.0), 4_000)
    look = asyncio.create_task(looked.look())
    num_turns = 0
    while not look.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns >= 10


async def test_history_is_kept_while_nobody_looks() -> None:
    """The load is sampled by itself, so that who opens the page sees what was."""
    looked = overview(Steps(0.0), 1)
    sampling = asyncio.create_task(looked.keep_samples())
    await asyncio.sleep(0)
    sampling.cancel()
    assert len((await looked.look())["history"]["at"]) == 2, "the sample, and now"
