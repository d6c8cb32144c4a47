"""The Locust users, run as a user runs them: in a process of their own, because Locust patches the standard library."""

import asyncio
import csv
import json
import re
import signal
import sys
import time
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import httpx2
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from loadtest.bench.processes import free_ports
from tests.support.gateway import eventually, running_gateway
from tests.support.toy_chat import Faults, ToyChat, serve

ROOT = Path(__file__).parents[2]
SMALL = ["--scale", "0.01", "--tool-speed-up", "100"]


async def started(file: str, url: str, *arguments: str) -> Process:
    return await create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / file), "--host", url, *SMALL, *arguments),
        cwd=ROOT,
        stdout=PIPE,
        stderr=STDOUT,
        # Where a shell runs the tests in the background, they inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


async def locust(
    file: str, url: str, directory: Path, *arguments: str, interrupted_when: Callable[[], bool] | None = None
) -> tuple[int, dict[str, dict[str, str]], str]:
    """The exit code, the statistics by type and name, and the output."""
    process = await started(file, url, "--headless", "--csv", str(directory / "out"), *arguments)
    try:
        if interrupted_when is not None:
            await eventually(interrupted_when)
            process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
    rows = by_name((directory / "out_stats.csv").read_text())
    assert process.returncode is not None
    return process.returncode, rows, output.decode()


def by_name(statistics: str) -> dict[str, dict[str, str]]:
    return {f"{row['Type']} {row['Name']}".strip(): row for row in csv.DictReader(statistics.splitlines())}


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


@pytest.mark.parametrize("shape", ["rollout", "ramp"])
async def test_a_run_whose_server_cannot_be_reached_ends_and_says_so(tmp_path: Path, shape: str) -> None:
    """It fails, with the reason among the failures, and without a traceback of each agent."""
    [port] = free_ports(1)
    code, rows, output = await locust(
        "shapes.py", f"http://127.0.0.1:{port}", tmp_path, "--agents", "3", "--shape", shape, "--ramp-s", "1"
    )
    assert code == 1, output
    # A ramp replaces agents that were refused, so there may be more than three.
    assert rows["GET models"]["Failure Count"] == rows["GET models"]["Request Count"]
    assert "Connection refused" in output
    assert "Traceback" not in output


async def refused(url: str, *arguments: str) -> bytes:
    """What a run of shapes says that ends by itself with status 1."""
    process = await started("shapes.py", url, "--headless", *arguments)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 1, output
    return output


async def test_a_shape_refuses_workers() -> None:
    """It would not see their agents, and never end."""
    output = await refused("http://127.0.0.1:1", "--master", "--expect-workers", "1")
    assert b"runs in one process" in output and b"Traceback" not in output, output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "absent.jsonl"), b"loadtest: [Errno 2] No such file"),
        (("--law", "cooking"), b"no law 'cooking'"),
        (("--tool-speed-up", "0"), b"loadtest: --tool-speed-up must be a number above 0"),
        (("--scale", "-1"), b"loadtest: --scale must be"),
        (("--scale", "1e308"), b"loadtest: lengths and tool times can be multiplied by a million at most"),
        (("--agents", "0"), b"loadtest: --agents must be"),
        (("--shape", "ramp", "--ramp-s", "0"), b"loadtest: --ramp-s must be"),
    ],
)
async def test_a_workload_that_cannot_be_played_ends_the_run_at_its_start(
    arguments: tuple[str, str], message: bytes
) -> None:
    """Each agent failed with a traceback, again and again, and a rollout waited for them without end."""
    with serve(ToyChat()) as url:
        output = await refused(url, "--agents", "2", *arguments)
    assert message in output and b"Traceback" not in output, output


async def test_the_kinds_of_agents_share_a_trace(tmp_path: Path) -> None:
    """Each kind played it from its beginning: the first trajectories came once for each kind, the last not at all."""
    app, trace = ToyChat(), tmp_path / "trace.jsonl"
    turn = {"new_tokens": 8, "output_tokens": 8, "tool_s": 0}
    lines = (json.dumps({"trajectory_id": f"only-{index}", "context_tokens": 8, "turns": [turn]}) for index in range(4))
    trace.write_text("\n".join(lines))
    with serve(app) as url:
        code, _, output = await locust("shapes.py", url, tmp_path, "--agents", "4", "--trace", str(trace))
    assert code == 0, output
    played = sorted(headers["x-trajectory-id"].rpartition("only-")[2] for _, headers, _ in app.seen)
    assert played == ["0", "1", "2", "3"]


