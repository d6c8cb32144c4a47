"""`heddle controller`, `heddle fleet` and the controller's HTTP API, with everything in processes of its own."""

import asyncio
import json
import os
import re
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.admin_key import ADMIN_KEY_VARIABLE
from controller.assembly import controller, launcher_of
from controller.fleet_file import load_fleet_file
from engines.children import free_port
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.controller.fleet_site import alive, stopped_at_the_end
from tests.support.gateway import ADMIN, ADMIN_KEY, eventually, running_gateway

TIMEOUT_S = 90.0
# Dozens of processes start here, and a busy machine takes seconds for each.
pytestmark = pytest.mark.timeout(300)


async def heddle(
    *arguments: str, admin_key: str | None = ADMIN_KEY, max_file_bytes: int = resource.RLIM_INFINITY
) -> tuple[int, str]:
    """A command's exit status and everything that it printed.

    Args:
        max_file_bytes: limit of its files' size, which is like a full disk.
    """
    environment = {name: value for name, value in os.environ.items() if name != ADMIN_KEY_VARIABLE}
    if admin_key:
        environment[ADMIN_KEY_VARIABLE] = admin_key
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "heddle", *arguments),
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


@asynccontextmanager
async def controller_process(path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Its log is the file `log` beside the fleet file."""
    with (path.parent / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "heddle", "controller", "--fleet", str(path)),
            env={**os.environ, ADMIN_KEY_VARIABLE: ADMIN_KEY},
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def write_fleet(tmp_path: Path, gateway_url: str, port: int) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(f"""
fleet = "toy"
model = "simulated"
gateway = "{gateway_url}"
listen = "127.0.0.1:{port}"
state_dir = "state"
cpu_slots = 2
tp_sizes = [1, 2]
[engine]
kind = "sim"
profiles = {{ 1 = "toy-cpu-tp1", 2 = "toy-cpu-tp2" }}
[limits]
observe_interval_s = 0.1
""")
    return path


async def test_a_state_folder_that_cannot_be_created_stops_the_start(tmp_path: Path) -> None:
    """The exit status is 2, and one line names the folder."""
    path = write_fleet(tmp_path, "http://127.0.0.1:9", 0)
    path.write_text(path.read_text().replace('"state"', '"fleet.toml/state"'))
    status, output = await heddle("controller", "--fleet", str(path))
    assert (status, len(output.splitlines())) == (2, 1), output
    assert "fleet.toml/state cannot be used: Not a directory" in output


async def test_a_full_disk_stops_the_start(tmp_path: Path) -> None:
    """The lease may still be written when the journal, which is written anew at each start, no longer fits. Either way
    the exit status is 2, and one line names the folder."""
    path = write_fleet(tmp_path, "http://127.0.0.1:9", free_port())
    (tmp_path / "state").mkdir()
    record = {"kind": "wanted", "at": 1.0, "why": "a fleet", "serial": 1, "wanted": []}
    (tmp_path / "state" / "journal.jsonl").write_text(json.dumps(record) + "\n")
    for max_file_bytes in (0, 20):
        status, output = await heddle("controller", "--fleet", str(path), max_file_bytes=max_file_bytes)
        assert (status, len(output.splitlines())) == (2, 1), output
        assert "/state cannot be used: File too large" in output
    assert json.loads((tmp_path / "state" / "journal.jsonl").read_text()) == record


async def test_a_journal_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    """The exit status is 2, and one line names the file, also of a dry run."""
    path = write_fleet(tmp_path, "http://127.0.0.1:9", free_port())
    (tmp_path / "state" / "journal.jsonl").mkdir(parents=True)
    for options in ((), ("--dry-run",)):
        status, output = await heddle("controller", "--fleet", str(path), *options)
        assert (status, len(output.splitlines())) == (2, 1), output
        assert "/journal.jsonl cannot be read: Is a directory" in output


async def test_a_full_disk_ends_a_controller_that_waits(tmp_path: Path) -> None:
    """It ends when the lease is free, with status 2 and one line that names the folder."""
    path = write_fleet(tmp_path, "http://127.0.0.1:9", free_port())
    first = load_fleet_file(path)
    async with controller(first, launcher_of(first)):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "heddle", "controller", "--fleet", str(path)),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        assert b"another controller acts; waiting" in await process.stderr.readline()
    output = await process.stderr.read()
    assert await process.wait() == 2 and output.count(b"\n") == 1, output
    assert b"/state cannot be used: File too large" in output


async def test_a_state_folder_belongs_to_one_fleet(tmp_path: Path) -> None:
    """A fleet that was renamed would leave its engines to nobody, and a second fleet would wait for the first one's
    lease. Each is refused with one line, also while the first one acts. An older journal names no fleet."""
    path = write_fleet(tmp_path, "http://127.0.0.1:9", free_port())
    first = load_fleet_file(path)
    record = {"kind": "wanted", "at": 1.0, "why": "a fleet", "serial": 1, "wanted": []}
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "journal.jsonl").write_text(json.dumps(record) + "\n")

    async def check_refused() -> None:
        for options in ((), ("--dry-run",)):
            status, output = await heddle("controller", "--fleet", str(path), *options)
            assert (status, len(output.splitlines())) == (2, 1), output
            assert "/state is that of fleet toy; give fleet renamed one of its own" in output

    async with controller(first, launcher_of(first)) as made:
        assert made.journal.state.why == "a fleet"
        path.write_text(path.read_text().replace('"toy"', '"renamed"'))
        await check_refused()
    await check_refused()
    async with controller(first, launcher_of(first)) as made:
        assert made.journal.state.why == "a fleet"


async def test_a_controller_whose_disk_is_full_goes_on_once_there_is_room(tmp_path: Path) -> None:
    """It could not write down that an engine had died, and ended; under `heddle up`, the gateway with it. An operator
    is told why nothing can be changed now; it was `Internal Server Error`."""
    async with running_gateway(observe_interval_s=0.1) as gateway, httpx.AsyncClient() as client:
        port = free_port()
        path = write_fleet(tmp_path, gateway.url, port)
        folder = tmp_path / "state"

        async def shows(*alarms: str, is_reached: bool) -> bool:
            try:
                told = (await client.get(f"http://127.0.0.1:{port}/v1/fleet")).json()
            except httpx.TransportError:
                return False
            return set(told["alarms"]) == set(alarms) and told["is_reached"] is is_reached

        async with stopped_at_the_end(load_fleet_file(path)), controller_process(path) as process:
            await eventually(lambda: shows(is_reached=True), TIMEOUT_S)
            # A limit of its files' size is like a full disk.
            limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            full_at = (folder / "journal.jsonl").stat().st_size
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (full_at, limits[1]))
            victim = next((folder / "servers" / "toy").glob("*/process.json"))
            os.killpg(json.loads(victim.read_text())["pid"], signal.SIGKILL)
            await eventually(lambda: shows("journal_away", is_reached=False), TIMEOUT_S)
            status, output = await heddle("fleet", "scale", "1xTP2", "--controller", f"http://127.0.0.1:{port}")
            assert status == 1 and output.startswith("heddle fleet: Nothing was changed: "), output
            assert "journal.jsonl cannot be written: File too large" in output
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
            await eventually(lambda: shows(is_reached=True), TIMEOUT_S)
            assert process.returncode is None


@pytest.mark.timeout(300)
async def test_a_fleet_is_shown_planned_scaled_and_drained(tmp_path: Path) -> None:
    """From the first dry run to a drained server. SIGTERM ends the controller and leaves the engines running."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        port = free_port()
        path = write_fleet(tmp_path, gateway.url, port)
        url = f"http://127.0.0.1:{port}"
        fleet = load_fleet_file(path)
        status, output = await heddle("controller", "--fleet", str(path), "--dry-run")
        assert status == 0 and "nothing serves" in output and output.rstrip().endswith("Nothing was changed.")
        assert re.findall(r"^1\. (\w+) .* \(TP (\d) on (\w+)\)", output, re.MULTILINE) == [
            ("launch", "1", "cpu0"),
            ("launch", "1", "cpu1"),
        ]
        larger = path.with_name("larger.toml")
        larger.write_text(path.read_text().replace("tp_sizes", "first = [2, 2]\ntp_sizes"))
        status, output = await heddle("controller", "--fleet", str(larger), "--dry-run")
        assert status == 0 and "It is not possible: 2 x TP 2 do not fit onto 2 devices" in output
        async with stopped_at_the_end(fleet):
            async with controller_process(path) as process, httpx.AsyncClient() as client:

                async def is_reached(count: int) -> bool:
                    try:
                        reply = (await client.get(f"{url}/v1/fleet")).json()
                    except httpx.TransportError:
                        return False
                    return bool(reply["is_reached"]) and len(reply["servers"]) == count

                await eventually(lambda: is_reached(2), TIMEOUT_S)
                status, output = await heddle("fleet", "show", "--controller", url)
                assert status == 0 and output.count("serving") == 2
                assert re.search(r"^start took TP 1 [\d.]+ s$", output, re.MULTILINE)
                assert (
                    "plan: 0 trajectories are at work: too few to plan for\nplans are only shown, because planning"
                    in output
                )
                status, output = await heddle("fleet", "plan", "2xTP2", "--controller", url)
                assert status == 1 and output == "heddle fleet: 2 x TP 2 do not fit onto 2 devices\n"
                for order, said in (
                    (("plan", "9999xTP1"), "9999 x TP 1 do not fit onto 2 devices"),
                    (("plan", "1xTP2048"), "tps.0: must be at most 1024, not '2048'"),
                    (("scale", "9999xTP1"), "tps: must have at most 4096 items, not [1, 1, "),
                    (("scale", "1xTP2048"), "tps.0: must be at most 1024, not 2048"),
                ):
                    status, output = await heddle("fleet", *order, "--controller", url)
                    assert (status, len(output.splitlines())) == (1, 1) and len(output) < 200
                    assert output.startswith(f"heddle fleet: {said}")
                status, output = await heddle("fleet", "plan", "0xTP1", "--controller", url)
                assert status == 0 and output.startswith("to no engine:\n1. drain ")
                assert "other server" not in output and "another server" not in output, "there is none"
                status, output = await heddle("fleet", "plan", "1xTP2", "--controller", url)
                assert output.startswith("to 1 x TP 2:\n")
                steps = [line.split()[1] for line in output.splitlines() if re.match(r"\d+\. ", line)]
                assert steps[:2] == ["drain", "drain"] and steps[-3:] == ["register", "remove", "remove"]

                status, output = await heddle("fleet", "scale", "1xTP2", "--controller", url, admin_key=None)
                assert status == 1 and "needs the admin key" in output
                status, _ = await heddle("fleet", "scale", "1xTP2", "--controller", url)
                assert status == 0
                await eventually(lambda: is_reached(1), TIMEOUT_S)
                status, output = await heddle("controller", "--fleet", str(path), "--dry-run")
                assert "1 x TP 2 serves" in output and "too few to plan for" in output

                status, output = await heddle("fleet", "scale", "0xTP1", "--controller", url)
                assert status == 1 and "ends every engine of the fleet" in output and await is_reached(1)

                (server,) = (await client.get(f"{url}/v1/fleet")).json()["servers"]
                assert (await heddle("fleet", "drain", "nobody", "--controller", url))[0] == 1
                assert (await heddle("fleet", "drain", server["id"], "--controller", url))[0] == 0
                await eventually(lambda: is_reached(0), TIMEOUT_S)
                shown = (await heddle("fleet", "show", "--controller", url))[1]
                assert "resting: cpu0, cpu1" in shown and "drained by hand" in shown
                status, output = await heddle("fleet", "plan", "2xTP1", "--controller", url)
                assert status == 0 and re.findall(r"launch .* on (cpu\d)", output) == ["cpu0", "cpu1"]
                assert "`heddle fleet scale --plans` lets them decide" in shown
                assert (await heddle("fleet", "scale", "2x1", "--controller", url))[0] == 0
                await eventually(lambda: is_reached(2), TIMEOUT_S)
                metrics = (await client.get(f"{url}/metrics")).text
                assert 'heddle_fleet_servers{state="serving"} 2' in metrics and "heddle_fleet_reached 1" in metrics
                assert (await heddle("fleet", "scale", "--plans", "--controller", url))[0] == 0
                assert not (await client.get(f"{url}/v1/fleet")).json()["is_manual"]
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
            assert len(await alive(fleet)) == 2
            async with controller_process(path):

                async def is_ended() -> bool:
                    await heddle("fleet", "scale", "0xTP1", "--empty", "--controller", url)
                    return not await alive(fleet)

                await eventually(is_ended, TIMEOUT_S)


async def test_a_fleet_that_was_ended_says_how_to_start_it_again(tmp_path: Path) -> None:
    """The next controller launched nothing and never told why, and `scale --plans` did not help: without engines there
    is no work to plan for."""
    async with running_gateway(observe_interval_s=0.1) as gateway, httpx.AsyncClient() as client:
        port = free_port()
        path, url = write_fleet(tmp_path, gateway.url, port), f"http://127.0.0.1:{port}"
        ended = {"kind": "wanted", "at": 1.0, "why": "scaled by hand", "serial": 2, "wanted": [], "is_manual": True}
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "journal.jsonl").write_text(json.dumps(ended) + "\n")
        status, output = await heddle("controller", "--fleet", str(path), "--dry-run")
        assert status == 0
        assert "No engines are wanted (scaled by hand): `heddle fleet scale 2xTP1` starts some." in output

        async def warns() -> bool:
            said = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
            return {("warning", "no engines are wanted", "scaled by hand", "heddle fleet scale 2xTP1")} == {
                (one["level"], one["message"], one["why"], one["start"]) for one in said if one["level"] != "info"
            }

        async def serves() -> bool:
            told = (await client.get(f"{url}/v1/fleet")).json()
            return bool(told["is_reached"]) and [one["tp"] for one in told["servers"]] == [1, 1]

        async with stopped_at_the_end(load_fleet_file(path)), controller_process(path):
            await eventually(warns, TIMEOUT_S)
            status, output = await heddle("fleet", "show", "--controller", url)
            assert "no engines are wanted, also after a restart: `heddle fleet scale 2xTP1` starts some\n" in output
            status, output = await heddle("fleet", "scale", "--plans", "--controller", url)
            assert status == 0 and "(the first fleet)" in output and "no engines" not in output
            await eventually(serves, TIMEOUT_S)


