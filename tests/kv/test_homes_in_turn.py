"""KV of a trajectory that moves again before its last move has ended."""

import asyncio

from engines.simulated.settings import Fault
from tests.kv.kv_fleet import Fleet, engine, id_of, running_fleet
from tests.support.gateway import eventually


async def _has_legs(fleet: Fleet, engine_id: str) -> bool:
    return bool((await fleet.engines())[engine_id]["num_legs"])


async def test_kv_is_fetched_from_where_it_is_if_its_last_move_was_broken_off() -> None:
    """Its next home is drained, too, while it still fetches the KV: it has none, and must not compute what the first
    home can still offer."""
    hanging = Fault("hang", path="/v1/chat", count=1)
    async with running_fleet(engine(), engine(hanging), engine()) as fleet:
        first, second, third = map(id_of, fleet.urls)
        messages = await fleet.begin_at_first()
        await fleet.act(second, "uncordon")
        evacuation = asyncio.create_task(fleet.act(first, "evacuate"))
        await eventually(lambda: _has_legs(fleet, second))
        await fleet.act(third, "uncordon")
        await fleet.act(second, "evacuate")
        await evacuation
        assert await fleet.moves() == {"fetched": 1}
        assert await fleet.generated_tokens(fleet.urls[1]) <= 1, "it only gives back the offer of the first move"
        await fleet.turn("t", messages)
        assert (await fleet.last("t"))["engine"] == third and await fleet.cached_share("t") >= 0.9


async def test_a_trajectory_that_moves_back_needs_no_kv() -> None:
    """Its KV has not left its first home yet."""
    hanging = Fault("hang", path="/v1/chat", count=1)
    async with running_fleet(engine(), engine(hanging)) as fleet:
        first, second = map(id_of, fleet.urls)
        messages = await fleet.begin_at_first()
        made = await fleet.generated_tokens(fleet.urls[0])
        await fleet.act(second, "uncordon")
        evacuation = asyncio.create_task(fleet.act(first, "evacuate"))
        await eventually(lambda: _has_legs(fleet, second))
        await fleet.act(first, "uncordon")
        await fleet.act(second, "evacuate")
        await evacuation
        assert await fleet.moves() == {} and await fleet.generated_tokens(fleet.urls[1]) <= 1
        assert await fleet.generated_tokens(fleet.urls[0]) <= made + 1, "only the offer of the move that was broken off"
        await fleet.turn("t", messages)
        last = await fleet.last("t")
        assert (last["engine"], last["kv_by"]) == (first, None) and await fleet.cached_share("t") >= 0.9
