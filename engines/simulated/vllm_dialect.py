"""vLLM's server where it differs: errors, ids, priorities and metrics (vLLM 0.33, entrypoints/)."""

import os

import orjson

from engines.simulated.anthropic_api import anthropic_error
from engines.simulated.dialect import Shape
from engines.simulated.exchange import ApiError, Exchange, InvalidField
from engines.simulated.fields import Body, integer
from engines.simulated.metrics import Exposition
from engines.simulated.service import EngineService

VERSION = "0.33.0"
_GUARDED = ("/v1", "/inference")
_SHAPE = Shape(
    call_id_prefix="chatcmpl-tool-",
    named_call_reason="stop",
    call_content="",
    fingerprint=f"vllm-{VERSION}-simulated",
    has_id_names=True,
    answer_nulls=dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics")),
    choice_nulls=dict.fromkeys(("token_ids", "routed_experts")),
    message_fields=dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning")),
)


class VllmDialect:
    """How vLLM answers."""

    shape = _SHAPE

    def __init__(self, service: EngineService) -> None:
        self._service = service

    def error_body(self, error: ApiError, path: str) -> bytes:
        if error.status == 401:
            return b'{"error":"Unauthorized"}'
        # A body that does not validate never reaches the route, so its error has OpenAI's form there too.
        if path.startswith("/v1/messages") and error.type != "Bad Request":
            return anthropic_error(error, error.type)
        return orjson.dumps({"error": _error(error)})

    def error_event(self, error: ApiError) -> bytes:
        return b"data: " + orjson.dumps({"error": _error(error)}) + b"\n\n"

    def is_guarded(self, path: str) -> bool:
        """Whether the API key is required; control routes never require it."""
        return path.startswith(_GUARDED)

    def answer_id(self, exchange: Exchange, body: Body, prefix: str) -> str:
        given = exchange.header(b"x-request-id") or body.get("request_id")
        return f"{prefix}{given or os.urandom(16).hex()}"

    def priority(self, exchange: Exchange, body: Body) -> int:
        given = integer(body, "priority", 0) or 0
        try:
            return int(exchange.header(b"x-vllm-priority") or given)
        except ValueError:
            return given

    def check_model(self, body: Body) -> None:
        model = body.get("model")
        if model not in (None, "") and model != self._service.settings.model:
            raise ApiError(
                404,
                f"The model `{model}` does not exist. Valid aliases: {self._service.settings.model}.",
                "NotFoundError",
                "model",
            )

    def check_tokenize(self, body: Body) -> None:
        """Tokenizes any."""

    def check_chat(self, body: Body) -> None:
        if not body.get("messages"):
            raise ApiError(400, "Cannot apply chat template to an empty conversation.")
        if body.get("stream_options") and not body.get("stream"):
            problem = "Stream options can only be defined when `stream=True`."
            raise ApiError(400, problem, param="stream_options")
        if body.get("tool_choice") not in (None, "none", "auto") and not body.get("tools"):
            raise ApiError(400, "When using `tool_choice`, `tools` must be set.", param="tool_choice")

    async def admit(self) -> None:
        self._service.check_queue()

    def late_refusal(self) -> ApiError | None:
        if self._service.sleep_level is not None or self._service.live.engine.paused in ("abort", "wait"):
            return ApiError(503, "Generation is paused.", "Service Unavailable")
        return None

    def final_fields(self, stop_reason: str | int | None) -> Body:
        return {"stop_reason": stop_reason}

    def metrics(self) -> bytes:
        """vLLM's metrics, as far as they are simulated."""
        service = self._service
        service.live.settle()
        counts, totals = service.live.engine.counts(), service.totals
        profile = service.settings.profile
        out = Exposition(f'engine="{service.rank}",model_name="{service.settings.model}"')
        out.gauge("vllm:num_requests_running", counts.num_running)
        out.gauge("vllm:num_requests_waiting", counts.num_waiting)
        out.gauges("vllm:num_requests_waiting_by_reason", "reason", {"capacity": counts.num_waiting, "deferred": 0})
        out.gauge("vllm:kv_cache_usage_perc", counts.kv_usage)
        level = service.sleep_level
        states = {"awake": int(level is None), "weights_offloaded": int(level == 1), "discard_all": int(level == 2)}
        out.gauges("vllm:engine_sleep_state", "sleep_state", states)
        block = service.settings.block_size
        num_blocks = profile.kv_capacity_tokens // block * service.settings.data_parallel_size  # of all ranks
        info = f'block_size="{block}",num_gpu_blocks="{num_blocks}"'
        info += f',kv_cache_size_tokens="{profile.kv_capacity_tokens}"'
        out.gauge("vllm:cache_config_info", 1, info)
        out.counter("vllm:prefix_cache_queries", counts.num_prefix_queries)
        out.counter("vllm:prefix_cache_hits", counts.num_prefix_hits)
        out.counter("vllm:external_prefix_cache_queries", 0)
        out.counter("vllm:external_prefix_cache_hits", 0)
        out.counter("vllm:num_preemptions", counts.num_preemptions)
        out.counter("vllm:prompt_tokens", counts.num_prompt_tokens)
        out.counter("vllm:prompt_tokens_cached", counts.num_cached_tokens)
        out.counter("vllm:generation_tokens", counts.num_generated_tokens)
        reasons = {reason: totals.num_finished[reason] for reason in ("stop", "length")}
        reasons |= dict.fromkeys(("abort", "error", "repetition"), 0)  # vLLM 0.32 does not count aborts
        out.counters("vllm:request_success", "finished_reason", reasons)
        out.counters("vllm:admission_rejections", "reason", {"max_num_queued_reqs": totals.num_rejected})
        out.histogram("vllm:time_to_first_token_seconds", totals.time_to_first_token)
        out.histogram("vllm:inter_token_latency_seconds", totals.inter_token)
        out.histogram("vllm:request_time_per_output_token_seconds", totals.inter_token)
        out.histogram("vllm:e2e_request_latency_seconds", totals.end_to_end)
        out.histogram("vllm:request_queue_time_seconds", totals.queue_time)
        out.histogram("vllm:request_prefill_time_seconds", totals.prefill_time)
        out.histogram("vllm:request_decode_time_seconds", totals.decode_time)
        out.of_process("process_start_time_seconds", service.started_at)
        return out.text()


def _error(error: ApiError) -> Body:
    if isinstance(error, InvalidField):
        place = f"body.{error.param}"
        message = f"1 validation error:\n  {{'loc': '{place}', 'msg': '{error.problem}'}}"
        return {"message": message, "type": error.type, "param": place, "code": error.status}
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.status}
