"""Transfers a context's KV from one engine to another, with a request for one token to each.

The engine that has the KV is asked first, with `do_remote_decode`. It answers from its cache, keeps the blocks for a
lease, and tells how to fetch them. That goes with the same request to the other engine, which fetches the blocks over
NIXL and keeps them as its own prefix cache; then the blocks are free again. If the first engine gives no offer, the
second request is a prefill. An offer that was not fetched is given back with a third request. Any route of an
OpenAI-style server works, because only the prompt matters.

Source: vLLM 0.32 and 0.33, kv_connector/v1/nixl/pull_scheduler.py. Its other mode, in which every answer pins its
blocks until a timeout (`bidirectional_kv_xfer`), is not used: the blocks cannot be freed earlier, and most trajectories
stay.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

LEASE_S = 30.0
"""vLLM's `kv_lease_duration`: how long offered blocks are kept if no engine fetches them."""

# Fields that make an answer longer, more expensive or a stream; none of them affects the prompt.
_ABOUT_THE_ANSWER = (
    "background",
    "best_of",
    "ignore_eos",
    "kv_transfer_params",
    "logprob_token_ids",
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
    "use_beam_search",
)
_OFFER: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_ECHOED = "remote_prefill_cached_tokens"


@dataclass(frozen=True, slots=True)
class HeldContext:
    """What an engine reports of a context after a request for one token.

    Args:
        prompt_tokens: the context's size.
        cached_tokens: how much of it was there, or was fetched; None if the engine does not report it.
        offer: how another engine can fetch it; None if it cannot.
    """

    prompt_tokens: int
    cached_tokens: int | None
    offer: Mapping[str, Any] | None

    @property
    def is_there(self) -> bool:
        """Whether it was there or fetched, and not computed, as far as the engine reports."""
        return self.cached_tokens is not None and is_mostly(self.cached_tokens, self.prompt_tokens)


def is_mostly(cached_tokens: int, context_tokens: int) -> bool:
    """Whether this much of a context means that it was not computed again: its siblings share less than that."""
    return 2 * cached_tokens >= context_tokens


def one_token(path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """A turn's request, changed to ask for one token."""
    asked = {name: value for name, value in request.items() if name not in _ABOUT_THE_ANSWER}
    thinking = asked.get("thinking")
    if isinstance(thinking, dict) and "budget_tokens" in thinking:  # Anthropic's; vLLM refuses one above the limit
        asked["thinking"] = {"type": "adaptive"}  # the same prompt, on SGLang, too
    if path.endswith("/responses"):
        return asked | {"max_output_tokens": 1, "store": False}  # else an engine with a store keeps it for good
    return asked | {"max_tokens": 1}


def offering(request: Mapping[str, Any]) -> dict[str, Any]:
    """Such a request to the engine that has the KV, so that it offers the KV."""
    return {**request, "kv_transfer_params": dict(_OFFER)}


def fetching(request: Mapping[str, Any], offer: Mapping[str, Any]) -> dict[str, Any]:
    """Such a request to the engine that will get the KV. It reports what that engine has then: with `_ECHOED` in the
    offer, vLLM reports what the other one had, also if the fetch failed and it computed all.
    """
    return {**request, "kv_transfer_params": {name: value for name, value in offer.items() if name != _ECHOED}}


def releasing(model: object, offer: Mapping[str, Any]) -> dict[str, Any]:
    """A request to any engine that could have fetched an offer; it releases the engine that made the offer.

    Its prompt is one token, so it fetches one block; any fetch, however small, ends the offer. Its salt is unique, so
    that no other request ever finds that block in the cache.
    """
    salt = os.urandom(16).hex()
    return fetching({"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0, "cache_salt": salt}, offer)


def held(answer: bytes) -> HeldContext:
    """What an answer to any of them reports. Raises ValueError if it is malformed."""
    try:
        told = orjson.loads(answer)
        usage = told["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        offer = told.get("kv_transfer_params")
        apart = 0  # Anthropic's `input_tokens` are those that were neither read from the cache nor written to it
        if "input_tokens" in usage and "input_tokens_details" not in usage:
            apart = (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
        return HeldContext(
            prompt_tokens=int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0) + apart,
            cached_tokens=details.get("cached_tokens", usage.get("cache_read_input_tokens")),
            offer=offer if isinstance(offer, dict) and offer.get("do_remote_prefill") else None,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an answer: {error!r}") from None
