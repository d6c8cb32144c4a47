"""One rollout of the whole loop: a gateway, a controller and its engines, all separate processes, and agents.

Engines are faster by the requested factor, through separate profiles, and so are tools. So every process measures and
plans in this machine's seconds; only the results reported here are in the seconds of real engines: *virtual* ones.
"""

import asyncio
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from controller.admin_key import ADMIN_KEY_VARIABLE
from controller.local_launcher import LocalLauncher
from controller.planning import PhaseTimes, relaunch_s
from engines.children import Child, child, free_port
from engines.profiling import to_toml
from heddle.processors import cpu_s, idle_and_all_ticks
from heddle.rollouts import START_TIMEOUT_S, play
from loadtest.replayer import ReplaySettings
from scheduling.cost import EngineProfile
from scheduling.fleets import in_words, largest_first
from simulator import runs
from simulator.scenario import Scenario
from workloads.trajectories import Workload

FLEET = "loop"
PREDICTOR = "tabular"
# The controller's default; the simulator is told the same.
MIN_GAIN_SHARE = 0.15
# 64 processes on two cores need some time.
FLEET_TIMEOUT_S = 600.0
# Between looks at the fleet; more often would load 64 engines.
_MIN_OBSERVE_S = 0.2


@dataclass(frozen=True, slots=True)
class Loop:
    """What is played, and how fast; times are virtual seconds.

    Args:
        speed_up: virtual seconds per second.
        interval_s: between plans.
        start_s: that an engine takes to start, in addition to this machine's time to start a process.
        sleep_s: to fall asleep and to wake; None if engines do not sleep.
        work_dir: for logs, stores and the journal.
    """

    scenario: Scenario
    seed: int
    speed_up: float
    interval_s: float
    start_s: float
    sleep_s: float | None
    token_legs: str
    work_dir: Path

    def profiles(self) -> list[EngineProfile]:
        """One for each TP size, as fast as real engines."""
        return [one for one in self.scenario.fleets()[0].family if one.tp in self.scenario.fleet.tp]

    @property
    def first(self) -> tuple[int, ...]:
        """TP sizes of the first fleet."""
        fleet = self.scenario.fleet
        assert fleet.gpus is not None
        return (fleet.tp[0],) * (fleet.gpus // fleet.tp[0])


@dataclass(frozen=True, slots=True)
class Seen:
    """One rollout of the whole loop, in virtual seconds.

    Args:
        counted_s: what the controller expected the relaunch to take.
        relaunch_s: from its plan until the new fleet served; None if there was no relaunch during the rollout.
        planned_at_s: when the relaunch was planned, since the first turn; None as above.
        fleets: the fleets wanted one after the other, with the reason, whose seconds are the machine's.
        busy_share: of all cores of this machine, whatever used them.
        cpu_s: CPU seconds of agents, gateway and engines.
    """

    makespan_s: float
    num_failed: int
    counted_s: float
    relaunch_s: float | None
    planned_at_s: float | None
    fleets: tuple[str, ...]
    busy_share: float
    cpu_s: tuple[float, float, float]


async def rollout(loop: Loop, workload: Workload, name: str, is_automatic: bool, console: Console) -> Seen:
    """Play it, with the controller's plans carried out or not, and end all processes.

    Raises:
        LaunchError: gateway or controller did not start.
    """
    folder = loop.work_dir.absolute() / name.split()[0]
    async with _engines_end_with(folder):
        pass  # those of an earlier run that was killed
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, ADMIN_KEY_VARIABLE: secrets.token_hex(8)}
    console.print(f"{name}: starting gateway, controller and {len(loop.first)} engines, which may take minutes")
    async with _gateway(loop, folder, environment) as (gateway, gateway_session):
        file, listen = folder / "fleet.toml", f"127.0.0.1:{free_port()}"
        file.write_text(_fleet_toml(loop, gateway, listen, is_automatic))
        (folder / "journal.jsonl").write_text(_earlier_wakes(loop))
        async with _engines_end_with(folder), _controller(file, f"http://{listen}", folder, environment):
            settings = ReplaySettings(
                f"{gateway}/v1", speed_up=loop.speed_up, client="raw", stream_share=0.0, rollout_id=folder.name
            )
            (idle_before, all_before), cpu_before_s, began_at = idle_and_all_ticks(), time.process_time(), time.time()
            result = await play(workload, name, settings, console)
            idle_after, all_after = idle_and_all_ticks()
            engine_sessions = {json.loads(one.read_text())["pid"] for one in folder.glob("servers/*/*/process.json")}
            used_s = time.process_time() - cpu_before_s, cpu_s({gateway_session}), cpu_s(engine_sessions)
            fleet = await _ask(f"http://{listen}/v1/fleet")
    for error in result.errors[:5]:
        console.print(f"  {error}", soft_wrap=True)
    records = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    wanted = [record for record in records if record["kind"] == "wanted"][1:]
    phase_s = {(one["phase"], one["tp"]): one["last"] for one in fleet["phase_seconds"]}
    counted_s, took_s = _counted_s(loop, wanted, phase_s), relaunch_took_s(records)
    return Seen(
        result.makespan_s * loop.speed_up,
        len(result.errors),
        counted_s * loop.speed_up,
        None if took_s is None else took_s * loop.speed_up,
        (wanted[0]["at"] - began_at) * loop.speed_up if wanted else None,
        tuple(f"{in_words(_tps(one))} ({one['why']})" for one in wanted),
        1 - (idle_after - idle_before) / (all_after - all_before),
        used_s,
    )


