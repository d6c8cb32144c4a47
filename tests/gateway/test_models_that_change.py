"""Models that come and go while an engine runs: it loads LoRA adapters on request."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import orjson

from engines.simulated.settings import SimulatedEngineSettings
from tests.support.engine import Asked, RecordedEngine, Script, fixed, recorded_engine
from tests.support.gateway import ADMIN, eventually, running_gateway


@asynccontextmanager
async def watched(kind: str) -> AsyncIterator[tuple[RecordedEngine, httpx.AsyncClient]]:
    """An engine that is looked at all the time, and a client of its gateway."""
    settings = SimulatedEngineSettings(dialect=kind, speed_up=0.2)  # type: ignore[arg-type]
    fast = {"models_interval_s": 0.01, "observe_interval_s": 0.01}
    async with (
        recorded_engine(settings) as engine,
        running_gateway(engine.url, **fast) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        yield engine, client


def tell(engine: RecordedEngine, *names: str) -> None:
    """These are its models from now on."""
    cards = [{"id": name, "owned_by": "vllm", "max_model_len": None} for name in names]
    engine.scripts["/v1/models"] = fixed(200, orjson.dumps({"data": cards}))


async def known(client: httpx.AsyncClient) -> list[str]:
    return sorted(model["id"] for model in (await client.get("/v1/models")).json()["data"])


def chat(model: str, num_tokens: int = 2) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": num_tokens}


async def test_an_adapter_is_known_while_its_engine_has_it() -> None:
    """Turns that name it go to the engine then, and are a 404 before and after."""
    async with watched("vllm") as (engine, client):
        assert (await client.post("/v1/chat/completions", json=chat("adapter"))).status_code == 404
        for names, num_asked in ((["adapter", "simulated"], 1), (["simulated"], 1)):
            tell(engine, *names)

            async def are_known(names: list[str] = names) -> bool:
                return await known(client) == names

            await eventually(are_known)
            answer = await client.post("/v1/chat/completions", json=chat("adapter"))
            assert [turn.json["model"] for turn in engine.turns] == ["adapter"] * num_asked
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_turn_whose_engine_fails_it_after_its_adapter_was_taken_out_is_refused() -> None:
    """No engine has the adapter any more. The turn waited for one for `queue_timeout_s`, half an hour by default."""
    may_fail = asyncio.Event()

    async def fail(_: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        await may_fail.wait()
        await write(b"{}")

    async with watched("vllm") as (engine, client):
        for names in (["adapter", "simulated"], ["simulated"]):
            tell(engine, *names)

            async def are_known(names: list[str] = names) -> bool:
                return await known(client) == names

            await eventually(are_known)
            if "adapter" in names:
                engine.scripts["/v1/chat/completions"] = Script(fail, 500)
                turn = asyncio.create_task(client.post("/v1/chat/completions", json=chat("adapter"), timeout=60))
                await eventually(lambda: engine.turns)
        may_fail.set()
        answer = await turn
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_adapter_is_known_if_its_model_has_the_name_of_a_weights_path() -> None:
    """vLLM without `--served-model-name`, whose first version is what it was started with. No adapter that came or went
    after that was noticed."""
    async with watched("vllm") as (engine, client):
        for names in (["/ckpt/base"], ["/ckpt/base", "adapter"], ["/ckpt/base"]):
            tell(engine, *names)

            async def are_known(names: list[str] = names) -> bool:
                return await known(client) == names

            await eventually(are_known)
            updated = await client.post("/v1/weights", json={"version": "v0", "path": "/ckpt/base"}, headers=ADMIN)
            assert updated.json()["status"] == "done"


async def test_the_name_of_sglangs_model_stays_while_it_runs() -> None:
    """Given weights by its trainer, it calls its model by their path. Clients keep the name that they use."""
    async with watched("sglang") as (engine, client):
        tell(engine, "/ckpt/step-1")
        running = asyncio.create_task(client.post("/v1/chat/completions", json=chat("simulated", 200)))

        async def is_seen_running() -> bool:
            return bool((await client.get("/v1/engines")).json()["data"][0]["num_running"])

        await eventually(is_seen_running)
        assert await known(client) == ["simulated"]
        running.cancel()


async def test_an_adapter_of_sglang_has_the_name_by_which_sglang_finds_it() -> None:
    """SGLang lists it by its own name alone, but a request that names only that is answered by the model without it."""
    cards: list[dict[str, Any]] = [
        {"id": "simulated", "owned_by": "sglang", "max_model_len": 4096},
        {"id": "adapter", "owned_by": "sglang", "parent": "simulated", "max_model_len": None},
    ]
    async with recorded_engine(SimulatedEngineSettings(dialect="sglang")) as engine:
        engine.scripts["/v1/models"] = fixed(200, orjson.dumps({"data": cards}))
        async with running_gateway(engine.url) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            assert await known(client) == ["simulated", "simulated:adapter"]
            answers = [
                await client.post("/v1/chat/completions", json=chat(name)) for name in ("adapter", "simulated:adapter")
            ]
    assert answers[0].json()["error"]["code"] == "model_not_found"
    assert answers[1].status_code == 200
    assert [turn.json["model"] for turn in engine.turns] == ["simulated:adapter"]


async def test_an_adapter_of_sglang_is_known_while_its_engine_has_it() -> None:
    """Also after its trainer gave it weights, by whose path it then calls its model. One that was loaded after the
    gateway had seen the engine was a 404."""
    async with watched("sglang") as (engine, client):
        for base, adapters in (("simulated", ["one"]), ("/ckpt/step-1", ["one", "two"]), ("/ckpt/step-1", ["two"])):
            cards = [{"id": base, "owned_by": "sglang"}]
            cards += [{"id": adapter, "owned_by": "sglang", "parent": base} for adapter in adapters]
            engine.scripts["/v1/models"] = fixed(200, orjson.dumps({"data": cards}))

            async def are_known(names: list[str]) -> bool:
                return await known(client) == names

            names = ["simulated", *(f"simulated:{adapter}" for adapter in adapters)]
            await eventually(partial(are_known, names))
            assert (await client.post("/v1/chat/completions", json=chat(names[-1]))).status_code == 200
        answer = await client.post("/v1/chat/completions", json=chat("simulated:one"))
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_an_adapter_takes_as_long_a_context_as_its_model() -> None:
    """Engines tell only the model's."""
    cards: list[dict[str, Any]] = [
        {"id": "adapter", "owned_by": "vllm", "parent": "simulated"},
        {"id": "simulated", "owned_by": "vllm", "parent": None, "max_model_len": 4096},
        {"id": "orphan", "owned_by": "vllm", "parent": "unlisted", "max_model_len": None},
    ]
    async with recorded_engine(SimulatedEngineSettings(dialect="vllm")) as engine:
        engine.scripts["/v1/models"] = fixed(200, orjson.dumps({"data": cards}))
        async with running_gateway(engine.url) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            models = (await client.get("/v1/models")).json()["data"]
    lengths = {model["id"]: model["max_model_len"] for model in models}
    assert lengths == {"adapter": 4096, "orphan": None, "simulated": 4096}


