"""Heddle where Linux is not, as on a laptop. No such machine is at hand, so the processes get a Python as it is there:
without what only Linux has.
"""

import os
import sys
from pathlib import Path

import httpx
import pytest

from engines.children import child, free_port
from heddle.cli import main

ROOT = Path(__file__).parents[2]
NO_LINUX = """
import os, select, socket, sys, time

for module, names in {
    os: "copy_file_range eventfd fdatasync memfd_create pidfd_open posix_fadvise posix_fallocate sched_getaffinity "
        "sched_setaffinity splice",
    select: "epoll EPOLLIN EPOLLOUT",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK TCP_CORK TCP_DEFER_ACCEPT TCP_QUICKACK TCP_USER_TIMEOUT",
    time: "CLOCK_BOOTTIME",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
socket.TCP_KEEPALIVE = socket.TCP_KEEPIDLE
del socket.TCP_KEEPIDLE

# They have read what this machine is before they are told otherwise.
import asyncio, subprocess, sysconfig, urllib.request, uvloop, zoneinfo

sysconfig.get_config_vars()
sys.platform = "darwin"
"""
START_TIMEOUT_S = 120.0


async def test_a_turn_is_served_by_a_gateway_that_is_not_on_linux(tmp_path: Path) -> None:
    """And by a simulated engine there. There are no byte workers, however many are asked for."""
    (tmp_path / "sitecustomize.py").write_text(NO_LINUX)
    lending = {"HEDDLE_BYTE_WORKERS": "2", "HEDDLE_BYTE_WORKER_TURNS": "0"}
    environment = os.environ | lending | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    heddle = (sys.executable, "-m", "heddle")
    engine, gateway = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    engine_command = (*heddle, "sim-engine", "--model", "m", "--port", engine.rpartition(":")[2])
    command = (*heddle, "serve", "--engine", engine, "--port", gateway.rpartition(":")[2], "--store", "memory:")
    async with (
        child(engine_command, tmp_path / "engine.log", environment) as server,
        child(command, tmp_path / "gateway.log", environment) as front,
        httpx.AsyncClient(base_url=gateway, timeout=60.0) as client,
    ):
        await server.until_ready("engine", [f"{engine}/v1/models"], START_TIMEOUT_S)
        await front.until_ready("gateway", [f"{gateway}/readyz"], START_TIMEOUT_S)
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "stream": True}
        answer = await client.post("/t/a/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
    logs = (tmp_path / "gateway.log").read_text() + (tmp_path / "engine.log").read_text()
    assert "Traceback" not in logs
    assert "byte worker" not in logs


@pytest.mark.parametrize("verb", ["keep", "up", "controller"])
def test_what_needs_linux_says_so(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes that end with their parent, and memory that outlives one, are the kernel's work."""
    monkeypatch.setattr(sys, "platform", "darwin")
    arguments = {"keep": ["--", "true"]}.get(verb, ["--fleet", "fleet.toml"])
    with pytest.raises(SystemExit) as ended:
        main([verb, *arguments])
    assert ended.value.code == 2
    assert f"heddle {verb}: needs Linux" in capsys.readouterr().err
