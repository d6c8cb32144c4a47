"""Routes that put a simulated engine to sleep, in the forms of vLLM (0.33, serve/dev/sleep) and SGLang (0.5.23).

Asleep it behaves like the real ones: it is healthy, lists its models, and makes no tokens. Its KV is gone. Dropped
weights are gone as well, so if a waking forgets to reload them, the output differs.
"""

import asyncio

from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.routes import Routes
from engines.simulated.service import EngineService
from engines.simulated.sglang_dialect import SglangDialect

_DROPPED = "dropped"


async def _fall_asleep(service: EngineService, level: int) -> None:
    await asyncio.sleep(service.settings.sleep_s / service.settings.speed_up)
    service.live.clear_prefix_cache()
    service.sleep_level = level
    if level == 2:
        service.load_weights(_DROPPED)


async def _wake(service: EngineService) -> None:
    if service.sleep_level is not None:
        await asyncio.sleep(service.settings.sleep_s / service.settings.speed_up)
    service.sleep_level = None
    service.live.resume()


class VllmSleepRoutes:
    """The routes of development mode."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    def table(self) -> Routes:
        """These routes."""
        return {
            ("POST", "/sleep"): self.sleep,
            ("POST", "/wake_up"): self.wake_up,
            ("GET", "/is_sleeping"): self.is_sleeping,
        }

    async def sleep(self, exchange: Exchange) -> None:
        level = exchange.query_value("level", "1")
        if level not in ("0", "1", "2"):
            raise ApiError(400, f"1 validation error: 'loc': 'query.level', 'input': '{level}'", param="query.level")
        self._service.live.pause("abort")
        await self._service.drained()
        await _fall_asleep(self._service, int(level))
        await exchange.respond_json({"status": "sleeping", "level": int(level)})

    async def wake_up(self, exchange: Exchange) -> None:
        """On a sleeping engine a tag wakes only that part: its weights come back, and it stays asleep."""
        tag = exchange.query_value("tags", "")
        if tag != "weights":
            await _wake(self._service)
        status = "awake" if self._service.sleep_level is None else "sleeping"
        await exchange.respond_json({"status": status, "tags": [tag] if tag else None})

    async def is_sleeping(self, exchange: Exchange) -> None:
        """True also while it is only paused."""
        is_still = self._service.sleep_level is not None or self._service.live.engine.paused is not None
        await exchange.respond_json({"is_sleeping": is_still})


class SglangSleepRoutes:
    """As with `--enable-memory-saver --enable-weights-cpu-backup`."""

    def __init__(self, service: EngineService, dialect: SglangDialect) -> None:
        self._service = service
        self._dialect = dialect

    def table(self) -> Routes:
        """These routes."""
        return {
            ("POST", "/release_memory_occupation"): self.release,
            ("POST", "/resume_memory_occupation"): self.resume,
        }

    async def release(self, exchange: Exchange) -> None:
        if self._service.running:
            raise ApiError(400, "release_memory_occupation should be called only when no ongoing request.")
        self._dialect.stop_entry()
        self._service.live.pause("abort")
        await _fall_asleep(self._service, 1)
        await exchange.respond(b"")

    async def resume(self, exchange: Exchange) -> None:
        await _wake(self._service)
        self._dialect.allow_entry()
        await exchange.respond(b"")
