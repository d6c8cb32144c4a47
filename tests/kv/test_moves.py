"""A trajectory's KV follows it to another engine; what cannot be brought is computed, and no turn notices."""

import asyncio
from typing import Any

import httpx
import pytest

from engines.kv import LEASE_S
from engines.simulated.settings import Fault
from tests.kv.site import Site, engine, first_messages, site
from tests.support.gateway import ADMIN, eventually

TOKEN_LEGS = pytest.mark.parametrize("token_legs", ["off", "auto"])


async def answers_at_rest(num_turns: int) -> list[str]:
    """What the turns of a trajectory say where nothing moves."""
    async with site(engine()) as alone:
        messages = first_messages()
        return [await alone.turn("t", messages) for _ in range(num_turns)]


@TOKEN_LEGS
async def test_in_a_tool_call_the_new_home_fetches_the_kv(token_legs: str) -> None:
    """Before the next turn comes: of its context at least 90 % are there, and the answers stay the same."""
    expected = await answers_at_rest(3)
    async with site(engine(), engine(), token_legs=token_legs) as fleet:
        messages = first_messages()
        said = [await fleet.turn("t", messages) for _ in range(2)]
        home = (await fleet.last("t"))["engine"]
        told = await fleet.act(home, "evacuate")
        assert told["is_evacuated"] and await fleet.moves() == {"fetched": 1}
        said.append(await fleet.turn("t", messages))
        assert (await fleet.last("t"))["engine"] != home
        assert await fleet.cached_share("t") >= 0.9
        assert await fleet.moves() == {"fetched": 1}, "the turn found all that it needs"
        assert all(one["kv_offered_tokens"] == 0 for one in (await fleet.engines()).values())
    assert said == expected


@TOKEN_LEGS
async def test_a_turn_that_comes_first_has_its_kv_fetched_before_it_runs(token_legs: str) -> None:
    """Its home gets no more turns, and nobody had the time to move it."""
    expected = await answers_at_rest(3)
    async with site(engine(), engine(), token_legs=token_legs) as fleet:
        messages = first_messages()
        said = [await fleet.turn("t", messages) for _ in range(2)]
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "cordon")
        said.append(await fleet.turn("t", messages))
        assert await fleet.cached_share("t") >= 0.9 and await fleet.moves() == {"fetched": 1}
    assert said == expected


async def test_a_turn_that_goes_on_elsewhere_takes_its_tokens_and_its_kv_along() -> None:
    """Drained in mid-turn: the other engine has the prompt and what was made of the answer, but for the last block."""
    async with site(engine(), engine(), token_legs="auto") as undisturbed:
        expected = await undisturbed.turn("t", first_messages(), tokens=400)
    async with site(engine(speed_up=2.0), engine(speed_up=2.0), token_legs="auto") as fleet:
        running = asyncio.create_task(fleet.turn("t", first_messages(), tokens=400))

        async def has_made_some() -> bool:
            return max([await fleet.made_tokens(url) for url in fleet.urls]) > 0

        await eventually(has_made_some, 60)
        home = next(id for id, one in (await fleet.engines()).items() if one["num_legs"])
        while not (await fleet.act(home, "drain", timeout_s=60))["is_drained"]:
            pass
        assert await running == expected
        row = await fleet.last("t")
        assert row["engine"] != home and row["legs"] == 2
        assert await fleet.moves() == {"fetched": 1}


@pytest.mark.parametrize("fault", ["refuse", "reset", "hang"])
async def test_what_cannot_be_fetched_is_prefilled_in_the_tool_call(fault: Any) -> None:
    """The transfer fails, at once or by silence: it is counted, and the next turn still finds its context."""
    broken = Fault(fault, path="/simulate/kv")
    async with site(engine(broken), engine(broken), kv_move_timeout_s=1.0) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "evacuate")
        assert (await fleet.engines())[home]["kv_offered_tokens"] > 500, "its lease is not over"

        async def counts_as_used() -> bool:
            one = (await fleet.engines())[home]
            whole = engine().profile.kv_capacity_tokens
            return bool(one["kv_capacity_tokens"] == whole - one["kv_offered_tokens"])

        await eventually(counts_as_used, 60)
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"failed": 1, "prefilled": 1} and await fleet.cached_share("t") >= 0.85


@pytest.mark.parametrize("fault", ["refuse", "hang"])
async def test_an_offer_that_was_not_fetched_is_given_back(fault: Any) -> None:
    """A move that failed or timed out leaves nothing pinned at the old home: nobody waits for the lease to be over."""
    once = Fault(fault, path="/simulate/kv", count=1)
    engines = [engine(once, kv_lease_s=1e6) for _ in range(2)]
    async with site(*engines, kv_move_timeout_s=2.0) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "evacuate")
        assert await fleet.moves() == {"failed": 1, "prefilled": 1}
        await eventually(lambda: fleet_is_free(fleet, home), LEASE_S - 5)
        await fleet.turn("t", messages)
        assert await fleet.cached_share("t") >= 0.85


async def test_an_offer_whose_lease_is_over_is_computed_anew() -> None:
    """The blocks are free again at the old home, and the new one prefills."""
    async with site(engine(kv_lease_s=0.0), engine(kv_lease_s=0.0)) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "cordon")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"failed": 1}
        await eventually(lambda: fleet_is_free(fleet, home), 60)


