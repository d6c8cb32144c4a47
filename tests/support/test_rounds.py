"""What a busy machine spoils is played again, but not for ever, and nothing is waited for in vain."""

import asyncio

import pytest

from tests.support.rounds import NUM_ROUNDS, came_about, num_ended, play_rounds


async def test_rounds_go_on_until_the_premise_came_about() -> None:
    """And no further."""
    played: list[int] = []

    async def play(number: int) -> bool:
        played.append(number)
        return number == 2

    await play_rounds("the third", play)
    assert played == [0, 1, 2]


async def test_a_premise_that_never_comes_about_fails_the_test_and_is_named() -> None:
    """A test that asserted nothing has not passed."""

    async def play(_: int) -> bool:
        return False

    with pytest.raises(pytest.fail.Exception, match=rf"in none of {NUM_ROUNDS} rounds: a turn was in flight"):
        await play_rounds("a turn was in flight", play)


async def test_what_a_round_asserts_is_not_tried_again() -> None:
    """The first wrong answer fails the test."""
    played: list[int] = []

    async def play(number: int) -> bool:
        played.append(number)
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        await play_rounds("anything", play)
    assert played == [0]


async def test_waiting_ends_as_soon_as_it_is_too_late() -> None:
    """Turns that are over are never seen to run; one that failed says so."""

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
