"""An engine of the gateway that somebody puts to sleep, as trainers do that share its GPUs."""

import asyncio
from typing import Any

import httpx

from engines.http import HttpClient
from engines.simulated.server import serve_engine
from engines.sleep import SLEEP
from tests.support.gateway import eventually, running_gateway
from tests.weights.asking import complete, engine, last_turn, said_by, update

QUICK = {"observe_interval_s": 0.05}
PROMPT = "Tell me about looms."


async def test_an_engine_that_slept_is_another_one_and_has_the_weights_set_meanwhile() -> None:
    """Asleep it gets no turn and no weights; awake it has a new id, for its KV is gone, and first the new weights."""
    async with (
        serve_engine(engine("vllm")) as url,
        serve_engine(engine("vllm")) as other,
        running_gateway(url, other, **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        http, control = HttpClient(url), SLEEP["vllm"]
        (before, _) = await _engines(client)
        await control.fall_asleep(http, 1, 60)

        async def is_lost() -> bool:
            return bool((await _engines(client))[0]["state"] == "lost")

        await eventually(is_lost, 60)
        assert "sleeps" in (await _engines(client))[0]["last_fault"]
        assert (await update(client, "v1")).json()["status"] in ("done", "partial")
        turns = [complete(client, f"while-{number}", PROMPT, 20) for number in range(4)]
        assert all(said_by(["v1"], PROMPT, text) for text in await asyncio.gather(*turns))
        await control.wake(http, 1, 60)

        async def is_ready() -> bool:
            return bool((await _engines(client))[0]["state"] == "ready")

        await eventually(is_ready, 60)
        (after, awake) = await _engines(client)
        assert after["id"] != before["id"] and after["weight_version"] == awake["weight_version"] == "v1"
        assert not after["is_cordoned"]
        await complete(client, "then", PROMPT, 20)
        assert (await last_turn(client, "then"))["weight_versions"] == ["v1"]
        http.close()


async def _engines(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await client.get("/v1/engines")).json()["data"]
    return listed
