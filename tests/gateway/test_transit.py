"""How long legs are on their way to an engine, as the gateway learns it from the engine's own counts."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx

from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.faults.asking import ask, body_of
from tests.support.gateway import eventually, running_gateway

DELAY_S = 0.5


def of_four_slots(url: str) -> Any:
    """How an engine is named in a gateway's settings."""
    return {"url": url, "slots": 4}


async def test_a_slow_front_end_shows_and_gets_turns_ahead() -> None:
    """Its steps take milliseconds, but each request is on its way for half a second. Twice as many turns as it has
    slots are sent there, and metrics and API say why.
    """
    slow = Fault("slow", delay_s=DELAY_S, path="/v1/chat")
    profile = replace(load_profile("qwen3-14b-h100-tp1"), slots=4)
    async with (
        serve_engine(SimulatedEngineSettings(profile=profile, speed_up=50, faults=(slow,))) as engine,
        running_gateway(of_four_slots(engine), observe_interval_s=0.05) as gateway,
        httpx.AsyncClient(timeout=60) as client,
    ):

        async def shown() -> dict[str, float]:
            (one,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
            return {"transit_s": one["transit_s"], "num_legs": one["num_legs"]}

        assert (await shown())["transit_s"] == 0.0
        turns = [
            asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", False, text=f"n {n}")))
            for n in range(64)
        ]

        async def is_sent_ahead() -> bool:
            return (await shown())["num_legs"] == 8

        await eventually(is_sent_ahead)
        assert all(reply.is_finished("chat") for reply in await asyncio.gather(*turns))
        assert DELAY_S / 2 < (await shown())["transit_s"] < 2 * DELAY_S
        [line] = [
            line
            for line in (await client.get(gateway.url + "/metrics")).text.splitlines()
            if line.startswith("heddle_engine_transit_seconds{")
        ]
        assert DELAY_S / 2 < float(line.rpartition(" ")[2]) < 2 * DELAY_S, "a look later"
