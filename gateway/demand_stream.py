"""Publishes the demand on a stream in the store's Redis, for a fleet controller that does not ask this process.

Rules:

- The demand is computed when it is published: after Redis was away, nothing stale is published.
- The last rollout is repeated until another one has ended, so that a controller that was away does not miss it. A
  restarted gateway continues from what was last published.
- A gateway that lost the store to another one publishes nothing more.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson

from gateway.demand import Demand
from store import StoreAway, StoreHealth, Stream


async def publish_demand(demand: Demand, stream: Stream, health: Callable[[], StoreHealth], interval_s: float) -> None:
    """Publish repeatedly until cancelled; then close the stream.

    Args:
        health: of the store that shares this Redis.
    """
    last_rollout: dict[str, Any] | None = None
    is_resumed = False
    try:
        while True:
            with suppress(StoreAway):  # the store's health reports it
                if not is_resumed:
                    last_rollout, is_resumed = await _last_published(stream), True
                found = await demand.look(last_rollout["ended_at"] if last_rollout else 0.0)
                last_rollout = found["last_rollout"] or last_rollout
                if health().ok:
                    await stream.add(orjson.dumps({**found, "last_rollout": last_rollout}))
            await asyncio.sleep(interval_s)
    finally:
        await stream.aclose()


async def _last_published(stream: Stream) -> dict[str, Any] | None:
    entry = await stream.newest()
    if entry is None:
        return None
    try:
        last: dict[str, Any] | None = orjson.loads(entry.value)["last_rollout"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None  # written by another version
    return last
