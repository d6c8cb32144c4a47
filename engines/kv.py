"""How a context's KV gets from one engine to another: two requests for one token each.

The engine that has it is asked first, with `do_remote_decode`: it answers from its cache, keeps the blocks for a lease,
and says how they can be fetched. What it said goes with the same request to the other engine, which fetches them over
NIXL and keeps them as its own prefix cache; then the blocks are free again. Without an answer of the first, the second
request is a prefill. An offer that was not fetched after all is given back with a third. Any route of an OpenAI-style
server will do: the prompt is what counts.

Source: vLLM 0.32 and 0.33, kv_connector/v1/nixl/pull_scheduler.py. Its other way, that every answer pins its blocks
until a time-out (`bidirectional_kv_xfer`), is not used: nobody can free them earlier, and most trajectories stay.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

LEASE_S = 30.0
"""vLLM's `kv_lease_duration`: so long blocks that were offered are kept if nobody fetches them."""

# What makes an answer longer, dearer or a stream; none of it is in the prompt.
_ABOUT_THE_ANSWER = (
    "background",
    "best_of",
    "ignore_eos",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "min_tokens",
    "n",
    "priority",
    "prompt_logprobs",
    "request_id",
    "response_format",
    "stop",
    "store",
    "stream",
    "stream_options",
    "structured_outputs",
    "thinking_token_budget",
    "top_logprobs",
)
_OFFER: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class Held:
    """What an engine says of a context after a request for one token.

    Args:
        prompt_tokens: the context's size.
        cached_tokens: how much of it was there, or was fetched; None where it does not tell.
        offer: how another engine can fetch it; None where it cannot.
    """

    prompt_tokens: int
    cached_tokens: int | None
    offer: Mapping[str, Any] | None

    @property
    def is_there(self) -> bool:
        """Whether it was there or fetched, and not computed, as far as the engine tells."""
        return self.cached_tokens is not None and is_mostly(self.cached_tokens, self.prompt_tokens)


def is_mostly(cached_tokens: int, context_tokens: int) -> bool:
    """Whether so much of a context means that it was not computed anew: what its siblings share is less."""
    return 2 * cached_tokens >= context_tokens


def one_token(path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The request of a turn, asking for one token only."""
    asked = {name: value for name, value in request.items() if name not in _ABOUT_THE_ANSWER}
    return asked | {"max_output_tokens" if path.endswith("/responses") else "max_tokens": 1}


def offering(request: Mapping[str, Any]) -> dict[str, Any]:
    """Such a request to the engine that has the KV, to have it offered."""
    return {**request, "kv_transfer_params": dict(_OFFER)}


def fetching(request: Mapping[str, Any], offer: Mapping[str, Any]) -> dict[str, Any]:
    """Such a request to the engine that is to have the KV."""
    return {**request, "kv_transfer_params": dict(offer)}


def releasing(model: object, offer: Mapping[str, Any]) -> dict[str, Any]:
    """A request to any engine that could have fetched an offer, by which the one that made it is free of it.

    It has one token as its prompt, and so fetches one block; whoever fetched is done, however little it was. The salt
    is its own, so that no other request ever finds that block in the cache.
    """
    salt = os.urandom(16).hex()
    return fetching({"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0, "cache_salt": salt}, offer)


def held(answer: bytes) -> Held:
    """What came of any of them. Raises ValueError for nonsense."""
    try:
        told = orjson.loads(answer)
        usage = told["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        offer = told.get("kv_transfer_params")
        return Held(
            prompt_tokens=int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0),
            cached_tokens=details.get("cached_tokens", usage.get("cache_read_input_tokens")),
            offer=offer if isinstance(offer, dict) and offer.get("do_remote_prefill") else None,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an answer: {error!r}") from None
