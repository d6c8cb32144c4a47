"""Fixtures of the fault tests."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.support.gateway import REUSED_FOR
from tests.support.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

# A Redis server has sixteen databases; each test takes its own.
_databases = itertools.cycle(range(16))


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120, limits=REUSED_FOR) as client:
        yield client


@pytest.fixture(params=["sqlite", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of the test's own that outlives a gateway."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'heddle.sqlite3'}"
    server: RedisServer = request.getfixturevalue("redis_server")
    return server.url(next(_databases))
