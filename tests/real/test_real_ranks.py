"""A real vLLM server of two data-parallel ranks: each is an engine, and a trajectory finds its context where it was."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.local_vllm import LocalEngine
from tests.support.gateway import ADMIN, PATIENT, running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

NUM_TURNS = 4
NAMES = [f"weaver-{number}" for number in range(6)]
TASK = "Weave the warp through the heddle, thread by thread. " * 40


async def played(client: httpx.AsyncClient, name: str) -> list[tuple[str, int]]:
    """Play a trajectory of one more message each turn; returns each turn's engine and how many tokens it had cached."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task {name}. {TASK}"}]
    turns = []
    for _ in range(NUM_TURNS):
        body = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = await client.post(f"/t/{name}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        turns.append((answer.headers["x-heddle-engine"], told["usage"]["prompt_tokens_details"]["cached_tokens"]))
        messages += [told["choices"][0]["message"], {"role": "user", "content": "the tool says: go on"}]
    return turns


@pytest.mark.parametrize("token_legs", ["auto", "off"])
async def test_a_trajectory_stays_at_the_rank_that_has_its_context(ranked_server: LocalEngine, token_legs: str) -> None:
    """vLLM's own balancer gives each turn to any rank. Both ranks are used, with the slots and the KV that each has."""
    async with (
        running_gateway(ranked_server.url, token_legs=token_legs, **PATIENT) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as client,
    ):
        engines = (await client.get("/v1/engines")).json()["data"]
        assert [engine["data_parallel_rank"] for engine in engines] == [0, 1]
        assert [(engine["slots"], engine["kv_capacity_tokens"]) for engine in engines] == [(4, 4096 * 32)] * 2
        played_turns = await asyncio.gather(*(played(client, f"{token_legs}-{name}") for name in NAMES))
        for (where, _), *later in played_turns:
            assert all(engine == where and cached > 1_000 for engine, cached in later), played_turns
        homes = Counter(turns[0][0] for turns in played_turns)
        assert set(homes) == {engine["id"] for engine in engines}


async def test_all_ranks_take_new_weights_at_once(
    ranked_server: LocalEngine, tiny_model: Path, new_weights: Path
) -> None:
    """One call to the server loads them for both, and afterwards both answer alike, and otherwise than before.

    Eight turns at once fill both, whichever has more to do: nothing is sent ahead beside a free slot.
    """
    async with (
        running_gateway(ranked_server.url, **PATIENT) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as client,
    ):
        texts = []
        for version, path in (("new", new_weights), ("old", tiny_model)):
            order = {"version": version, "path": str(path)}
            told = (await client.post("/v1/weights", json=order, headers=ADMIN)).json()
            assert told["status"] == "done" and len(told["engines"]) == 1, told
            answers = await asyncio.gather(*(said_at(client, f"{version}-{number}") for number in range(8)))
            engines = (await client.get("/v1/engines")).json()["data"]
            assert Counter(engine for engine, _ in answers) == {engine["id"]: 4 for engine in engines}
            [text] = {text for _, text in answers}
            texts.append(text)
        assert texts[0] != texts[1]


async def said_at(client: httpx.AsyncClient, name: str) -> tuple[str, str]:
    """The engine and the text of a greedy answer to a question that is always the same."""
    body = {"model": "tiny", "prompt": "What is a reed?", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    answer = await client.post(f"/t/{name}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-heddle-engine"], answer.json()["choices"][0]["text"]