async def fleet_is_free(fleet: Site, engine_id: str) -> bool:
    one = (await fleet.engines())[engine_id]
    return one["kv_used_share"] == 0.0 and one["kv_offered_tokens"] == 0


async def test_a_home_that_is_gone_costs_a_prefill_and_no_turn() -> None:
    """Lost in a tool call: nothing can be fetched, and nothing fails."""
    async with site(engine(), engine(), faults_to_open=1) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        assert (await fleet.client.delete(f"/v1/engines/{home}", headers=ADMIN)).status_code == 200
        await fleet.turn("t", messages)
        assert await fleet.cached_share("t") == 0.0 and await fleet.moves() == {}


@pytest.mark.parametrize("kinds", [(False, False), (True, False), (False, True)])
@TOKEN_LEGS
async def test_without_nixl_the_new_home_prefills_in_the_tool_call(kinds: tuple[bool, bool], token_legs: str) -> None:
    """Where one of the two cannot; then the next turn finds its context all the same."""
    engines = [engine(kv_transfer=kind) for kind in kinds]
    async with site(*engines, token_legs=token_legs) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "evacuate")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"prefilled": 1} and await fleet.cached_share("t") >= 0.85
        await fleet.act(home, "uncordon")


async def test_sglang_prefills_in_the_tool_call() -> None:
    """It hands out no KV that way."""
    async with site(engine(dialect="sglang"), engine(dialect="sglang")) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        await fleet.act((await fleet.last("t"))["engine"], "evacuate")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {"prefilled": 1} and await fleet.cached_share("t") >= 0.85


async def test_an_engine_that_only_seems_to_offer_kv_is_asked_once() -> None:
    """It was said to; its answer shows that it does not. The others prefill."""
    async with site(engine(kv_transfer=False), engine()) as fleet:
        liar, other = (url.removeprefix("http://") for url in fleet.urls)
        await fleet.client.delete(f"/v1/engines/{liar}", headers=ADMIN)
        said = {"url": fleet.urls[0], "kv_transfer": "nixl"}
        assert (await fleet.client.post("/v1/engines", json=said, headers=ADMIN)).status_code == 201
        liar += "~2"
        await eventually(lambda: is_ready(fleet, liar), 60)
        await fleet.act(other, "cordon")
        messages = {name: first_messages(name) for name in ("a", "b")}
        for name in messages:
            await fleet.turn(name, messages[name])
            assert (await fleet.last(name))["engine"] == liar
        await fleet.act(other, "uncordon")
        await fleet.act(liar, "evacuate")
        moves = await fleet.moves()
        assert moves["prefilled"] == 2 and 1 <= moves["failed"] <= 2
        assert not (await fleet.engines())[liar]["moves_kv"]


async def is_ready(fleet: Site, engine_id: str) -> bool:
    found = (await fleet.engines()).get(engine_id)
    return found is not None and found["state"] == "ready"


async def test_a_short_context_and_one_that_ended_are_left_alone() -> None:
    """A prefill of it is as fast; and nobody goes on from the other."""
    async with site(engine(), engine(), kv_move_min_tokens=100_000) as fleet:
        messages = first_messages()
        await fleet.turn("short", messages)
        home = (await fleet.last("short"))["engine"]
        await fleet.client.post("/v1/trajectories/short/finish")
        await fleet.act(home, "evacuate")
        assert await fleet.moves() == {}


async def test_kv_of_other_weights_is_not_fetched() -> None:
    """An engine that holds other weights hands nothing over."""
    async with site(engine(), engine(weight_version="other")) as fleet:
        messages = first_messages()
        await fleet.turn("t", messages)
        home = (await fleet.last("t"))["engine"]
        await fleet.act(home, "cordon")
        await fleet.turn("t", messages)
        assert await fleet.moves() == {} and await fleet.cached_share("t") == 0.0


async def test_many_trajectories_leave_in_one_drain() -> None:
    """Those in a tool call at once, those that run when their turn is over; all are fetched, and none is altered."""
    async with site(engine(), engine(), kv_moves_at_once=2) as undisturbed:
        expected = [await undisturbed.turn(f"t{number}", first_messages(f"{number}")) for number in range(6)]
    async with site(engine(), engine(), kv_moves_at_once=2) as fleet:
        first, second = (url.removeprefix("http://") for url in fleet.urls)
        await fleet.act(second, "cordon")
        talks = [first_messages(f"{number}") for number in range(6)]
        said = await asyncio.gather(*(fleet.turn(f"t{number}", talk) for number, talk in enumerate(talks)))
        assert said == expected
        await fleet.act(second, "uncordon")
        drained = await fleet.act(first, "drain")
        assert drained["is_drained"] and drained["is_evacuated"] and await fleet.moves() == {"fetched": 6}
        await asyncio.gather(*(fleet.turn(f"t{number}", talk) for number, talk in enumerate(talks)))
        for number in range(6):
            assert await fleet.cached_share(f"t{number}") >= 0.9


async def test_the_admin_key_is_asked_for() -> None:
    """To evacuate is to change the fleet."""
    async with site(engine(), engine()) as fleet:
        engine_id = fleet.urls[0].removeprefix("http://")
        answer: httpx.Response = await fleet.client.post(f"/v1/engines/{engine_id}/evacuate")
        assert answer.status_code == 401
