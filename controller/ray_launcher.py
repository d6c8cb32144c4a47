"""Launches servers on the nodes of a Ray cluster: a placement group and a detached actor for each (`ray_server.py`).

Rules:

- A device is one of a node's logical GPUs, "node name-id/number". The controller chooses the node and the number of
  GPUs. Ray chooses which ones (CUDA_VISIBLE_DEVICES), so no other job of the cluster ever shares one.
- A server stays on one node (STRICT_PACK). With `across_nodes` it may span several (PACK, one bundle per node). The
  command then runs once on each, with "{node_rank}", "{num_nodes}", "{head_host}" and "{head_port}" filled in.
- Ray restarts nothing: the controller is the only writer of the fleet.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from controller.launcher import Launcher, LaunchFailed, Server, ServerSpec, ServerState, check_free, loaded_spec

try:
    import ray
except ModuleNotFoundError:
    raise ModuleNotFoundError("launcher = \"ray\" needs Ray: pip install 'ray>=2.60'", name="ray") from None
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from controller import ray_server
from controller.ray_server import NAMESPACE, Keeper, Part, Records, all_records

# Limit of ended servers; older ones are forgotten when another is launched.
MAX_ENDED_KEPT = 50
# A worker process starts in a second; a loaded node takes longer.
KEEPER_TIMEOUT_S = 120.0
LOOK_TIMEOUT_S = 10.0  # A node that is cut off must not keep the others from being observed.
_POLL_S = 0.02
# Launches and stops at once, each in a thread that waits for Ray or for a server's end. They are not asyncio's threads,
# of which there may be six: looks at the fleet need those.
_MAX_ACTS = 64


class RayLauncher:
    """Servers on the nodes of a Ray cluster that this process joins as a driver.

    Args:
        address: of Ray's head, "host:port"; "auto" is the cluster that runs on this machine.
        across_nodes: whether a server may have devices of several nodes.
        log_dir: folder on each node.
        reserve_timeout_s: how long Ray may take to give the GPUs, which are free as far as the controller knows.
    """

    def __init__(
        self,
        address: str = "auto",
        across_nodes: bool = False,
        log_dir: str = "/tmp/heddle-logs",
        reserve_timeout_s: float = 60.0,
    ) -> None:
        self._across_nodes = across_nodes
        self._log_dir = log_dir
        self._reserve_timeout_s = reserve_timeout_s
        self._acts = ThreadPoolExecutor(_MAX_ACTS)
        if not ray.is_initialized():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        ray.cloudpickle.register_pickle_by_value(ray_server)

    def inventory(self) -> tuple[str, ...]:
        """The GPUs of each living node, node by node.

        Raises:
            ConnectionError: Ray cannot be reached; safe to repeat.
        """
        try:
            nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=_name)
        except RayError as error:
            raise ConnectionError(f"Ray: {error}") from error
        return tuple(f"{_name(node)}/{i}" for node in nodes for i in range(int(node["Resources"].get("GPU", 0))))

    async def launch(self, spec: ServerSpec) -> Server:
        """Start a server, or return the one of this id that is or was there.

        Raises:
            LaunchFailed: a device is unknown, held, or on another node than the first; or Ray does not give it.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._acts, self._launch, spec)
        except ConnectionError as error:
            raise LaunchFailed(str(error)) from error
        except RayError as error:
            raise LaunchFailed(f"Ray: {error}") from error

    async def find(self, fleet_id: str) -> list[Server]:
        """All servers of a fleet that are recorded.

        Raises:
            ConnectionError: Ray cannot be reached; safe to repeat.
        """
        try:
            return await asyncio.to_thread(lambda: _servers(all_records(fleet_id)))
        except RayError as error:
            raise ConnectionError(f"Ray: {error}") from error

    async def stop(self, server_id: str, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to all its processes; returns when its placement group is gone.

        Raises:
            ConnectionError: Ray cannot be reached; safe to repeat.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(self._acts, _stop, server_id, grace_s)
        except RayError as error:
            raise ConnectionError(f"Ray: {error}") from error

    def _launch(self, spec: ServerSpec) -> Server:
        records = Records(spec.fleet_id, spec.server_id)
        if records.read("server") is None:
            node_ids = self._checked(spec)
            _prune(spec.fleet_id)
            records.write_once("server", spec=asdict(spec), node_ids=node_ids, at=time.time())
        (server,) = _servers([records])
        if server.state is ServerState.EXITED or records.read("stop"):
            return server
        self._start(server.spec, records)
        (server,) = _servers([records])
        return server

    def _checked(self, spec: ServerSpec) -> dict[str, int]:
        """The number of devices on each node (by Ray id); the first device's node comes first."""
        if unknown := set(spec.devices) - set(self.inventory()):
            raise LaunchFailed(f"no such device in the Ray cluster: {', '.join(sorted(unknown))}")
        node_ids = {_name(node): node["NodeID"] for node in ray.nodes() if node["Alive"]}
        num_devices = Counter(node_ids[device.rpartition("/")[0]] for device in spec.devices)
        if len(num_devices) > 1 and not self._across_nodes:
            raise LaunchFailed(f"{spec.server_id} would span {len(num_devices)} nodes; across_nodes is off")
        servers = _servers(all_records())
        check_free(spec, servers)
        for server in servers:
            if set(spec.devices) & set(server.spec.devices):
                _release(server.spec.server_id)  # Its keeper may have died before it could release them.
        return dict(num_devices)

    def _start(self, spec: ServerSpec, records: Records) -> None:
        """Reserve the GPUs and start the keepers, as far as not done yet."""
        node_ids = (records.read("server") or {})["node_ids"]
        group = _group(spec.server_id) or _reserve(spec.server_id, node_ids)
        if not group.wait(self._reserve_timeout_s):
            _release(spec.server_id)
            records.erase()
            raise LaunchFailed(f"Ray has not given {node_ids} to {spec.server_id} in {self._reserve_timeout_s:g} s")
        head = ""
        for rank, num_gpus in enumerate(node_ids.values()):
            options = {
                "name": _actor_name(spec.server_id, rank),
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
                "max_restarts": 0,
                "max_concurrency": 8,
                "num_cpus": 0,
                "num_gpus": num_gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank),
            }
            part = Part(rank, len(node_ids), head)
            arguments = (records, part, spec.command, dict(spec.environment), self._log_dir)
            keeper = ray.remote(Keeper).options(**options).remote(*arguments)
            try:
                head = ray.get(keeper.head.remote(), timeout=KEEPER_TIMEOUT_S)
            except RayError:
                if records.read("exit") is None:
                    raise
                return  # It has already ended, and recorded why.
        records.write_once("launched", at=time.time())


