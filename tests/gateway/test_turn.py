"""A turn that receives several signals before it can act on the first."""

import asyncio

import pytest

from gateway.http.errors import api_error
from gateway.http.outlet import Outlet
from gateway.turns.ask import Ask
from gateway.turns.outcome import LegFailed, Stopped
from gateway.turns.turn import Turn
from scheduling.types import Abort, Dispatch, Fault

DISPATCH = Dispatch("t", 1, "engine", 0, "entered")
HELD = Dispatch("t", 1, "engine", 0, "entered", send_at=5.0)
LOST = Abort("t", 1, Fault.ENGINE)


def new_turn() -> Turn:
    ask = Ask("chat", "/v1/chat/completions", "m", b"{}", {}, "trajectory", "group", None, 0, True)
    return Turn("t", ask, Outlet(None, "chat", "t", max_kept_bytes=100), 0.0, "")


async def waiting(turn: Turn) -> "asyncio.Task[Dispatch]":
    """A task in which the turn waits for its next leg."""
    task = asyncio.create_task(turn.next_leg())
    await asyncio.sleep(0)
    return task


async def test_a_leg_whose_engine_is_lost_before_it_begins_fails() -> None:
    """It is the engine's fault: otherwise the client would be told that its trajectory was aborted, and would not
    retry."""
    turn = new_turn()
    task = await waiting(turn)
    turn.dispatched(DISPATCH)
    turn.aborted(LOST)
    assert await task == DISPATCH
    with pytest.raises(Stopped) as stopped, turn.stoppable():
        pytest.fail("the leg began")
    assert stopped.value.fault is Fault.ENGINE


async def test_a_held_leg_begins_when_it_is_released() -> None:
    """And not before, whether the turn waited for it or asks later."""
    turn = new_turn()
    task = await waiting(turn)
    turn.dispatched(HELD)
    await asyncio.sleep(0)
    assert not task.done() and turn.is_held
    turn.release()
    assert await task == HELD
    turn.dispatched(HELD)
    task = await waiting(turn)
    assert not task.done()
    turn.release()
    assert await task == HELD


async def test_a_held_leg_whose_engine_is_lost_fails_as_one_that_began() -> None:
    """So that it is tried elsewhere."""
    turn = new_turn()
    task = await waiting(turn)
    turn.dispatched(HELD)
    await asyncio.sleep(0)
    turn.aborted(LOST)
    turn.release()
    assert await task == HELD
    with pytest.raises(Stopped) as stopped, turn.stoppable():
        pytest.fail("the leg began")
    assert stopped.value.fault is Fault.ENGINE


@pytest.mark.parametrize("fault", [Fault.CLIENT_LEFT, Fault.CLOSED])
async def test_a_held_turn_is_stopped_at_once(fault: Fault) -> None:
    """Under the number of the leg that it was to run, of which the scheduler knows."""
    turn = new_turn()
    task = await waiting(turn)
    turn.dispatched(HELD)
    turn.stop(fault)
    with pytest.raises(Stopped) as stopped:
        await task
    assert stopped.value.fault is fault and turn.leg == HELD.leg
    turn.release()  # its timer still comes


@pytest.mark.parametrize("is_lost_first", [True, False])
async def test_a_client_that_leaves_before_its_leg_begins_ends_its_turn(is_lost_first: bool) -> None:
    """Whether or not the engine is lost at the same moment."""
    turn = new_turn()
    task = await waiting(turn)
    turn.dispatched(DISPATCH)
    if is_lost_first:
        turn.aborted(LOST)
    turn.left()
    with pytest.raises(Stopped) as stopped:
        await task
        with turn.stoppable():
            pytest.fail("the leg began")
    assert stopped.value.fault is Fault.CLIENT_LEFT


async def test_a_leg_that_was_paused_and_found_too_stale_at_once_leaves_no_staleness_to_the_next() -> None:
    """Its turn is checked again before the next leg. When the engine of that one was lost, its client got a 409, or its
    tokens were dropped, as if the new weights were the cause."""
    turn = new_turn()

    async def run_leg() -> None:
        turn.leg_runs_at("engine", True)
        try:
            with turn.stoppable():
                await asyncio.Event().wait()
        finally:
            turn.leg_runs_at("", False)

    paused = asyncio.create_task(run_leg())
    await asyncio.sleep(0)
    turn.pause()
    turn.stale_version = "old"
    turn.stop(Fault.ENGINE)
    with pytest.raises(Stopped) as stopped:
        await paused
    assert (stopped.value.fault, turn.stale_version) == (None, None)
    lost = asyncio.create_task(run_leg())
    await asyncio.sleep(0)
    turn.aborted(Abort("t", 0, Fault.ENGINE))
    with pytest.raises(Stopped) as stopped:
        await lost
    assert (stopped.value.fault, turn.stale_version) == (Fault.ENGINE, None)


async def test_a_leg_that_stops_its_own_turn_and_fails_at_once_leaves_nothing_to_the_next() -> None:
    """What an engine sends may make the scheduler preempt the turn, and be followed by an error in the same bytes. The
    turn's next leg was taken for one that the gateway's shutdown cancels."""
    turn = new_turn()

    async def run_legs() -> Dispatch:
        with pytest.raises(LegFailed), turn.stoppable():
            turn.leg_runs_at("engine", True)
            assert turn.pause()
            raise LegFailed(Fault.ENGINE, api_error(502, "It died."))
        turn.leg_failed(api_error(502, "It died."))
        return await turn.next_leg()

    task = asyncio.create_task(run_legs())
    await asyncio.sleep(0)
    turn.dispatched(DISPATCH)
    assert await task == DISPATCH


async def test_a_client_that_leaves_while_its_leg_fails_ends_its_turn() -> None:
    """No other leg follows, for nobody."""
    turn = new_turn()
    with pytest.raises(LegFailed), turn.stoppable():
        turn.left()
        raise LegFailed(Fault.ENGINE, api_error(502, "It died."))
    turn.leg_failed(api_error(502, "It died."))
    with pytest.raises(Stopped) as stopped:
        await turn.next_leg()
    assert stopped.value.fault is Fault.CLIENT_LEFT


async def test_a_leg_that_stops_its_own_turn_ends_where_it_waits_next() -> None:
    """As one that is stopped from outside."""
    turn = new_turn()
    with pytest.raises(Stopped), turn.stoppable():
        turn.leg_runs_at("engine", True)
        turn.pause()
        await asyncio.Event().wait()
