"""A time limit for a coroutine that cannot be lost in another task."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def bounded(function: Callable[_Given, Awaitable[_Returned]], limit_s: float) -> Callable[_Given, Awaitable[_Returned]]:
    """The same coroutine function; raises TimeoutError at what it awaits once `limit_s` have passed."""

    @wraps(function)
    async def within_limit(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        async with asyncio.timeout(limit_s):
            return await function(*args, **kwargs)

    return within_limit