async def test_turns_of_a_model_leave_a_draining_engine_that_alone_has_an_adapter() -> None:
    """Only the adapter's own turns have to end where they run."""
    slow = SimulatedEngineSettings(speed_up=0.02)
    long = chat("simulated", 1000) | {"ignore_eos": True}
    async with recorded_engine(slow) as first, recorded_engine(slow) as second:
        tell(first, "adapter", "simulated")
        async with (
            running_gateway(first.url, second.url, token_legs="auto") as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
        ):
            draining, other = [
                f"/v1/engines/{engine['id']}" for engine in (await client.get("/v1/engines")).json()["data"]
            ]
            await client.post(f"{other}/cordon", headers=ADMIN)
            turn = asyncio.create_task(client.post("/v1/chat/completions", json=long))
            await eventually(lambda: first.turns)
            await client.post(f"{other}/uncordon", headers=ADMIN)
            drained = await client.post(f"{draining}/drain?timeout_s=10", headers=ADMIN)
            assert drained.json()["is_drained"]
            await eventually(lambda: second.turns)
            turn.cancel()


async def test_turns_leave_a_draining_engine_once_another_gets_their_adapter() -> None:
    """It ran and was ready all the time."""
    slow = SimulatedEngineSettings(model="adapter", speed_up=0.02)
    long = chat("adapter", 1000) | {"ignore_eos": True}
    fast = {"models_interval_s": 0.01, "observe_interval_s": 0.01}
    async with recorded_engine(slow) as first, recorded_engine(slow) as second:
        tell(second, "another")
        async with (
            running_gateway(first.url, second.url, token_legs="auto", **fast) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
        ):
            turn = asyncio.create_task(client.post("/v1/chat/completions", json=long))
            await eventually(lambda: first.turns)
            draining = f"/v1/engines/{first.url.removeprefix('http://')}"
            drained = await client.post(f"{draining}/drain?timeout_s=0", headers=ADMIN)
            assert not drained.json()["is_drained"]
            tell(second, "adapter", "another")
            await eventually(lambda: second.turns, 20)
            turn.cancel()
