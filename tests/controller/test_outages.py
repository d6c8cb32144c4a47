"""Gateway, controller, launcher, engines and Redis lose contact with each other: no working engine is killed."""

import asyncio
import errno
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from controller.fleet_file import FleetFileError
from controller.gateway_client import GatewayAway, Member
from controller.journal import Journal, State
from controller.launcher import Server, ServerSpec, ServerState
from controller.loop import Controller
from controller.planning import Proposal
from controller.steps import is_reached
from engines.children import free_port
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
from tests.controller.ports import (
    Fuse,
    LostMessage,
    MemoryDemand,
    MemoryGateway,
    MemoryLauncher,
    Points,
    answering_engines,
)
from tests.controller.script import Change, Run, memory_folder, run_in
from tests.engines.raw_server import Handler, Peer, raw_server
from tests.support.gateway import running_gateway
from tests.support.redis_server import RedisServer, redis_server

__all__ = ["memory_folder", "redis_server"]

# How many looks an outage lasts.
NUM_LOOKS = 3


@asynccontextmanager
async def controller_of(
    run: Run, to_launcher: Points | None = None, to_gateway: Points | None = None, **changes: Any
) -> AsyncIterator[Controller]:
    """A controller, not running yet, of a run's fleet with these fields changed."""
    fleet, points = run.fleet.model_copy(update=changes), Fuse()
    journal = Journal(fleet.state_dir / "journal.jsonl")
    launcher = MemoryLauncher(run.cluster, to_launcher or points)
    gateway = MemoryGateway(run.cluster, to_gateway or points)
    made = Controller(fleet, launcher, gateway, MemoryDemand(run.cluster), journal)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()
        journal.close()


@asynccontextmanager
async def running(made: Controller) -> AsyncIterator[None]:
    """It runs."""
    task = asyncio.create_task(made.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["gateway", "launcher"])
async def test_a_lost_request_or_answer_does_no_harm(who: str, memory_folder: Path) -> None:
    """At each point on the way to the gateway, or to the launcher, one request or answer is lost, and the next looks
    find nobody. The cluster asserts that no server is stopped with turns. The script is finished, with no alarm
    left."""
    async with answering_engines() as port:
        num_points, point = 0, 0
        while point <= num_points:
            run = run_in(memory_folder / str(point), port)

            def outage(run=run) -> None:  # type: ignore[no-untyped-def]
                run.cluster.num_looks_lost = NUM_LOOKS if who == "gateway" else 0
                run.cluster.num_finds_lost = NUM_LOOKS if who == "launcher" else 0

            fault = GatewayAway("the line is down") if who == "gateway" else OSError("the line is down")
            message = LostMessage(point, fault, outage)
            made = await run.run_controller(Fuse(), **{f"to_{who}": message})
            run.check_end()
            assert not made.alarms
            num_points, point = max(num_points, message.num_passed if not point else 0), point + 1
        assert num_points > 20


@pytest.mark.parametrize("what", ["num_finds_lost", "num_inventories_lost"])
async def test_a_controller_without_its_launcher_waits(what: str, memory_folder: Path) -> None:
    """However long the outage is, the wanted change is made once the controller can look again. An outage that began
    after the servers were found, and before the devices were, ended the controller."""
    async with answering_engines() as port:
        run = run_in(memory_folder / "away", port)
        setattr(run.cluster, what, 200)
        made = await run.run_controller(Fuse())
        run.check_end()
        assert getattr(run.cluster, what) == 0 and not made.alarms


@pytest.mark.parametrize(("gateway_start_s", "is_alarm"), [(1e6, False), (0.0, True)])
async def test_a_gateway_that_may_still_be_starting_is_no_alarm(
    gateway_start_s: float, is_alarm: bool, memory_folder: Path
) -> None:
    """Every `heddle up` raised one, because its controller looks before its gateway serves. A gateway that has had its
    time, or that answered before, is one."""
    run = run_in(memory_folder / "starting", 9)
    limits = run.fleet.limits.model_copy(update={"gateway_start_s": gateway_start_s})
    cluster = run.cluster
    async with controller_of(run, limits=limits) as made:
        alarm = {"gateway_away": "no connection to the gateway"}
        cluster.num_looks_lost = NUM_LOOKS
        for _ in range(NUM_LOOKS):
            assert not await made.observe() and made.alarms == (alarm if is_alarm else {})
        assert await made.observe() and not made.alarms
        cluster.num_looks_lost = 1
        assert not await made.observe() and made.alarms == alarm


