"""The salt that keeps KV of earlier weights apart: a context has one salt, whichever route the engine is asked by."""

from typing import Any

import orjson
import pytest

from engines.dialect import Dialect
from engines.sglang import Sglang
from engines.sglang_facts import ServerFacts
from engines.sglang_tokens import SglangTokens
from engines.tokens import TokenLeg, TokenRoutes
from engines.upstream import Leg, Upstream
from engines.vllm import Vllm
from engines.vllm_tokens import VllmTokens

CHAT = "/v1/chat/completions"
# The gateway's own: a number for each version set, and the run's id.
SALT = "w3-0123456789abcdef"
FACTS = ServerFacts(1_000, is_incremental=False, has_own_defaults=False, tool_parser="hermes", reasoning_parser=None)
KINDS = pytest.mark.parametrize(
    ("dialect", "routes", "answer"),
    [
        (Vllm(), VllmTokens(), {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9}}),
        (Sglang(), SglangTokens(FACTS), {"tokens": [5, 6]}),
    ],
    ids=["vllm", "sglang"],
)


def salt_in(sent: Upstream) -> Any:
    body = sent.body if isinstance(sent.body, bytes) else b"".join(sent.body)
    return orjson.loads(body).get("cache_salt")


def salt_of_plain_request(dialect: Dialect, request: dict[str, Any], salt: str) -> Any:
    body = orjson.dumps(request)
    return salt_in(dialect.upstream(Leg(CHAT, "r-001", "t", 0, body, request, counts_tokens=False, cache_salt=salt)))


def salt_of_token_leg(routes: TokenRoutes, request: dict[str, Any], answer: dict[str, Any], salt: str) -> Any:
    own = {"cache_salt": request["cache_salt"]} if "cache_salt" in request else {}
    rendered = routes.rendered(CHAT, request, orjson.dumps(answer | own))
    assert rendered is not None
    leg = TokenLeg("r-001.", "t", 0, rendered.prompt_ids, 0, salt, 1, wants_logprobs=False)
    return salt_in(routes.generate(rendered, leg))


@KINDS
@pytest.mark.parametrize("own", [None, "mine", "m" * 109, "m" * 120, "m" * 128])
@pytest.mark.parametrize("salt", ["", SALT])
def test_a_context_has_the_same_salt_as_plain_request_and_token_leg(
    dialect: Dialect, routes: TokenRoutes, answer: dict[str, Any], own: str | None, salt: str
) -> None:
    """Otherwise a turn would not find the KV of the previous turn. vLLM 0.33 takes no salt above 128 characters."""
    request: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
    request |= {"cache_salt": own} if own else {}
    found = salt_of_token_leg(routes, request, answer, salt)
    assert found == salt_of_plain_request(dialect, request, salt)
    assert (found is None) == (own is None and not salt)
    assert found is None or (len(found) <= 128 and (not salt or found != own))
