"""`python -m heddle.loop`: what cutting the fleet anew is worth in the whole loop, and what the simulator promises.

The same rollout twice, each with a gateway, a controller and engines of its own, all of them processes: once with the
first fleet for good, once with the controller's plans carried out while the rollout goes on. Only the engines' work is
simulated. The simulator plays both in virtual time, told only how long a relaunch took here.

Believe it only if the first rollout takes about as long as the simulator says: where it takes clearly longer, this
machine was too slow for the speed-up, and nothing follows from the second.
"""

import argparse
import asyncio
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console

from controller.fleet_file import ADMIN_KEY_VARIABLE
from controller.local_launcher import LocalLauncher
from engines.children import Child, LaunchError, child, free_port
from heddle.processors import cpu_s, idle_and_all_ticks
from heddle.rollouts import START_TIMEOUT_S, play
from loadtest.replayer import ReplaySettings
from scheduling.fleets import in_words, largest_first
from simulator import runs
from simulator.conditions import Reshape
from simulator.scenario import Scenario, load_scenario
from workloads.trajectories import Workload

FLEET = "loop"
FIXED, PLANNED = "fixed fleet", "plans carried out"
PREDICTOR = "tabular"
# The controller's default; the simulator is told the same.
MIN_GAIN_SHARE = 0.15
# 64 processes on two cores need a while.
FLEET_TIMEOUT_S = 600.0
# What the simulator may be wrong by.
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Seen:
    """One rollout of the whole loop; times are the engines' virtual seconds.

    Args:
        relaunch_s: the longest that a new engine took until it served; None where none was launched on the way.
        fleets: what was wanted one after the other, with the reason.
        busy_share: of all cores of this machine, whoever used them.
        cpu_s: processor seconds of agents, gateway and engines.
    """

    makespan_s: float
    num_failed: int
    relaunch_s: float | None
    fleets: tuple[str, ...]
    busy_share: float
    cpu_s: tuple[float, float, float]


def main() -> int:
    """Play both, predict both; 1 if a turn failed or the prediction was off by more than the tolerance."""
    parser = argparse.ArgumentParser(prog="heddle.loop", description=__doc__)
    parser.add_argument("--scenario", type=Path, default=Path("scenarios/coding-14b-1600.toml"))
    parser.add_argument("--trajectories", type=int, help="fewer than the scenario has")
    parser.add_argument("--gpus", type=int, help="fewer than the scenario has; whole nodes of 8")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed-up", type=float, default=1.0, help="virtual seconds per second")
    parser.add_argument("--interval-s", type=float, default=30.0, help="virtual seconds between plans")
    parser.add_argument("--start-s", type=float, default=10.8, help="virtual seconds that an engine takes to start")
    parser.add_argument(
        "--sleep-s", type=float, help="virtual seconds to fall asleep and to wake: engines of all sizes sleep"
    )
    parser.add_argument("--token-legs", choices=("auto", "off"), default="off")
    parser.add_argument("--work-dir", type=Path, default=Path(".work/loop"), help="for logs, stores and the journal")
    parsed = parser.parse_args()
    try:
        return uvloop.run(_run(parsed))
    except (LaunchError, ValueError, OSError) as error:
        print(f"heddle.loop: {error}", file=sys.stderr)
        return 2


async def _run(parsed: argparse.Namespace) -> int:
    console = Console(highlight=False)
    scenario = _scenario(parsed)
    workload = scenario.workloads(parsed.seed)[-1]
    console.print(
        f"{len(workload.trajectories):,} trajectories of {scenario.name}, {workload.num_turns:,} turns, "
        f"{workload.output_tokens:,} output tokens, seed {parsed.seed}, on {scenario.fleet.gpus} simulated GPUs, "
        f"{parsed.speed_up:g} times as fast as real ones, on {os.cpu_count()} cores."
    )
    seen = {}
    for name in (FIXED, PLANNED):
        seen[name] = await _rollout(parsed, scenario, workload, name, console)
        console.print(_line(name, seen[name]), soft_wrap=True)
    relaunch_s = seen[PLANNED].relaunch_s
    reshape = Reshape(parsed.interval_s, relaunch_s or parsed.start_s, MIN_GAIN_SHARE)
    said = {
        FIXED: _simulated_s(scenario, workload, parsed.seed),
        PLANNED: _simulated_s(replace(scenario, reshape=reshape), workload, parsed.seed),
    }
    gain, promise = (times[FIXED] / times[PLANNED] for times in ({n: s.makespan_s for n, s in seen.items()}, said))
    error = gain / promise - 1
    console.print(
        f"Simulator: {said[FIXED]:.1f} s, with plans {said[PLANNED]:.1f} s (relaunch {reshape.relaunch_s:.1f} s).\n"
        f"Gain: x{gain:.2f}; the simulator said x{promise:.2f}: {error:+.1%}, {TOLERANCE:.0%} are allowed.\n"
        f"The fixed fleet took {seen[FIXED].makespan_s / said[FIXED]:.2f} of the simulator's time; far above 1, this "
        "machine was too slow.",
        soft_wrap=True,
    )
    is_as_said = abs(error) <= TOLERANCE and not any(one.num_failed for one in seen.values())
    return 0 if is_as_said else 1