async def test_the_first_fleet_waits_until_there_are_devices(memory_folder: Path) -> None:
    """A controller may start before any node has joined. It recorded that no engine is wanted, for ever."""
    run = run_in(memory_folder / "early", 9)
    cluster = run.cluster
    async with controller_of(run, first=None, tp_sizes=(2,)) as made:
        for devices in ((), ("cpu0",)):
            cluster.devices = devices
            await made.tick()
            assert made.alarms == {
                "no_devices": f"the launcher has {len(devices)} devices now, and the smallest engine needs 2"
            }
            assert made.journal.state == State()
        cluster.devices = ("cpu0", "cpu1")
        await made.tick()
        assert [one.tp for one in made.journal.state.wanted] == [2] and not made.alarms


async def test_the_first_fleet_waits_until_it_fits(memory_folder: Path) -> None:
    """Nodes join one after the other. The file's first fleet ended the controller if not all were there at its start;
    on this machine, where none will join, it still does."""
    run = run_in(memory_folder / "joining", 9)
    cluster, points = run.cluster, Fuse()
    fleet = run.fleet.model_copy(update={"first": (1, 1), "launcher": "kubernetes"})
    journal = Journal(fleet.state_dir / "journal.jsonl")
    ports = MemoryLauncher(cluster, points), MemoryGateway(cluster, points), MemoryDemand(cluster)
    local = Controller(fleet.model_copy(update={"launcher": "local"}), *ports, journal)  # type: ignore[arg-type]
    made = Controller(fleet, *ports, journal)  # type: ignore[arg-type]
    cluster.devices = ("cpu0",)
    with pytest.raises(FleetFileError, match="first fleet is not possible: "):
        await local.tick()
    await made.tick()
    assert "first fleet is not possible yet: " in made.alarms["no_devices"] and journal.state == State()
    cluster.devices = ("cpu0", "cpu1")
    await made.tick()
    assert [one.tp for one in journal.state.wanted] == [1, 1] and not made.alarms
    await made.close()
    journal.close()


@pytest.mark.parametrize("is_known", [True, False])
async def test_engines_that_serve_are_adopted_before_a_sleeper_on_their_devices(
    is_known: bool, memory_folder: Path
) -> None:
    """The journal is lost, the sleeper is older, and SGLang does not tell who sleeps: the engines were stopped under
    their turns, and the sleeper kept. It makes no difference whether the gateway still knows the sleeper."""
    asleep, changed = set[str](), asyncio.Event()
    async with answering_engines(asleep, changed) as port:
        run = run_in(memory_folder / "lost", port, asleep, changed)
        run.changes = [Change((1, 1))]
        made = await run.run_controller(Fuse())
        serving = {one.server_id for one in made.journal.state.wanted}
    cluster = run.cluster
    (sleeper,) = [one for one in cluster.alive() if one not in cluster.awake()]
    if is_known and sleeper.url:
        cluster.members[sleeper.url] = Member(f"at {sleeper.url}", sleeper.url, False, False, 0)
    (run.fleet.state_dir / "journal.jsonl").unlink()
    engine = run.fleet.engine.model_copy(update={"kind": "sglang"})
    async with controller_of(run, engine=engine) as made:
        for _ in range(20):
            await made.tick()
        assert {one.server_id for one in made.journal.state.wanted} == serving and not made.alarms
        assert {one.spec.server_id for one in cluster.alive()} == serving
        assert is_reached(made.journal.state.wanted, made.seen)


