"""A coroutine's time limit ends it whatever other tasks do with the exceptions that they meet."""

import asyncio

import pytest

from tests.support.bounded import bounded


async def test_what_waits_for_ever_ends_at_its_limit_and_what_returns_returns() -> None:
    async def for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    async def double(number: int) -> int:
        return 2 * number

    with pytest.raises(TimeoutError):
        await bounded(for_ever, 0.01)()
    assert await bounded(double, 60.0)(21) == 42


async def test_this_test_has_such_a_limit(request: pytest.FixtureRequest) -> None:
    assert hasattr(request.node.obj, "__wrapped__")
