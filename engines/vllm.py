"""vLLM's dialect, as of 0.32 and 0.33: lower priority is earlier, and closing the connection aborts a request."""

import re
from math import isfinite, nan

import orjson

from engines.dialect import Asleep, Observation, ObservationError
from engines.http import HttpClient
from engines.tokens import TokenRoutes
from engines.upstream import VLLM_GENERATE, Leg, Upstream, salted, stream_options, with_fields
from engines.vllm_tokens import token_routes

_LABEL = re.compile(r'(\w+)="([^"]*)"')
_ENGINE = re.compile(r'[{,]engine="(\d+)"')


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

    async def observe(self, http: HttpClient, timeout_s: float) -> tuple[Observation, ...]:
        status, page = await http.get("/metrics", timeout_s)
        if status != 200:
            raise ObservationError(f"/metrics answered {status}")
        text = page.decode("utf-8", "replace")
        running = _by_rank(text, "vllm:num_requests_running")
        if not running:
            raise ObservationError("/metrics has no vllm:num_requests_running")
        if 'sleep_state="awake"} 0' in text:
            raise Asleep("it sleeps")
        waiting = _by_rank(text, "vllm:num_requests_waiting")
        shares = _by_rank(text, "vllm:kv_cache_usage_perc")
        made = _by_rank(text, "vllm:generation_tokens_total")
        read = _by_rank(text, "vllm:prompt_tokens_total")
        capacities = _kv_capacities(text)
        started_at = next(iter(_by_rank(text, "process_start_time_seconds").values()), None)
        return tuple(
            Observation(
                num_running=int(running[rank]),
                num_waiting=int(waiting.get(rank, 0)),
                kv_used_share=shares.get(rank, 0.0),
                kv_capacity_tokens=capacities.get(rank),
                slots=None,
                work_counter=made.get(rank, 0) + read.get(rank, 0),
                started_at=started_at,
            )
            for rank in sorted(running)
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


def _kv_capacities(text: str) -> dict[int, int]:
    """The tokens that the KV of each rank holds, as far as they are told.

    Each has a series, with the tokens of one rank, but with the blocks of all (vllm/v1/engine/core_client.py).
    """
    labels = [
        dict(_LABEL.findall(line[1])) for line in re.finditer(r"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE)
    ]
    capacities = {}
    for of_rank in labels:
        try:
            tokens = of_rank.get("kv_cache_size_tokens", "None")
            if tokens == "None":
                num_tokens = int(of_rank["num_gpu_blocks"]) * int(of_rank["block_size"]) // len(labels)
            else:
                num_tokens = int(tokens)
        except (KeyError, ValueError):
            continue
        if num_tokens > 0:
            capacities[int(of_rank.get("engine", 0))] = num_tokens
    return capacities


def _by_rank(page: str, name: str) -> dict[int, float]:
    """The value of one Prometheus metric for each data-parallel rank, its `engine`; rank 0 if it names none. Cost: a
    search, because pages have 80 KB for each rank.

    Raises:
        ObservationError: a series has no finite value.
    """
    values: dict[int, float] = {}
    start = 0
    while (start := page.find(name, start)) >= 0:
        end = start + len(name)
        if (start == 0 or page[start - 1] == "\n") and page[end : end + 1] in ("{", " "):
            line_end = page.find("\n", start)
            series = page[start : line_end if line_end >= 0 else len(page)]
            rank = _ENGINE.search(series)
            number = int(rank[1]) if rank else 0
            values[number] = values.get(number, 0.0) + _value(series)
        start = end
    return values


def _value(series: str) -> float:
    try:
        value = float(series.rpartition("}")[2].split()[0] if "}" in series else series.split()[1])
    except (IndexError, ValueError):
        value = nan
    if not isfinite(value):
        raise ObservationError(f"the metrics have no value at {series[:100]!r}")
    return value