async def test_an_operators_fleet_is_not_replaced_by_what_runs(memory_folder: Path) -> None:
    """Without a journal, each server is asked whether it sleeps, for up to five seconds. What an operator was promised
    meanwhile was forgotten, and the servers adopted."""
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n")).decode())
        made.ask(made.desired.scaled([2], made.observed()))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    engine = await asyncio.start_server(answer, "127.0.0.1", 0)
    run = run_in(memory_folder / "lost", engine.sockets[0].getsockname()[1], set())
    spec = ServerSpec("found", run.fleet.fleet, 1, ("cpu0",), ())
    run.cluster.servers["found"] = Server(spec, ServerState.RUNNING, f"http://127.0.0.1:{run.cluster.port}")
    async with engine, controller_of(run) as made:
        await made.tick()
        assert asked == ["GET /metrics HTTP/1.1\r\n"]
        assert [one.tp for one in made.journal.state.wanted] == [2] and made.journal.state.why == "scaled by hand"


@dataclass
class Line:
    """To the launcher: every request fails with this fault, if there is one. `num_passed`: how many there were."""

    fault: Exception | None = None
    num_passed: int = 0

    def pass_point(self) -> None:
        self.num_passed += 1
        if self.fault is not None:
            raise self.fault

    def look(self) -> None:
        pass


@pytest.mark.parametrize(
    "fault",
    [TimeoutError("is node-a lost?"), ConnectionError("Kubernetes: 503"), OSError(errno.ENOSPC, "No space left")],
)
async def test_a_stop_that_fails_is_no_defect(fault: Exception, memory_folder: Path) -> None:
    """It has an alarm of its own, as long as the server is not known to have ended; then the change goes on. It was
    called a defect to report."""
    async with answering_engines() as port:
        run = run_in(memory_folder / "lost", port)
        line = Line()
        async with controller_of(run, line) as made, running(made):
            await until_reached(made, 1, 1)
            line.fault = fault
            made.ask(made.desired.scaled([2], made.observed()))
            await until(lambda: bool(made.alarms), lambda: made.seen)
            for _ in range(20):
                await asyncio.sleep(0)
                assert made.alarms == {"stop_failed": str(fault)}
            line.fault = None
            await until_reached(made, 2)
            assert not made.alarms


async def test_a_server_waits_for_devices_that_left(memory_folder: Path) -> None:
    """Its node is lost, or cordoned. Its TP size was given up within seconds, and nothing brought it back. Meanwhile
    the rest of the fleet is at rest, so plans may change it."""
    async with answering_engines() as port:
        run = run_in(memory_folder / "left", port)
        cluster = run.cluster
        async with controller_of(run) as made, running(made):
            await until_reached(made, 1, 1)
            lost = next(one for one in cluster.alive() if one.spec.devices == ("cpu1",))
            cluster.devices = ("cpu0",)
            cluster.servers[lost.spec.server_id] = replace(
                lost, state=ServerState.EXITED, exit_cause="its node is lost"
            )
            cluster.turns[lost.url or ""] = 0
            await until(lambda: "no_devices" in made.alarms, lambda: made.alarms)
            replacement = next(one for one in made.journal.state.wanted if one.devices == ("cpu1",))
            for _ in range(200):
                await asyncio.sleep(0)
                why = f"{replacement.server_id} waits for cpu1, which left"
                assert made.alarms == {"no_devices": why} and not made.journal.state.blocked_tps
            assert [one.cause for one in made.journal.state.failures] == ["its node is lost"]
            assert made.desired.at_hand(made.seen) == [
                one for one in made.journal.state.wanted if one is not replacement
            ]
            cluster.devices = ("cpu0", "cpu1")
            await until_reached(made, 1, 1)
            await until(lambda: not made.alarms, lambda: made.alarms)
            assert cluster.servers[replacement.server_id].state is ServerState.RUNNING


