"""Real vLLM servers that share a KV tier: a trajectory's new home loads from a folder what the old home computed,
whatever the TP sizes of the two and whether or not the old home is still alive.

On a machine without a GPU, vLLM's tier copies with deploy/vllm_cpu_tier.py; everything else is vLLM's own.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from engines.local_vllm import LocalEngine
from tests.support.gateway import ADMIN, PATIENT, Listening, eventually, running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.tier, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

TASK = "Weave the warp through the heddle, thread by thread. " * 40
Json = dict[str, Any]


@dataclass
class Agent:
    """A greedy trajectory, turn by turn.

    Args:
        more: fields of each of its requests.
    """

    client: httpx.AsyncClient
    url: str
    name: str
    more: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.answers: list[str] = []
        self._messages = [{"role": "user", "content": f"{self.name}: {TASK}"}]

    async def turns(self, num_turns: int) -> None:
        for _ in range(num_turns):
            body = {"model": "tiny", "messages": self._messages, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            response = await self.client.post(
                f"{self.url}/v1/chat/completions", json=body | self.more, headers={"x-trajectory-id": self.name}
            )
            assert response.status_code == 200, response.text
            self.answers.append(response.json()["choices"][0]["message"]["content"])
            self._messages += [
                {"role": "assistant", "content": self.answers[-1]},
                {"role": "user", "content": "the tool says: go on"},
            ]

    async def last_rows(self) -> tuple[Json, Json]:
        """Its last two turns."""
        before, last = (await self.client.get(f"{self.url}/v1/trajectories/{self.name}")).json()["turns"][-2:]
        return before, last


class TierFleet:
    """The gateway before the two engines, of TP 1 and TP 2, with control over which of them gets turns."""

    def __init__(self, gateway: Listening, client: httpx.AsyncClient, engines: list[LocalEngine]) -> None:
        self.url = gateway.url
        self.client = client
        self.ids = [engine.url.removeprefix("http://") for engine in engines]

    async def act(self, number: int, what: str) -> None:
        path = f"{self.url}/v1/engines/{self.ids[number]}/{what}"
        params = {"timeout_s": 300} if what in ("drain", "evacuate") else {}
        answer = await self.client.post(path, params=params, headers=ADMIN)
        assert answer.status_code == 200, answer.text

    async def only(self, number: int) -> None:
        """This engine gets new turns, the other none."""
        await self.act(number, "uncordon")
        await self.act(1 - number, "cordon")

    async def share_tiers(self) -> bool:
        members = (await self.client.get(f"{self.url}/v1/engines")).json()["data"]
        return (
            all(one["state"] == "ready" for one in members) and len({one["kv_tier"] for one in members} - {None}) == 1
        )

    async def moves(self) -> dict[str, int]:
        page = (await self.client.get(f"{self.url}/metrics")).text
        counts = [line.split("outcome=")[1] for line in page.splitlines() if line.startswith("heddle_kv_moves_total{")]
        return {line.split('"')[1]: int(float(line.split()[-1])) for line in counts if not line.endswith(" 0.0")}


@asynccontextmanager
async def tier_fleet(engines: list[LocalEngine]) -> AsyncIterator[TierFleet]:
    """Starts when the gateway knows that both engines share a tier."""
    settings: Json = {**PATIENT, "kv_move_timeout_s": 25.0, "token_legs": "auto", "observe_interval_s": 0.2}
    async with (
        running_gateway(*(engine.url for engine in engines), **settings) as gateway,
        httpx.AsyncClient(timeout=600.0) as client,
    ):
        fleet = TierFleet(gateway, client, engines)
        await eventually(fleet.share_tiers, 120)
        yield fleet


async def check_loaded_at(agents: list[Agent], target: str) -> None:
    """Check that their last turn was the first at this new home, and found at least 90 % of the context in the tier."""
    for agent in agents:
        before, last = await agent.last_rows()
        assert before["engine"] != target == last["engine"]
        context = before["prompt_tokens"] + before["output_tokens"]
        assert last["cached_tokens"] >= 0.9 * context and last["kv_by"] == "loaded", (last, context)


async def test_a_moved_trajectory_finds_its_context_in_the_tier(tier_engines: list[LocalEngine]) -> None:
    """From TP 1 to TP 2 in a tool call, and from TP 2 to TP 1 after the old home was killed. The answers equal those of
    an engine that computes everything itself."""
    async with tier_fleet(tier_engines) as fleet:
        await fleet.only(0)
        movers = [Agent(fleet.client, fleet.url, f"moves-{number}") for number in range(2)]
        await asyncio.gather(*(agent.turns(2) for agent in movers))
        await fleet.act(1, "uncordon")
        await fleet.act(0, "drain")
        assert await fleet.moves() == {"loaded": 2}
        await asyncio.gather(*(agent.turns(1) for agent in movers))
        await check_loaded_at(movers, fleet.ids[1])

        orphans = [Agent(fleet.client, fleet.url, f"outlives-{number}") for number in range(2)]
        await asyncio.gather(*(agent.turns(2) for agent in orphans))
        tier_engines[1].server.send_signal(signal.SIGKILL)
        await fleet.act(0, "uncordon")
        await asyncio.gather(*(agent.turns(1) for agent in orphans))
        await check_loaded_at(orphans, fleet.ids[0])
        assert await fleet.moves() == {"loaded": 4}

        for agent in (*movers, *orphans):  # with its own salt, so that it finds none of this KV
            undisturbed = Agent(fleet.client, tier_engines[0].url, agent.name, {"cache_salt": "alone"})
            await undisturbed.turns(3)
            assert agent.answers == undisturbed.answers
