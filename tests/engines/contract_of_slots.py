"""The part of the contract about turns that hold slots, wait for them and leave them.

Each promise needs turns in flight when it checks. If there were none, it plays another round.
"""

import asyncio
import time
from functools import partial
from typing import Any

import orjson

from tests.engines.engine_under_test import TIMEOUT_S, EngineUnderTest
from tests.support.rounds import num_ended, play_rounds


async def turns_beyond_the_slots_wait(engine: EngineUnderTest) -> None:
    """The gauges show it. While turns run, KV is in use and the work counter grows; when they have left, the KV is free
    again."""
    slots = engine.facts.slots

    async def play(_: int) -> bool:
        async with engine.endless_turns(slots + 2) as turns:
            first = await engine.until_or_ended(lambda seen: (seen.num_running, seen.num_waiting) == (slots, 2), turns)
            if first is None:
                return False
            later = await engine.until_or_ended(lambda seen: seen.work_counter > first.work_counter, turns)
            if later is None:
                return False
            assert (later.num_running, later.num_waiting) == (slots, 2)
            assert 0.0 < first.kv_used_share < 1.0
        await engine.until_idle()
        assert (await engine.observe()).kv_used_share == 0.0
        return True

    await play_rounds("endless turns were in flight, and observed", play)


async def the_most_urgent_turn_runs_first(engine: EngineUnderTest) -> None:
    """When all slots are taken, the lowest number gets the next one, whatever the order of arrival."""

    async def play(_: int) -> bool:
        async with engine.endless_turns(engine.facts.slots - 1) as others:
            order = await _order_on_one_slot(engine, others, {"first": 0, "low": 9, "mid": 5, "high": 1})
        await engine.until_idle()
        assert order in (None, ["first", "high", "mid", "low"])
        return order is not None

    await play_rounds("endless turns held their slots all the time", play)


async def _order_on_one_slot(
    engine: EngineUnderTest, others: "list[asyncio.Task[Any]]", priorities: dict[str, int]
) -> list[str] | None:
    """The order in which turns get the one slot that the others leave free; the first turn arrives alone. Each leaves
    at its first token, so only one holds the slot at a time. None if a turn ended by itself."""
    began: asyncio.Queue[str] = asyncio.Queue()

    async def turn(name: str, priority: int) -> None:
        response = await engine.begin(engine.endless | {"stream": True}, priority=priority, request_id=ids[name])
        try:
            await response.piece(TIMEOUT_S)  # All engines begin a stream with its first token.
            began.put_nowait(name)
            while await response.piece(TIMEOUT_S):
                pass
        finally:
            response.close()

    ids = {name: engine.new_id() for name in priorities}
    turns: dict[str, asyncio.Task[None]] = {}
    order: list[str] = []
    try:
        for num_waiting, (name, priority) in enumerate(priorities.items()):
            turns[name] = asyncio.create_task(turn(name, priority))
            wanted = (engine.facts.slots, num_waiting)
            in_flight = [*others, *turns.values()]
            if not await engine.until_or_ended(
                lambda seen, wanted=wanted: (seen.num_running, seen.num_waiting) == wanted, in_flight
            ):
                return None
        while turns:
            order.append(await asyncio.wait_for(began.get(), TIMEOUT_S))
            if num_ended([*others, *turns.values()]):
                return None
            await engine.abandon(turns.pop(order[-1]), ids[order[-1]])
        return order
    finally:
        await asyncio.gather(*(engine.abandon(turn, ids[name]) for name, turn in turns.items()))


async def an_abandoned_turn_frees_its_slot(engine: EngineUnderTest) -> None:
    """Within a second of closing its connection and telling the engine, streaming or not, running or waiting."""
    slots = engine.facts.slots

    async def play(_: int, is_stream: bool, took_s: list[float]) -> bool:
        async with engine.endless_turns(slots + 1, is_stream) as turns:
            seen = await engine.until_or_ended(lambda seen: (seen.num_running, seen.num_waiting) == (slots, 1), turns)
            abandoned_at = time.monotonic()
        await engine.until_idle()
        if seen is not None:
            took_s.append(time.monotonic() - abandoned_at)
        return seen is not None

    for is_stream in (True, False):
        took_s: list[float] = []
        while not took_s or (min(took_s) >= 1.0 and len(took_s) < engine.facts.num_tries):
            await play_rounds(
                "endless turns were in flight, and observed", partial(play, is_stream=is_stream, took_s=took_s)
            )
        assert min(took_s) < 1.0, took_s


async def an_aborted_turn_ends_with_reason_abort(engine: EngineUnderTest) -> None:
    """The engine's own abort route ends it with status 200 and finish reason `abort`, streaming or not."""

    async def play(_: int, is_stream: bool) -> bool:
        request_id = engine.new_id()
        turn = asyncio.create_task(engine.ask(engine.endless | {"stream": is_stream}, request_id=request_id))
        runs = await engine.until_or_ended(lambda seen: seen.num_running == 1 and seen.kv_used_share > 0, [turn])
        target, body = engine.facts.abort(request_id)
        assert (await engine.http.post(target, orjson.dumps(body), TIMEOUT_S))[0] == 200
        answer = await turn
        await engine.until_idle()
        if runs is None:
            return False
        choices = [c for part in (answer.chunks if is_stream else [answer.json]) for c in part["choices"]]
        assert answer.status == 200
        assert [c["finish_reason"] for c in choices if c.get("finish_reason")] == ["abort"]
        return True

    for is_stream in (True, False):
        await play_rounds("an endless turn was in flight, and observed", partial(play, is_stream=is_stream))
