"""KV follows its trajectory between two real vLLM servers, over NIXL: nothing is prefilled again, and no answer
changes."""

import asyncio
from typing import Any

import httpx
import pytest

from engines.local_vllm import LocalEngine
from tests.support.gateway import ADMIN, PATIENT, eventually, running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

TASK = "Weave the warp through the heddle, thread by thread. " * 40
NUM_TRAJECTORIES = 3
# A busy machine is slow, and a lease lasts 30 s.
SETTINGS: dict[str, Any] = {**PATIENT, "kv_move_timeout_s": 25.0}


class Agents:
    """Some trajectories, turn by turn.

    Args:
        base_url: of the gateway, or of an engine, which knows no trajectories.
    """

    def __init__(self, client: httpx.AsyncClient, base_url: str, name: str) -> None:
        self.answers: list[list[str]] = [[] for _ in range(NUM_TRAJECTORIES)]
        self._client = client
        self._base_url = base_url
        self._name = name
        self._conversations = [
            [{"role": "user", "content": f"Task {name} {number}. {TASK}"}] for number in range(NUM_TRAJECTORIES)
        ]

    def id_of(self, number: int) -> str:
        return f"{self._name}-{number}"

    async def all_ask(self) -> None:
        """One turn of each, concurrently."""
        await asyncio.gather(*map(self._ask, range(NUM_TRAJECTORIES)))

    async def _ask(self, number: int) -> None:
        messages = self._conversations[number]
        body = {"model": "tiny", "messages": messages, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        headers = {"x-trajectory-id": self.id_of(number)}
        response = await self._client.post(f"{self._base_url}/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        answer = response.json()["choices"][0]["message"]["content"]
        self.answers[number].append(answer)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "the tool says: go on"}]


async def rows_of(client: httpx.AsyncClient, url: str, trajectory_id: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await client.get(f"{url}/v1/trajectories/{trajectory_id}")).json()["turns"]
    return rows


@pytest.mark.parametrize("token_legs", ["auto", "off"])
async def test_the_other_engine_fetches_the_kv_of_drained_trajectories(
    nixl_engines: list[LocalEngine], token_legs: str
) -> None:
    """During their tool calls. Each finds at least 90 % of its context at its new home, and its answers equal those of
    an engine where nothing moves."""
    first, second = (engine.url for engine in nixl_engines)
    ids = {url: url.removeprefix("http://") for url in (first, second)}
    name = f"migration-{token_legs}"
    async with (
        running_gateway(first, second, token_legs=token_legs, **SETTINGS) as gateway,
        httpx.AsyncClient(timeout=600.0) as client,
    ):

        async def act(url: str, what: str) -> dict[str, Any]:
            params = {"timeout_s": 300} if what in ("drain", "evacuate") else {}
            answer = await client.post(f"{gateway.url}/v1/engines/{ids[url]}/{what}", params=params, headers=ADMIN)
            assert answer.status_code == 200, answer.text
            done: dict[str, Any] = answer.json()
            return done

        async def moves_kv() -> bool:
            members = (await client.get(f"{gateway.url}/v1/engines")).json()["data"]
            return all(one["state"] == "ready" and one["moves_kv"] for one in members)

        await eventually(moves_kv, 120)
        await act(second, "cordon")
        agents = Agents(client, gateway.url, name)
        await agents.all_ask()
        await agents.all_ask()
        await act(second, "uncordon")
        drained = await act(first, "drain")
        assert drained["is_drained"] and drained["is_evacuated"] and drained["kv_offered_tokens"] == 0
        await agents.all_ask()
        for number in range(NUM_TRAJECTORIES):
            *_, before, last = await rows_of(client, gateway.url, agents.id_of(number))
            assert (before["engine"], last["engine"]) == (ids[first], ids[second])
            context = before["prompt_tokens"] + before["output_tokens"]
            assert last["cached_tokens"] >= 0.9 * context, (last, context)
        page = (await client.get(f"{gateway.url}/metrics")).text
        assert f'heddle_kv_moves_total{{outcome="fetched"}} {NUM_TRAJECTORIES}.0' in page, page
        undisturbed = Agents(client, first, name)
        for _ in range(3):
            await undisturbed.all_ask()
        assert agents.answers == undisturbed.answers
