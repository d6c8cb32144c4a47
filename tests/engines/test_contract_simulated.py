"""The engine contract on the simulated vLLM and the simulated SGLang."""

from dataclasses import replace

import pytest

from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.engines.contract import PROMISES, Promise
from tests.engines.engine_under_test import Facts, engine_under_test

PROFILE = load_profile("toy-cpu-tp1")  # about 1 ms a token, as fast as the real engine of tests/real
VLLM = Facts(
    kind="vllm",
    model="simulated",
    max_context_tokens=8192,
    kv_capacity_tokens=PROFILE.kv_capacity_tokens,
    slots=PROFILE.slots,
    block_tokens=16,
    template_tokens=0,
    retold_tokens=0,
    keep_alive_s=0.5,
    tells_start=True,
    unknown_model_status=404,
    bad_type_status=400,
    named_call_reason="stop",
    tells_usage_always=True,
    tells_fingerprint=True,
    num_tries=1,
    abort=lambda request_id: ("/abort_requests", {"request_ids": [f"chatcmpl-{request_id}"]}),
)
SGLANG = replace(
    VLLM,
    kind="sglang",
    tells_start=False,
    unknown_model_status=200,
    named_call_reason="tool_calls",
    tells_usage_always=False,
    tells_fingerprint=False,
    abort=lambda request_id: ("/abort_request", {"rid": request_id}),
)


def settings_of(facts: Facts) -> SimulatedEngineSettings:
    """The settings of an engine with these facts."""
    return SimulatedEngineSettings(
        dialect=facts.kind,  # type: ignore[arg-type]
        profile=PROFILE,
        model=facts.model,
        max_model_len=facts.max_context_tokens,
        block_size=facts.block_tokens,
        keep_alive_s=facts.keep_alive_s,
    )


@pytest.mark.parametrize("facts", (VLLM, SGLANG), ids=lambda facts: facts.kind)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_a_simulated_engine_keeps_the_contract(facts: Facts, promise: Promise) -> None:
    """The double promises what the real engines promise."""
    async with serve_engine(settings_of(facts)) as url, engine_under_test(url, facts) as engine:
        await promise(engine)
