"""Real vLLM servers that get new weights from disk while turns run, and a server that was started with these
weights."""

import asyncio
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import httpx2
import orjson
import pytest
import pytest_asyncio

from engines.local_vllm import LocalEngine
from tests.support.gateway import ADMIN, PATIENT, running_gateway
from tests.support.rounds import came_about, num_ended, play_rounds

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_TOKENS = 1500
PROMPTS = [f"{n}: " + " ".join(f"row {i * n}" for i in range(60)) for n in range(1, 7)]


@pytest.fixture
def engines(real_engines: list[LocalEngine], tiny_model: Path) -> Iterator[list[str]]:
    """The two servers, with the weights of their start before and after."""
    urls = [engine.url for engine in real_engines]
    reset_weights(urls, tiny_model)  # another test may have put them to sleep, and an awakened engine has other weights
    yield urls
    reset_weights(urls, tiny_model)


def reset_weights(engines: list[str], weights: Path) -> None:
    """Load the weights of this folder, under the version that engines have at their start."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    for engine in engines:
        with httpx2.Client(base_url=engine, timeout=300.0) as client:
            client.post("/pause", params={"mode": "keep", "clear_cache": "true"}).raise_for_status()
            client.post("/collective_rpc", json=reload).raise_for_status()
            client.post("/update_weight_version", json={"new_version": "default"}).raise_for_status()
            client.post("/resume").raise_for_status()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def undisturbed(real_engines: list[LocalEngine]) -> list[tuple[list[int], list[int], int]]:
    """What `complete` returns for each prompt with the old weights."""
    urls = cycle(engine.url for engine in real_engines)
    return await asyncio.gather(*(complete(next(urls), prompt, NUM_TOKENS) for prompt in PROMPTS))


def completion_request(prompt: str | list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy completion that returns its token ids."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True} | fields


async def complete(url: str, prompt: str | list[int], tokens: int) -> tuple[list[int], list[int], int]:
    """Token ids of the prompt and of the answer, and how many of the prompt were cached."""
    async with httpx.AsyncClient(timeout=300) as client:
        response = await client.post(url + "/v1/completions", json=completion_request(prompt, tokens))
    assert response.status_code == 200, response.text
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    return choice["prompt_token_ids"], choice["token_ids"], usage["prompt_tokens_details"]["cached_tokens"]


async def stream(url: str, prompt: str, tokens: int, received: list[int]) -> list[int]:
    """Token ids; `received` has them as soon as they arrive."""
    async with (
        httpx.AsyncClient(timeout=300) as client,
        client.stream(
            "POST", url + "/v1/completions", json=completion_request(prompt, tokens, stream=True)
        ) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = orjson.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                received += choice.get("token_ids") or []
    return received


def begin_rollout(url: str) -> tuple[list["asyncio.Task[list[int]]"], list[list[int]]]:
    """Six turns, alternately streamed and not, and the tokens received on each stream."""

    async def whole(number: int) -> list[int]:
        return (await complete(f"{url}/t/t{number}", PROMPTS[number], NUM_TOKENS))[1]

    received: list[list[int]] = [[] for _ in PROMPTS[::2]]
    turns = [
        asyncio.create_task(
            whole(number) if number % 2 else stream(f"{url}/t/t{number}", prompt, NUM_TOKENS, received[number // 2])
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    return turns, received


def common_prefix(first: list[int], second: list[int]) -> int:
    """The length of the common prefix of two lists."""
    return next((i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), len(first))


@pytest.mark.parametrize("mode", ["restart", "keep"])
async def test_an_update_in_mid_rollout_fails_no_turn(
    undisturbed: list[tuple[list[int], list[int], int]],
    new_engine: LocalEngine,
    engines: list[str],
    tiny_model: Path,
    new_weights: Path,
    mode: str,
) -> None:
    """Running turns finish, with tokens of both weights. Later turns are of the new weights, and find no KV of the old.

    With `restart`, the tokens after the update equal those of a server that had the new weights from that token on.
    """

    async def rest(number: int, ids: list[int], num_before: int) -> tuple[list[int], list[int]]:
        prompt_ids = undisturbed[number][0] + ids[:num_before]
        return ids[num_before:], (await complete(new_engine.url, prompt_ids, NUM_TOKENS - num_before))[1]

    async def play(round_number: int) -> bool:
        if round_number:
            reset_weights(engines, tiny_model)
        async with (
            running_gateway(*engines, **PATIENT) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=300) as client,
        ):
            turns, received = begin_rollout(gateway.url)

            async def all_stream() -> bool:
                return all(received)

            await came_about(all_stream, lambda: num_ended(turns) == len(turns))
            update = await updated(client, new_weights, mode)
            made = await asyncio.gather(*turns)
            print({one["paused_s"] for one in update["engines"].values()}, update["ended_at"] - update["began_at"])
            num_before = []
            for number, ids in enumerate(made):
                assert len(ids) == NUM_TOKENS
                num_before.append(common_prefix(ids, undisturbed[number][1]))
                shown = (await client.get(f"/v1/trajectories/t{number}")).json()["turns"][-1]
                if shown["weight_versions"] == ["default"]:  # it had ended before the update
                    assert num_before[-1] == NUM_TOKENS
                else:
                    assert shown["weight_versions"] in (["default", "step/1"], ["step/1"])
            if mode == "restart":
                resumed = zip(range(len(made)), made, num_before, strict=True)
                for got, expected in await asyncio.gather(*(rest(*one) for one in resumed if one[2] < NUM_TOKENS)):
                    assert got == expected, num_before
            await check_new_turns_have_the_new_weights(gateway.url, new_engine.url)
            return any(0 < num < NUM_TOKENS for num in num_before)

    await play_rounds("a turn was in flight at the update", play)


async def updated(client: httpx.AsyncClient, weights: Path, mode: str) -> dict[str, Any]:
    """Update the gateway's engines to these weights, as version step/1."""
    order = {"version": "step/1", "path": str(weights), "mode": mode}
    update: dict[str, Any] = (await client.post("/v1/weights", json=order, headers=ADMIN)).json()
    assert update["status"] == "done", update
    return update


