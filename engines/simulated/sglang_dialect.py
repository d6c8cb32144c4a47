"""SGLang's server where it differs: errors, ids, priorities and metrics (SGLang 0.5.23, srt/entrypoints/)."""

import asyncio
import os

import orjson

from engines.simulated.anthropic_api import anthropic_error
from engines.simulated.dialect import Shape
from engines.simulated.exchange import ApiError, Exchange
from engines.simulated.fields import Body, flag, integer
from engines.simulated.metrics import Exposition
from engines.simulated.service import EngineService

VERSION = "0.5.23"
TOOL_CALL_PARSER = "hermes"  # the form in which the simulated model writes calls
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    503: "overloaded_error",
}
_SHAPE = Shape(
    call_id_prefix="call_",
    named_call_reason="tool_calls",
    call_content=None,
    usage_elsewhere=b',"usage":null',
    ends_apart=True,
    message_fields={"reasoning_content": None},
)
_WORST_PRIORITY = 2**31
_UNGUARDED = ("/health", "/ready", "/ping", "/metrics")


class SglangDialect:
    """How SGLang answers."""

    shape = _SHAPE

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._may_enter = asyncio.Event()
        self._may_enter.set()

    def error_body(self, error: ApiError, path: str) -> bytes:
        if path.startswith("/v1/messages"):
            return anthropic_error(error, _ANTHROPIC_TYPES.get(error.status, "api_error"))
        if path == "/v1/responses":
            return orjson.dumps({"error": _error(error)})
        if path == "/generate":
            return orjson.dumps({"error": {"message": error.message}})
        return orjson.dumps({"object": "error", **_error(error)})

    def error_event(self, error: ApiError) -> bytes:
        return b"data: " + orjson.dumps({"error": {"object": "error", **_error(error)}}) + b"\n\n"

    def is_guarded(self, path: str) -> bool:
        """Whether the API key is required."""
        return path not in _UNGUARDED

    def answer_id(self, exchange: Exchange, body: Body, prefix: str) -> str:
        return str(body.get("rid") or os.urandom(16).hex())

    def priority(self, exchange: Exchange, body: Body) -> int:
        given = integer(body, "priority")
        if given is None:
            return _WORST_PRIORITY
        return given if self._service.settings.low_priority_values_first else -given

    def check_model(self, body: Body) -> None:
        """Accepts any model name."""

    def check_tokenize(self, body: Body) -> None:
        if flag(body, "stream"):
            raise ApiError(501, "OpenAIServingTokenize does not support streaming requests", "NotImplementedError")

    def check_chat(self, body: Body) -> None:
        if flag(body, "stream") and flag(body, "return_token_ids"):
            raise ApiError(400, "return_token_ids is not supported in streams.", param="return_token_ids")

    async def admit(self) -> None:
        await self._may_enter.wait()

    def late_refusal(self) -> ApiError | None:
        try:
            self._service.check_queue()
        except ApiError as full:
            return ApiError(full.status, full.message, "SERVICE_UNAVAILABLE")
        return None

    def final_fields(self, stop_reason: str | int | None) -> Body:
        return {"matched_stop": stop_reason}

    def stop_entry(self) -> None:
        """Makes new requests wait in the HTTP server from now on."""
        self._may_enter.clear()

    def allow_entry(self) -> None:
        self._may_enter.set()

    def metrics(self) -> bytes:
        """SGLang's metrics with `--enable-metrics`, as far as they are simulated."""
        service = self._service
        service.live.settle()
        counts, totals = service.live.engine.counts(), service.totals
        capacity = service.settings.profile.kv_capacity_tokens
        labels = f'engine_type="unified",model_name="{service.settings.model}",tp_rank="0"'
        if service.settings.data_parallel_size > 1:
            labels += f',dp_rank="{service.rank}"'
        out = Exposition(labels)
        out.gauge("sglang:num_running_reqs", counts.num_running)
        out.gauge("sglang:num_queue_reqs", counts.num_waiting)
        out.gauge("sglang:token_usage", counts.kv_usage)
        out.gauge("sglang:full_token_usage", counts.kv_usage)
        out.gauge("sglang:num_used_tokens", round(counts.kv_usage * capacity))
        out.gauge("sglang:max_total_num_tokens", capacity)
        out.gauge("sglang:cache_hit_rate", cache_hit_rate(service))
        out.gauge("sglang:num_paused_reqs", counts.num_running if service.live.engine.paused else 0)
        out.counter("sglang:num_retracted_requests", counts.num_preemptions)
        out.counter("sglang:num_aborted_requests", totals.num_finished["abort"])
        out.counter("sglang:prompt_tokens", counts.num_prompt_tokens)
        out.counters("sglang:cached_tokens", "cache_source", {"device": counts.num_cached_tokens})
        out.counter("sglang:generation_tokens", counts.num_generated_tokens)
        out.histogram("sglang:time_to_first_token_seconds", totals.time_to_first_token)
        out.histogram("sglang:inter_token_latency_seconds", totals.inter_token)
        out.histogram("sglang:e2e_request_latency_seconds", totals.end_to_end)
        out.histogram("sglang:queue_time_seconds", totals.queue_time)
        return out.text()


def cache_hit_rate(service: EngineService) -> float:
    """Share of looked-up prompt tokens that were in the prefix cache, since the start."""
    counts = service.live.engine.counts()
    return counts.num_prefix_hits / counts.num_prefix_queries if counts.num_prefix_queries else 0.0


def _error(error: ApiError) -> Body:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.status}