async def test_a_machine_that_cannot_launch_now_is_no_defect(memory_folder: Path) -> None:
    """Its disk is full, or it has too many processes. The alarm tells so as long as that lasts, and no try counts. It
    was called a defect to report."""
    async with answering_engines() as port:
        run = run_in(memory_folder / "full", port)
        line = Line(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        async with controller_of(run, line) as made, running(made):
            await until(lambda: bool(made.alarms), lambda: made.seen)
            (server_id,) = (one.partition(":")[0] for one in made.alarms.values())
            for _ in range(50):
                await asyncio.sleep(0)
                assert (
                    list(made.alarms) == ["launch_hindered"]
                    and "No space left on device" in made.alarms["launch_hindered"]
                )
            assert server_id in {one.server_id for one in made.journal.state.wanted}
            line.fault = None
            await until_reached(made, 1, 1)
            await until(lambda: not made.alarms, lambda: made.alarms)
            assert not made.journal.state.failures


@pytest.mark.parametrize(("who", "kind"), [("launcher", OSError), ("launcher", RuntimeError), ("gateway", GatewayAway)])
async def test_a_step_that_is_tried_again_is_logged_when_its_cause_changes(
    who: str, kind: type[Exception], memory_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try was logged, one a second, a defect with its traceback; and another cause was not. A gateway that lists
    its engines, but cannot change them (another one has its store), ends the alarm with each look."""
    caplog.set_level(logging.INFO)
    async with answering_engines() as port:
        run = run_in(memory_folder / "again", port)
        run.cluster.devices = ("cpu0",)
        line = Line(kind("a full disk"))
        async with controller_of(run, **{f"to_{who}": line}, first=(1,)) as made, running(made):

            async def tries(cause: str) -> None:
                line.fault, line.num_passed = kind(cause), 0
                await until(lambda: line.num_passed >= 10, lambda: made.alarms)

            await tries("a full disk")
            caplog.clear()
            await tries("a full disk")
            assert not caplog.records
            await tries("too many processes")
            assert len([one for one in caplog.records if one.getMessage() == "alarm"]) == 1
            assert len(caplog.records) == 1 + (kind is RuntimeError)


async def is_half_there(peer: Peer) -> None:
    """An engine that answers `/health` and nothing else."""
    while request := await peer.request():
        status = b"200 OK" if request.startswith(b"GET /health ") else b"500 Internal Server Error"
        await peer.send(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")


@pytest.mark.parametrize(
    ("answers", "lack"),
    [
        (is_half_there, "/v1/models answered 500"),
        (Peer.until_client_leaves, "it has not answered"),
        (None, "/health: no connection: "),
    ],
    ids=["500", "silence", "another port"],
)
async def test_an_engine_that_was_not_ready_in_time_tells_what_it_lacked(
    answers: Handler | None, lack: str, memory_folder: Path
) -> None:
    """Such as an engine with a key of its own, which answers 401, or one whose flags name another port. After 15
    minutes, three times, all that was told of it was `not ready in 900 s`."""
    async with raw_server(answers or is_half_there, "0.0.0.0") as raw:
        port = int(raw.url.rpartition(":")[2]) if answers else free_port()
        run = run_in(memory_folder / "not-ready", port)
        limits = run.fleet.limits.model_copy(update={"start_timeout_s": 1.0})
        async with controller_of(run, limits=limits) as made, running(made):
            await until(lambda: bool(made.journal.state.failures), lambda: made.seen)
            assert made.journal.state.failures[0].cause.startswith(f"not ready in 1 s: {lack}")


async def test_a_server_that_never_ran_failed_for_its_launchers_reason(memory_folder: Path) -> None:
    """Such as a Pod that had no room. All that was told of it was `not ready in 900 s: it has no address`."""
    async with answering_engines() as port:
        run = run_in(memory_folder / "no-room", port)
        servers = run.cluster.servers
        limits = run.fleet.limits.model_copy(update={"start_timeout_s": 0.1})
        async with controller_of(run, limits=limits) as made:
            await made.tick()
            await made.tick()
            await until(lambda: [one.state for one in run.cluster.alive()] == [ServerState.RUNNING] * 2)
            said = "Unschedulable: 0/2 nodes are available"
            for server_id, server in servers.items():
                servers[server_id] = replace(server, state=ServerState.STARTING, url=None, last_lines=(said,))
            async with running(made):
                await until(lambda: bool(made.journal.state.failures), lambda: made.seen)
            assert made.journal.state.failures[0].cause == f"not ready in 0.1 s: {said}"


async def test_a_step_does_not_look_at_the_launcher_by_itself(memory_folder: Path) -> None:
    """A Pod has no address until its image is there, for minutes. Meanwhile its start asked Kubernetes for the whole
    fleet five times a second, and called one lost answer a defect to report."""
    async with answering_engines() as port:
        run = run_in(memory_folder / "pending", port)
        cluster = run.cluster
        async with controller_of(run) as made:
            await made.tick()
            await made.tick()
            await until(lambda: [one.state for one in cluster.alive()] == [ServerState.RUNNING] * 2)
            urls = {server_id: server.url for server_id, server in cluster.servers.items()}
            for server_id, server in cluster.servers.items():
                cluster.servers[server_id] = replace(server, url=None)
            await made.tick()
            cluster.num_finds_lost = 1
            await until(lambda: list(made.journal.state.begun.values()) == ["MakeReady"] * 2)
            for _ in range(20):
                await asyncio.sleep(0)
            assert cluster.num_finds_lost == 1 and not made.alarms
            cluster.num_finds_lost = 0
            for server_id, url in urls.items():
                cluster.servers[server_id] = replace(cluster.servers[server_id], url=url)
            async with running(made):
                await until_reached(made, 1, 1)
                assert not made.alarms


@pytest.mark.parametrize("is_member", [True, False])
async def test_an_engine_that_somebody_else_removed_is_replaced(is_member: bool, memory_folder: Path) -> None:
    """As after `kubectl delete pod`, the launcher no longer lists a server. While the gateway still reaches it, it
    stays, with an alarm. Once the gateway has lost it, or an operator has removed it there, too, another one takes its
    place."""
    async with answering_engines() as port:
        run = run_in(memory_folder / "removed", port)
        run.changes = [Change((1, 1))]
        made = await run.run_controller(Fuse())
        victim = made.journal.state.wanted[0]
        url = run.cluster.servers.pop(victim.server_id).url or ""
        made = await run.run_controller(Fuse())
        assert victim in made.journal.state.wanted and victim.server_id in made.alarms["engine_unlisted"]
        member = run.cluster.members.pop(url)
        if is_member:
            run.cluster.members[url] = replace(member, is_ready=False)
        run.changes = [Change((1, 1))]
        made = await run.run_controller(Fuse())
        run.check_end()
        (failure,) = made.journal.state.failures
        assert failure.server_id == victim.server_id and "somebody else" in failure.cause
        assert {one.devices for one in made.journal.state.wanted} == {("cpu0",), ("cpu1",)} and not made.alarms


async def test_an_engine_that_the_gateway_cannot_see_is_left_running(tmp_path: Path) -> None:
    """The engine hangs: the controller sees it and waits. When it continues, the same process serves again."""
    async with running_gateway(observe_interval_s=0.1, observe_timeout_s=1.0, faults_to_open=1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            before = await launcher_for(fleet).find("test")
            victim = before[0].spec.server_id
            process = json.loads((tmp_path / "servers" / "test" / victim / "process.json").read_text())
            os.killpg(process["pid"], signal.SIGSTOP)
            await until(lambda: [one.is_serving for one in made.seen].count(False) == 1, lambda: made.seen)
            silent = [one for one in made.seen if not one.is_serving]
            assert [one.server_id for one in silent] == [victim] and silent[0].is_alive
            changes = made.journal.state
            for _ in range(20):
                await made.observe()
            assert made.journal.state.wanted == changes.wanted
            os.killpg(process["pid"], signal.SIGCONT)
            await until(lambda: is_reached(made.journal.state.wanted, made.seen), lambda: made.seen)
            after = await launcher_for(fleet).find("test")
            assert [(one.spec, one.state) for one in after] == [(one.spec, ServerState.RUNNING) for one in before]


@pytest.mark.timeout(300)
async def test_the_fleet_serves_and_changes_while_redis_is_away(redis_server: RedisServer, tmp_path: Path) -> None:
    """Redis stops under a rollout and a change of shape, and comes back: no turn fails, and the gateway has exactly the
    engines that run. A controller that reads the work from Redis reports that it cannot, and plans again afterwards."""
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
