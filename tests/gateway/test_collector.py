"""The collector frees cycles of every age by the clock, and exempts what was there before it began."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from gateway.collector import Collector
from tests.support.gateway import eventually

NEVER_S = 3_600.0
PATIENCE_S = 30.0


class Cycle:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    gc.collect()
    yield
    gc.enable()
    gc.unfreeze()


async def test_a_young_cycle_is_freed_while_automatic_collection_is_off() -> None:
    freed = asyncio.Event()
    collector = Collector(0.001, 1_000_000, NEVER_S)
    collector.start()
    try:
        weakref.finalize(Cycle(), freed.set)
        await asyncio.wait_for(freed.wait(), PATIENCE_S)
        assert not gc.isenabled()
    finally:
        collector.stop()


@pytest.mark.parametrize(("generation", "full_every_s"), [(1, NEVER_S), (2, 0.01)])
async def test_a_cycle_that_survived_collections_is_freed_later(generation: int, full_every_s: float) -> None:
    freed = asyncio.Event()
    collector = Collector(0.001, 3, full_every_s)
    collector.start()
    try:
        cycle = Cycle()
        weakref.finalize(cycle, freed.set)
        for younger in range(generation):
            gc.collect(younger)
        assert is_in(cycle, generation)
        del cycle
        await asyncio.wait_for(freed.wait(), PATIENCE_S)
    finally:
        collector.stop()


async def test_what_was_there_before_is_exempt() -> None:
    early = Cycle()
    collector = Collector(0.001, 1, 0.001)
    collector.start()
    try:
        late = Cycle()
        await eventually(lambda: is_in(late, 2), PATIENCE_S)  # full collections have run
        assert not any(is_in(early, generation) for generation in range(3))
    finally:
        collector.stop()


def is_in(wanted: object, generation: int) -> bool:
    return any(one is wanted for one in gc.get_objects(generation=generation))
