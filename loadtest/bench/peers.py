"""The servers under test: the gateway with everything that it enables, and rivals as their users start them.

Each keeps a trajectory on one backend if it can: by a session header, or by hashing it. Concurrency limits are set
beyond what is measured, for all alike.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WORK = Path(os.environ.get("HEDDLE_WORK", ".work")).resolve()
NGINX = WORK / "bench-nginx" / "nginx"
HAPROXY = WORK / "bench-haproxy" / "haproxy"
ROUTERS = WORK / "bench-venv" / "bin"
COMPILED = Path(".venv-compiled").resolve() / "bin" / "heddle"
MAX_CONNECTIONS = 32_768  # of which 10,000 are open streams

# port, a second free port, the backends' ports, a separate directory
Command = Callable[[int, int, list[int], Path], list[str]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One server.

    Args:
        command: None for the backend itself, with nothing in front of it.
        needs: a file without which it cannot be started.
        needs_redis: `{redis}` in its environment is the URL of a separate Redis server.
        has_tools: requests offer tools, which an engine must parse out of an answer.
        has_ids: requests name their trajectory.
        model: what it lists once it knows its backends; sglang-router does not ask them for a name.
    """

    name: str
    command: Command | None
    needs: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    needs_redis: bool = False
    has_tools: bool = True
    has_ids: bool = True
    model: bytes = b"bench"


def gateway(*heddle: str) -> Command:
    """Identity by header, policy heddle, SQLite, metrics, and a log line per turn to a file.

    Args:
        heddle: the command that starts it.
    """

    def command(port: int, _: int, backends: list[int], home: Path) -> list[str]:
        # The environment sets Redis; the command line would override it.
        (home / "heddle.toml").write_text(
            f'max_connections_per_engine = {MAX_CONNECTIONS}\nstore = "sqlite:{home / "store.sqlite3"}"\n'
        )
        start = [*heddle, "serve", "--port", str(port), "--policy", "heddle", "--log-level", "info"]
        start += ["--config", str(home / "heddle.toml")]
        return start + [word for backend in backends for word in ("--engine", f"http://127.0.0.1:{backend}")]

    return command


def router(program: str, *options: str) -> Command:
    """One of the routers in Rust, with a policy."""

    def command(port: int, metrics_port: int, backends: list[int], _: Path) -> list[str]:
        workers = [f"http://127.0.0.1:{backend}" for backend in backends]
        start = [str(ROUTERS / program), *([] if program == "vllm-router" else ["launch"])]
        start += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
        start += ["--worker-startup-check-interval", "1", "--max-concurrent-requests", str(MAX_CONNECTIONS)]
        start += ["--log-level", "warning" if program == "vllm-router" else "warn"]
        return [*start, "--worker-urls", *workers, *options]

    return command


def _max_connections() -> int:
    """How many connections a proxy may have open: with more than it has descriptors for, it refuses to start, or
    complains.
    """
    return min(MAX_CONNECTIONS, (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 100) // 2)


def nginx(port: int, _: int, backends: list[int], home: Path) -> list[str]:
    """nginx with one worker, keep-alive to its backends, and affinity by header."""
    servers = "".join(f"server 127.0.0.1:{backend}; " for backend in backends)
    (home / "nginx.conf").write_text(f"""
        daemon off; worker_processes 1; pid {home}/pid; error_log {home}/error.log;
        events {{ worker_connections {2 * _max_connections()}; }}
        http {{
            access_log off; keepalive_requests 1000000;
            client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
            uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
            client_body_buffer_size 2m; client_max_body_size 512m;
            upstream engines {{
                hash $http_x_session_id consistent; {servers} keepalive 2048; keepalive_requests 1000000;
            }}
            server {{
                listen 127.0.0.1:{port} backlog=4096;
                location / {{
                    proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
                    proxy_buffering off; proxy_read_timeout 600s;
                }}
            }}
        }}""")
    return [str(NGINX), "-c", str(home / "nginx.conf"), "-e", str(home / "error.log")]


def haproxy(port: int, _: int, backends: list[int], home: Path) -> list[str]:
    """HAProxy with one thread, keep-alive to its backends, and affinity by header."""
    servers = "\n".join(f"    server e{backend} 127.0.0.1:{backend}" for backend in backends)
    (home / "haproxy.cfg").write_text(f"""
global
    nbthread 1
    maxconn {_max_connections()}
defaults
    mode http
    timeout connect 5s
    timeout client 600s
    timeout server 600s
frontend agents
    bind 127.0.0.1:{port} backlog 4096
    default_backend engines
backend engines
    balance hdr(X-Session-ID)
    hash-type consistent
    http-reuse always
    option abortonclose
    option http-no-delay
{servers}
""")
    return [str(HAPROXY), "-f", str(home / "haproxy.cfg")]


_PROGRAMS = '{"program_scheduling_enable_key":"auto","global_queue":true,"token_capacity_per_target":1000000000}'
_BY_TOKENS = {"HEDDLE_TOKEN_LEGS": "auto"}
_BY_WORKERS = {"HEDDLE_BYTE_WORKER_TURNS": "0"}

DIRECT, GATEWAY, STICKY = "direct", "gateway", "vllm-router, sticky_least_loaded"
PROGRAMS = "vllm-router, program scheduling"
NO_IDS, BYTE_WORKER = "gateway, no ids", "gateway, byte worker"
TOKEN_LEGS, TOKEN_LEGS_TOOLS = "gateway, token legs", "gateway, token legs, tools"
RUST = (STICKY, "vllm-router, round_robin", "sglang-router, manual", "smg, least_load and sticky")

FROM_SOURCE = gateway(sys.executable, "-m", "heddle")
PEERS = (
    Peer(DIRECT, None),
    Peer(GATEWAY, FROM_SOURCE),
    Peer(NO_IDS, FROM_SOURCE, has_ids=False),
    Peer(BYTE_WORKER, FROM_SOURCE, environment={"HEDDLE_BYTE_WORKERS": "1", **_BY_WORKERS}),
    Peer("gateway, 4 byte workers", FROM_SOURCE, environment={"HEDDLE_BYTE_WORKERS": "4", **_BY_WORKERS}),
    Peer("gateway, machine code", gateway(str(COMPILED)), COMPILED),
    Peer("gateway, Redis", FROM_SOURCE, environment={"HEDDLE_STORE": "{redis}"}, needs_redis=True),
    Peer(TOKEN_LEGS, FROM_SOURCE, environment=_BY_TOKENS, has_tools=False),
    Peer(TOKEN_LEGS_TOOLS, FROM_SOURCE, environment=_BY_TOKENS),
    Peer(STICKY, router("vllm-router", "--policy", "sticky_least_loaded"), ROUTERS / "vllm-router"),
    Peer(RUST[1], router("vllm-router", "--policy", "round_robin"), ROUTERS / "vllm-router"),
    Peer(
        PROGRAMS,
        router(
            "vllm-router",
            *("--policy", "sticky_least_loaded", "--enable-program-scheduling"),
            *("--program-scheduling-config-json", _PROGRAMS),
        ),
        ROUTERS / "vllm-router",
    ),
    Peer(RUST[2], router("sglang-router", "--policy", "manual"), ROUTERS / "sglang-router", model=b"unknown"),
    Peer(RUST[3], router("smg", "--policy", "least_load", "--routing-key-override"), ROUTERS / "smg"),
    Peer("nginx, 1 worker", nginx, NGINX),
    Peer("haproxy, 1 thread", haproxy, HAPROXY),
)
