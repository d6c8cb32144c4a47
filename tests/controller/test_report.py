"""The state of the fleet, as the controller reports it."""

from pathlib import Path

import pytest

from controller.gateway_client import Member
from controller.journal import Journal
from controller.launcher import Server, ServerSpec, ServerState
from controller.loop import Controller
from controller.records import step_record
from controller.report import alarms, status
from controller.steps import Register
from tests.controller.fleet_site import fleet_file
from tests.controller.ports import Cluster, Fuse, MemoryDemand, MemoryGateway, MemoryLauncher

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
