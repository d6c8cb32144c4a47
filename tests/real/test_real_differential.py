"""Two hundred requests, each sent directly to a real vLLM and through the gateway."""

import asyncio
from typing import Any

import httpx
import pytest

from engines.local_vllm import LocalEngine
from tests.api.differential import CREATED, compare
from tests.api.requests_table import make_cases
from tests.support.gateway import PATIENT, running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

TIMEOUT_S = 300.0
# vLLM closes a connection after 5 idle seconds; a client that stalled meanwhile would still reuse it.
NEW_CONNECTIONS = httpx.Limits(max_keepalive_connections=0)
# Token routes do not return these fields.
ABSENT_FIELDS = frozenset({"system_fingerprint", "created_cache_tokens", "cache_write_tokens", CREATED})


async def test_the_gateway_answers_like_a_real_vllm(real_engines: list[LocalEngine]) -> None:
    """A client that moves from the engine to the gateway sees other ids and times and no other difference, whether
    turns pass through or run at token level. Requests with tools, schemas, log-probabilities and stop strings, streamed
    and not.

    Each engine has one request at a time, because log-probabilities change in their last bits with the batch.
    """
    plain, by_tokens = (engine.url for engine in real_engines)
    found = await asyncio.gather(
        differences(plain, frozenset()), differences(by_tokens, ABSENT_FIELDS, token_legs="auto")
    )
    assert not any(found), "\n\n".join(found[0] + found[1])


async def differences(engine: str, absent_fields: frozenset[str], **settings: Any) -> list[str]:
    """Where the answers of a gateway with these settings differ from its engine's."""
    async with (
        running_gateway(engine, **PATIENT, **settings) as gateway,
        httpx.AsyncClient(base_url=engine, timeout=TIMEOUT_S, limits=NEW_CONNECTIONS) as direct,
        httpx.AsyncClient(base_url=gateway.url, timeout=TIMEOUT_S) as proxied,
    ):
        [shown] = (await proxied.get("/v1/engines")).json()["data"]
        assert "store" not in (shown["token_legs_note"] or ""), "the engine was started without a response store"
        return [one for case in make_cases("tiny") for one in await compare(direct, proxied, case, absent_fields)]
