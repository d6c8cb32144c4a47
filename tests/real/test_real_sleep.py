"""The contract of sleep on a real vLLM. Without a GPU, sleeping frees no memory; everything else is the same as with
one."""

import pytest

from engines.local_vllm import LocalEngine
from tests.engines.contract_of_sleep import PROMISES, Promise
from tests.engines.engine_under_test import engine_under_test
from tests.real.test_contract_real import FACTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("level", (1, 2))
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_a_real_vllm_keeps_the_contract_of_sleep(
    real_engines: list[LocalEngine], promise: Promise, level: int
) -> None:
    """If this fails and the simulated engine's test does not, the double is wrong."""
    async with engine_under_test(real_engines[1].url, FACTS) as engine:
        await promise(engine, level)
