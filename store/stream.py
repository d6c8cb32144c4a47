"""A short stream on a Redis server, from the process that knows something to one that needs the newest state of it.

It is not a record: an older entry is worth nothing once there is a newer one. So only a few entries are kept, for
people who look, and nothing waits for a Redis that is away. An entry's age is measured by the server's clock alone.
"""

from dataclasses import dataclass
from typing import Any

from store.port import StoreAway
from store.redis_client import FAULTS, asked, let_go, place_of, redis_client
from store.settings import StoreSettings

DEMAND = "demand"
"""The stream of what the gateway's work demands of the fleet, as JSON: see `GET /v1/demand`."""

# Each is 1 MB at 6,400 trajectories.
MAX_ENTRIES = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry's value, and its age in seconds."""

    value: bytes
    age_s: float


class Stream:
    """One stream of one namespace. Every method raises StoreAway, and is safe to repeat.

    Raises:
        StoreError: the URL is malformed.
    """

    def __init__(self, url: str, name: str, settings: StoreSettings) -> None:
        self._redis = redis_client(url, settings)
        self._place = place_of(url)
        self._key = settings.namespace + name

    async def add(self, value: bytes) -> None:
        """Add an entry; only the last few entries are kept."""
        try:
            await asked(self._redis.xadd(self._key, {"value": value}, maxlen=MAX_ENTRIES, approximate=False))
        except FAULTS as fault:
            await let_go(self._redis)
            raise self._away(fault) from fault

    async def newest(self) -> Entry | None:
        """The newest entry; None if there never was one."""
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.xrevrange(self._key, count=1)
                pipe.time()
                found: list[Any] = await asked(pipe.execute())
        except FAULTS as fault:
            raise self._away(fault) from fault
        entries, (seconds, microseconds) = found
        if not entries:
            return None
        entry_id, fields = entries[0]
        said_at = int(entry_id.partition(b"-")[0]) / 1000
        return Entry(bytes(fields[b"value"]), max(seconds + microseconds / 1e6 - said_at, 0.0))

    async def aclose(self) -> None:
        await self._redis.aclose()

    def _away(self, fault: BaseException) -> StoreAway:
        return StoreAway(f"Redis at {self._place} is away: {type(fault).__name__}: {fault}")
