"""SGLang's routes (SGLang 0.5.23, srt/entrypoints/http_server.py): OpenAI's, load, and control."""

import dataclasses
import time
from functools import partial

from engines.simulated.common_routes import common_routes, model_card
from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.fields import Body, flag
from engines.simulated.routes import Routes
from engines.simulated.service import EngineService
from engines.simulated.sglang_anthropic import anthropic_routes
from engines.simulated.sglang_dialect import TOOL_CALL_PARSER, VERSION, SglangDialect, cache_hit_rate
from engines.simulated.sglang_generate import generate
from engines.simulated.sglang_responses import responses_routes
from engines.simulated.sglang_tokens import message_routes
from engines.simulated.sleep import SglangSleepRoutes
from engines.simulated.weights import SglangWeightRoutes


def sglang_routes(service: EngineService, dialect: SglangDialect) -> Routes:
    """Every route of the server."""
    control = _Control(service, dialect)
    common = common_routes(service, dialect)
    return {
        **common,
        **anthropic_routes(service, dialect),
        **responses_routes(service, dialect),
        **SglangWeightRoutes(service).table(),
        **SglangSleepRoutes(service, dialect).table(),
        ("POST", "/v1/tokenize"): common["POST", "/tokenize"],
        **message_routes(service),
        ("POST", "/generate"): partial(generate, service, dialect),
        ("GET", f"/v1/models/{service.settings.model}"): control.model,
        ("GET", "/metrics"): control.metrics,
        ("GET", "/health"): control.health,
        ("GET", "/health_generate"): control.health,
        ("GET", "/ping"): control.health,
        ("GET", "/ready"): control.ready,
        ("GET", "/model_info"): control.model_info,
        ("GET", "/get_model_info"): control.model_info,
        ("GET", "/server_info"): control.server_info,
        ("GET", "/get_server_info"): control.server_info,
        ("GET", "/v1/loads"): control.loads,
        ("POST", "/abort_request"): control.abort_request,
        ("POST", "/pause_generation"): control.pause_generation,
        ("POST", "/continue_generation"): control.continue_generation,
        ("GET", "/flush_cache"): control.flush_cache,
        ("POST", "/flush_cache"): control.flush_cache,
    }


class _Control:
    """Routes that change or show the engine itself."""

    def __init__(self, service: EngineService, dialect: SglangDialect) -> None:
        self._service = service
        self._dialect = dialect

    async def model(self, exchange: Exchange) -> None:
        await exchange.respond_json(model_card(self._service))

    async def metrics(self, exchange: Exchange) -> None:
        content_type = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await exchange.respond(self._dialect.metrics(), 200, content_type)

    async def health(self, exchange: Exchange) -> None:
        """Answers at once, as with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0."""
        await exchange.respond(b"")

    async def ready(self, exchange: Exchange) -> None:
        await exchange.respond(b"", 503 if self._service.live.engine.paused else 200)

    async def model_info(self, exchange: Exchange) -> None:
        settings = self._service.settings
        await exchange.respond_json(
            {
                "model_path": self._service.served_name,
                "tokenizer_path": settings.model,
                "is_generation": True,
                "tool_call_parser": TOOL_CALL_PARSER,
                "reasoning_parser": settings.reasoning_parser,
                "weight_version": self._service.weight_version,
            }
        )

    async def server_info(self, exchange: Exchange) -> None:
        settings = self._service.settings
        profile = settings.profile
        await exchange.respond_json(
            {
                "model_path": settings.model,
                "served_model_name": settings.model,
                "tp_size": profile.tp,
                **({"dp_size": settings.data_parallel_size} if settings.data_parallel_size > 1 else {}),
                "schedule_policy": "fcfs",
                "enable_priority_scheduling": settings.scheduling_policy == "priority",
                "schedule_low_priority_values_first": settings.low_priority_values_first,
                "incremental_streaming_output": settings.incremental_streaming_output,
                "sampling_defaults": "openai",  # the simulated model has no parameters of its own
                "tool_call_parser": TOOL_CALL_PARSER,
                "reasoning_parser": settings.reasoning_parser,
                "enable_response_store": settings.response_store,
                "skip_tokenizer_init": False,
                "max_running_requests": profile.slots,
                "max_total_num_tokens": profile.kv_capacity_tokens,
                "internal_states": [self._load()],
                "version": VERSION,
                "simulated": {"profile": dataclasses.asdict(profile), "speed_up": settings.speed_up},
            }
        )

    async def loads(self, exchange: Exchange) -> None:
        load = self._load()
        await exchange.respond_json(
            {"timestamp": time.time(), "version": VERSION, "dp_rank_count": 1, "loads": [load], "aggregate": load}
        )

    async def abort_request(self, exchange: Exchange) -> None:
        """Aborts every request whose rid BEGINS with the given one, as the real scheduler does."""
        body = await exchange.json()
        prefix = str(body.get("rid") or "")
        everything = flag(body, "abort_all")
        if everything or prefix:
            for id, running in list(self._service.running.items()):
                if everything or id.startswith(prefix):
                    self._service.abort(running)
        await exchange.respond(b"")

    async def pause_generation(self, exchange: Exchange) -> None:
        body = await exchange.json()
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise ApiError(400, f"Invalid pause mode: {mode}", param="mode")
        self._dialect.stop_entry()
        self._service.live.pause("abort" if mode == "abort" else "keep")
        if mode == "abort":
            await self._service.drained()
        else:
            await self._service.live.stilled()
        if mode == "retract":
            self._service.live.retract()
        await exchange.respond_json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, exchange: Exchange) -> None:
        self._service.live.resume()
        self._dialect.allow_entry()
        await exchange.respond_json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, exchange: Exchange) -> None:
        if not self._service.live.clear_prefix_cache():
            raise ApiError(400, "Flush cache failed: requests are running or waiting.")
        await exchange.respond(b"Cache flushed.\n", 200, (b"content-type", b"text/plain"))

    def _load(self) -> Body:
        self._service.live.settle()
        counts = self._service.live.engine.counts()
        profile = self._service.settings.profile
        used = round(counts.kv_usage * profile.kv_capacity_tokens)
        return {
            "timestamp": time.time(),
            "dp_rank": self._service.rank,
            "num_running_reqs": counts.num_running,
            "num_waiting_reqs": counts.num_waiting,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": profile.kv_capacity_tokens,
            "max_running_requests": profile.slots,
            "token_usage": counts.kv_usage,
            "cache_hit_rate": cache_hit_rate(self._service),
            "utilization": counts.num_running / profile.slots,
        }
