"""What the gateway needs to know of an engine kind, and what both kinds share."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from engines.http import HttpClient
from scheduling.values import value_class

if TYPE_CHECKING:
    from engines.tokens import TokenRoutes

# What vLLM takes (0.33, entrypoints/generate/base/protocol.py); SGLang takes any length.
_MAX_SALT_LENGTH = 128
_TRIES = 3


@value_class(frozen=True, slots=True)
class Leg:
    """What the gateway tells an engine about one leg.

    Args:
        request_id: unique, and of fixed length, because SGLang aborts by prefix.
        priority: lower is earlier.
        body: the client's request body, as it came.
        request: the same, parsed.
        counts_tokens: the answer is a stream that would not tell its usage unless asked.
        cache_salt: keeps its KV apart from that of other weights; "" sends none.
    """

    path: str
    request_id: str
    trajectory_id: str
    priority: int
    body: bytes
    request: Mapping[str, Any]
    counts_tokens: bool
    cache_salt: str = ""


@value_class(frozen=True, slots=True)
class Upstream:
    """One request to an engine: header lines end in CRLF."""

    path: str
    headers: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Observation:
    """What an engine says of itself at one instant.

    Args:
        kv_capacity_tokens, slots: None where the engine does not say.
        work_counter: grows while the engine works; one that stands still while turns run is a hung engine.
        started_at: when its process started, in epoch seconds; tells a relaunched server from the old one.
    """

    num_running: int
    num_waiting: int
    kv_used_share: float
    kv_capacity_tokens: int | None
    slots: int | None
    work_counter: float
    started_at: float | None


class ObservationError(Exception):
    """The engine is not healthy, or does not answer as its kind does."""


class Dialect(Protocol):
    """How one kind of engine is spoken to.

    Attributes:
        tokens: how at token level; None for an engine that has no such routes, or until `find_tokens` found them.
        tokens_note: why not, or which requests pass through all the same, for people to read; "" until then.
    """

    kind: str
    tokens: "TokenRoutes | None"
    tokens_note: str

    async def find_tokens(self, http: HttpClient, timeout_s: float) -> None:
        """Ask whether the engine has token routes."""
        ...

    def upstream(self, leg: Leg) -> Upstream:
        """The request that serves a leg."""
        ...

    async def observe(self, http: HttpClient, timeout_s: float) -> Observation:
        """Ask the engine how it is. Raises ObservationError, or what HttpClient raises."""
        ...

    async def slots(self, http: HttpClient, timeout_s: float) -> int | None:
        """How many turns it runs at once, if it tells."""
        ...

    async def abort(self, http: HttpClient, request_id: str, timeout_s: float) -> None:
        """Stop a request whose connection was closed, where closing is not enough."""
        ...


async def has_route(http: HttpClient, path: str, timeout_s: float) -> bool:
    """Whether a POST route is there: it refuses an empty request as malformed, not as unknown or forbidden.

    What a server says now stands until it is lost, so one that fails for once is asked again.
    """
    for _ in range(_TRIES):
        status, _ = await http.post(path, b"{}", timeout_s)
        if status < 500:
            break
    return status in (400, 422)


def with_fields(body: bytes, request: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    """The body with `fields` set: spliced in before its first member, so that the rest stays as it came.

    A field that the client set too is replaced, at the price of encoding the whole body anew.
    """
    if not fields:
        return body
    if any(name in request for name in fields) or not request:
        return orjson.dumps({**request, **fields})
    brace = body.index(b"{")
    return b"{" + orjson.dumps(fields)[1:-1] + b"," + body[brace + 1 :]


def salted(request: Mapping[str, Any], cache_salt: str) -> dict[str, Any]:
    """The field that keeps a request's KV apart: this salt, behind the client's own; nothing for "".

    A salt of its own that vLLM would not take stays as it is, for the engine to refuse.
    """
    own = request.get("cache_salt")
    if not cache_salt or (own is not None and not isinstance(own, str)) or len(own or "") > _MAX_SALT_LENGTH:
        return {}
    salt = f"{own}.{cache_salt}" if own else cache_salt
    if len(salt) > _MAX_SALT_LENGTH:
        salt = blake2b(salt.encode("utf-8", "replace"), digest_size=32).hexdigest()
    return {"cache_salt": salt}


def stream_options(leg: Leg) -> dict[str, Any]:
    """The field that makes an OpenAI stream tell its usage in a last chunk.

    A malformed one stays as it is, for the engine to refuse. Continuous usage is off unless the client asked for usage,
    which is how the engines read it (vLLM 0.33, entrypoints/openai/api_utils.py).
    """
    given = leg.request.get("stream_options")
    options = {} if given is None else given
    if not leg.counts_tokens or not isinstance(options, dict) or options.get("include_usage") not in (None, False):
        return {}
    return {"stream_options": {**options, "include_usage": True, "continuous_usage_stats": False}}


def metric_sum(page: str, name: str) -> float | None:
    """The sum of all series of one Prometheus metric; None if it is absent. Cost: a search, for pages have 80 KB.

    Raises:
        ObservationError: a series has no finite value.
    """
    total: float | None = None
    start = 0
    while (start := page.find(name, start)) >= 0:
        end = start + len(name)
        if (start == 0 or page[start - 1] == "\n") and page[end : end + 1] in ("{", " "):
            line_end = page.find("\n", start)
            total = (total or 0.0) + _value(page[start : line_end if line_end >= 0 else len(page)])
        start = end
    return total


def _value(series: str) -> float:
    try:
        value = float(series.rpartition("}")[2].split()[0] if "}" in series else series.split()[1])
    except (IndexError, ValueError):
        value = nan
    if not isfinite(value):
        raise ObservationError(f"the metrics have no value at {series[:100]!r}")
    return value
