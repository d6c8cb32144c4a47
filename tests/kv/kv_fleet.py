"""A gateway before simulated engines that transfer KV between each other, and a trajectory with long turns."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.support.gateway import ADMIN, eventually, running_gateway

TASK = "Weave the warp through the heddle, thread by thread. " * 60


def engine(*faults: Fault, **settings: Any) -> SimulatedEngineSettings:
    """A fast engine with NIXL, unless told otherwise."""
    return SimulatedEngineSettings(faults=faults, **{"speed_up": 50.0, "kv_transfer": True} | settings)


def id_of(url: str) -> str:
    """The id that the gateway gives to the engine at this address."""
    return url.removeprefix("http://")


@dataclass
class Fleet:
    """A gateway's client and its engines' addresses."""

    client: httpx.AsyncClient
    urls: list[str] = field(default_factory=list)

    async def turn(self, trajectory: str, messages: list[dict[str, Any]], tokens: int = 40, **more: Any) -> str:
        """One greedy turn, which must finish; its answer is appended to the messages."""
        body = {"model": "simulated", "messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        response = await self.client.post(f"/t/{trajectory}/v1/chat/completions", json=body | more)
        assert response.status_code == 200, response.text
        answer: str = response.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "the tool says: go on"}]
        return answer

    async def begin_at_first(self) -> list[dict[str, Any]]:
        """Play the first turn of trajectory `t` on the first engine, and leave the others cordoned; returns its
        messages.
        """
        for url in self.urls[1:]:
            await self.act(id_of(url), "cordon")
        messages = first_messages()
        await self.turn("t", messages)
        return messages

    async def begin_fetch(self) -> tuple[list[dict[str, Any]], "asyncio.Task[str]"]:
        """Have the second turn of trajectory `t` fetch its KV from the first engine to the second, where that hangs;
        returns its messages and the turn.
        """
        home, target = map(id_of, self.urls)
        messages = await self.begin_at_first()
        await self.act(target, "uncordon")
        await self.act(home, "cordon")
        turn = asyncio.create_task(self.turn("t", messages))
        await eventually(lambda: self.offers_kv(home))
        return messages, turn

    async def offers_kv(self, engine_id: str) -> bool:
        """Whether an engine holds KV that another one has not fetched yet."""
        return bool((await self.engines())[engine_id]["kv_offered_tokens"])

    async def rows(self, trajectory: str) -> list[dict[str, Any]]:
        """The trajectory's turns."""
        turns: list[dict[str, Any]] = (await self.client.get(f"/v1/trajectories/{trajectory}")).json()["turns"]
        return turns

    async def last(self, trajectory: str) -> dict[str, Any]:
        """The trajectory's last turn."""
        return (await self.rows(trajectory))[-1]

    async def cached_share(self, trajectory: str) -> float:
        """The share of the context before the last turn that its engine had cached."""
        before, last = (await self.rows(trajectory))[-2:]
        return float(last["cached_tokens"] / (before["prompt_tokens"] + before["output_tokens"]))

    async def engines(self) -> dict[str, dict[str, Any]]:
        """The engines by id."""
        return {one["id"]: one for one in (await self.client.get("/v1/engines")).json()["data"]}

    async def act(self, engine_id: str, what: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Run an operator's action on an engine."""
        path = f"/v1/engines/{engine_id}/{what}"
        params = {"timeout_s": timeout_s} if what in ("drain", "evacuate") else {}
        response = await self.client.post(path, params=params, headers=ADMIN)
        assert response.status_code == 200, response.text
        done: dict[str, Any] = response.json()
        return done

    async def generated_tokens(self, url: str) -> float:
        """Tokens that an engine has generated so far."""
        page = (await self.client.get(f"{url}/metrics")).text
        line = next(line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total"))
        return float(line.rpartition(" ")[2])

    async def moves(self) -> dict[str, float]:
        """How many moves ended with each outcome."""
        page = (await self.client.get("/metrics")).text
        prefix = 'heddle_kv_moves_total{outcome="'
        lines = [line.removeprefix(prefix) for line in page.splitlines() if line.startswith(prefix)]
        counts = {line.partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}
        return {outcome: count for outcome, count in counts.items() if count}


@asynccontextmanager
async def running_fleet(*engines: SimulatedEngineSettings, **settings: Any) -> AsyncIterator[Fleet]:
    """A gateway before these engines."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serve_engine(one)) for one in engines]
        gateway = await stack.enter_async_context(
            running_gateway(*urls, **{"kv_move_min_tokens": 100, "observe_interval_s": 0.05} | settings)
        )
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=90))
        yield Fleet(client, urls)


def first_messages(name: str = "") -> list[dict[str, Any]]:
    """A long task."""
    return [{"role": "user", "content": f"{name}: {TASK}"}]


async def undisturbed_answers(num_turns: int) -> list[str]:
    """The answers of a trajectory's turns if nothing moves."""
    async with running_fleet(engine()) as undisturbed:
        messages = first_messages()
        return [await undisturbed.turn("t", messages) for _ in range(num_turns)]
