"""SIGKILL of the controller at random points of a change under a rollout; and two controllers at once."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path

import httpx
import pytest

from controller.admin_key import ADMIN_KEY_VARIABLE
from controller.fleet_file import FleetFile
from controller.launcher import Server
from tests.controller.fleet_site import (
    Rollout,
    acting,
    alive,
    engines,
    fleet_file,
    stopped_at_the_end,
    until,
    until_reached,
)
from tests.support.gateway import ADMIN_KEY, running_gateway

# For more seeds: CRASH_SEEDS=20 pytest tests/controller/test_crashes.py
SEEDS = range(int(os.environ.get("CRASH_SEEDS", "1")))


async def run_until_point(fleet: FleetFile, point: int) -> tuple[int, int]:
    """Run a controller process that ends at that point. Gives its status, and the points that it passed if it
    finished."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.controller.crashing", fleet.model_dump_json(), str(point)),
        env={**os.environ, ADMIN_KEY_VARIABLE: ADMIN_KEY},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode is not None
    return process.returncode, int(output or 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sleeping", [(), (1, 2)], ids=["stopped", "asleep"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_change_of_shape_survives_sigkill_anywhere(
    seed: int, sleeping: tuple[int, ...], tmp_path: Path
) -> None:
    """Kills come a random number of points apart: the change is finished, nothing is left over, and no turn fails."""
    dice = random.Random(seed)
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url, sleep={"tp_sizes": sleeping})
        async with stopped_at_the_end(fleet):
            async with acting(fleet) as made:
                await until_reached(made, 1, 1)
            rollout = Rollout(gateway.url, "simulated", 3, tool_s=0.5)
            rollout.begin()
            num_crashes = 0
            for tps in ([2], [1, 1]):
                async with acting(fleet) as made:
                    await until(lambda: bool(made.seen))
                    made.ask(made.desired.scaled(tps, made.seen))
                while True:
                    status, _ = await run_until_point(fleet, dice.randint(1, 40))
                    if status == 0:
                        break
                    assert status == -signal.SIGKILL
                    num_crashes += 1
                    await check_devices(fleet)
                await check_end(fleet, gateway.url, tps)
            await rollout.end()
            assert rollout.failures == []
            assert num_crashes >= 2, "the fuse never blew"


async def check_devices(fleet: FleetFile) -> None:
    """No device has two servers awake, whatever else is half done."""
    held = [device for server in await awake(fleet) for device in server.spec.devices]
    assert len(held) == len(set(held))


async def check_end(fleet: FleetFile, gateway_url: str, tps: list[int]) -> None:
    """The gateway has exactly the servers that are awake, and they are the wanted ones; servers of other sizes that may
    sleep are asleep."""
    servers = await awake(fleet)
    assert sorted(server.spec.tp for server in servers) == sorted(tps)
    members = await engines(gateway_url)
    assert {one["url"] for one in members} == {server.url for server in servers}
    assert not any(one["is_cordoned"] for one in members)
    asleep = {one.spec.tp for one in (await alive(fleet)).values()} - set(tps)
    assert asleep == set(fleet.sleep.tp_sizes) - set(tps)


async def awake(fleet: FleetFile) -> list[Server]:
    """By the servers' own answers; one that does not answer yet holds its devices."""
    found = []
    async with httpx.AsyncClient(timeout=60.0) as client:
        for server in (await alive(fleet)).values():
            try:
                reply = (await client.get(f"{server.url}/is_sleeping")).json()
            except httpx.TransportError:
                reply = {"is_sleeping": False}
            if not reply["is_sleeping"]:
                found.append(server)
    return found


async def test_a_second_controller_waits_and_then_takes_over(tmp_path: Path) -> None:
    """The second does nothing while the first lives, and then finishes what the first has begun."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet):
            async with acting(fleet) as first:
                await until_reached(first, 1, 1)
                second = asyncio.create_task(run_until_point(fleet, 10_000))
                first.ask(first.desired.scaled([2], first.seen))
                await until_reached(first, 2)
                assert not second.done()
                first.ask(first.desired.scaled([1, 1], first.seen))
            status, num_passed = await second
            assert status == 0 and num_passed > 0
            await check_end(fleet, gateway.url, [1, 1])
