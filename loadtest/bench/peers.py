"""The servers under test: the gateway with all it has turned on, and rivals as their users start them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WORK = Path(os.environ.get("HEDDLE_WORK", ".work")).resolve()
NGINX = WORK / "bench-nginx" / "nginx"
VLLM_ROUTER = WORK / "bench-venv" / "bin" / "vllm-router"

# port, a second free port, the backends' ports, a directory of its own
Command = Callable[[int, int, list[int], Path], list[str]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One server; `command` None is the backend itself, without anything before it."""

    name: str
    command: Command | None
    needs: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def is_there(self) -> bool:
        """Whether it can be started here."""
        return self.needs is None or self.needs.exists()


def gateway(port: int, _: int, backends: list[int], home: Path) -> list[str]:
    """Identity by header, policy heddle, SQLite, metrics, and a log line per turn to a file."""
    command = [sys.executable, "-m", "heddle", "serve", "--port", str(port), "--policy", "heddle"]
    command += ["--store", f"sqlite:{home / 'store.sqlite3'}", "--log-level", "info"]
    return command + [word for backend in backends for word in ("--engine", f"http://127.0.0.1:{backend}")]


def vllm_router(*options: str) -> Command:
    """vllm-router with a policy."""

    def command(port: int, metrics_port: int, backends: list[int], _: Path) -> list[str]:
        workers = [f"http://127.0.0.1:{backend}" for backend in backends]
        start = [str(VLLM_ROUTER), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
        return [
            *start,
            "--worker-startup-check-interval",
            "1",
            "--log-level",
            "warning",
            "--worker-urls",
            *workers,
            *options,
        ]

    return command


def nginx(port: int, _: int, backends: list[int], home: Path) -> list[str]:
    """nginx with one worker, keep-alive to its backends, and affinity by header."""
    servers = "".join(f"server 127.0.0.1:{backend}; " for backend in backends)
    (home / "nginx.conf").write_text(f"""
        daemon off; worker_processes 1; pid {home}/pid; error_log {home}/error.log;
        events {{ worker_connections 4096; }}
        http {{
            access_log off; keepalive_requests 1000000;
            client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
            uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
            client_body_buffer_size 1m;
            upstream engines {{
                hash $http_x_session_id consistent; {servers} keepalive 256; keepalive_requests 1000000;
            }}
            server {{
                listen 127.0.0.1:{port};
                location / {{
                    proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
                    proxy_buffering off;
                }}
            }}
        }}""")
    return [str(NGINX), "-c", str(home / "nginx.conf"), "-e", str(home / "error.log")]


_PROGRAMS = '{"program_scheduling_enable_key":"auto","global_queue":true,"token_capacity_per_target":1000000000}'

PEERS = (
    Peer("direct", None),
    Peer("gateway", gateway),
    Peer("nginx, 1 worker", nginx, NGINX),
    Peer("vllm-router, round_robin", vllm_router("--policy", "round_robin"), VLLM_ROUTER),
    Peer(
        "vllm-router, program scheduling",
        vllm_router(
            "--policy",
            "sticky_least_loaded",
            "--enable-program-scheduling",
            "--program-scheduling-config-json",
            _PROGRAMS,
        ),
        VLLM_ROUTER,
    ),
)
