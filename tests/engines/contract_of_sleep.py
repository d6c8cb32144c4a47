"""What the controller and the gateway rely on of an engine that sleeps: one suite for real and simulated ones."""

import uuid
from collections.abc import Awaitable, Callable

import orjson
import pytest

from engines.dialect import Asleep
from engines.sleep import AS_STARTED, SLEEP
from engines.weights import WEIGHTS
from tests.engines.site import TIMEOUT_S, Site

Promise = Callable[[Site, int], Awaitable[None]]


async def what_wakes_says_what_it_said_before(engine: Site, level: int) -> None:
    """The same greedy answer; its KV is gone; both acts may be repeated, and one that is awake is not harmed."""
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


async def asleep_it_is_there_and_no_look_takes_it_for_ready(engine: Site, level: int) -> None:
    """Its process and its models are shown as ever, so a controller that was killed finds it."""
    control = SLEEP[engine.facts.kind]
    await control.fall_asleep(engine.http, level, TIMEOUT_S)
    try:
        assert (await engine.http.get("/health", TIMEOUT_S))[0] == 200
        status, listed = await engine.http.get("/v1/models", TIMEOUT_S)
        assert status == 200 and orjson.loads(listed)["data"][0]["id"] == engine.facts.model
        if engine.facts.kind == "vllm":  # SGLang tells nobody
            with pytest.raises(Asleep):
                await engine.observe()
            status, said = await engine.http.post("/wake_up?tags=weights", b"", TIMEOUT_S)
            assert (status, orjson.loads(said)["status"]) == (200, "sleeping")
            with pytest.raises(Asleep):
                await engine.observe()
    finally:
        await control.wake(engine.http, level, TIMEOUT_S)
    assert (await engine.observe()).num_running == 0


async def weights_that_were_dropped_are_not_called_what_they_were(engine: Site, level: int) -> None:
    """A level that keeps them keeps their name; after the other one, nobody takes them for newer ones than they are."""
    weights, control = WEIGHTS[engine.facts.kind], SLEEP[engine.facts.kind]
    before = await weights.version(engine.http, TIMEOUT_S)
    await control.fall_asleep(engine.http, level, TIMEOUT_S)
    await control.wake(engine.http, level, TIMEOUT_S)
    assert await weights.version(engine.http, TIMEOUT_S) == (AS_STARTED if level == 2 else before)


PROMISES: tuple[Promise, ...] = (
    what_wakes_says_what_it_said_before,
    asleep_it_is_there_and_no_look_takes_it_for_ready,
    weights_that_were_dropped_are_not_called_what_they_were,
)


def _cached(answer: dict[str, dict[str, dict[str, int]]]) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