async def test_a_run_takes_as_long_as_it_was_told(tmp_path: Path) -> None:
    """Locust counted its own start: of 3 s nothing was left on a slow machine, and that was a success. A URL may end
    with a slash, as browsers show it."""
    with serve(ToyChat()) as url:
        code, _, output = await locust("locustfile.py", url + "/", tmp_path, "-u", "1", "-t", "3s")
    assert code == 0, output
    told, ended = (
        datetime.fromisoformat(found[1].replace(",", "."))
        for words in ("Run time limit set", "--run-time limit reached")
        if (found := re.search(rf"\[(.*?)\].*{words}", output))
    )
    assert (ended - told).total_seconds() > 2.9, output


async def test_a_gateway_that_lists_no_models_ends_a_rollout(tmp_path: Path) -> None:
    """A gateway without engines refuses every agent."""
    async with running_gateway() as gateway:
        code, rows, output = await locust("shapes.py", gateway.url, tmp_path, "--agents", "3")
    assert code == 1, output
    assert rows["GET models"]["Failure Count"] == "3"
    assert "the server lists no models" in output
    assert "Traceback" not in output


async def test_a_refused_turn_shows_what_the_server_said(tmp_path: Path) -> None:
    """Not only the status: a wrong model and a wrong path are both a 404."""
    with serve(ToyChat(faults=Faults(num_unavailable=1))) as url:
        _, _, output = await locust("shapes.py", url, tmp_path, "--agents", "1", "--law", "math")
    assert '"message": "no engine"' in output


async def test_an_interrupted_rollout_has_no_makespan(tmp_path: Path) -> None:
    """Agents that are stopped in the middle have not ended their rollout."""
    app = ToyChat()
    slow_tools = ("--law", "coding", "--tool-speed-up", "0.000001")
    with serve(app) as url:
        code, rows, output = await locust(
            "shapes.py", url, tmp_path, "--agents", "2", *slow_tools, interrupted_when=lambda: len(app.seen) >= 2
        )
    assert code == 0, output
    # Locust writes its file before its agents are stopped, and prints its table afterwards.
    assert "AGENT rollout" not in rows
    assert not re.search(r"AGENT +rollout", output), output


async def test_the_web_page_starts_rollouts_one_after_the_other() -> None:
    """Each run has the page's options. A makespan begins with its run, not with Locust."""
    [port] = free_ports(1)
    with serve(ToyChat()) as url:
        process = await started("shapes.py", url, "--web-host", "127.0.0.1", "--web-port", str(port))
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as page:
                for num_agents in (2, 3):
                    took_s, rows = await run_from(page, url, num_agents)
                    assert rows["AGENT trajectory"]["Request Count"] == str(num_agents)
                    assert float(rows["AGENT rollout"]["Max Response Time"]) <= took_s * 1_000
        finally:
            process.kill()
            await process.communicate()


async def run_from(page: httpx2.AsyncClient, url: str, num_agents: int) -> tuple[float, dict[str, dict[str, str]]]:
    """Start a rollout on Locust's page: how long it took to end, and its statistics."""
    form = {"user_count": 1, "spawn_rate": 1, "host": url, "shape": "rollout", "agents": num_agents}

    async def is_up() -> bool:
        with suppress(httpx2.TransportError):
            return (await page.get("/stats/requests")).status_code == 200
        return False

    async def statistics() -> dict[str, dict[str, str]]:
        return by_name((await page.get("/stats/requests/csv")).text)

    async def has_ended() -> bool:
        rows = await statistics()
        return "AGENT rollout" in rows and rows["AGENT trajectory"]["Request Count"] == str(num_agents)

    async def is_stopped() -> bool:
        return bool((await page.get("/stats/requests")).json()["state"] == "stopped")

    await eventually(is_up)
    began_at = time.perf_counter()
    assert (await page.post("/swarm", data=form)).json()["success"]
    await eventually(has_ended)
    took_s = time.perf_counter() - began_at
    # Until then the page starts no other. It shows this up to 2 s late, so it does not tell that a run has ended.
    await eventually(is_stopped)
    return took_s, await statistics()


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
