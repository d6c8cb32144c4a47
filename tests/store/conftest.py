"""Fixtures of the store tests: one way to open each kind of store, empty at first and again on the same data."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from store import Store, StoreSettings, open_store
from tests.support.redis_server import PATIENT, RedisServer, redis_server

__all__ = ["redis_server"]

KINDS = ["memory", "sqlite", "redis"]
_numbers = itertools.count()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_store(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Store]:
    """A store of this kind on data of its own, or on the data of an earlier store of the same name."""

    def make(name: str = "", **limits: object) -> Store:
        name = name or f"unnamed-{next(_numbers)}"
        match kind:
            case "memory":
                return open_store("memory:", StoreSettings(**limits))
            case "sqlite":
                return open_store(f"sqlite:{tmp_path / name}.sqlite3", StoreSettings(**limits))
            case _:
                # Only tests of the Redis store start a server.
                server: RedisServer = request.getfixturevalue("redis_server")
                namespace = f"{tmp_path.name}-{name}:"
                return open_store(server.url(), StoreSettings(namespace=namespace, **(PATIENT | limits)))

    return make
