"""Requests to an engine: what a leg asks for, and how the client's body becomes the engine's."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import orjson

from engines.flags import flag_of
from engines.http import Body
from scheduling.values import value_class

# The routes with tokens in and tokens out, of which each kind has its own.
VLLM_GENERATE = "/inference/v1/generate"
SGLANG_GENERATE = "/generate"

# Names the data-parallel rank that a request is for (vLLM 0.33, entrypoints/generate/base/serving.py; SGLang 0.5.23,
# srt/entrypoints/openai/serving_base.py).
RANK_HEADER = "x-data-parallel-rank"

# vLLM's limit (0.33, entrypoints/generate/base/protocol.py); SGLang takes any length.
_MAX_SALT_LENGTH = 128


class TooDeep(ValueError):
    """A request cannot be re-encoded: JSON is read to a greater depth than it is written, and with larger numbers. The
    client's mistake.
    """


@value_class(frozen=True, slots=True)
class Leg:
    """What the gateway tells an engine about one leg.

    Args:
        request_id: unique, and of fixed length, because SGLang aborts by prefix.
        priority: lower is earlier.
        body: the client's request body, as it came.
        request: the same, parsed.
        counts_tokens: the answer is a stream that reports usage only if asked.
        cache_salt: separates its KV from that of other weights; "" sends none.
        rank: the data-parallel rank that it is for, if its server has ranks. A header names it, too, where it counts.
    """

    path: str
    request_id: str
    trajectory_id: str
    priority: int
    body: bytes
    request: Mapping[str, Any]
    counts_tokens: bool
    cache_salt: str = ""
    rank: int | None = None


@value_class(frozen=True, slots=True)
class Upstream:
    """One request to an engine: header lines end in CRLF."""

    path: str
    headers: bytes
    body: Body


def with_headers(upstream: Upstream, lines: bytes) -> Upstream:
    """The request with these header lines too, if there are any."""
    return replace(upstream, headers=upstream.headers + lines) if lines else upstream


def with_fields(body: bytes, request: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    """The body with `fields` set: inserted before its first member, so that the rest stays as it came.

    If the client also set one of the fields, it is replaced, at the cost of re-encoding the whole body. Raises TooDeep.
    """
    if not fields:
        return body
    if any(name in request for name in fields) or not request:
        return encoded({**request, **fields})
    return body.replace(b"{", orjson.dumps(fields)[:-1] + b",", 1)


def without_field(body: bytes, request: Mapping[str, Any], name: str) -> tuple[bytes, Mapping[str, Any]]:
    """Body and request without this field; as they are if the client did not set it. Raises TooDeep."""
    if name not in request:
        return body, request
    rest = {other: value for other, value in request.items() if other != name}
    return encoded(rest), rest


def salted(request: Mapping[str, Any], cache_salt: str) -> dict[str, Any]:
    """The field that separates a request's KV: this salt, after the client's own; {} for "".

    A client's salt that vLLM would not accept is left unchanged, for the engine to refuse.
    """
    own = request.get("cache_salt")
    if not cache_salt or (own is not None and not isinstance(own, str)) or len(own or "") > _MAX_SALT_LENGTH:
        return {}
    salt = f"{own}.{cache_salt}" if own else cache_salt
    if len(salt) > _MAX_SALT_LENGTH:
        salt = blake2b(salt.encode("utf-8", "replace"), digest_size=32).hexdigest()
    return {"cache_salt": salt}


def stream_options(leg: Leg) -> dict[str, Any]:
    """The field that makes an OpenAI stream report its usage in a last chunk.

    A malformed field is left unchanged, for the engine to refuse. Continuous usage is off unless the client asked for
    usage, which is how the engines read it (vLLM 0.33, entrypoints/openai/api_utils.py).
    """
    given = leg.request.get("stream_options")
    options = {} if given is None else given
    if not leg.counts_tokens or not isinstance(options, dict):
        return {}
    wanted = options.get("include_usage")
    if wanted is not None and flag_of(wanted) is not False:
        return {}
    return {"stream_options": {**options, "include_usage": True, "continuous_usage_stats": False}}


def encoded(request: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """The JSON of a request or of a part of it.

    Args:
        default: gives what stands for a value that JSON does not have.

    Raises: TooDeep.
    """
    try:
        return orjson.dumps(request, default)
    except orjson.JSONEncodeError:
        raise TooDeep("The request is nested too deeply, or has too large a number.") from None
