"""Requests to an engine: what a leg is to ask, and the client's body turned into the engine's."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

from engines.http import Body
from scheduling.values import value_class

# The routes of tokens in and tokens out, which each kind has for itself.
VLLM_GENERATE = "/inference/v1/generate"
SGLANG_GENERATE = "/generate"

# What vLLM takes (0.33, entrypoints/generate/base/protocol.py); SGLang takes any length.
_MAX_SALT_LENGTH = 128


class TooDeep(ValueError):
    """A request cannot be written anew: JSON is read to a greater depth than it is written. The client's mistake."""


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
    body: Body


def with_fields(body: bytes, request: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    """The body with `fields` set: spliced in before its first member, so that the rest stays as it came.

    A field that the client set too is replaced, at the price of encoding the whole body anew. Raises TooDeep.
    """
    if not fields:
        return body
    if any(name in request for name in fields) or not request:
        try:
            return orjson.dumps({**request, **fields})
        except orjson.JSONEncodeError:
            raise TooDeep("The request is nested too deeply.") from None
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
