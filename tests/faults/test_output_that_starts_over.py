"""Turns at token level whose later legs cannot use what earlier ones made: a grammar's state is lost, and an engine's
penalties count only the output of its own leg."""

import asyncio
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.faults.asking import ask
from tests.faults.test_token_legs import engines_of, generated_by
from tests.faults.token_jobs import ENDURING, body_of, engine_of, fleet_of
from tests.support.engine import recorded_engine
from tests.support.gateway import ADMIN, eventually, running_gateway

GENERATE = {"vllm": ("/inference/v1/generate", "token_ids"), "sglang": ("/generate", "input_ids")}
_FIELDS = {f"field_{number}": {"type": "string"} for number in range(12)}
LONG = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS)}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "long", "schema": LONG}}}
ONE = {"x-trajectory-id": "one"}
on_both = pytest.mark.parametrize("kind", GENERATE)


@on_both
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("penalty", [{}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}])
async def test_a_leg_with_penalties_begins_with_the_prompt_unless_some_output_was_told(
    client: httpx.AsyncClient, kind: str, stream: bool, penalty: dict[str, Any]
) -> None:
    """The client waits for the whole answer, so it gets what one uninterrupted leg makes. A stream goes on, as turns
    without penalties do."""
    path, name = GENERATE[kind]
    settings = SimulatedEngineSettings(dialect=kind, speed_up=20)  # type: ignore[arg-type]
    async with recorded_engine(settings) as engine, running_gateway(engine.url, **ENDURING) as gateway:
        fault = Fault("die", after_chunks=2, count=1, path=path)
        put = await client.post(engine.url + "/simulate/faults", json={"faults": [asdict(fault)]})
        assert put.status_code == 200
        body = body_of(1, "plain", "chat", stream) | penalty
        assert (await ask(client, gateway.url, "chat", body)).is_finished("chat")
        first, second = [asked.json[name] for asked in engine.turns if asked.path == path]
    assert second[: len(first)] == first
    assert (second == first) is bool(penalty and not stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [FORMAT, {"frequency_penalty": 0.5}])
async def test_a_drain_lets_a_turn_end_that_another_leg_would_not_continue(
    client: httpx.AsyncClient, more: dict[str, Any], stream: bool
) -> None:
    """On another engine it would be made again, a stream that is held to a grammar would fail if it then differs, and
    one with penalties would go on without them."""
    body = body_of(1, "plain", "chat", stream) | more
    async with (
        fleet_of(*(engine_of("vllm", speed_up=0.3, seed=n) for n in range(2))) as engines,
        running_gateway(*engines, **ENDURING) as gateway,
    ):
        asked = asyncio.create_task(ask(client, gateway.url, "chat", body, ONE))

        async def has_begun() -> bool:
            return sum([await generated_by(client, engine) for engine in engines]) > 4

        await eventually(has_begun)
        [busy] = [engine["id"] for engine in await engines_of(client, gateway.url) if engine["num_legs"]]
        drained = await client.post(f"{gateway.url}/v1/engines/{busy}/drain?timeout_s=60", headers=ADMIN, timeout=90)
        assert drained.json()["is_drained"]
        assert (await asked).is_finished("chat")
        [turn] = (await client.get(gateway.url + "/v1/trajectories/one")).json()["turns"]
    assert (turn["legs"], turn["engine"]) == (1, busy)
