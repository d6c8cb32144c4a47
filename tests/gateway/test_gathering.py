"""Turns that begin together at an engine whose profile says that this saves it time."""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from engines.profiles import load_profile
from engines.profiling import to_toml
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.engine_settings import EngineSettings
from scheduling.cost import EngineProfile
from tests.support.gateway import eventually, running_gateway

NUM_AGENTS, NUM_TURNS, NUM_LEAVING = 24, 6, 8


def eager_profile(folder: Path) -> tuple[EngineProfile, str]:
    """An engine whose every prefill takes 60 ms, and the name under which a gateway finds its profile."""
    toy = replace(load_profile("toy-cpu-tp1"), slots=64, prefill_step_ms=60.0)
    (folder / "eager.toml").write_text(to_toml("toy", toy), encoding="utf-8")
    name = f"{folder / 'eager.toml'}:{toy.name}"
    return load_profile(name), name


async def test_turns_gather_and_none_is_lost(tmp_path: Path) -> None:
    """A turn that is held is sent when its time has come and not before, whatever else happens; its client may leave
    meanwhile."""
    profile, name = eager_profile(tmp_path)
    log = tmp_path / "events.jsonl"
    async with serve_engine(SimulatedEngineSettings(profile=profile)) as url:
        engine: Any = EngineSettings(url=url, profile=name)
        async with (
            running_gateway(engine, event_log=str(log)) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=100.0, limits=httpx.Limits(max_connections=None)) as client,
        ):
            told = await asyncio.gather(*(agent(client, f"a{number}") for number in range(NUM_AGENTS)), leave(client))
            assert [told[number] for number in range(NUM_AGENTS)] == [NUM_TURNS] * NUM_AGENTS

            async def is_idle() -> bool:
                (member,) = (await client.get("/v1/engines")).json()["data"]
                return bool(member["num_running"] == member["num_legs"] == 0)

            await eventually(is_idle)
            sent_at = {
                row["turn_id"]: row["dispatched_at"]
                for number in range(NUM_AGENTS)
                for row in (await client.get(f"/v1/trajectories/a{number}")).json()["turns"]
            }
    said = [json.loads(line) for line in log.read_bytes().splitlines()]
    held = {line["turn_id"]: line["send_at"] for line in said if line.get("type") == "Dispatch" and "send_at" in line}
    assert len(held) > NUM_AGENTS, "turns gathered"
    assert len(set(held.values())) < len(held), "some at the same instant"
    # uvloop's timers count whole milliseconds
    assert all(sent_at[turn_id] > send_at - 0.002 for turn_id, send_at in held.items() if turn_id in sent_at)


async def agent(client: httpx.AsyncClient, name: str) -> int:
    """Plays its turns; returns how many were answered."""
    messages: list[dict[str, str]] = [{"role": "user", "content": name}]
    num_answered = 0
    for _ in range(NUM_TURNS):
        body = {"model": "simulated", "messages": messages, "max_tokens": 3, "ignore_eos": True}
        answer = await client.post("/v1/chat/completions", json=body, headers={"x-trajectory-id": name})
        num_answered += answer.status_code == 200
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    return num_answered


async def leave(client: httpx.AsyncClient) -> None:
    """Clients that give up after 10 to 80 ms."""
    for number in range(NUM_LEAVING):
        body = {"model": "simulated", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        with suppress(httpx.TimeoutException):
            timeout = httpx.Timeout(100.0, read=0.01 * (number + 1))
            await client.post(
                "/v1/chat/completions", json=body, headers={"x-trajectory-id": f"l{number}"}, timeout=timeout
            )
