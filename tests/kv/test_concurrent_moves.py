"""Several KV moves at once, and the log of each."""

import asyncio
import logging

import pytest

from engines.simulated.settings import Fault
from gateway.turnlog import LOGGER
from tests.kv.kv_fleet import engine, first_messages, id_of, running_fleet
from tests.support.gateway import eventually


async def test_a_turn_does_not_wait_for_a_move_that_has_not_begun() -> None:
    """Two trajectories leave, one after the other, and the fetch of the first hangs. The turn of the second fetches its
    own KV."""
    hanging = Fault("hang", path="/simulate/kv", count=1)
    async with running_fleet(engine(hanging), engine(), kv_moves_at_once=1, kv_move_timeout_s=4.0) as fleet:
        home, target = map(id_of, fleet.urls)
        await fleet.act(target, "cordon")
        conversations = {name: first_messages(name) for name in ("a", "b")}
        for name, messages in conversations.items():
            await fleet.turn(name, messages)
        await fleet.act(target, "uncordon")
        evacuation = asyncio.create_task(fleet.act(home, "evacuate"))
        await eventually(lambda: fleet.offers_kv(home))
        turns = [asyncio.create_task(fleet.turn(name, messages), name=name) for name, messages in conversations.items()]
        [first], _ = await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
        assert await fleet.moves() == {"fetched": 1}
        assert (await fleet.last(first.get_name()))["kv_by"] == "fetched"
        assert await fleet.cached_share(first.get_name()) >= 0.9
        await asyncio.gather(evacuation, *turns)
        assert (await fleet.moves())["fetched"] == 1, "the waiting move of its tool call is dropped"


async def test_an_evacuation_reports_whether_all_moves_have_ended() -> None:
    """An engine with nothing to move is evacuated at once; one whose move still hangs at the timeout is not."""
    hanging = Fault("hang", path="/simulate/kv", count=1)
    async with running_fleet(engine(hanging), engine(), kv_move_timeout_s=2.0) as fleet:
        home, target = map(id_of, fleet.urls)
        drained = await fleet.act(target, "drain")
        assert drained["is_drained"] and drained["is_evacuated"]
        await fleet.turn("t", first_messages())
        await fleet.act(target, "uncordon")
        assert not (await fleet.act(home, "evacuate", timeout_s=0.1))["is_evacuated"]
        assert (await fleet.act(home, "evacuate"))["is_evacuated"]
        assert await fleet.moves() == {"failed": 1, "prefilled": 1}


async def test_an_engine_is_not_evacuated_while_a_turn_fetches_from_it() -> None:
    """It gets no more turns, and one that begins elsewhere fetches its own KV. A controller stopped the engine in the
    middle of that."""
    hanging = Fault("hang", path="/simulate/kv", count=1)
    async with running_fleet(engine(hanging), engine(), kv_move_timeout_s=25.0) as fleet:
        home = id_of(fleet.urls[0])
        _, turn = await fleet.begin_fetch()
        assert not (await fleet.act(home, "drain", timeout_s=0.1))["is_evacuated"]
        turn.cancel()  # its client leaves, and nothing is fetched any more
        assert (await fleet.act(home, "drain"))["is_evacuated"]


async def test_each_move_is_logged_with_its_engines_and_its_outcome(caplog: pytest.LogCaptureFixture) -> None:
    """A fetch that failed and the prefill after it: whose KV, from where to where, how much, and why it failed."""
    caplog.set_level(logging.INFO, LOGGER.name)
    refused = Fault("refuse", path="/simulate/kv", count=1)
    async with running_fleet(engine(refused), engine(refused)) as fleet:
        await fleet.turn("t", first_messages())
        home = (await fleet.last("t"))["engine"]
        [target] = set(map(id_of, fleet.urls)) - {home}
        await fleet.act(home, "evacuate")
    moves = [record.__dict__["fields"] for record in caplog.records if record.message == "kv moved"]
    assert [(move["trajectory_id"], move["source"], move["target"]) for move in moves] == [("t", home, target)] * 2
    assert [(move["outcome"], bool(move["why"]), move["tokens"] > 500) for move in moves] == [
        ("failed", True, False),
        ("prefilled", False, True),
    ]
