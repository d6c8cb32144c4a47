"""A turn that receives several signals before it can act on the first."""

import asyncio

import pytest

from gateway.http.outlet import Outlet
from gateway.turns.ask import Ask
from gateway.turns.outcome import Stopped
from gateway.turns.turn import Turn
from scheduling.types import Abort, Dispatch, Fault

DISPATCH = Dispatch("t", 1, "engine", 0, "entered")
LOST = Abort("t", 1, Fault.ENGINE)


def new_turn() -> Turn:
    ask = Ask("chat", "/v1/chat/completions", "m", b"{}", {}, "trajectory", "group", None, 0, False, True)
    return Turn("t", ask, Outlet(None, "chat", "t", keeps=True, max_kept_bytes=100), 0.0, "")


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
