"""One rollout through a separate gateway: the unit with which the demo and `heddle real` compare policies."""

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from engines.children import child, free_port
from loadtest.display import RolloutProgress
from loadtest.replayer import ReplaySettings, replay
from loadtest.results import RolloutResult
from workloads.trajectories import Workload

COMPARED = (("round-robin", "round-robin / fcfs"), ("heddle", "Heddle"))
"""The policies that both compare, each with its title."""

START_TIMEOUT_S = 120.0

# Engines on the gateway's machine stall with it when it is busy (seen: 20 s), but are healthy.
PATIENCE = {"HEDDLE_START_TIMEOUT_S": "60", "HEDDLE_OBSERVE_TIMEOUT_S": "60"}


@asynccontextmanager
async def local_gateway(
    engines: Sequence[str], policy: str, work_dir: Path, *flags: str, profile: str | None = None
) -> AsyncIterator[str]:
    """A gateway process in front of these engines, with a separate embedded store; yields its URL.

    Args:
        flags: further ones of `heddle serve`.
        profile: of all engines; None: the gateway learns how slow they are.
    """
    port = free_port()
    store = _new_store(work_dir / f"{policy}.sqlite3")
    command = [sys.executable, "-m", "heddle", "serve", "--port", str(port), "--policy", policy]
    command += ["--store", f"sqlite:{store}", *flags]
    if profile is None:
        for engine in engines:
            command += ["--engine", engine]
    else:
        config = work_dir / f"gateway-{policy}.toml"
        tables = [f"[[engines]]\nurl = {json.dumps(engine)}\nprofile = {json.dumps(profile)}\n" for engine in engines]
        config.write_text("\n".join(tables), encoding="utf-8")
        command += ["--config", str(config)]
    async with child(command, work_dir / f"gateway-{policy}.log", PATIENCE | os.environ) as gateway:
        url = f"http://127.0.0.1:{port}"
        await gateway.until_ready("gateway", [f"{url}/readyz"], START_TIMEOUT_S)
        yield url


async def play(workload: Workload, title: str, settings: ReplaySettings, console: Console) -> RolloutResult:
    """Play a workload against the gateway that the settings name, with a progress bar."""
    with RolloutProgress(workload, title, console) as progress:
        return await replay(workload, settings, name=title, on_turn=progress.on_turn)


def _new_store(path: Path) -> Path:
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    return path
