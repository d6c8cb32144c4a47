"""Two hundred requests straight to a real vLLM and through the gateway."""

import httpx
import pytest

from engines.local_vllm import LocalEngine
from tests.api.differential import compare
from tests.api.requests_table import make_cases
from tests.support.gateway import running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]


async def test_the_gateway_answers_as_a_real_vllm_does(real_engines: list[LocalEngine]) -> None:
    """A client that moves from the engine to the gateway sees other ids and times, and nothing else."""
    engine = real_engines[0].url
    async with (
        running_gateway(engine) as gateway,
        httpx.AsyncClient(base_url=engine, timeout=120) as straight,
        httpx.AsyncClient(base_url=gateway.url, timeout=120) as through,
    ):
        found = [one for case in make_cases("tiny") for one in await compare(straight, through, case)]
    assert not found, "\n\n".join(found)
