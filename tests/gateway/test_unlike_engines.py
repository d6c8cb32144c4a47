"""Engines that serve the same model and differ otherwise: a request reaches one that can serve it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, FaultKind, SimulatedEngineSettings
from store import open_store
from tests.support.gateway import ADMIN, REUSED_FOR, eventually, running_gateway

CONTEXTS = {"large": 32_768, "middle": 8_192, "small": 4_096}


KINDS: list[tuple[str, ...]] = [("vllm", "sglang"), ("sglang", "vllm"), ("vllm", "vllm", "sglang")]


@asynccontextmanager
async def unlike_engines(
    *engines: dict[str, Any], **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, list[str]]]:
    """A client of a gateway with one engine for each of these settings, in their order, and the engines' ids."""
    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(serve_engine(SimulatedEngineSettings(speed_up=200, **engine)))
            for engine in engines
        ]
        gateway = await stack.enter_async_context(running_gateway(*urls, **settings))
        client = httpx.AsyncClient(base_url=gateway.url, timeout=60, limits=REUSED_FOR)
        yield await stack.enter_async_context(client), [url.removeprefix("http://") for url in urls]


@pytest.mark.parametrize("order", [*permutations(CONTEXTS)], ids="-".join)
async def test_a_long_prompt_goes_to_an_engine_that_takes_it(order: tuple[str, ...]) -> None:
    """Whichever engine was added last: of long prompts that come at once, none is sent where it is refused."""
    async with unlike_engines(*({"max_model_len": CONTEXTS[name]} for name in order)) as (client, ids):

        async def ask(number: int) -> tuple[int, str]:
            messages = [{"role": "user", "content": f"{number} " + "word " * 12_000}]
            body = {"model": "simulated", "messages": messages, "max_tokens": 100, "ignore_eos": True}
            answer = await client.post("/v1/chat/completions", json=body)
            return answer.status_code, answer.headers["x-heddle-engine"]

        assert set(await asyncio.gather(*map(ask, range(8)))) == {(200, ids[order.index("large")])}
        assert (await client.get("/v1/models/simulated")).json()["max_model_len"] == CONTEXTS["large"]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("path", ["/v1/tokenize", "/v1/detokenize"])
async def test_a_route_that_one_kind_lacks_is_served_by_the_other(kinds: tuple[str, ...], path: str) -> None:
    """Whichever is asked first, and however many lack it: these routes are SGLang's."""
    async with unlike_engines(*({"dialect": kind} for kind in kinds), max_attempts=1) as (client, _):
        body = {"model": "simulated", "prompt": "Hello", "tokens": [1, 2]}
        assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("model", [{}, {"model": ""}, {"model": None}], ids=["absent", "empty", "null"])
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/embeddings", "/v1/messages/count_tokens"])
async def test_where_engines_serve_different_models_one_must_be_named(path: str, model: dict[str, Any]) -> None:
    """Else any engine would answer, with tokens or vectors of whichever model it serves; as for turns."""
    async with unlike_engines({"model": "one"}, {"model": "other"}) as (client, _):
        body = {"prompt": "Hello", "input": "Hello", "tokens": [1, 2], "messages": [{"role": "user", "content": "Hi"}]}
        answer = await client.post(path, json=body | model)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "'model' must name one of the models served: 'one', 'other'."
        assert (await client.post(path, json=body | {"model": "other"})).status_code == 200


async def test_where_engines_serve_one_model_none_need_be_named() -> None:
    """All engines would answer the same."""
    async with unlike_engines({}, {"dialect": "sglang"}) as (client, _):
        assert (await client.post("/tokenize", json={"prompt": "Hello"})).status_code == 200


async def test_an_error_does_not_deny_that_engines_of_other_models_are_ready() -> None:
    """The engines of one model are cordoned: its name is in the error, which was "0 of 2 in the fleet"."""
    async with unlike_engines({"model": "one"}, {"model": "other"}, admin_key="a-key") as (client, ids):
        await client.post(f"/v1/engines/{ids[1]}/cordon", headers={"authorization": "Bearer a-key"})
        answer = await client.post("/tokenize", json={"model": "other", "prompt": "Hello"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        said = "No engine with the model 'other' is ready; GET /v1/engines tells why."
        assert answer.json()["error"]["message"] == said
        assert (await client.post("/tokenize", json={"model": "one", "prompt": "Hello"})).status_code == 200


async def test_a_route_that_no_engine_has_gets_404() -> None:
    """Each engine was asked. It had no code."""
    async with unlike_engines({}, {}) as (client, _):
        answer = await client.post("/v1/tokenize", json={"model": "simulated", "prompt": "Hello"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")


@pytest.mark.parametrize("kind", ["error", "refuse", "reset"])
async def test_an_engine_that_fails_is_reported_before_one_that_lacks_the_route(kind: FaultKind) -> None:
    """A 404 would tell the client that trying again is useless."""
    fault = Fault(kind, path="/v1/tokenize")
    for engines in permutations([{}, {"dialect": "sglang", "faults": (fault,)}]):
        async with unlike_engines(*engines) as (client, _):
            answer = await client.post("/v1/tokenize", json={"model": "simulated", "prompt": "Hello"})
            assert answer.status_code >= 500


async def test_a_turn_that_ends_where_it_passes_through_keeps_no_tokens(tmp_path: Path) -> None:
    """What its first leg made, at an engine with token routes, belongs to another answer. It stayed in the store, where
    an equal request of the trajectory would go on from it after a restart."""
    dies = Fault("die", after_chunks=1, path="/inference")
    lacks = Fault("html", path="/v1/completions/render")
    store = f"sqlite:{tmp_path / 's.sqlite3'}"
    settings = {"token_legs": "auto", "retry_pause_s": 600, "store": store, "save_tokens_s": 1e-9}
    async with unlike_engines({"faults": (dies,)}, {"faults": (lacks,)}, **settings) as (client, [_, other]):
        await client.post(f"/v1/engines/{other}/cordon", headers=ADMIN)
        messages = [{"role": "user", "content": "Tell me about looms."}]
        body = {"model": "simulated", "messages": messages, "max_tokens": 100, "ignore_eos": True}
        pending = asyncio.create_task(client.post("/t/a/v1/chat/completions", json=body))

        async def waits_again() -> bool:
            live = (await client.get("/v1/trajectories/a")).json().get("live_turns", [])
            return [(turn["state"], turn["legs"]) for turn in live] == [("waiting", 1)]

        await eventually(waits_again)
        await client.post(f"/v1/engines/{other}/uncordon", headers=ADMIN)
        assert (await pending).json()["usage"]["completion_tokens"] == 100
        (turn,) = (await client.get("/v1/trajectories/a")).json()["turns"]
        assert (turn["engine"], turn["legs"], turn["tokens"]) == (other, 2, "none")
        shown = (await client.get("/v1/trajectories/a/tokens")).json()
        assert (shown["turns"], [one["why"] for one in shown["missing"]]) == ([], ["no_token_legs"])
    record = open_store(store)
    await record.open()
    assert await record.get_pieces("a", "partial/") == {}
    await record.close()
