"""The engine contract on a real vLLM."""

from dataclasses import replace

import pytest

from engines.local_vllm import LocalEngine
from tests.engines.contract import PROMISES, Promise
from tests.engines.engine_under_test import engine_under_test
from tests.engines.test_contract_simulated import VLLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

FACTS = replace(
    VLLM,
    model="tiny",
    max_context_tokens=32_768,
    kv_capacity_tokens=131_072,
    slots=4,
    block_tokens=32,
    keep_alive_s=5.0,
    num_tries=3,
)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_a_real_vllm_keeps_the_contract(real_engines: list[LocalEngine], promise: Promise) -> None:
    """If this fails and the simulated engine's test does not, the double is wrong."""
    async with engine_under_test(real_engines[0].url, FACTS) as engine:
        await promise(engine)
