"""vLLM's routes (vLLM 0.33, entrypoints/): inference, tokens in and out, and the control routes of development mode."""

import dataclasses
from functools import partial
from typing import Any

import orjson

from engines.kv_connectors import kv_connectors, kv_transfer_config
from engines.simulated.anthropic_api import anthropic_routes
from engines.simulated.common_routes import common_routes
from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.fields import items
from engines.simulated.responses_api import responses_routes
from engines.simulated.routes import Routes
from engines.simulated.service import EngineService
from engines.simulated.settings import SimulatedEngineSettings
from engines.simulated.sleep import VllmSleepRoutes
from engines.simulated.text import packed
from engines.simulated.vllm_dialect import VERSION, VllmDialect
from engines.simulated.vllm_tokens import token_routes
from engines.simulated.weights import VllmWeightRoutes


def vllm_routes(service: EngineService, dialect: VllmDialect) -> Routes:
    """Every route of the server."""
    control = _Control(service)
    return {
        **common_routes(service, dialect),
        **anthropic_routes(service, dialect),
        **responses_routes(service, dialect),
        **token_routes(service, dialect),
        **VllmWeightRoutes(service).table(),
        **VllmSleepRoutes(service).table(),
        ("POST", "/detokenize"): partial(_detokenize, service, dialect),
        ("GET", "/metrics"): partial(_metrics, dialect),
        ("GET", "/health"): _empty,
        ("GET", "/ping"): _empty,
        ("POST", "/ping"): _empty,
        ("GET", "/version"): _version,
        ("GET", "/load"): control.load,
        ("POST", "/pause"): control.pause,
        ("POST", "/resume"): control.resume,
        ("GET", "/is_paused"): control.is_paused,
        ("POST", "/abort_requests"): control.abort_requests,
        ("POST", "/inference/v1/abort_requests"): control.abort_requests,
        ("POST", "/reset_prefix_cache"): control.reset_prefix_cache,
        ("GET", "/server_info"): control.server_info,
    }


_HOST_BYTES = 2**30  # which limits nothing here


class _Control:
    """Routes that change or show the engine itself. vLLM requires no key for them."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def load(self, exchange: Exchange) -> None:
        await exchange.respond_json({"server_load": len(self._service.running)})

    async def pause(self, exchange: Exchange) -> None:
        mode = exchange.query_value("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise ApiError(400, f"Invalid pause mode: {mode}", param="mode")
        self._service.live.pause(mode)  # type: ignore[arg-type]
        if mode == "keep":
            await self._service.live.stilled()
        else:
            await self._service.drained()
        if exchange.query_value("clear_cache", "true") == "true":
            self._clear(mode == "keep")
        await exchange.respond_json({"status": "paused"})

    async def resume(self, exchange: Exchange) -> None:
        self._service.live.resume()
        await exchange.respond_json({"status": "resumed"})

    async def is_paused(self, exchange: Exchange) -> None:
        await exchange.respond_json({"is_paused": self._service.live.engine.paused is not None})

    async def abort_requests(self, exchange: Exchange) -> None:
        raw = await exchange.body()
        running = self._service.running
        ids = (items(_object(raw), "request_ids") if raw else []) or list(running)
        for id in ids:
            if id in running:
                self._service.abort(running[id])
        # vLLM counts the ids that it was given, whether or not they run.
        await exchange.respond_json({"status": "aborted", "aborted": len(ids)})

    async def reset_prefix_cache(self, exchange: Exchange) -> None:
        is_paused = self._service.live.engine.paused == "keep"
        retracts = is_paused and exchange.query_value("reset_running_requests", "false") == "true"
        await exchange.respond_json({"success": self._clear(retracts)})

    def _clear(self, retracts: bool) -> bool:
        if retracts:
            self._service.live.retract()
        return self._service.live.clear_prefix_cache()

    async def server_info(self, exchange: Exchange) -> None:
        settings = self._service.settings
        await exchange.respond_json(
            {
                "vllm_config": {
                    "model_config": {"model": settings.model, "max_model_len": self._service.max_model_len},
                    "parallel_config": _parallel_config(settings),
                    "scheduler_config": {
                        "policy": settings.scheduling_policy,
                        "max_num_seqs": settings.profile.slots,
                    },
                    "kv_transfer_config": _kv_transfer_config(settings),
                    "cache_config": {"block_size": settings.block_size, "enable_prefix_caching": True},
                },
                "simulated": {"profile": dataclasses.asdict(settings.profile), "speed_up": settings.speed_up},
            }
        )


def _parallel_config(settings: SimulatedEngineSettings) -> dict[str, int]:
    config = {"tensor_parallel_size": settings.profile.tp}
    if (size := settings.data_parallel_size) > 1:
        config |= {"data_parallel_size": size, "data_parallel_size_local": size}
    return config


def _kv_transfer_config(settings: SimulatedEngineSettings) -> dict[str, Any] | None:
    """As the real server reports it; with both ways there is one connector that combines two."""
    return kv_transfer_config(kv_connectors(settings.kv_transfer, settings.kv_tier, _HOST_BYTES, has_gpu=True))


def _object(raw: bytes) -> dict[str, object]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"Invalid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


async def _detokenize(service: EngineService, dialect: VllmDialect, exchange: Exchange) -> None:
    body = await exchange.json()
    dialect.check_model(body)
    ids = items(body, "tokens")
    try:
        packed(ids)
    except ValueError as error:
        raise ApiError(400, str(error), param="tokens") from error
    text = service.tokenizer.decode(ids)
    await exchange.respond_json({"prompt": text, "text": text})


async def _metrics(dialect: VllmDialect, exchange: Exchange) -> None:
    await exchange.respond(dialect.metrics(), 200, (b"content-type", b"text/plain; version=0.0.4; charset=utf-8"))


async def _empty(exchange: Exchange) -> None:
    await exchange.respond(b"")


async def _version(exchange: Exchange) -> None:
    await exchange.respond_json({"version": VERSION})
