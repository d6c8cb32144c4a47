"""Real vLLM servers that get new weights from disk while turns run, and a server that was started with them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import orjson
import pytest
import pytest_asyncio

from engines.children import LaunchError
from engines.local_vllm import LocalEngine, LocalVllm, launch_all
from engines.tiny_model import make_tiny_model
from tests.support.gateway import ADMIN, eventually, running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_TOKENS = 1500
PROMPTS = [f"{n}: " + " ".join(f"row {i * n}" for i in range(60)) for n in range(1, 7)]


@pytest.fixture(scope="session")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("new-weights"), seed=1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def starting(
    vllm_venv: Path, new_weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator["asyncio.Task[list[LocalEngine]]"]:
    """It starts while the others do."""
    spec = LocalVllm(new_weights, max_model_len=8192, venv=vllm_venv)
    async with AsyncExitStack() as stack:
        launched = launch_all([spec], tmp_path_factory.mktemp("vllm-new"))
        yield asyncio.create_task(stack.enter_async_context(launched))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started_with_them(
    starting: "asyncio.Task[list[LocalEngine]]", real_engines: list[LocalEngine]
) -> LocalEngine:
    """A server that never had other weights than the new ones."""
    try:
        return (await starting)[0]
    except LaunchError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def engines(real_engines: list[LocalEngine], tiny_model: Path) -> Iterator[list[str]]:
    """The two servers, with the weights that they were started with before and after."""
    yield [engine.url for engine in real_engines]
    for engine in real_engines:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tiny_model)}}
        with httpx2.Client(base_url=engine.url, timeout=120.0) as client:
            client.post("/pause", params={"mode": "keep", "clear_cache": "true"}).raise_for_status()
            client.post("/collective_rpc", json=reload).raise_for_status()
            client.post("/update_weight_version", json={"new_version": "default"}).raise_for_status()
            client.post("/resume").raise_for_status()


def asked(prompt: str | list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy completion that tells its tokens."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True} | fields


async def complete(url: str, prompt: str | list[int], tokens: int) -> tuple[list[int], list[int], int]:
    """Token ids of the prompt and of the answer, and how many of the prompt were cached."""
    async with httpx.AsyncClient(timeout=300) as client:
        response = await client.post(url + "/v1/completions", json=asked(prompt, tokens))
    assert response.status_code == 200, response.text
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    return choice["prompt_token_ids"], choice["token_ids"], usage["prompt_tokens_details"]["cached_tokens"]


async def stream(url: str, prompt: str, tokens: int, begun: asyncio.Event) -> list[int]:
    """Token ids as they come; `begun` is set when fifty are there."""
    ids: list[int] = []
    async with (
        httpx.AsyncClient(timeout=300) as client,
        client.stream("POST", url + "/v1/completions", json=asked(prompt, tokens, stream=True)) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = orjson.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
            if len(ids) >= 50:
                begun.set()
    return ids


@asynccontextmanager
async def rollout(url: str) -> AsyncIterator[list["asyncio.Task[list[int]]"]]:
    """Six turns under way, streams and others in turn, of which the streams have begun."""
    begun = [asyncio.Event() for _ in PROMPTS[::2]]

    async def whole(number: int) -> list[int]:
        return (await complete(f"{url}/t/t{number}", PROMPTS[number], NUM_TOKENS))[1]

    tasks = [
        asyncio.create_task(
            whole(number)
            if number % 2
            else stream(f"{url}/t/t{number}", PROMPTS[number], NUM_TOKENS, begun[number // 2])
        )
        for number in range(len(PROMPTS))
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    yield tasks


def common(first: list[int], second: list[int]) -> int:
    """How long two lists are the same."""
    return next((i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), len(first))


@pytest.mark.parametrize("mode", ["restart", "keep"])
async def test_an_update_in_mid_rollout_fails_no_turn(
    started_with_them: LocalEngine, engines: list[str], new_weights: Path, mode: str
) -> None:
    """What runs ends well, with tokens of both weights; what follows is of the new ones, and meets no KV of the old.

    With `restart` the tokens after the update are those of a server that had the new weights from that token on.
    """
    undisturbed = [await complete(engines[0], prompt, NUM_TOKENS) for prompt in PROMPTS]
    async with running_gateway(*engines) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=300) as client:
        async with rollout(gateway.url) as turns:
            order = {"version": "step/1", "path": str(new_weights), "mode": mode}
            update = (await client.post("/v1/weights", json=order, headers=ADMIN)).json()
            assert update["status"] == "done", update
            made = await asyncio.gather(*turns)
        print({one["paused_s"] for one in update["engines"].values()}, update["ended_at"] - update["began_at"])
        num_before = []
        for number, ids in enumerate(made):
            assert len(ids) == NUM_TOKENS
            prompt_ids, old_ids, _ = undisturbed[number]
            num_before.append(common(ids, old_ids))
            shown = (await client.get(f"/v1/trajectories/t{number}")).json()["turns"][-1]
            if shown["weight_versions"] == ["default"]:  # it had ended before
                assert num_before[-1] == NUM_TOKENS
            else:
                assert shown["weight_versions"] in (["default", "step/1"], ["step/1"])
            if mode == "restart" and num_before[-1] < NUM_TOKENS:
                rest = prompt_ids + ids[: num_before[-1]]
                _, resumed_ids, _ = await complete(started_with_them.url, rest, NUM_TOKENS - num_before[-1])
                assert ids[num_before[-1] :] == resumed_ids, (number, num_before)
        assert any(0 < num < NUM_TOKENS for num in num_before), num_before
        for number, prompt in enumerate(PROMPTS):
            _, ids, num_cached = await complete(f"{gateway.url}/t/new{number}", prompt, 100)
            assert num_cached == 0, "KV of the old weights was met"
            assert ids == (await complete(started_with_them.url, prompt, 100))[1]
            _, _, num_cached = await complete(f"{gateway.url}/t/new{number}", prompt, 1)
            assert num_cached > 0, "KV of the new weights was not met"


async def test_at_token_level_each_token_carries_the_version_that_made_it(
    started_with_them: LocalEngine, engines: list[str], new_weights: Path
) -> None:
    """Up to the span's end they are the old weights', from there on those of a server that had the new ones."""
    async with (
        running_gateway(*engines, token_legs="auto") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as client,
    ):

        async def turn(number: int) -> None:
            body = asked(PROMPTS[number], NUM_TOKENS)
            del body["return_token_ids"]
            response = await client.post(f"/t/t{number}/v1/completions", json=body)
            assert response.status_code == 200, response.text

        async def are_running() -> bool:
            live = [
                (await client.get(f"/v1/trajectories/t{n}")).json().get("live_turns", []) for n in range(len(PROMPTS))
            ]
            return sum(turn["chunks"] > 50 for turns in live for turn in turns) >= 3

        turns = [asyncio.create_task(turn(number)) for number in range(len(PROMPTS))]
        await eventually(are_running, 120)
        order = {"version": "step/1", "path": str(new_weights), "mode": "restart"}
        update = (await client.post("/v1/weights", json=order, headers=ADMIN)).json()
        assert update["status"] == "done", update
        await asyncio.gather(*turns)
        has_both = 0
        for number in range(len(PROMPTS)):
            (kept,) = (await client.get(f"/v1/trajectories/t{number}/tokens")).json()["turns"]
            spans, made = kept["versions"], kept["output_ids"]
            assert (spans[0]["start"], spans[-1]["end"], len(made)) == (0, NUM_TOKENS, NUM_TOKENS)
            has_both += [span["version"] for span in spans] == ["default", "step/1"]
            if spans[-1]["version"] == "step/1":
                seam = spans[-1]["start"]
                _, ids, _ = await complete(started_with_them.url, kept["prompt_ids"] + made[:seam], NUM_TOKENS - seam)
                assert made[seam:] == ids, (number, spans)
        assert has_both, "no turn was in flight at the update"


async def test_a_path_that_is_not_there_costs_one_engine_until_the_next_update(
    engines: list[str], new_weights: Path, tmp_path: Path
) -> None:
    """The first engine refuses it and is held, the fleet goes on; a right path brings both to the new weights."""
    async with running_gateway(*engines) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=300) as client:
        order = {"version": "step/1", "path": str(tmp_path / "missing")}
        response = await client.post("/v1/weights", json=order, headers=ADMIN)
        assert response.status_code == 502, response.text
        assert sorted(one["state"] for one in response.json()["engines"].values()) == ["failed", "untouched"]
        listed = (await client.get("/v1/engines")).json()["data"]
        assert sorted(one["is_cordoned"] for one in listed) == [False, True]
        assert len((await complete(gateway.url, "Hello", 20))[1]) == 20
        order["path"] = str(new_weights)
        response = await client.post("/v1/weights", json=order, headers=ADMIN)
        assert (response.status_code, response.json()["status"]) == (200, "done"), response.text
        listed = (await client.get("/v1/engines")).json()["data"]
        assert [(one["is_cordoned"], one["weight_version"]) for one in listed] == [(False, "step/1")] * 2
