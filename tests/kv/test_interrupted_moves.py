"""KV moves whose engines end in the middle, and what a turn that arrives meanwhile gets of them."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault
from tests.kv.kv_fleet import Fleet, engine, first_messages, id_of, running_fleet
from tests.support.gateway import ADMIN, eventually, running_gateway
from tests.support.rounds import came_about, play_rounds


async def has_placed_turn(fleet: Fleet) -> bool:
    """Whether a turn of the trajectory has an engine, and perhaps waits for its KV there."""
    live = (await fleet.client.get("/v1/trajectories/t")).json()["live_turns"]
    return any(turn["state"] == "running" for turn in live)


async def test_kv_by_is_none_if_the_engine_that_fetched_the_kv_left() -> None:
    """Fetched in the tool call. Then the new home leaves, and the turn computes its context on a third engine."""
    async with running_fleet(engine(), engine(), engine()) as fleet:
        home, target, third = map(id_of, fleet.urls)
        messages = await fleet.begin_at_first()
        await fleet.act(target, "uncordon")
        await fleet.act(home, "evacuate")
        assert await fleet.moves() == {"fetched": 1}
        await fleet.client.delete(f"/v1/engines/{target}", headers=ADMIN)
        await fleet.act(third, "uncordon")
        await fleet.turn("t", messages)
        last = await fleet.last("t")
        assert (last["engine"], last["kv_by"]) == (third, None)
        assert await fleet.cached_share("t") == 0.0


async def test_kv_that_a_turn_did_not_wait_for_is_fetched_by_the_next() -> None:
    """Its client left in the middle of the fetch. The KV counted as fetched, and the next turn computed its context."""
    hanging = Fault("hang", path="/simulate/kv", count=1)
    async with running_fleet(engine(hanging), engine(), kv_move_timeout_s=25.0) as fleet:
        messages, turn = await fleet.begin_fetch()
        turn.cancel()

        async def has_left() -> bool:
            return bool((await fleet.last("t"))["outcome"] == "left")

        await eventually(has_left)
        await fleet.turn("t", messages)
        last = await fleet.last("t")
        assert (last["engine"], last["kv_by"]) == (id_of(fleet.urls[1]), "fetched")


async def test_a_turn_that_waits_for_its_kv_leaves_an_engine_that_is_drained() -> None:
    """Nothing of it is there yet. It waited for the fetch, and then ran there to its end."""
    hanging = Fault("hang", path="/simulate/kv", count=1)
    async with running_fleet(engine(hanging), engine(), engine(), token_legs="auto", kv_move_timeout_s=25.0) as fleet:
        home, target, third = map(id_of, fleet.urls)
        messages = await fleet.begin_at_first()
        await fleet.act(target, "uncordon")
        await fleet.act(home, "cordon")
        turn = asyncio.create_task(fleet.turn("t", messages))
        await eventually(lambda: fleet.offers_kv(home))
        await fleet.act(third, "uncordon")
        assert (await fleet.act(target, "drain"))["is_drained"]
        await turn
        last = await fleet.last("t")
        assert (last["engine"], last["kv_by"], last["legs"]) == (third, "fetched", 2)


# Requests for one token of a context; turns at token level use other routes.
MOVES_HANG = Fault("hang", path="/v1/completions")


async def test_a_turn_waits_for_a_move_for_at_most_its_timeout() -> None:
    """Its move in the tool call failed to fetch and hangs in the prefill: the turn runs, and fetches nothing itself."""

    async def play(number: int) -> bool:
        limits = {"token_legs": "auto", "kv_move_timeout_s": 2.0**number}
        async with running_fleet(engine(), engine(MOVES_HANG), **limits) as fleet:
            home, target = map(id_of, fleet.urls)
            messages = await fleet.begin_at_first()
            await fleet.act(target, "uncordon")
            evacuation = asyncio.create_task(fleet.act(home, "evacuate"))
            if not await came_about(lambda: fleet.offers_kv(home), evacuation.done):
                return False  # it could time out before there was an offer
            turn = asyncio.create_task(fleet.turn("t", messages))
            waits_for_the_fetch = await came_about(lambda: has_placed_turn(fleet), turn.done)
            waits_for_the_fetch = waits_for_the_fetch and await fleet.moves() == {}
            await turn
            last = await fleet.last("t")
            assert (last["engine"], last["kv_by"], last["legs"]) == (target, None, 1)
            await evacuation
            if waits_for_the_fetch:
                assert await fleet.moves() == {"failed": 1}
            return waits_for_the_fetch

    await play_rounds("the turn arrived before the fetch timed out", play)


async def test_kv_by_is_none_if_the_last_of_two_moves_timed_out() -> None:
    """The first one fetched the KV. The second, to a third engine, hangs there until the turn no longer waits."""

    async def play(number: int) -> bool:
        limits = {"token_legs": "auto", "kv_move_timeout_s": 2.0**number}
        async with running_fleet(engine(), engine(), engine(MOVES_HANG), **limits) as fleet:
            home, second, third = map(id_of, fleet.urls)
            messages = await fleet.begin_at_first()
            await fleet.act(second, "uncordon")
            await fleet.act(home, "evacuate")
            is_in_time = await fleet.moves() == {"fetched": 1}
            await fleet.act(third, "uncordon")
            evacuation = asyncio.create_task(fleet.act(second, "evacuate"))
            hangs = await came_about(lambda: fleet.offers_kv(second), evacuation.done)
            await fleet.turn("t", messages)
            await evacuation
            last = await fleet.last("t")
            assert (last["engine"], last["legs"]) == (third, 1)
            assert (last["kv_by"], last["cached_tokens"]) == (None, 0)
            return is_in_time and hangs

    await play_rounds("the first move ended before its timeout, and the second hung when the turn came", play)


async def test_a_relaunched_engine_has_none_of_its_predecessors_offers() -> None:
    """KV that nobody fetched is gone with the process: the new process has all its memory for its own turns."""
    not_fetched = Fault("refuse", path="/simulate/kv", count=1)
    not_released = Fault("hang", path="/v1/completions", count=1)
    async with AsyncExitStack() as first_process, serve_engine(engine(not_released)) as other:
        url = await first_process.enter_async_context(serve_engine(engine(not_fetched)))
        async with (
            running_gateway(url, other, kv_move_min_tokens=100, observe_interval_s=0.05) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
        ):
            fleet = Fleet(client, [url, other])
            await fleet.act(id_of(other), "cordon")
            await fleet.turn("t", first_messages())
            await fleet.act(id_of(other), "uncordon")
            await fleet.act(id_of(url), "evacuate")
            assert await fleet.offers_kv(id_of(url))
            await first_process.aclose()
            again = f"{id_of(url)}~2"

            async def is_back() -> bool:
                found = (await fleet.engines()).get(again)
                return found is not None and found["state"] == "ready"

            async with serve_engine(engine(), port=int(url.rpartition(":")[2])):
                await eventually(is_back)
                relaunched = (await fleet.engines())[again]
                assert relaunched["kv_offered_tokens"] == 0
                assert relaunched["kv_capacity_tokens"] == engine().profile.kv_capacity_tokens


@pytest.mark.parametrize("mode", ["keep", "restart"])
async def test_kv_of_old_weights_is_not_fetched_under_new_ones(mode: str) -> None:
    """All engines take new weights while the old home makes its offer. Fetched, that KV would count as the new
    weights'. Later moves are fetched as before."""
    slow = Fault("slow", delay_s=1.0, path="/v1/chat", count=2)
    async with running_fleet(engine(slow), engine()) as fleet:
        home, target = map(id_of, fleet.urls)
        messages = await fleet.begin_at_first()
        await fleet.act(target, "uncordon")
        evacuation = asyncio.create_task(fleet.act(home, "evacuate"))

        async def is_asked() -> bool:
            return bool((await fleet.engines())[home]["num_legs"])

        await eventually(is_asked)
        weights = {"version": "step-1", "path": "/weights/step-1", "mode": mode}
        updated = await fleet.client.post("/v1/weights", json=weights, headers=ADMIN)
        assert updated.json()["status"] == "done", updated.text
        await evacuation
        assert await fleet.moves() == {"failed": 1, "prefilled": 1}
        await fleet.turn("t", messages)
        last = await fleet.last("t")
        assert (last["engine"], last["kv_by"]) == (target, "prefilled") and await fleet.cached_share("t") >= 0.85
        await fleet.act(home, "uncordon")
        await fleet.act(target, "evacuate")
        assert await fleet.moves() == {"failed": 1, "prefilled": 1, "fetched": 1}
