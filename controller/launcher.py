"""The interface of every launcher, whatever it launches with: processes of this machine, Ray placement groups,
Kubernetes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class ServerState(StrEnum):
    """`starting`: launched, not seen to run yet. `running`: its process runs. `exited`: it has ended."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One engine server to launch.

    Args:
        server_id: chosen by the controller and never reused; launching it twice gives the same server.
        fleet_id: the fleet it belongs to; `find` returns only servers of one fleet.
        devices: GPUs (or CPU slots) that it holds, named as in the launcher's inventory. As many as `tp`.
        beside: ids of sleeping servers with which it may share devices; only local servers can.
        command: program and arguments; the launcher fills in "{port}" and "{host}".
        leaves: patterns of files that it leaves on its node when it is killed; for local servers these are removed.
        environment: added to the launcher's own; "{host}" is filled in too, and "{kv_port}" with another port.
    """

    server_id: str
    fleet_id: str
    tp: int
    devices: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Server:
    """A server as its launcher sees it.

    Args:
        url: where it will answer; None until that is known.
        exit_cause: how it ended, in words; "" while it runs.
        last_lines: the end of its output; Kubernetes' launcher leaves it out while the server is ready.
    """

    spec: ServerSpec
    state: ServerState
    url: str | None = None
    exit_cause: str = ""
    last_lines: tuple[str, ...] = ()

    @property
    def waits_for(self) -> str:
        """Why it does not run yet, in its launcher's words; "" if it runs, or nothing tells."""
        return " | ".join(self.last_lines[-3:]) if self.state is ServerState.STARTING else ""


def loaded_spec(written: Mapping[str, Any]) -> ServerSpec:
    """A specification from the JSON of its `asdict`, as launchers store it."""
    fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in written.items()}
    return ServerSpec(**fields)


class LaunchFailed(Exception):
    """The launcher could not start the server at all: no such device, no permission, or its API refused."""


def check_free(spec: ServerSpec, servers: Iterable[Server]) -> None:
    """Raises LaunchFailed if another of these servers holds one of its devices."""
    for server in servers:
        held, shares_it = set(spec.devices) & set(server.spec.devices), {spec.server_id, *spec.beside}
        if held and server.state is not ServerState.EXITED and server.spec.server_id not in shares_it:
            raise LaunchFailed(f"{server.spec.server_id} holds {', '.join(sorted(held))}")


class Launcher(Protocol):
    """Starts and stops engine servers. Servers outlive the controller; another controller finds them."""

    def inventory(self) -> tuple[str, ...]:
        """All devices, in an order in which neighbours are best connected; with several nodes, as `node/device`.

        Blocks while it queries a cluster. Raises ConnectionError if that cannot be reached; safe to repeat.
        """

    async def launch(self, spec: ServerSpec) -> Server:
        """Start a server; does not wait until it answers.

        Raises LaunchFailed, and OSError if the launcher cannot do it now; that is safe to repeat.
        """

    async def find(self, fleet_id: str) -> list[Server]:
        """All servers of a fleet that exist, including those of an earlier controller and those that have ended."""

    async def stop(self, server_id: str, grace_s: float) -> None:
        """End a server and all its processes, by force after the grace; on return its devices are free. Idempotent.

        Raises TimeoutError if its node does not confirm it, ConnectionError if a cluster cannot be reached, and another
        OSError if the launcher cannot do it now, as on a full disk; all are safe to repeat.
        """
