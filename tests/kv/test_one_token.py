"""The request for one token with which an engine is asked for a context's KV."""

from typing import Any

import pytest

from engines.kv import one_token

CHAT = "/v1/chat/completions"
TASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Weave on."}], "seed": 7}


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 2, "logprob_token_ids": [5, 6]},
        {"n": 4, "use_beam_search": True},
        {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    ],
    ids=lambda fields: next(reversed(fields)),
)
def test_nothing_about_the_answer_is_asked(fields: dict[str, Any]) -> None:
    """vLLM refuses `logprob_token_ids` without `logprobs`, so no move of such a trajectory brought anything. Beam
    search offers no KV, and the engine was never asked for any again. A client's own transfer pinned KV at the new
    home."""
    assert one_token(CHAT, TASK | fields) == TASK | {"max_tokens": 1}


@pytest.mark.parametrize("said", [{}, {"store": True}, {"store": False}, {"background": True, "store": True}])
def test_a_response_of_one_token_is_not_kept_by_the_engine(said: dict[str, Any]) -> None:
    """An engine with a store keeps each response and its input for good, unless the request declines. Nobody knows the
    id of this one, and the client may have declined for its own."""
    asked = {"model": "m", "input": "Weave on."}
    assert one_token("/v1/responses", asked | said) == asked | {"max_output_tokens": 1, "store": False}