async def test_invalid_commands_and_absent_controllers_are_reported(tmp_path: Path) -> None:
    """Invalid arguments are refused before any request; an absent controller or fleet file is named."""
    url = f"http://127.0.0.1:{free_port()}"
    for arguments in (("scale",), ("scale", "4TP1"), ("drain",), ("scale", "1x1", "--plans")):
        status, output = await heddle("fleet", *arguments, "--controller", url)
        assert status == 2 and output.startswith("heddle fleet: ")
    status, output = await heddle("fleet", "show", "--controller", url)
    assert status == 1 and f"no controller at {url}" in output
    status, output = await heddle("fleet", "show", "--controller", "http://127.0.0.1:abc")
    assert (status, len(output.splitlines())) == (1, 1) and "no controller at http://127.0.0.1:abc: " in output
    status, output = await heddle("controller", "--fleet", str(tmp_path / "absent.toml"))
    assert status == 2 and "cannot read" in output


async def test_something_else_at_the_controllers_address_is_reported() -> None:
    """It does not speak HTTP. The message is one line."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        status, output = await heddle("fleet", "show", "--controller", url)
    assert (status, len(output.splitlines())) == (1, 1) and f"no controller at {url}: " in output, output


async def test_a_dry_run_without_its_cluster_is_reported(tmp_path: Path) -> None:
    """The API server of Kubernetes is away: one line says so."""
    pytest.importorskip("kubernetes")
    away = {"name": "away", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "away", "context": {"cluster": "away", "user": ""}}
    config = {"clusters": [away], "contexts": [context], "current-context": "away"}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "pod.yaml").write_text("spec: {containers: [{name: engine, image: vllm}]}")
    options = '[launcher_options]\ntemplate = "pod.yaml"\nkubeconfig = "config.yaml"\n'
    path = tmp_path / "fleet.toml"
    path.write_text(f'fleet = "toy"\nmodel = "simulated"\nlauncher = "kubernetes"\n{options}')
    status, output = await heddle("controller", "--fleet", str(path), "--dry-run")
    assert (status, len(output.splitlines())) == (2, 1) and "heddle controller: Kubernetes: " in output, output


async def test_a_dry_run_without_its_gateway_is_reported(tmp_path: Path) -> None:
    """One line says so, with the address: it said `GET /v1/engines: no connection`, of nobody knew whom."""
    url = f"http://127.0.0.1:{free_port()}"
    status, output = await heddle("controller", "--fleet", str(write_fleet(tmp_path, url, 0)), "--dry-run")
    assert (status, len(output.splitlines())) == (2, 1), output
    assert output.startswith(f"heddle controller: the gateway at {url}: GET /v1/engines: no connection: "), output


async def test_a_first_fleet_that_does_not_fit_stops_the_start(tmp_path: Path) -> None:
    """The last line states why, once the gateway can be asked."""
    async with running_gateway() as gateway:
        path = write_fleet(tmp_path, gateway.url, free_port())
        path.write_text(path.read_text().replace("tp_sizes", "first = [2, 2]\ntp_sizes"))
        status, output = await heddle("controller", "--fleet", str(path))
        assert status == 2 and "the first fleet is not possible" in output.splitlines()[-1]


async def test_the_gateway_reports_the_work_at_hand(tmp_path: Path) -> None:
    """With the admin key, it reports what each active trajectory still needs, and how well predictions came true."""
    async with running_gateway() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        assert (await client.get("/v1/demand")).status_code == 401
        for number in range(12):
            declared = {"id": f"t{number}", "expected_output_tokens": 1000 * (number + 1)}
            assert (await client.post("/v1/trajectories", json=declared)).status_code == 201
        reply = (await client.get("/v1/demand", headers=ADMIN)).json()
        assert sorted(one["output_tokens"] for one in reply["trajectories"]) == [1000 * n for n in range(1, 13)]
        assert reply["correlation"] is None and reply["num_waiting_turns"] == 0
        await client.delete("/v1/trajectories/t0")
        reply = (await client.get("/v1/demand", headers=ADMIN)).json()
        assert len(reply["trajectories"]) == 11


async def test_the_gateway_reports_the_last_rollout(tmp_path: Path) -> None:
    """It is reported whole, once none of its trajectories is active, whatever other rollouts do, and not to a client
    that knows it already."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=100.0)) as engine,
        running_gateway(engine) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60.0) as client,
    ):

        async def last_rollout(since: float = 0.0) -> Any:
            return (await client.get(f"/v1/demand?since={since}", headers=ADMIN)).json()["last_rollout"]

        async def play(name: str, rollout: str | None, turns: int) -> None:
            headers = {"x-rollout-id": rollout} if rollout else {}
            messages = [{"role": "user", "content": "one two three"}]
            for _ in range(turns):
                body = {"model": "simulated", "messages": messages, "max_tokens": 8, "ignore_eos": True}
                response = await client.post(f"/t/{name}/v1/chat/completions", json=body, headers=headers)
                messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]

        async def finish(name: str) -> None:
            (await client.post(f"/v1/trajectories/{name}/finish")).raise_for_status()

        for number in range(3):
            await play(f"a{number}", "a", number + 1)
        await finish("a0")
        assert await last_rollout() is None, "two of its trajectories are active"
        await finish("a1")
        await finish("a2")
        await play("b0", "b", 1)
        reply = await last_rollout()
        assert reply["rollout_id"] == "a"
        assert sorted(one["output_tokens"] for one in reply["trajectories"]) == [8, 16, 24]
        short, _, long = sorted(reply["trajectories"], key=lambda one: one["output_tokens"])
        assert short["context_tokens"] == long["context_tokens"] > 0 == short["new_tokens"] < long["new_tokens"]
        assert await last_rollout(reply["ended_at"]) is None
        await play("nobody", None, 1)
        await finish("nobody")
        assert (await last_rollout(reply["ended_at"]))["rollout_id"] is None
