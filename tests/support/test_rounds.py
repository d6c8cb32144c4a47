"""Rounds whose premise failed are repeated, but not forever, and no wait is in vain."""

import asyncio

import pytest

from tests.support.rounds import NUM_ROUNDS, came_about, num_ended, play_rounds


async def test_rounds_are_played_until_the_premise_comes_about() -> None:
    """And no further."""
    played: list[int] = []

    async def play(number: int) -> bool:
        played.append(number)
        return number == 2

    await play_rounds("the third", play)
    assert played == [0, 1, 2]


async def test_a_premise_that_never_comes_about_fails_the_test() -> None:
    """A test that asserted nothing has not passed. The message names the premise."""

    async def play(_: int) -> bool:
        return False

    with pytest.raises(pytest.fail.Exception, match=rf"in none of {NUM_ROUNDS} rounds: a turn was in flight"):
        await play_rounds("a turn was in flight", play)


async def test_a_failed_assertion_is_not_retried() -> None:
    """The first wrong answer fails the test."""
    played: list[int] = []

    async def play(number: int) -> bool:
        played.append(number)
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        await play_rounds("anything", play)
    assert played == [0]


async def test_waiting_ends_as_soon_as_it_is_too_late() -> None:
    """Turns that are over will never be seen running; the exception of a failed one is raised."""

    async def never() -> bool:
        return False

    async def always() -> bool:
        return True

    async def fail() -> None:
        raise ValueError("lost")

    turn = asyncio.create_task(asyncio.sleep(0))
    assert not await came_about(never, lambda: num_ended([turn]) == 1)
    assert not await came_about(always, turn.done)
    assert await came_about(always, lambda: False)
    lost = asyncio.create_task(fail())
    with pytest.raises(ValueError, match="lost"):
        await came_about(never, lambda: bool(num_ended([lost])))
