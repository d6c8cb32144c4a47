"""vLLM's dialect, as of 0.32 and 0.33: lower priority is earlier, and closing the connection aborts a request."""

import re
from collections.abc import Iterator
from math import isfinite, nan
from statistics import fmean

import orjson

from engines.dialect import Asleep, Observation, ObservationError
from engines.http import HttpClient
from engines.tokens import TokenRoutes
from engines.upstream import VLLM_GENERATE, Leg, Upstream, salted, stream_options, with_fields
from engines.vllm_tokens import token_routes

_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Vllm:
    """Talks to `vllm serve`, started with `--scheduling-policy priority` (with fcfs it ignores priorities)."""

    kind = "vllm"

    def __init__(self) -> None:
        self.tokens: TokenRoutes | None = None
        self.tokens_note = ""

    async def find_tokens(self, http: HttpClient, timeout_s: float) -> None:
        self.tokens = await token_routes(http, timeout_s)
        self.tokens_note = (
            self.tokens.limits if self.tokens else "it has no render and derender routes (--enable-scale-out)"
        )

    def upstream(self, leg: Leg) -> Upstream:
        # Headers, not body fields: the body stays as it came, and the header overrides a priority in it.
        headers = (
            f"x-request-id: {leg.request_id}\r\n"
            f"x-vllm-priority: {leg.priority}\r\n"
            f"x-session-id: {leg.trajectory_id}\r\n"
        )
        body = leg.body
        # On this route alone the header does not set the priority (0.33, scale_out/token_in_token_out/serving.py).
        said = {"priority": leg.priority} if leg.path == VLLM_GENERATE else {}
        if leg.counts_tokens or leg.cache_salt or said:
            body = with_fields(body, leg.request, said | stream_options(leg) | salted(leg.request, leg.cache_salt))
        return Upstream(leg.path, headers.encode("latin-1", "replace"), body)

    async def observe(self, http: HttpClient, timeout_s: float) -> Observation:
        status, page = await http.get("/metrics", timeout_s)
        if status != 200:
            raise ObservationError(f"/metrics answered {status}")
        text = page.decode("utf-8", "replace")
        running = _metric_sum(text, "vllm:num_requests_running")
        if running is None:
            raise ObservationError("/metrics has no vllm:num_requests_running")
        if 'sleep_state="awake"} 0' in text:
            raise Asleep("it sleeps")
        shares = list(_metric_values(text, "vllm:kv_cache_usage_perc"))
        tokens = (_metric_sum(text, "vllm:generation_tokens_total") or 0) + (
            _metric_sum(text, "vllm:prompt_tokens_total") or 0
        )
        return Observation(
            num_running=int(running),
            num_waiting=int(_metric_sum(text, "vllm:num_requests_waiting") or 0),
            kv_used_share=fmean(shares) if shares else 0.0,
            kv_capacity_tokens=_kv_capacity(text),
            slots=None,
            work_counter=tokens,
            started_at=_metric_sum(text, "process_start_time_seconds"),
        )

    async def slots(self, http: HttpClient, timeout_s: float) -> int | None:
        # Only a server in development mode reports its configuration.
        status, body = await http.get("/server_info?config_format=json", timeout_s)
        if status != 200:
            return None
        try:
            scheduler = orjson.loads(body)["vllm_config"]["scheduler_config"]
            return int(scheduler["max_num_seqs"])
        except (KeyError, TypeError, ValueError):
            return None

    async def abort(self, http: HttpClient, request_id: str, timeout_s: float) -> None:
        return None


def _kv_capacity(text: str) -> int | None:
    """The tokens of all data-parallel engines. Each has a series, with the tokens of one engine, but with the blocks of
    all (vllm/v1/engine/core_client.py)."""
    tokens = 0
    for line in re.finditer(r"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE):
        labels = dict(_LABEL.findall(line[1]))
        try:
            if labels.get("kv_cache_size_tokens", "None") == "None":
                return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
            tokens += int(labels["kv_cache_size_tokens"])
        except (KeyError, ValueError):
            return None
    return tokens or None


def _metric_sum(page: str, name: str) -> float | None:
    """The sum of all series of one Prometheus metric; None if it is absent. Raises: see `_metric_values`."""
    values = list(_metric_values(page, name))
    return sum(values) if values else None


def _metric_values(page: str, name: str) -> Iterator[float]:
    """The value of each series of one Prometheus metric: with data parallelism, each engine has one. Cost: a search,
    because pages have 80 KB.

    Raises:
        ObservationError: a series has no finite value.
    """
    start = 0
    while (start := page.find(name, start)) >= 0:
        end = start + len(name)
        if (start == 0 or page[start - 1] == "\n") and page[end : end + 1] in ("{", " "):
            line_end = page.find("\n", start)
            yield _value(page[start : line_end if line_end >= 0 else len(page)])
        start = end


def _value(series: str) -> float:
    try:
        value = float(series.rpartition("}")[2].split()[0] if "}" in series else series.split()[1])
    except (IndexError, ValueError):
        value = nan
    if not isfinite(value):
        raise ObservationError(f"the metrics have no value at {series[:100]!r}")
    return value
