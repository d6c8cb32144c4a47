"""Routes that give a simulated engine other weights, in the forms of vLLM (0.33, entrypoints/rl) and SGLang (0.5.23).

Weights are named by the last part of their path, or by the version that comes with a transfer. Text depends on the
loaded weights, and answers report the version that was set. As with a real engine these are separate, so that tests
show an engine that has one without the other. A path whose last part begins with `missing` does not exist.
"""

import asyncio
from pathlib import PurePath
from typing import Any

from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.fields import flag, items, mapping
from engines.simulated.routes import Routes
from engines.simulated.service import EngineService


async def _load(service: EngineService, weights: str) -> None:
    await asyncio.sleep(service.settings.weight_load_s / service.settings.speed_up)
    service.load_weights(weights)


def _at(path: str) -> str:
    name = PurePath(path).name
    if name.startswith("missing"):
        raise ApiError(500, f"Cannot find any model weights with `{path}`", "InternalServerError")
    return name


class VllmWeightRoutes:
    """The routes of development mode."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._has_group = False
        self._is_updating = False

    def table(self) -> Routes:
        """These routes."""
        return {
            ("POST", "/collective_rpc"): self.collective_rpc,
            ("POST", "/init_weight_transfer_engine"): self.init,
            ("POST", "/start_weight_update"): self.start,
            ("POST", "/update_weights"): self.update,
            ("POST", "/finish_weight_update"): self.finish,
            ("POST", "/update_weight_version"): self.set_version,
            ("GET", "/weight_info"): self.info,
        }

    async def collective_rpc(self, exchange: Exchange) -> None:
        body = await exchange.json()
        if body.get("method") == "reload_weights":
            path = mapping(body, "kwargs").get("weights_path") if "kwargs" in body else None
            # Without a path this is the checkpoint that the engine was started with.
            await _load(self._service, _at(str(path)) if path else self._service.settings.weight_version)
            await exchange.respond_json({"results": [None]})
            return
        await exchange.respond_json({"results": [f"{body.get('method')} on a simulated worker"]})

    async def init(self, exchange: Exchange) -> None:
        mapping(await exchange.json(), "init_info")
        self._has_group = True
        await exchange.respond_json({"message": "Weight transfer initialized"})

    async def start(self, exchange: Exchange) -> None:
        self._need(self._has_group, "The weight transfer engine is not initialized.")
        self._is_updating = True
        await exchange.respond_json({"message": "Weight update started"})

    async def update(self, exchange: Exchange) -> None:
        self._need(self._is_updating, "No weight update was started.")
        info: Any = (await exchange.json()).get("update_info")
        await _load(self._service, str(info["weights"]) if isinstance(info, dict) and "weights" in info else "sent")
        await exchange.respond_json({"message": "Weights updated"})

    async def finish(self, exchange: Exchange) -> None:
        self._need(self._is_updating, "No weight update was started.")
        self._is_updating = False
        version = (await exchange.json()).get("weight_version")
        if version is not None:
            self._service.name_weights(str(version))
        await exchange.respond_json({"message": "Weight update finished"})

    async def set_version(self, exchange: Exchange) -> None:
        self._service.name_weights(str((await exchange.json()).get("new_version", "")))
        await exchange.respond_json({"success": True, "new_version": self._service.weight_version})

    async def info(self, exchange: Exchange) -> None:
        await exchange.respond_json({"weight_version": self._service.weight_version})

    def _need(self, held: bool, otherwise: str) -> None:
        if not held:
            raise ApiError(500, otherwise, "InternalServerError")


class SglangWeightRoutes:
    """The routes of weight updates; a load from disk renames the served model to its path, as the real one does."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._has_session = False

    def table(self) -> Routes:
        """These routes."""
        return {
            ("POST", "/update_weights_from_disk"): self.from_disk,
            ("POST", "/init_weights_update_group"): self.succeed,
            ("POST", "/begin_weight_update"): self.begin,
            ("POST", "/update_weights_from_distributed"): self.from_distributed,
            ("POST", "/update_weights_from_tensor"): self.from_distributed,
            ("POST", "/end_weight_update"): self.end,
            ("POST", "/update_weight_version"): self.set_version,
        }

    async def from_disk(self, exchange: Exchange) -> None:
        body = await exchange.json()
        path = str(body.get("model_path", ""))
        try:
            weights = _at(path)
        except ApiError as error:
            await exchange.respond_json({"success": False, "message": error.message, "num_paused_requests": 0}, 400)
            return
        await _load(self._service, weights)
        self._service.served_name = path
        await self._loaded(exchange, body)

    async def from_distributed(self, exchange: Exchange) -> None:
        body = await exchange.json()
        if not self._has_session:
            told = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            await exchange.respond_json({"success": False, "message": told}, 400)
            return
        items(body, "names")
        await _load(self._service, str(body.get("weight_version") or "sent"))
        await self._loaded(exchange, body)

    async def _loaded(self, exchange: Exchange, body: dict[str, Any]) -> None:
        if (version := body.get("weight_version")) is not None:
            self._service.name_weights(str(version))
        if flag(body, "flush_cache", True) and not self._service.live.clear_prefix_cache():
            told = "Weights were updated, but the cache was not flushed because requests are still running or queued."
            await exchange.respond_json({"success": False, "message": told}, 400)
            return
        told = "Succeeded to update model weights."
        await exchange.respond_json({"success": True, "message": told, "num_paused_requests": 0})

    async def begin(self, exchange: Exchange) -> None:
        self._has_session = True
        await self.succeed(exchange)

    async def end(self, exchange: Exchange) -> None:
        self._has_session = False
        await self.succeed(exchange)

    async def succeed(self, exchange: Exchange) -> None:
        await exchange.respond_json({"success": True, "message": "Success"})

    async def set_version(self, exchange: Exchange) -> None:
        body = await exchange.json()
        if flag(body, "abort_all_requests", True):
            for running in list(self._service.running.values()):
                self._service.abort(running)
        version = str(body.get("new_version", ""))
        self._service.name_weights(version)
        told = f"Weight version updated to {version}"
        await exchange.respond_json({"success": True, "message": told, "new_version": version})
