"""What a launcher does, whatever it launches with: processes of this machine, Ray placement groups, Kubernetes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class ServerState(StrEnum):
    """`starting`: launched, not seen to answer. `running`: its process runs. `exited`: it has ended."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One engine server to launch.

    Args:
        server_id: chosen by the controller, unique for ever; launching it twice gives the same server.
        fleet_id: whose it is; `find` gives only servers of this fleet.
        devices: GPUs (or CPU slots) that it holds; names within the launcher's own inventory. As many as `tp`.
        beside: ids of servers that sleep, with whom it may share devices; only local servers can.
        command: program and arguments; "{port}" and "{host}" in them are filled in by the launcher.
        leaves: patterns of files that it leaves on its node when it is killed; local servers' are removed.
        environment: added to the launcher's own; "{host}", and "{kv_port}" for another port, are filled in too.
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
        last_lines: the end of its output.
    """

    spec: ServerSpec
    state: ServerState
    url: str | None = None
    exit_cause: str = ""
    last_lines: tuple[str, ...] = ()


def loaded_spec(written: Mapping[str, Any]) -> ServerSpec:
    """What `asdict` made of a specification and JSON of that, as launchers keep it."""
    fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in written.items()}
    return ServerSpec(**fields)


class LaunchFailed(Exception):
    """The launcher could not start the server at all: no such device, no permission, its API refused."""


class Launcher(Protocol):
    """Starts and stops engine servers. Servers outlive the controller: another one finds them."""

    def inventory(self) -> tuple[str, ...]:
        """All devices, in an order in which neighbours are best connected; of several nodes, as `node/device`."""

    async def launch(self, spec: ServerSpec) -> Server:
        """Start a server; does not wait until it answers. Raises LaunchFailed."""

    async def find(self, fleet_id: str) -> list[Server]:
        """All servers of a fleet that exist, also those of an earlier controller and those that have ended."""

    async def stop(self, server_id: str, grace_s: float) -> None:
        """End a server and all its processes, by force after the grace; its devices are free on return. Idempotent."""
