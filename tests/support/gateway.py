"""A gateway on a real socket in the test's own event loop."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from gateway.config import load_settings
from gateway.server import Listening, serving

ADMIN_KEY = "admin-key-of-the-tests"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
# For engines in processes of their own: on a busy machine they may stall (up to 20 s seen) although they are healthy.
PATIENT: dict[str, Any] = {"start_timeout_s": 60, "observe_timeout_s": 60, "connect_timeout_s": 60}

# Servers close a connection after 5 idle seconds, as httpx would: on a busy machine a request may race with that.
REUSED_FOR = httpx.Limits(keepalive_expiry=1.0)


@asynccontextmanager
async def running_gateway(*engines: str, **settings: Any) -> AsyncIterator[Listening]:
    """A gateway before these engines, with an in-memory store unless told otherwise; `.url` is its address."""
    chosen = load_settings(
        engines=engines,
        **{"store": "memory:", "host": "127.0.0.1", "port": 0, "admin_key": ADMIN_KEY, "shutdown_timeout_s": 1}
        | settings,
    )
    async with serving(chosen) as listening:
        yield listening


async def eventually(condition: Any, timeout_s: float = 60.0) -> None:
    """Wait until `condition()` holds; it may be a coroutine function. Each pause is a twentieth of the time so far, at
    most 50 ms: looking every 5 ms took half a core."""
    began_at = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while True:
            held = condition()
            if asyncio.iscoroutine(held):
                held = await held
            if held:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.sleep(min(max((time.monotonic() - began_at) / 20, 0.005), 0.05))
