"""The state of the fleet, as the controller reports it."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from controller.api import build_api
from controller.gateway_client import Member
from controller.journal import Journal
from controller.launcher import Server, ServerSpec, ServerState
from controller.loop import Controller
from controller.records import step_record
from controller.report import alarms, status
from controller.steps import Register
from heddle.cli import main
from tests.controller.fleet_site import fleet_file
from tests.controller.ports import Cluster, Fuse, MemoryDemand, MemoryGateway, MemoryLauncher
from tests.engines.raw_server import Peer, raw_server

URL = "http://127.0.1.1:8000"


@pytest.mark.parametrize(
    ("at_the_gateway", "state", "raised"),
    [
        (None, "ready", {}),
        (Member("one", URL, is_ready=False, is_cordoned=False, num_turns=0, is_starting=True), "ready", {}),
        (Member("one", URL, is_ready=True, is_cordoned=False, num_turns=0), "serving", {}),
        (
            Member("one", URL, is_ready=False, is_cordoned=False, num_turns=0),
            "lost",
            {"engine_lost": "server-1 runs, but the gateway cannot use it"},
        ),
        (
            Member("one", URL, is_ready=True, is_cordoned=True, num_turns=0, cordon_reason="send them again"),
            "held",
            {"engine_held": "server-1 gets no turns: send them again"},
        ),
    ],
    ids=["not told", "not observed yet", "observed", "lost", "held"],
)
async def test_a_server_that_the_gateway_does_not_use_is_an_alarm(
    at_the_gateway: Member | None, state: str, raised: dict[str, str], tmp_path: Path
) -> None:
    """But not one that it has not observed yet: every server passes through that state when it starts. One that was
    held for its weights was shown as drained, without a reason."""
    cluster = Cluster(devices=("cpu0",), port=8000)
    spec = ServerSpec("server-1", "test", 1, ("cpu0",), ("engine",))
    cluster.servers["server-1"] = Server(spec, ServerState.RUNNING, URL)
    if at_the_gateway is not None:
        cluster.members[URL] = at_the_gateway
    journal = Journal(tmp_path / "journal.jsonl")
    wanted = [{"server_id": "server-1", "tp": 1, "devices": ["cpu0"]}]
    journal.write(kind="wanted", at=0.0, wanted=wanted, serial=1, why="first")
    journal.write(**step_record("begun", Register("server-1"), 0.0, url=URL))
    launcher, gateway = MemoryLauncher(cluster, Fuse()), MemoryGateway(cluster, Fuse())
    made = Controller(fleet_file(tmp_path, URL), launcher, gateway, MemoryDemand(cluster), journal)  # type: ignore[arg-type]
    assert await made.observe()
    assert [one["state"] for one in status(made, 0.0)["servers"]] == [state]
    assert alarms(made, 0.0) == raised
    journal.close()


async def test_a_wanted_server_that_is_not_there_is_shown_with_what_it_waits_for(tmp_path: Path) -> None:
    """Each one seemed to wait for its devices: while a restarted controller has not seen the fleet yet (its gateway is
    away), as if the engines were gone, and while others start on devices of their own (`limits.max_starting`)."""
    cluster, journal = Cluster(devices=("cpu0", "cpu1", "cpu2"), port=8000), Journal(tmp_path / "journal.jsonl")
    spec = ServerSpec("server-1", "test", 1, ("cpu0",), ("engine",))
    cluster.servers["server-1"] = Server(spec, ServerState.RUNNING, URL)
    devices = {"server-1": "cpu0", "server-2": "cpu1", "server-3": "cpu0", "server-4": "cpu9"}
    wanted = [{"server_id": server_id, "tp": 1, "devices": [device]} for server_id, device in devices.items()]
    journal.write(kind="wanted", at=0.0, wanted=wanted, serial=4, why="first")
    launcher, gateway = MemoryLauncher(cluster, Fuse()), MemoryGateway(cluster, Fuse())
    made = Controller(fleet_file(tmp_path, URL), launcher, gateway, MemoryDemand(cluster), journal)  # type: ignore[arg-type]

    def states() -> dict[str, str]:
        return {one["id"]: one["state"] for one in status(made, 0.0)["servers"]}

    cluster.num_looks_lost = 1
    assert not await made.observe()
    assert states() == dict.fromkeys(devices, "not seen yet")
    assert await made.observe()
    assert states() == {
        "server-1": "starting",
        "server-2": "waiting to start",
        "server-3": "waiting for its devices",
        "server-4": "waiting for its devices",
    }
    await made.close()
    journal.close()


async def test_a_fleet_without_profiles_says_why_it_has_no_plan(tmp_path: Path) -> None:
    """It said for ever that none was made yet, as in the example fleet of Kubernetes."""
    cluster, journal = Cluster(devices=("cpu0",), port=8000), Journal(tmp_path / "journal.jsonl")
    launcher, gateway = MemoryLauncher(cluster, Fuse()), MemoryGateway(cluster, Fuse())
    fleet = fleet_file(tmp_path, URL, engine={"kind": "sim"})
    made = Controller(fleet, launcher, gateway, MemoryDemand(cluster), journal)  # type: ignore[arg-type]
    for _ in range(3):
        await made.tick()
    assert status(made, 0.0)["proposal"]["why"] == "none, because engine.profiles is empty"
    await made.close()
    journal.close()


async def test_a_size_that_was_given_up_keeps_its_own_cause(tmp_path: Path) -> None:
    """The alarm said the cause of whichever server had failed last, such as one of another size weeks later."""
    cluster, journal = Cluster(devices=("cpu0",), port=8000), Journal(tmp_path / "journal.jsonl")
    for tp, cause in ((2, "exit status 1"), (4, "no such flag"), (1, "killed by SIGKILL")):
        failure = {"server_id": f"server-{tp}", "tp": tp, "at": 0.0, "cause": cause, "last_lines": []}
        journal.write(kind="failed", failure=failure)
    for tp in (4, 2):
        journal.write(kind="blocked", tp=tp, devices=[])
    launcher, gateway = MemoryLauncher(cluster, Fuse()), MemoryGateway(cluster, Fuse())
    made = Controller(fleet_file(tmp_path, URL), launcher, gateway, MemoryDemand(cluster), journal)  # type: ignore[arg-type]
    assert alarms(made, 0.0) == {"size_given_up": "TP 2: exit status 1; TP 4: no such flag"}
    await made.close()
    journal.close()


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("text/plain", b'{"tps": [1]}', "The body must be JSON, sent with 'content-type: application/json'."),
        ("application/json", b'{"tps": [1]', "The body is not valid JSON: Expecting ',' delimiter: char 11."),
        ("application/json", b"", "The request has no body; it must be a JSON object."),
        ("application/json", b"[1]", "must be a JSON object, not [1]"),
    ],
    ids=["curl's own type", "broken", "empty", "list"],
)
async def test_a_body_that_is_no_json_is_said_to_be_none(kind: str, body: bytes, said: str, tmp_path: Path) -> None:
    """`curl -d` without the header got "must be a JSON object" about its JSON object."""
    cluster, journal = Cluster(devices=("cpu0",), port=8000), Journal(tmp_path / "journal.jsonl")
    launcher, gateway = MemoryLauncher(cluster, Fuse()), MemoryGateway(cluster, Fuse())
    made = Controller(fleet_file(tmp_path, URL), launcher, gateway, MemoryDemand(cluster), journal)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(build_api(made, SecretStr("secret")))
    headers = {"authorization": "Bearer secret", "content-type": kind}
    async with httpx.AsyncClient(transport=transport, base_url="http://controller") as client:
        answer = await client.post("/v1/scale", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)
    journal.close()


async def test_a_server_that_does_not_run_yet_is_shown_with_its_launchers_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a Pod without room, or without an image. It was just `starting`, for 15 minutes."""
    said = "Unschedulable: 0/2 nodes are available: Insufficient nvidia.com/gpu."
    spec = ServerSpec("server-1", "test", 1, ("cpu0",), ("engine",))
    cluster = Cluster(devices=("cpu0",), port=8000)
    cluster.servers["server-1"] = Server(spec, ServerState.STARTING, None, "", (said,))
    journal = Journal(tmp_path / "journal.jsonl")
    wanted = [{"server_id": "server-1", "tp": 1, "devices": ["cpu0"]}]
    journal.write(kind="wanted", at=0.0, wanted=wanted, serial=1, why="first")
    launcher, gateway = MemoryLauncher(cluster, Fuse()), MemoryGateway(cluster, Fuse())
    made = Controller(fleet_file(tmp_path, URL), launcher, gateway, MemoryDemand(cluster), journal)  # type: ignore[arg-type]
    assert await made.observe()

    async def controller_api(peer: Peer) -> None:
        await peer.request()
        body = json.dumps(status(made, 0.0)).encode()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async with raw_server(controller_api) as api:
        assert await asyncio.to_thread(main, ["fleet", "show", "--controller", api.url]) == 0
    assert f"    waits: {said}\n" in capsys.readouterr().out
    await made.close()
    journal.close()