def relaunch_took_s(records: Sequence[Mapping[str, Any]]) -> float | None:
    """From the first change's plan until its fleet served; None if that was not during the rollout.

    On a busy machine that is much longer than each step: engines begin one after the other.

    Args:
        records: the controller's journal, from the first fleet on.
    """
    wanted_at = [record["at"] for record in records if record["kind"] == "wanted"]
    served_at = [record["at"] for record in records if record["kind"] == "proven"]
    return served_at[1] - wanted_at[1] if len(wanted_at) > 1 and len(served_at) > 1 else None


def _counted_s(loop: Loop, wanted: Sequence[Mapping[str, Any]], phase_s: PhaseTimes) -> float:
    """The expected time of the first change; without a change, the time that would have been expected."""
    if wanted:
        return float(wanted[0]["counted_s"])
    other = (max(loop.scenario.fleet.tp),)
    return relaunch_s(phase_s, loop.first, other, other if loop.sleep_s is not None else ())


def _tps(record: Mapping[str, Any]) -> tuple[int, ...]:
    return largest_first(one["tp"] for one in record["wanted"])


def write_faster(profiles: Iterable[EngineProfile], speed_up: float, folder: Path) -> dict[int, str]:
    """Write profiles of engines that are faster by this factor; returns their names, by TP size."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {}
    for one in profiles:
        faster = one.slower(1 / speed_up)
        file = folder / f"tp{one.tp}.toml"
        file.write_text(to_toml("fast", faster))
        names[one.tp] = f"{file}:fast-{one.gpu}-tp{one.tp}"
    return names


# --- the processes --------------------------------------------------------------------------------------------


@asynccontextmanager
async def _gateway(loop: Loop, folder: Path, environment: dict[str, str]) -> AsyncIterator[tuple[str, int]]:
    """A gateway without engines, whose predictor has learned from the scenario's earlier rollouts; yields its URL, and
    the session of its processes.
    """
    model = folder / "predictor"
    model.write_bytes(runs.experienced(loop.scenario, PREDICTOR, loop.scenario.workloads(loop.seed), loop.seed).dump())
    url = f"http://127.0.0.1:{free_port()}"
    limits = loop.scenario.limits
    settings = {
        "HEDDLE_PORT": url.rpartition(":")[2],
        "HEDDLE_STORE": f"sqlite:{folder / 'store.sqlite3'}",
        "HEDDLE_PREDICTOR": PREDICTOR,
        "HEDDLE_PREDICTOR_MODEL": str(model),
        "HEDDLE_TOKEN_LEGS": loop.token_legs,
        "HEDDLE_QUEUE_TIMEOUT_S": "100000",
        "HEDDLE_AGEING_TOKENS_PER_S": str(limits.ageing_tokens_per_s * loop.speed_up),
        "HEDDLE_PREEMPT_AFTER_S": str(limits.preempt_after_s / loop.speed_up),
        "HEDDLE_GATHER_MAX_S": str(limits.gather_max_s / loop.speed_up),
        "HEDDLE_LOG_LEVEL": "warning",
    }
    if limits.entry_patience_s is not None:
        settings["HEDDLE_ENTRY_PATIENCE_S"] = str(limits.entry_patience_s / loop.speed_up)
    if limits.in_tool_lease_s is not None:
        settings["HEDDLE_IN_TOOL_LEASE_S"] = str(limits.in_tool_lease_s / loop.speed_up)
    command = [sys.executable, "-m", "heddle", "serve"]
    async with child(command, folder / "gateway.log", {**environment, **settings}) as gateway:
        await gateway.until_ready("gateway", [f"{url}/healthz"], START_TIMEOUT_S)
        yield url, gateway.pid


@asynccontextmanager
async def _controller(file: Path, url: str, folder: Path, environment: dict[str, str]) -> AsyncIterator[Child]:
    """A controller whose first fleet is serving."""
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


def _earlier_wakes(loop: Loop) -> str:
    """The journal of a fleet that has woken engines before; without it, 6 s are expected, as for a large model."""
    if loop.sleep_s is None:
        return ""
    known = {"kind": "phase", "phase": "wake", "seconds": loop.sleep_s / loop.speed_up, "engine_kind": "sim"}
    return "".join(json.dumps({**known, "tp": tp, "at": time.time()}) + "\n" for tp in loop.scenario.fleet.tp)


def _fleet_toml(loop: Loop, gateway: str, listen: str, is_automatic: bool) -> str:
    """JSON's strings, numbers and lists are valid TOML. The profiles are written beside it."""
    fleet = loop.scenario.fleet
    names = write_faster(loop.profiles(), loop.speed_up, loop.work_dir.absolute())
    profiles = ", ".join(f"{tp} = {json.dumps(name)}" for tp, name in names.items())
    longest = max(workload.max_context_tokens for workload in loop.scenario.workloads(loop.seed))
    flags = ["--start-s", str(loop.start_s / loop.speed_up)]
    flags += ["--max-model-len", str(2 * longest)]  # a tokenizer's words are longer or shorter than the law's tokens
    if loop.sleep_s is not None:
        flags += ["--sleep-s", str(loop.sleep_s / loop.speed_up)]
    lines = [
        f"fleet = {json.dumps(FLEET)}",
        'model = "simulated"',
        f"gateway = {json.dumps(gateway)}",
        f"listen = {json.dumps(listen)}",
        'state_dir = "."',
        f"cpu_slots = {fleet.gpus}",
        f"tp_sizes = {json.dumps(list(fleet.tp))}",
        f"first = {json.dumps(list(loop.first))}",
        "[engine]",
        'kind = "sim"',
        f"flags = {json.dumps(flags)}",
        f"profiles = {{ {profiles} }}",
        "[sleep]",
        f"tp_sizes = {json.dumps([] if loop.sleep_s is None else list(fleet.tp))}",
        "[limits]",
        f"start_timeout_s = {FLEET_TIMEOUT_S}",
        "stop_grace_s = 0.5",
        f"observe_interval_s = {max(1.0 / loop.speed_up, _MIN_OBSERVE_S)}",
        "[planning]",
        f"is_automatic = {json.dumps(is_automatic)}",
        f"interval_s = {loop.interval_s / loop.speed_up}",
        f"min_gain_share = {MIN_GAIN_SHARE}",
        "min_correlation = 0.0",  # the simulator requires no trust, so none is required here
    ]
    return "\n".join(lines) + "\n"


async def _ask(url: str) -> Any:
    async with httpx.AsyncClient(timeout=60.0) as client:
        return (await client.get(url)).raise_for_status().json()