def _scenario(parsed: argparse.Namespace) -> Scenario:
    scenario = load_scenario(parsed.scenario)
    if parsed.trajectories:
        scenario = replace(scenario, workload=replace(scenario.workload, trajectories=parsed.trajectories))
    if parsed.gpus:
        scenario = replace(scenario, fleet=replace(scenario.fleet, gpus=parsed.gpus))
    if scenario.fleet.gpus is None or scenario.fleet.gpus % 8:
        raise ValueError(f"{parsed.scenario}: a fleet of whole nodes is wanted: gpus, profile and tp")
    return scenario


def _simulated_s(scenario: Scenario, workload: Workload, seed: int) -> float:
    fleet = scenario.fleets()[0]
    bounds = runs.bounds_of(scenario, fleet, workload)
    run = runs.play(scenario, "heddle", fleet, PREDICTOR, seed, [workload], bounds)
    return run.outcome.makespan_s


def _line(name: str, seen: Seen) -> str:
    agents, gateway, engines = seen.cpu_s
    words = (
        f"{name}: {seen.makespan_s:.1f} s, {seen.num_failed} failed turns, cores {seen.busy_share:.0%} busy; CPU: "
        f"agents {agents:.0f} s, gateway {gateway:.0f} s, engines {engines:.0f} s"
    )
    if seen.relaunch_s is not None:
        words += f", a relaunch took {seen.relaunch_s:.1f} s"
    return "; then ".join([words, *seen.fleets])


# --- the loop -------------------------------------------------------------------------------------------------


async def _rollout(
    parsed: argparse.Namespace, scenario: Scenario, workload: Workload, name: str, console: Console
) -> Seen:
    folder = parsed.work_dir.absolute() / name.split()[0]
    async with _engines_end_with(folder):
        pass  # those of an earlier run that was killed
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, ADMIN_KEY_VARIABLE: secrets.token_hex(8)}
    async with _gateway(parsed, scenario, folder, environment) as (gateway, gateway_session):
        file = folder / "fleet.toml"
        listen = f"127.0.0.1:{free_port()}"
        file.write_text(_fleet_toml(parsed, scenario, gateway, listen, is_automatic=name == PLANNED))
        async with _engines_end_with(folder), _controller(file, f"http://{listen}", folder, environment):
            settings = ReplaySettings(
                f"{gateway}/v1", speed_up=parsed.speed_up, client="raw", stream_share=0.0, rollout_id=folder.name
            )
            (idle_before, all_before), cpu_before_s = idle_and_all_ticks(), time.process_time()
            result = await play(workload, gateway, name, settings, console)
            idle_after, all_after = idle_and_all_ticks()
            engine_sessions = {json.loads(one.read_text())["pid"] for one in folder.glob("servers/*/*/process.json")}
            used_s = time.process_time() - cpu_before_s, cpu_s({gateway_session}), cpu_s(engine_sessions)
            fleet = await _ask(f"http://{listen}/v1/fleet")
    for error in result.errors[:5]:
        console.print(f"  {error}", soft_wrap=True)
    took_s: dict[str, float] = {}
    for one in (phase for phase in fleet["phase_seconds"] if phase["tp"] > min(scenario.fleet.tp)):
        took_s[one["phase"]] = max(took_s.get(one["phase"], 0.0), one["median"])
    begun_s = took_s.get("start" if parsed.sleep_s is None else "wake")
    return Seen(
        result.makespan_s * parsed.speed_up,
        len(result.errors),
        None if begun_s is None else (begun_s + took_s.get("register", 0.0)) * parsed.speed_up,
        _fleets(folder / "journal.jsonl"),
        1 - (idle_after - idle_before) / (all_after - all_before),
        used_s,
    )


