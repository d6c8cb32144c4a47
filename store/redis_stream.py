"""A stream on a Redis server. An entry's age is measured by the server's clock alone."""

from typing import Any

from store.port import StoreAway
from store.redis_client import FAULTS, asked, let_go, place_of, redis_client
from store.settings import StoreSettings
from store.stream import Entry

# Each is 1 MB at 6,400 trajectories.
MAX_ENTRIES = 4


class RedisStream:
    """A stream whose key is its name in the namespace.

    Raises:
        StoreError: the URL is malformed.
    """

    def __init__(self, url: str, name: str, settings: StoreSettings) -> None:
        self._redis = redis_client(url, settings)
        self._place = place_of(url)
        self._key = settings.namespace + name

    async def add(self, value: bytes) -> None:
        try:
            await asked(self._redis.xadd(self._key, {"value": value}, maxlen=MAX_ENTRIES, approximate=False))
        except FAULTS as fault:
            await let_go(self._redis)
            raise self._away(fault) from fault

    async def newest(self) -> Entry | None:
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
