"""The client of a Redis server, and what it means that the server is away: the one place that knows the library."""

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from store.port import StoreError
from store.settings import StoreSettings

__all__ = ["FAULTS", "AuthenticationError", "place_of", "redis_client"]

FAULTS = (RedisError, OSError, TimeoutError)


def redis_client(url: str, settings: StoreSettings) -> Redis:
    """A client that is not connected yet and repeats nothing: only who calls it knows what is safe to send again.

    Raises:
        StoreError: the URL is malformed. The message repeats no password.
    """
    try:
        return Redis.from_url(
            url,
            socket_timeout=settings.op_timeout_s,
            socket_connect_timeout=settings.connect_timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as fault:
        raise StoreError(f"Redis URL for {place_of(url)}: {fault}") from None


def place_of(url: str) -> str:
    """Host, port and database, without secrets."""
    return url.rpartition("@")[2].partition("://")[2] or url.rpartition("@")[2]
