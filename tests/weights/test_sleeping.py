"""An engine of the gateway that somebody else puts to sleep, as trainers do that share its GPUs."""

import asyncio

import httpx

from engines.http import HttpClient
from engines.simulated.server import serve_engine
from engines.sleep import SLEEP
from tests.support.gateway import eventually, running_gateway
from tests.weights.gateway_client import complete, engine, engines, is_generated_by, last_turn, update

QUICK = {"observe_interval_s": 0.05}
PROMPT = "Tell me about looms."


async def test_an_awakened_engine_is_a_new_one_with_the_current_weights() -> None:
    """Asleep, it gets no turns. Awake, it has a new id, because its KV is gone, and the weights that were set in the
    meantime."""
    async with (
        serve_engine(engine("vllm")) as url,
        serve_engine(engine("vllm")) as other,
        running_gateway(url, other, **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        http, control = HttpClient(url), SLEEP["vllm"]
        (before, _) = await engines(client)
        await control.fall_asleep(http, 1, 60)
        await eventually(lambda: has_state(client, "lost"))
        assert "sleeps" in (await engines(client))[0]["last_fault"]
        assert (await update(client, "v1")).json()["status"] in ("done", "partial")
        turns = [complete(client, f"while-{number}", PROMPT, 20) for number in range(4)]
        assert all(is_generated_by(["v1"], PROMPT, text) for text in await asyncio.gather(*turns))
        await control.wake(http, 1, 60)
        await eventually(lambda: has_state(client, "ready"))
        (after, other_shown) = await engines(client)
        assert after["id"] != before["id"] and after["weight_version"] == other_shown["weight_version"] == "v1"
        assert not after["is_cordoned"]
        await complete(client, "then", PROMPT, 20)
        assert (await last_turn(client, "then"))["weight_versions"] == ["v1"]
        http.close()


async def test_weights_in_doubt_stay_so_while_an_engine_sleeps() -> None:
    """v2 failed in the middle, and an engine wakes with the weights that it had: it loads v1 before its next turn."""
    async with (
        serve_engine(engine("vllm")) as url,
        running_gateway(url, **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        assert (await update(client, "v1")).json()["status"] == "done"
        fault = {"kind": "error", "path": "/update_weight_version", "count": 1}
        await client.post(url + "/simulate/faults", json={"faults": [fault]})
        assert (await update(client, "v2")).status_code == 502
        http, control = HttpClient(url), SLEEP["vllm"]
        await control.fall_asleep(http, 1, 60)
        await eventually(lambda: has_state(client, "lost"))
        await control.wake(http, 1, 60)
        await eventually(lambda: has_state(client, "ready"))
        assert is_generated_by(["v1"], PROMPT, await complete(client, "one", PROMPT, 40))
        http.close()


async def has_state(client: httpx.AsyncClient, state: str) -> bool:
    return bool((await engines(client))[0]["state"] == state)
