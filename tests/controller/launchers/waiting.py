"""Waiting until a test's condition holds."""

import asyncio
import urllib.request
from collections.abc import Callable

from tests.controller.launcher_contract import TIMEOUT_S


async def until(holds: Callable[[], object]) -> None:
    """Return once `holds` is true; it is called in a thread."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if await asyncio.to_thread(holds):
                return
            await asyncio.sleep(0.05)


def serves_models(url: str | None) -> bool:
    """Whether an engine answers at this URL."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False