def ray_launcher(options: Mapping[str, Any]) -> Launcher:
    """The launcher of a fleet file with launcher = "ray"; the options are RayLauncher's arguments.

    Raises:
        ValueError: there is no Ray cluster at the address, or it runs another version of Ray or Python.
    """
    try:
        return RayLauncher(**options)
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(" ".join(str(error).split())) from None  # Ray's words have several lines


def _servers(all_of: Sequence[Records]) -> list[Server]:
    """The servers as they are now, oldest first."""
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    written = [(records, asked) for records in all_of if (asked := records.read("server"))]
    written.sort(key=lambda pair: pair[1]["at"])
    keepers = {records: _keepers(records, asked) for records, asked in written if records.read("exit") is None}
    lines = _last_lines({records: of_nodes[0] for records, of_nodes in keepers.items() if of_nodes[0] is not None})
    return [
        _server(records, asked, keepers.get(records, ()), lines.get(records, ()), nodes) for records, asked in written
    ]


def _server(
    records: Records,
    asked: dict[str, Any],
    keepers: Sequence[Any],
    last_lines: tuple[str, ...],
    nodes: Mapping[str, Any],
) -> Server:
    spec = loaded_spec(asked["spec"])
    # Read after the keepers were looked up: if one is gone by now, it has left its last record.
    process, ended = records.read("process") or {}, records.read("exit")
    state, cause = ServerState.RUNNING if process else ServerState.STARTING, ""
    if ended is not None:
        state, cause, last_lines = ServerState.EXITED, ended["cause"], tuple(ended["last_lines"])
    elif lost := [node_id for node_id in asked["node_ids"] if not nodes.get(node_id, {}).get("Alive")]:
        why = nodes.get(lost[0], {}).get("DeathReasonMessage") or "Ray has forgotten it"
        state, cause = ServerState.EXITED, f"its node {lost[0]} is lost: {why}"
    elif process and any(keeper is None for keeper in keepers):
        state, cause = ServerState.EXITED, "its Ray actor died, and took it along"
    return Server(spec, state, process.get("url"), cause, last_lines)


