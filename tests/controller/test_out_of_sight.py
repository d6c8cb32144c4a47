"""Gateway, controller, launcher, engines and Redis lose sight of each other: nobody kills a working engine."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from controller.gateway_client import GatewayAway
from controller.launcher import ServerState
from controller.planning import Proposal
from controller.steps import is_reached
from tests.controller.fleet_site import (
    Rollout,
    acting,
    engines,
    fleet_file,
    launcher_for,
    stopped_at_the_end,
    until,
    until_reached,
)
from tests.controller.ports import BadLine, Fuse, answering_engines
from tests.controller.script import memory_folder, run_in
from tests.support.gateway import running_gateway
from tests.support.redis_server import RedisServer, redis_server

__all__ = ["memory_folder", "redis_server"]

# Looks that an outage lasts in memory.
NUM_LOOKS = 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["gateway", "launcher"])
async def test_a_lost_request_or_answer_does_no_harm(who: str, memory_folder: Path) -> None:
    """At each point on the way to the gateway, or to the launcher: one request or answer is lost, and then nobody is
    there for some looks. The floor asserts that no server is stopped with turns; the script comes to its end, with no
    alarm left.
    """
    async with answering_engines() as port:
        num_points, point = 0, 0
        while point <= num_points:
            run = run_in(memory_folder / str(point), port)

            def outage(run=run) -> None:  # type: ignore[no-untyped-def]
                run.floor.looks_lost = NUM_LOOKS if who == "gateway" else 0
                run.floor.finds_lost = NUM_LOOKS if who == "launcher" else 0

            fault = GatewayAway("the line is down") if who == "gateway" else OSError("the line is down")
            line = BadLine(point, fault, outage)
            made = await run.live(Fuse(), **{f"to_{who}": line})
            run.check_end()
            assert not made.alarms
            num_points, point = max(num_points, line.num_passed if not point else 0), point + 1
        assert num_points > 20


async def test_a_controller_without_its_launcher_waits(memory_folder: Path) -> None:
    """However long: what is wanted is done when it can look again."""
    async with answering_engines() as port:
        run = run_in(memory_folder / "away", port)
        run.floor.finds_lost = 200
        made = await run.live(Fuse())
        run.check_end()
        assert run.floor.finds_lost == 0 and not made.alarms


async def test_an_engine_that_the_gateway_cannot_see_is_left_running(tmp_path: Path) -> None:
    """It hangs: the controller tells, and waits. It goes on: it serves again, the same process, as if nothing was."""
    async with running_gateway(observe_interval_s=0.1, observe_timeout_s=1.0, faults_to_open=1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            before = await launcher_for(fleet).find("test")
            victim = before[0].spec.server_id
            told = json.loads((tmp_path / "servers" / "test" / victim / "process.json").read_text())
            os.killpg(told["pid"], signal.SIGSTOP)
            await until(lambda: [one.is_serving for one in made.seen].count(False) == 1, lambda: made.seen)
            looks = [one for one in made.seen if not one.is_serving]
            assert [one.server_id for one in looks] == [victim] and looks[0].is_alive
            changes = made.journal.state
            for _ in range(20):
                await made.look()
            assert made.journal.state.wanted == changes.wanted
            os.killpg(told["pid"], signal.SIGCONT)
            await until(lambda: is_reached(made.journal.state.wanted, made.seen), lambda: made.seen)
            after = await launcher_for(fleet).find("test")
            assert [(one.spec, one.state) for one in after] == [(one.spec, ServerState.RUNNING) for one in before]


@pytest.mark.timeout(300)
async def test_without_redis_the_fleet_serves_and_changes_on(redis_server: RedisServer, tmp_path: Path) -> None:
    """Redis ends under a rollout and a change of shape, and comes back: no turn fails, and the gateway has just what
    runs. Who reads there what there is to do says that it cannot, and plans again afterwards.
    """
    redis_server.restart(empty=True)
    async with running_gateway(store=redis_server.url(), observe_interval_s=0.1, demand_interval_s=0.1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url, demand={"redis": redis_server.url()})
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            rollout = Rollout(gateway.url, "simulated", 3)
            rollout.begin()
            await until(lambda: rollout.num_turns > 3, lambda: rollout.failures)
            await until(lambda: isinstance(made.proposal, Proposal), lambda: made.proposal)
            await asyncio.to_thread(redis_server.kill)
            await until(lambda: "is away" in made.alarms.get("demand_away", ""), lambda: made.alarms)
            assert made.proposal == "none, because nothing reports the work"
            made.ask(made.desired.scaled([2], made.observed()))
            await until_reached(made, 2)
            num_turns = rollout.num_turns
            await until(lambda: rollout.num_turns > num_turns + 3, lambda: rollout.failures)
            assert "demand_away" in made.alarms
            await asyncio.to_thread(redis_server.start)
            await until(lambda: isinstance(made.proposal, Proposal), lambda: made.proposal)
            assert not made.alarms
            made.ask(made.desired.scaled([1, 1], made.observed()))
            await until_reached(made, 1, 1)
            await rollout.end()
            assert rollout.failures == []
            alive = [one for one in await launcher_for(fleet).find("test") if one.state is not ServerState.EXITED]
            await until(lambda: len(made.journal.state.urls) == 2, lambda: made.journal.state)
            assert {one["url"] for one in await engines(gateway.url)} == {one.url for one in alive}