async def check_new_turns_have_the_new_weights(gateway: str, new_engine: str) -> None:
    """And so is the KV that the next turn finds."""

    async def check(number: int, prompt: str) -> None:
        _, ids, num_cached = await complete(f"{gateway}/t/new{number}", prompt, 100)
        assert num_cached == 0, "KV of the old weights was found"
        assert ids == (await complete(new_engine, prompt, 100))[1]
        _, _, num_cached = await complete(f"{gateway}/t/new{number}", prompt, 1)
        assert num_cached > 0, "KV of the new weights was not found"

    await asyncio.gather(*map(check, range(len(PROMPTS)), PROMPTS))


async def test_at_token_level_each_token_carries_its_weight_version(
    undisturbed: list[tuple[list[int], list[int], int]],
    new_engine: LocalEngine,
    engines: list[str],
    tiny_model: Path,
    new_weights: Path,
) -> None:
    """Up to the end of the old version's span, tokens are the old weights'; from there on, they equal those of a server
    with the new ones."""

    async def check(number: int, turns: list[dict[str, Any]]) -> bool:
        (kept,), (prompt_ids, old_ids, _) = turns, undisturbed[number]
        spans, made = kept["versions"], kept["output_ids"]
        assert kept["prompt_ids"] == prompt_ids
        assert (spans[0]["start"], spans[-1]["end"], len(made)) == (0, NUM_TOKENS, NUM_TOKENS)
        switch_at = spans[-1]["start"] if spans[-1]["version"] == "step/1" else NUM_TOKENS
        assert made[:switch_at] == old_ids[:switch_at], spans
        if switch_at < NUM_TOKENS:
            _, ids, _ = await complete(new_engine.url, prompt_ids + made[:switch_at], NUM_TOKENS - switch_at)
            assert made[switch_at:] == ids, spans
        return [span["version"] for span in spans] == ["default", "step/1"]

    async def play(round_number: int) -> bool:
        if round_number:
            reset_weights(engines, tiny_model)
        async with (
            running_gateway(*engines, **PATIENT, token_legs="auto") as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=300) as client,
        ):

            async def turn(number: int) -> None:
                body = completion_request(PROMPTS[number], NUM_TOKENS)
                del body["return_token_ids"]
                response = await client.post(f"/t/t{number}/v1/completions", json=body)
                assert response.status_code == 200, response.text

            async def three_have_tokens() -> bool:
                shown = [(await client.get(f"/v1/trajectories/t{n}")).json() for n in range(len(PROMPTS))]
                return sum(turn["chunks"] > 0 for one in shown for turn in one.get("live_turns", ())) >= 3

            turns = [asyncio.create_task(turn(number)) for number in range(len(PROMPTS))]
            await came_about(three_have_tokens, lambda: num_ended(turns) > len(turns) - 3)
            await updated(client, new_weights, "restart")
            await asyncio.gather(*turns)
            listed = [(await client.get(f"/v1/trajectories/t{n}/tokens")).json()["turns"] for n in range(len(PROMPTS))]
            return any(await asyncio.gather(*map(check, range(len(PROMPTS)), listed)))

    await play_rounds("a turn was in flight at the update", play)


async def test_a_missing_path_costs_one_engine_until_the_next_update(
    engines: list[str], new_weights: Path, tmp_path: Path
) -> None:
    """The first engine refuses it and is held, and the fleet goes on. A correct path brings both engines to the new
    weights."""
    async with (
        running_gateway(*engines, **PATIENT) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as client,
    ):
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