def _keepers(records: Records, asked: dict[str, Any]) -> list[Any]:
    """That of each node, the first one's first; None for one that is gone. During its launch, only the first counts."""
    num_nodes = len(asked["node_ids"]) if records.read("launched") else 1
    return [_keeper(records.server_id, rank) for rank in range(num_nodes)]


def _last_lines(keepers: Mapping[Records, Any]) -> dict[Records, tuple[str, ...]]:
    """The last lines of the servers whose keepers answer in time."""
    asked = {keeper.last_lines.remote(): records for records, keeper in keepers.items()}
    if not asked:
        return {}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_TIMEOUT_S)
    lines = {}
    for reference in answered:
        try:
            lines[asked[reference]] = tuple(ray.get(reference))
        except RayError:
            lines[asked[reference]] = ()
    return lines


def _stop(server_id: str, grace_s: float) -> None:
    for records in all_records():
        if records.server_id != server_id or (asked := records.read("server")) is None:
            continue
        records.write_once("stop", at=time.time())
        keepers = [_keeper(server_id, rank) for rank in range(len(asked["node_ids"]))]
        stopping = [keeper.stop.remote(grace_s) for keeper in keepers if keeper is not None]
        if stopping:
            # A keeper on a lost node never answers; one that has begun to stop ends with its placement group.
            ray.wait(stopping, num_returns=len(stopping), timeout=grace_s + LOOK_TIMEOUT_S)
        _release(server_id)
        (server,) = _servers([records])
        records.write_once("exit", cause=server.exit_cause or "stopped", last_lines=server.last_lines, at=time.time())


def _release(server_id: str) -> None:
    """Release its GPUs, and wait until they are free and its actors are gone."""
    group = _group(server_id)
    if group is not None:
        remove_placement_group(group)
        while placement_group_table(group)["state"] != "REMOVED":
            time.sleep(_POLL_S)


def _reserve(server_id: str, node_ids: Mapping[str, int]) -> PlacementGroup:
    try:
        return placement_group(
            [{"GPU": float(num_gpus)} for num_gpus in node_ids.values()],
            strategy="STRICT_PACK" if len(node_ids) == 1 else "PACK",
            name=server_id,
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in node_ids],
        )
    except RayError:
        if (group := _group(server_id)) is not None:
            return group  # Another controller was first.
        raise


def _prune(fleet_id: str) -> None:
    ended = [(end["at"], records) for records in all_records(fleet_id) if (end := records.read("exit"))]
    for _, records in sorted(ended, key=lambda pair: pair[0])[:-MAX_ENDED_KEPT]:
        records.erase()


def _group(server_id: str) -> PlacementGroup | None:
    try:
        return get_placement_group(server_id)
    except ValueError:
        return None


def _keeper(server_id: str, rank: int = 0) -> Any:
    try:
        return ray.get_actor(_actor_name(server_id, rank), NAMESPACE)
    except ValueError:
        return None


def _actor_name(server_id: str, rank: int) -> str:
    return server_id if rank == 0 else f"{server_id}#{rank}"


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeName']}-{node['NodeID'][:8]}"
