"""What the controller and the gateway rely on from an engine that sleeps: one suite for real and simulated engines."""

import uuid
from collections.abc import Awaitable, Callable

import orjson
import pytest

from engines.dialect import Asleep
from engines.sleep import AS_STARTED, SLEEP
from engines.weights import WEIGHTS
from tests.engines.engine_under_test import TIMEOUT_S, EngineUnderTest

Promise = Callable[[EngineUnderTest, int], Awaitable[None]]


async def an_awakened_engine_answers_as_before(engine: EngineUnderTest, level: int) -> None:
    """The greedy answer is the same and its KV is gone. Both calls may be repeated, and waking an engine that is awake
    does no harm."""
    control = SLEEP[engine.facts.kind]
    fields = {"messages": [{"role": "user", "content": f"{uuid.uuid4()} " * 20}], "max_tokens": 20, "ignore_eos": True}
    before = (await engine.ask(fields)).json
    assert _cached((await engine.ask(fields)).json) > 0
    await control.wake(engine.http, level, TIMEOUT_S)
    for _ in range(2):
        await control.fall_asleep(engine.http, level, TIMEOUT_S)
    for _ in range(2):
        await control.wake(engine.http, level, TIMEOUT_S)
    after = (await engine.ask(fields)).json
    assert after["choices"][0]["message"]["content"] == before["choices"][0]["message"]["content"]
    assert _cached(after) == 0


async def a_sleeping_engine_is_reachable_but_not_ready(engine: EngineUnderTest, level: int) -> None:
    """Health and the model list answer as usual, so a restarted controller finds the engine; on vLLM, `observe` raises
    Asleep."""
    control = SLEEP[engine.facts.kind]
    await control.fall_asleep(engine.http, level, TIMEOUT_S)
    try:
        assert (await engine.http.get("/health", TIMEOUT_S))[0] == 200
        status, listed = await engine.http.get("/v1/models", TIMEOUT_S)
        assert status == 200 and orjson.loads(listed)["data"][0]["id"] == engine.facts.model
        if engine.facts.kind == "vllm":  # SGLang does not report it
            with pytest.raises(Asleep):
                await engine.observe()
            status, answered = await engine.http.post("/wake_up?tags=weights", b"", TIMEOUT_S)
            assert (status, orjson.loads(answered)["status"]) == (200, "sleeping")
            with pytest.raises(Asleep):
                await engine.observe()
    finally:
        await control.wake(engine.http, level, TIMEOUT_S)
    assert (await engine.observe()).num_running == 0


async def dropped_weights_lose_their_version(engine: EngineUnderTest, level: int) -> None:
    """A level that keeps the weights keeps their version. After level 2, the version is that of the start, so nobody
    takes them for newer weights."""
    weights, control = WEIGHTS[engine.facts.kind], SLEEP[engine.facts.kind]
    before = await weights.version(engine.http, TIMEOUT_S)
    await control.fall_asleep(engine.http, level, TIMEOUT_S)
    await control.wake(engine.http, level, TIMEOUT_S)
    assert await weights.version(engine.http, TIMEOUT_S) == (AS_STARTED if level == 2 else before)


PROMISES: tuple[Promise, ...] = (
    an_awakened_engine_answers_as_before,
    a_sleeping_engine_is_reachable_but_not_ready,
    dropped_weights_lose_their_version,
)


def _cached(answer: dict[str, dict[str, dict[str, int]]]) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
