"""A gateway that starts without engines and is told of them: requests wait for the fleet instead of failing."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.faults.asking import ask, body_of, check_error, client_connection
from tests.support.gateway import ADMIN, eventually, running_gateway

NUM_TRAJECTORIES = 2
LONG_S = 60.0
ENGINE = SimulatedEngineSettings(speed_up=100)


async def test_turns_wait_for_the_engines_that_a_restarted_gateway_knew(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """A controller tells of one engine after the other. Turns that came before got a 503, and those that came between
    the two all went to the first one, away from their KV."""
    settings: dict[str, Any] = {"store": f"sqlite:{tmp_path / 'store'}", "start_timeout_s": LONG_S}
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serve_engine(ENGINE)) for _ in range(2)]
        async with running_gateway(**settings) as gateway:
            for number, engine in enumerate(engines):
                await add(client, gateway.url, engine)
                await ask_turn(client, gateway.url, number)
                await cordon(client, gateway.url, engine)
            for engine in engines:
                await cordon(client, gateway.url, engine, "uncordon")
            before = await homes(client, gateway.url)
            assert len(set(before)) == 2
        async with running_gateway(**settings) as gateway:
            turns = asyncio.create_task(all_turns(client, gateway.url))
            unnamed = {"prompt": "hello"}  # for the only model
            others = [
                asyncio.create_task(client.post(gateway.url + path, json=unnamed))
                for path in ("/v1/completions", "/tokenize")
            ]
            for num, engine in enumerate(engines, 1):
                assert not any(task.done() for task in (turns, *others))
                await add(client, gateway.url, engine)
                await eventually(lambda: num_ready(client, gateway.url, num))  # noqa: B023 (awaited here)
            await turns
            assert [(await other).status_code for other in others] == [200, 200]
            assert await homes(client, gateway.url) == before


async def test_new_weights_wait_for_the_fleet(client: httpx.AsyncClient) -> None:
    """A trainer tries until the gateway is back. It was told that all was done, with no engine; of a transfer, that no
    engine is there."""
    async with serve_engine(ENGINE) as engine, running_gateway(start_timeout_s=LONG_S) as gateway:
        order = {"version": "v1", "path": "/weights/1"}
        update = asyncio.create_task(client.post(f"{gateway.url}/v1/weights", json=order, headers=ADMIN))
        await has_connections(client, gateway.url)
        await add(client, gateway.url, engine)
        answer = (await update).json()
        assert [one["state"] for one in answer["engines"].values()] == ["done"], answer


async def test_an_engine_that_does_not_come_back_is_waited_for_once(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """Its address may never be used again."""
    store = f"sqlite:{tmp_path / 'store'}"
    async with serve_engine(ENGINE) as engine:
        async with serve_engine(ENGINE) as gone, running_gateway(store=store) as gateway:
            await add(client, gateway.url, engine, gone)
            await all_turns(client, gateway.url)
        for start_timeout_s in (0.1, LONG_S):
            async with (
                asyncio.timeout(LONG_S / 2),
                running_gateway(store=store, start_timeout_s=start_timeout_s) as gateway,
            ):
                await add(client, gateway.url, engine)
                await all_turns(client, gateway.url)


async def test_without_an_engine_to_come_turns_are_refused(client: httpx.AsyncClient) -> None:
    """Nobody told of one in time. Later turns are refused at once."""
    async with running_gateway(start_timeout_s=0.2) as gateway:
        for _ in range(2):
            check_error("chat", await client.post(f"{gateway.url}/v1/chat/completions", json=body_of("chat")), 503)


async def test_a_client_that_leaves_while_the_fleet_is_awaited_gets_no_turn(client: httpx.AsyncClient) -> None:
    """The other turns that wait are served."""
    async with serve_engine(ENGINE) as engine, running_gateway(start_timeout_s=LONG_S) as gateway:
        async with client_connection(gateway.url, "chat", body_of("chat"), {"x-trajectory-id": "left"}):
            staying = asyncio.create_task(all_turns(client, gateway.url))
            await eventually(lambda: has_connections(client, gateway.url))
        await add(client, gateway.url, engine)
        await staying
        listed = (await client.get(f"{gateway.url}/v1/trajectories")).json()["data"]
        assert "left" not in {one["id"] for one in listed}


async def test_a_turn_that_waits_for_the_fleet_at_a_shutdown_is_told(client: httpx.AsyncClient) -> None:
    """It may be repeated to the next process."""
    async with running_gateway(start_timeout_s=LONG_S, shutdown_timeout_s=0.2) as gateway:
        waiting = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat")))
        await has_connections(client, gateway.url)
    assert (await waiting).error("chat")["code"] == "shutting_down"


async def add(client: httpx.AsyncClient, url: str, *engines: str) -> None:
    for engine in engines:
        assert (await client.post(url + "/v1/engines", json={"url": engine}, headers=ADMIN)).status_code == 201


async def num_ready(client: httpx.AsyncClient, url: str, num: int) -> bool:
    engines = (await client.get(url + "/v1/engines")).json()["data"]
    return [engine["state"] for engine in engines].count("ready") == num


async def has_connections(client: httpx.AsyncClient, url: str) -> bool:
    """Requests that were sent before this are being served then."""
    return (await client.get(url + "/healthz")).status_code == 200


async def cordon(client: httpx.AsyncClient, url: str, engine: str, action: str = "cordon") -> None:
    engine_id = engine.removeprefix("http://")
    (await client.post(f"{url}/v1/engines/{engine_id}/{action}", headers=ADMIN)).raise_for_status()


async def all_turns(client: httpx.AsyncClient, url: str) -> None:
    """A turn of each trajectory, all at once."""
    await asyncio.gather(*(ask_turn(client, url, number) for number in range(NUM_TRAJECTORIES)))


async def ask_turn(client: httpx.AsyncClient, url: str, number: int) -> None:
    reply = await ask(client, url, "chat", body_of("chat"), {"x-trajectory-id": f"t{number}"})
    assert reply.is_finished("chat"), reply.text


async def homes(client: httpx.AsyncClient, url: str) -> list[str]:
    found = [(await client.get(f"{url}/v1/trajectories/t{number}")).json() for number in range(NUM_TRAJECTORIES)]
    return [trajectory["turns"][-1]["engine"] for trajectory in found]
