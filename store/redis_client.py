"""The client of a Redis server, and which faults mean that the server is away: the only place that knows the
library."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from store.port import StoreError
from store.settings import StoreSettings

FAULTS = (RedisError, OSError, TimeoutError)


def redis_client(url: str, settings: StoreSettings) -> Redis:
    """A client that is not connected yet and repeats nothing: only its caller knows what is safe to send again.

    Raises:
        StoreError: the URL is malformed, or names a file that is not there. The message contains no password.
    """
    try:
        redis = Redis.from_url(
            url,
            socket_timeout=settings.op_timeout_s,
            socket_connect_timeout=settings.connect_timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        redis.connection_pool.make_connection()  # type: ignore[no-untyped-call] # to find faults in its options
    except (ValueError, RedisError) as fault:
        raise StoreError(f"Redis URL for {place_of(url)}: {fault}") from None
    for option in ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"):
        path = redis.connection_pool.connection_kwargs.get(option)
        if path and not Path(path).exists():
            raise StoreError(f"Redis URL for {place_of(url)}: {option}: there is no {path}")
    return redis


def is_full(fault: Exception) -> bool:
    """Whether the server has no memory for more. Redis 6.2 reports it as a fault of the script, 7 as one of its own."""
    return "> 'maxmemory'" in str(fault)


def refused(fault: Exception) -> str:
    """What the server refuses until a person changes something; "" if the fault may pass."""
    if isinstance(fault, AuthenticationError):
        return "the login"
    if isinstance(fault, NoPermissionError):
        return "a command"
    return "the database" if str(fault).startswith(("DB index is out of range", "SELECT is not allowed")) else ""


async def mode_of(redis: Redis) -> str:
    """`standalone`, `cluster` or `sentinel`."""
    told: Any = await asked(redis.execute_command("HELLO"))  # type: ignore[no-untyped-call]
    fields = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))  # by protocol
    return str(fields[b"mode"], "utf-8")


async def let_go(redis: Redis) -> None:
    """Make the next call connect again: after a failover the old connection leads to a server that is only a
    replica."""
    with suppress(*FAULTS):
        await redis.connection_pool.disconnect(inuse_connections=False)


async def asked(request: Awaitable[Any]) -> Any:
    """The server's reply.

    The library uses `asyncio.wait_for`, which in Python 3.11 swallows a cancellation that arrives just as it ends. With
    a cancellation at each step of the event loop, a third were swallowed.

    Raises:
        asyncio.CancelledError: the task was cancelled meanwhile, whatever the library made of it.
    """
    task = asyncio.current_task()
    assert task is not None  # nothing is awaited outside a task
    num_cancelled = task.cancelling()
    try:
        return await request
    finally:
        if task.cancelling() > num_cancelled:
            raise asyncio.CancelledError


def place_of(url: str) -> str:
    """Host, port and database, without secrets."""
    place = url.partition("?")[0].rpartition("@")[2]
    return place.partition("://")[2] or place
