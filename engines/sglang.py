"""SGLang's dialect, as of 0.5.23: priorities travel in the body, and an abort is requested by request id.

Start it with `--enable-priority-scheduling --schedule-low-priority-values-first`, so that lower is earlier as in vLLM.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from engines.dialect import Observation, ObservationError
from engines.http import HttpClient
from engines.sglang_facts import NoTokenRoutes, facts_of
from engines.sglang_tokens import SglangTokens
from engines.tokens import TokenRoutes
from engines.upstream import SGLANG_GENERATE, Leg, Upstream, salted, stream_options, with_fields, without_field

# The routes whose body takes `rid` and `priority`; the others check their fields or do not know them.
_TAGGED = frozenset({"/v1/chat/completions", "/v1/completions", SGLANG_GENERATE})


class Sglang:
    """Talks to `python -m sglang.launch_server`."""

    kind = "sglang"

    def __init__(self) -> None:
        self.tokens: TokenRoutes | None = None
        self.tokens_note = ""

    async def find_tokens(self, http: HttpClient, timeout_s: float) -> None:
        try:
            self.tokens = routes = SglangTokens(await facts_of(http, timeout_s))
            self.tokens_note = routes.limits
        except NoTokenRoutes as lack:
            self.tokens, self.tokens_note = None, str(lack)

    def upstream(self, leg: Leg) -> Upstream:
        fields: dict[str, Any] = stream_options(leg)
        if leg.path in _TAGGED:
            fields |= {"rid": leg.request_id, "priority": leg.priority}
        if leg.cache_salt and leg.path != "/v1/messages":  # which takes none: its KV is flushed at each update
            fields |= salted(leg.request, leg.cache_salt)
        body, request = leg.body, leg.request
        if leg.path == SGLANG_GENERATE:
            # It refuses unknown fields, and the model's name was for the gateway. It does not read the rank's header.
            body, request = without_field(body, request, "model")
            if leg.rank is not None:
                fields["routed_dp_rank"] = leg.rank
        headers = f"x-smg-routing-key: {leg.trajectory_id}\r\n"
        return Upstream(leg.path, headers.encode("latin-1", "replace"), with_fields(body, request, fields))

    async def observe(self, http: HttpClient, timeout_s: float) -> tuple[Observation, ...]:
        status, body = await http.get("/v1/loads?include=core", timeout_s)
        if status != 200:
            raise ObservationError(f"/v1/loads answered {status}")
        try:
            loads = orjson.loads(body)["loads"]
            loads.sort(key=lambda load: load.get("dp_rank", 0))
            ranks = [load.get("dp_rank", 0) for load in loads]
            seen = tuple(map(_observation, loads))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ObservationError(f"/v1/loads is not as SGLang's: {error!r}") from None
        if not seen or ranks != list(range(len(ranks))):
            raise ObservationError(f"/v1/loads lists the data-parallel ranks {ranks}")
        return seen

    async def slots(self, http: HttpClient, timeout_s: float) -> int | None:
        return None

    async def abort(self, http: HttpClient, request_id: str, timeout_s: float) -> None:
        # Closing the connection stops a stream after 2 s, and other requests later; this stops them at once.
        await http.post("/abort_request", orjson.dumps({"rid": request_id}), timeout_s)


def _observation(load: Mapping[str, Any]) -> Observation:
    used, capacity = load["num_used_tokens"], load["max_total_num_tokens"]
    return Observation(
        num_running=load["num_running_reqs"],
        num_waiting=load["num_waiting_reqs"],
        kv_used_share=used / capacity if capacity else 0.0,
        kv_capacity_tokens=capacity or None,
        slots=load["max_running_requests"] or None,
        work_counter=float(load["num_total_tokens"] + load.get("gen_throughput", 0)),
        started_at=None,
    )