@asynccontextmanager
async def _gateway(
    parsed: argparse.Namespace, scenario: Scenario, folder: Path, environment: dict[str, str]
) -> AsyncIterator[tuple[str, int]]:
    """A gateway without engines, whose predictor has learned from the scenario's earlier rollouts; its URL, and the
    session of its processes."""
    model = folder / "predictor"
    model.write_bytes(runs.experienced(scenario, PREDICTOR, scenario.workloads(parsed.seed), parsed.seed).dump())
    url = f"http://127.0.0.1:{free_port()}"
    lease_s, patience_s = 60.0, 300.0  # the gateway's own, and the simulator's
    settings = {
        "HEDDLE_PORT": url.rpartition(":")[2],
        "HEDDLE_STORE": f"sqlite:{folder / 'store.sqlite3'}",
        "HEDDLE_PREDICTOR": PREDICTOR,
        "HEDDLE_PREDICTOR_MODEL": str(model),
        "HEDDLE_TOKEN_LEGS": parsed.token_legs,
        "HEDDLE_QUEUE_TIMEOUT_S": "100000",
        "HEDDLE_IN_TOOL_LEASE_S": str(lease_s / parsed.speed_up),
        "HEDDLE_ENTRY_PATIENCE_S": str(patience_s / parsed.speed_up),
        "HEDDLE_LOG_LEVEL": "warning",
    }
    command = [sys.executable, "-m", "heddle", "serve"]
    async with child(command, folder / "gateway.log", {**environment, **settings}) as gateway:
        await gateway.until_ready("gateway", [f"{url}/healthz"], START_TIMEOUT_S)
        yield url, gateway.pid


@asynccontextmanager
async def _controller(file: Path, url: str, folder: Path, environment: dict[str, str]) -> AsyncIterator[Child]:
    """A controller whose first fleet serves."""
    command = [sys.executable, "-m", "heddle", "controller", "--fleet", str(file)]
    async with child(command, folder / "controller.log", environment) as controller:
        await controller.until_ready("controller", [f"{url}/healthz"], START_TIMEOUT_S)
        async with asyncio.timeout(FLEET_TIMEOUT_S):
            while not (await _ask(f"{url}/v1/fleet"))["is_reached"]:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(1.0)
        yield controller


@asynccontextmanager
async def _engines_end_with(folder: Path) -> AsyncIterator[None]:
    """Engines outlive their controller, but not this program."""
    try:
        yield
    finally:
        launcher = LocalLauncher(folder / "servers", (), None)
        servers = await launcher.find(FLEET)
        await asyncio.gather(*(launcher.stop(server.spec.server_id, 0.0) for server in servers))


def _fleet_toml(parsed: argparse.Namespace, scenario: Scenario, gateway: str, listen: str, is_automatic: bool) -> str:
    """JSON's strings, numbers and lists are TOML's as well."""
    fleet = scenario.fleet
    assert fleet.gpus is not None
    longest = max(workload.max_context_tokens for workload in scenario.workloads(parsed.seed))
    flags = ["--speed-up", str(parsed.speed_up), "--start-s", str(parsed.start_s)]
    flags += ["--max-model-len", str(2 * longest)]  # a tokenizer's words are longer or shorter than the law's tokens
    if parsed.sleep_s is not None:
        flags += ["--sleep-s", str(parsed.sleep_s)]
    profiles = ", ".join(f'{tp} = "{fleet.profile}-tp{tp}"' for tp in fleet.tp)
    lines = [
        f"fleet = {json.dumps(FLEET)}",
        'model = "simulated"',
        f"gateway = {json.dumps(gateway)}",
        f"listen = {json.dumps(listen)}",
        'state_dir = "."',
        f"cpu_slots = {fleet.gpus}",
        f"tp_sizes = {json.dumps(list(fleet.tp))}",
        f"first = {json.dumps([fleet.tp[0]] * (fleet.gpus // fleet.tp[0]))}",
        "[engine]",
        'kind = "sim"',
        f"flags = {json.dumps(flags)}",
        f"profiles = {{ {profiles} }}",
        "[sleep]",
        f"tp_sizes = {json.dumps([] if parsed.sleep_s is None else list(fleet.tp))}",
        "[limits]",
        f"start_timeout_s = {FLEET_TIMEOUT_S}",
        "stop_grace_s = 0.5",
        "[planning]",
        f"is_automatic = {json.dumps(is_automatic)}",
        f"interval_s = {parsed.interval_s / parsed.speed_up}",
        f"min_gain_share = {MIN_GAIN_SHARE}",
        "min_correlation = 0.0",  # the simulator asks for no trust, so none is asked for here
    ]
    return "\n".join(lines) + "\n"


def _fleets(journal: Path) -> tuple[str, ...]:
    """What the controller wanted after the first fleet, and why."""
    records: list[dict[str, Any]] = [json.loads(line) for line in journal.read_text().splitlines()]
    wanted = [record for record in records if record["kind"] == "wanted"][1:]
    return tuple(f"{in_words(largest_first(one['tp'] for one in each['wanted']))} ({each['why']})" for each in wanted)


async def _ask(url: str) -> Any:
    async with httpx.AsyncClient(timeout=60.0) as client:
        return (await client.get(url)).raise_for_status().json()


if __name__ == "__main__":
    began_at = time.monotonic()
    status = main()
    print(f"{time.monotonic() - began_at:.0f} s in all")
    sys.exit(status)
