"""Two hundred requests straight to a real vLLM and through the gateway."""

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
# vLLM closes what is idle for 5 s, and a client that stood still for as long has not seen it when it asks again.
NEW_CONNECTIONS = httpx.Limits(max_keepalive_connections=0)
# Token routes do not tell them.
UNTOLD = frozenset({"system_fingerprint", "created_cache_tokens", "cache_write_tokens", CREATED})


async def test_the_gateway_answers_as_a_real_vllm_does(real_engines: list[LocalEngine]) -> None:
    """A client that moves from the engine to the gateway sees other ids and times, and nothing else: whether turns pass
    through or are made at token level. Requests with tools, schemas, log-probabilities, stop strings, streamed and not.

    Each engine has one request at a time, because log-probabilities change in their last bits with the batch.
    """
    passing, by_tokens = (engine.url for engine in real_engines)
    found = await asyncio.gather(differences(passing, frozenset()), differences(by_tokens, UNTOLD, token_legs="auto"))
    assert not any(found), "\n\n".join(found[0] + found[1])


async def differences(engine: str, untold: frozenset[str], **settings: Any) -> list[str]:
    """What a gateway with these settings answers otherwise than its engine."""
    async with (
        running_gateway(engine, **PATIENT, **settings) as gateway,
        httpx.AsyncClient(base_url=engine, timeout=TIMEOUT_S, limits=NEW_CONNECTIONS) as straight,
        httpx.AsyncClient(base_url=gateway.url, timeout=TIMEOUT_S) as through,
    ):
        [shown] = (await through.get("/v1/engines")).json()["data"]
        assert "store" not in (shown["token_legs_note"] or ""), "it was started to keep no responses"
        return [one for case in make_cases("tiny") for one in await compare(straight, through, case, untold)]
