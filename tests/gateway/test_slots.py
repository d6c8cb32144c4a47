"""How many turns the gateway takes an engine to run at once."""

import asyncio
from dataclasses import replace

import httpx

from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.faults.asking import ask, body_of
from tests.support.gateway import eventually, running_gateway

# As vLLM outside of development mode.
SILENT = SimulatedEngineSettings(
    profile=replace(load_profile("qwen3-8b-h100-tp1"), slots=256),
    faults=(Fault("error", path="/server_info"),),
    speed_up=2,
)
NUM_TURNS = 220


async def test_an_engine_that_does_not_tell_its_slots_gets_as_many_turns_as_it_runs() -> None:
    """128 at first, and then all: its 256 slots are never full."""
    async with (
        serve_engine(SILENT) as engine,
        running_gateway(engine, observe_interval_s=0.05) as gateway,
        httpx.AsyncClient(timeout=60, limits=httpx.Limits()) as client,
    ):

        async def shown(name: str) -> int:
            (one,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
            return int(one[name])

        assert await shown("slots") == 128
        long = {"max_tokens": 20_000, "ignore_eos": True}
        asking = [
            ask(client, gateway.url, "chat", body_of("chat", False, text=f"n {n}") | long) for n in range(NUM_TURNS)
        ]
        turns = [asyncio.create_task(one) for one in asking]

        async def all_run() -> bool:
            return await shown("num_legs") == NUM_TURNS

        await eventually(all_run)
        assert await shown("slots") > 128
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


async def test_an_engine_that_cannot_tell_yet_is_used_and_asked_again() -> None:
    """vLLM's first answer about its configuration takes seconds, because it collects its environment (0.32). The engine
    gets turns meanwhile; it kept the default slots, and no KV was fetched from it or by it, until it was relaunched."""
    told = SimulatedEngineSettings(
        profile=SILENT.profile, kv_transfer=True, faults=(Fault("reset", path="/server_info", count=3),)
    )
    async with (
        serve_engine(told) as engine,
        running_gateway(engine, observe_interval_s=0.05, faults_to_open=1) as gateway,
        httpx.AsyncClient(timeout=60) as client,
    ):

        async def shown() -> tuple[str, int, bool]:
            (one,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
            return one["state"], one["slots"], one["moves_kv"]

        async def is_told() -> bool:
            state, slots, moves_kv = await shown()
            assert state == "ready"
            return (slots, moves_kv) == (256, True)

        await eventually(is_told)
