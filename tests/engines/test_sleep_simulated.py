"""The contract of sleep on the simulated vLLM and the simulated SGLang, and what an engine without sleep routes
does."""

import pytest

from engines.http import HttpClient
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from engines.sleep import SLEEP, CannotSleep, SleepFault
from tests.engines.contract_of_sleep import PROMISES, Promise
from tests.engines.engine_under_test import TIMEOUT_S, Facts, engine_under_test
from tests.engines.test_contract_simulated import PROFILE, SGLANG, VLLM, settings_of

EVERY_LEVEL = [(facts, level) for facts in (VLLM, SGLANG) for level in SLEEP[facts.kind].levels]


@pytest.mark.parametrize(("facts", "level"), EVERY_LEVEL, ids=lambda one: getattr(one, "kind", one))
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_a_simulated_engine_keeps_the_contract_of_sleep(facts: Facts, promise: Promise, level: int) -> None:
    """At each level."""
    async with serve_engine(settings_of(facts)) as url, engine_under_test(url, facts) as engine:
        await promise(engine, level)


async def test_a_missing_sleep_route_differs_from_an_unreachable_engine() -> None:
    """SGLang has no `/sleep`, and neither has vLLM without development mode. An unreachable engine is another error."""
    async with serve_engine(SimulatedEngineSettings(dialect="sglang", profile=PROFILE)) as url:
        http = HttpClient(url)
        with pytest.raises(CannotSleep, match="it has no /sleep"):
            await SLEEP["vllm"].fall_asleep(http, 1, TIMEOUT_S)
        http.close()
    nobody = HttpClient("http://127.0.0.1:9")
    with pytest.raises(SleepFault) as failed:
        await SLEEP["vllm"].wake(nobody, 1, TIMEOUT_S)
    assert not isinstance(failed.value, CannotSleep)
