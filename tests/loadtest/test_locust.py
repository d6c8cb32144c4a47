"""The Locust users, run as a user runs them: in a process of their own, because Locust patches the standard library."""

import csv
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import httpx2
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.support.gateway import running_gateway
from tests.support.toy_chat import Faults, ToyChat, serve

ROOT = Path(__file__).parents[2]
SMALL = ["--scale", "0.01", "--tool-speed-up", "100"]


async def locust(file: str, url: str, directory: Path, *arguments: str) -> tuple[int, dict[str, dict[str, str]], str]:
    """The exit code, the statistics by type and name, and the output."""
    process = await create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / file), "--headless", "--host", url),
        *("--csv", str(directory / "out"), *SMALL, *arguments),
        cwd=ROOT,
        stdout=PIPE,
        stderr=STDOUT,
    )
    output, _ = await process.communicate()
    with (directory / "out_stats.csv").open() as file_:
        rows = {f"{row['Type']} {row['Name']}".strip(): row for row in csv.DictReader(file_)}
    assert process.returncode is not None
    return process.returncode, rows, output.decode()


async def run_agents(url: str, directory: Path) -> tuple[int, dict[str, dict[str, str]], str]:
    """Run agents for 3 s, or for 30 s if the machine was too busy for one trajectory to end in 3."""
    for run_time in ("3s", "30s"):
        code, rows, output = await locust("locustfile.py", url, directory, "-u", "4", "-r", "4", "-t", run_time)
        if "AGENT trajectory" in rows:
            break
    return code, rows, output


async def test_agents_play_trajectories_and_report_them(tmp_path: Path) -> None:
    """A headless run succeeds. Turns, first tokens and whole trajectories have lines of their own."""
    app = ToyChat()
    with serve(app) as url:
        code, rows, output = await run_agents(url, tmp_path)
    assert code == 0, output
    num_turns = int(rows["POST turn"]["Request Count"])
    num_trajectories = int(rows["AGENT trajectory"]["Request Count"])
    assert num_turns > num_trajectories > 0
    assert int(rows["TTFT first token"]["Request Count"]) == num_turns
    assert float(rows["AGENT trajectory"]["Max Response Time"]) > float(rows["POST turn"]["Min Response Time"])
    assert all(headers["x-trajectory-id"] and headers["x-group-id"] for _, headers, _ in app.seen)
    assert rows["Aggregated"]["Failure Count"] == "0"


@pytest.mark.parametrize("faults", [Faults(num_unavailable=1), Faults(num_broken_streams=1), Faults(short_by=1)])
async def test_a_failure_fails_the_run(tmp_path: Path, faults: Faults) -> None:
    """One refused turn, broken stream or short answer means exit code 1 and a failed trajectory."""
    with serve(ToyChat(faults=faults)) as url:
        code, rows, output = await locust("shapes.py", url, tmp_path, "--agents", "3", "--law", "math-heavy")
    assert code == 1, output
    assert int(rows["POST turn"]["Failure Count"]) >= 1
    assert int(rows["AGENT trajectory"]["Failure Count"]) >= 1


async def test_rollouts_follow_each_other_and_are_complete(tmp_path: Path) -> None:
    """Two rollouts of five are ten trajectories, no more; the second rollout begins when the first has ended."""
    app = ToyChat()
    with serve(app) as url:
        code, rows, output = await locust("shapes.py", url, tmp_path, "--agents", "5", "--rollouts", "2")
    assert code == 0, output
    assert rows["AGENT rollout"]["Request Count"] == "2"
    assert rows["AGENT trajectory"]["Request Count"] == "10"
    rollouts = [headers["x-rollout-id"] for _, headers, _ in app.seen]
    assert len(set(rollouts)) == 2
    # All turns of the first rollout come before any of the second.
    assert rollouts == sorted(rollouts)


@pytest.mark.parametrize("faults", [Faults(), Faults(models_after_s=2.5)])
async def test_a_ramp_ends_by_itself(tmp_path: Path, faults: Faults) -> None:
    """Agents are added until all are there, however long they take to start, and the run ends soon after."""
    with serve(ToyChat(faults=faults)) as url:
        code, rows, output = await locust(
            "shapes.py", url, tmp_path, "--shape", "ramp", "--agents", "3", "--ramp-s", "2", "--law", "math"
        )
    assert code == 0, output
    assert int(rows["GET models"]["Request Count"]) == 3


async def test_agents_run_against_the_gateway_without_failures(tmp_path: Path) -> None:
    """Behind the gateway are two simulated engines. The gateway knows every trajectory."""
    settings = SimulatedEngineSettings(speed_up=50)
    async with (
        serve_engine(settings) as first,
        serve_engine(settings) as second,
        running_gateway(first, second) as gateway,
        httpx2.AsyncClient(base_url=gateway.url) as client,
    ):
        code, rows, output = await run_agents(gateway.url, tmp_path)
        known = (await client.get("/v1/trajectories", params={"limit": 1000})).json()["data"]
    assert code == 0, output
    assert rows["Aggregated"]["Failure Count"] == "0"
    assert len(known) >= int(rows["AGENT trajectory"]["Request Count"]) > 0
