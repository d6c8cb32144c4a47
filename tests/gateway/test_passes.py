"""What reads all trajectories, a page, a rollout's sum, the demand, leaves the event loop to turns meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from gateway.api.trajectories import Trajectories
from gateway.config import load_settings
from gateway.demand import Demand
from gateway.passes import Passes
from gateway.state.driver import Driver
from gateway.state.eventlog import EventLog
from gateway.state.ledger import Ledger
from predictor.named import predictor_named
from scheduling.policy import POLICIES
from scheduling.scheduler import Scheduler
from scheduling.types import TrajectoryRecord, TrajectoryState
from store.memory import MemoryStore
from store.settings import StoreSettings

NUM_TRAJECTORIES = 20_000
NOW = 1_000.0


class CountedPasses(Passes):
    """Counts them."""

    num_passes = 0

    async def over(self, *given: Any) -> None:
        self.num_passes += 1
        await super().over(*given)


@dataclass
class Parts:
    ledger: Ledger
    passes: CountedPasses
    trajectories: Trajectories
    demand: Demand


def parts(num_trajectories: int) -> Parts:
    """Of a gateway that knows so many trajectories, every tenth of them finished, in two rollouts."""
    settings, store, passes = load_settings(), MemoryStore(StoreSettings()), CountedPasses()
    ledger = Ledger(store, max_turns_kept=10)
    for number in reversed(range(num_trajectories)):
        ledger.save(record(number, TrajectoryState.ACTIVE if number % 10 else TrajectoryState.FINISHED))

    def nothing(_: Any) -> None:
        pass

    scheduler = Scheduler(POLICIES["heddle"], settings.limits(), [], NOW)
    driver = Driver(scheduler, lambda: NOW, ledger, EventLog(None, 2**20), nothing, nothing, nothing)
    predictor = predictor_named("tabular")
    trajectories = Trajectories(settings, lambda: NOW, driver, ledger, store, predictor, passes)
    return Parts(ledger, passes, trajectories, Demand(lambda: NOW, driver, ledger, passes))


def record(number: int, state: TrajectoryState) -> TrajectoryRecord:
    rollout_id = f"r{number % 2}"
    return TrajectoryRecord(f"t{number:06d}", "", rollout_id, state, None, 10, 5, 1, 20.0, 1.0, 2.0 + number)


async def iterations_during(work: Awaitable[Any]) -> tuple[Any, int]:
    """What it returns, and how often another task of the event loop had its turn meanwhile."""
    num_iterations = 0

    async def count() -> None:
        nonlocal num_iterations
        while True:
            await asyncio.sleep(0)
            num_iterations += 1

    counting = asyncio.create_task(count())
    returned = await work
    counting.cancel()
    with suppress(asyncio.CancelledError):
        await counting
    return returned, num_iterations


READS: dict[str, Callable[[Parts], Awaitable[Any]]] = {
    "page": lambda parts: parts.trajectories.page(None, None, None, 1_000),
    "rollout": lambda parts: parts.trajectories.rollout("r1"),
    "demand": lambda parts: parts.demand.look(),
}


@pytest.mark.parametrize("what", READS)
async def test_reading_many_trajectories_leaves_the_loop_to_others(what: str) -> None:
    """A page at 200,000 trajectories, and a rollout's sum, stopped the loop for as long as they took."""
    _, num_iterations = await iterations_during(READS[what](parts(NUM_TRAJECTORIES)))
    assert num_iterations > 4


async def test_an_abort_leaves_the_loop_to_others_after_every_twenty() -> None:
    """Where turns run, aborting a hundred trajectories stopped the loop for 50 ms."""
    aborted, num_iterations = await iterations_during(parts(2_000).trajectories.abort_rollout("r1"))
    assert aborted == 1_000 and num_iterations > 40


async def test_slices_of_several_passes_come_one_at_a_time() -> None:
    """Turns wait for one slice at each step, however many clients ask."""
    passes, num_iterations = Passes(), 0
    seen: list[tuple[int, int]] = []

    async def count() -> None:
        nonlocal num_iterations
        while True:
            await asyncio.sleep(0)
            num_iterations += 1

    async def one_pass(number: int) -> None:
        await passes.over(range(10), 2, lambda items: seen.append((num_iterations, number)))

    counting = asyncio.create_task(count())
    await asyncio.gather(*map(one_pass, range(5)))
    counting.cancel()
    assert sorted(number for _, number in seen) == sorted([*range(5)] * 5)
    assert len({iteration for iteration, _ in seen}) >= 20, "the last slice of a pass may share one with the next"


async def test_a_pass_has_all_items_in_their_order() -> None:
    """Those that there are when it begins; the last slice has what is left."""
    items, seen = list(range(7)), []

    def look(some: Sequence[int]) -> None:
        seen.append(list(some))
        items.append(99)

    await Passes().over(items, 3, look)
    assert seen == [[0, 1, 2], [3, 4, 5], [6]]


async def test_all_who_ask_for_the_demand_meanwhile_share_one_pass() -> None:
    """Five who asked at once had five passes, for each of which turns waited. One that runs already is not shared: it
    may have passed what changed since."""
    known = parts(2_000)
    first = asyncio.create_task(known.demand.look())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the pass of the first has begun
    known.ledger.save(record(1, TrajectoryState.FINISHED))
    others = await asyncio.gather(*(known.demand.look() for _ in range(4)))
    assert {len(orjson.loads(orjson.dumps(other["trajectories"]))) for other in others} == {1_799}
    assert len(orjson.loads(orjson.dumps((await first)["trajectories"]))) >= 1_799
    assert known.passes.num_passes == 2


async def test_a_page_shows_only_what_it_was_asked_for() -> None:
    """Also of trajectories that end while it is written, and its `last_id` leads on all the same."""
    known = parts(NUM_TRAJECTORIES)
    asked = asyncio.create_task(known.trajectories.page("r1", "active", "t000500", 1_000))
    await asyncio.sleep(0)
    for number in range(0, NUM_TRAJECTORIES, 3):
        known.ledger.save(record(number, TrajectoryState.FINISHED))
    page = orjson.loads(await asked)
    assert {(one["state"], one["rollout_id"]) for one in page["data"]} == {("active", "r1")}
    shown = [one["id"] for one in page["data"]]
    assert shown == sorted(shown) and min(shown) > "t000500" and page["last_id"] >= shown[-1] and page["has_more"]
