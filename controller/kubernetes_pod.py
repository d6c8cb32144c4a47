"""The Pod of an engine server, and the server that a Pod describes. Pure: dictionaries in, dictionaries out.

A Pod is made from a template: the operator's Pod manifest (image, volumes, tolerations, security), whose first
container is the engine's. Names, labels, command, GPUs, node and restart policy are set on top of it; see `engine_pod`.
"""

import copy
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from controller.launcher import Server, ServerSpec, ServerState, loaded_spec

Json = dict[str, Any]

FLEET_LABEL, SPEC_ANNOTATION, CONTAINER_ANNOTATION = "heddle/fleet", "heddle/spec", "heddle/container"
MANAGED = {"app.kubernetes.io/name": "heddle-engine", "app.kubernetes.io/managed-by": "heddle-controller"}
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
# NIXL's port, at which other servers ask for a server's memory.
_KV_PORT = 5600
# For people: the gateway observes engines itself, and takes the turns from one that hangs. A busy engine may need
# seconds to answer. There is no liveness probe, because nobody knows how many minutes a start takes.
_READINESS: Json = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 5}
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def engine_pod(spec: ServerSpec, template: Mapping[str, Any], resource: str, port: int) -> Json:
    """The Pod to create.

    Args:
        resource: the device plugin's name for a GPU, such as nvidia.com/gpu. The plugin also decides which of the
            node's GPUs the container sees, so nothing is pinned here.
        port: on which the server listens; each Pod has an address of its own.

    Raises:
        ValueError: the fleet's id cannot be a label, the devices are on several nodes, or a part of the template that
            is added to has another form than Kubernetes'.
    """
    if not _LABEL.fullmatch(spec.fleet_id):
        raise ValueError(f"fleet id {spec.fleet_id!r} cannot be a label's value")
    nodes = {device.rpartition("/")[0] for device in spec.devices}
    if len(nodes) != 1:
        raise ValueError(f"{spec.server_id} would span {len(nodes)} nodes; a Pod is on one")
    pod = copy.deepcopy(dict(template))
    metadata = _table(pod, "metadata")
    metadata["name"] = pod_name(spec.server_id)
    _table(metadata, "labels").update({**MANAGED, FLEET_LABEL: spec.fleet_id})
    container = pod["spec"]["containers"][0]
    _table(metadata, "annotations")[SPEC_ANNOTATION] = json.dumps(asdict(spec), sort_keys=True)
    metadata["annotations"][CONTAINER_ANNOTATION] = container["name"]
    # The controller is the only writer of the fleet: a Pod that has ended stays ended, and shows why.
    pod["spec"]["restartPolicy"] = "Never"
    on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": sorted(nodes)}]}
    required = {"nodeSelectorTerms": [on_node]}
    _table(pod["spec"], "affinity")["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    _fill_container(container, spec, resource, port)
    return pod


def check_template(template: object, path: object) -> None:
    """Raises ValueError, which names the file, if this is not a Pod manifest with a container for the engine, or no
    Pod can be made of it. What is only passed on, Kubernetes judges."""
    spec = template.get("spec") if isinstance(template, Mapping) else None
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    if not (isinstance(containers, list) and containers and isinstance(containers[0], Mapping)):
        raise ValueError(f"template {path} is not a Pod manifest: it has no spec.containers")
    if missing := [name for name in ("name", "image") if not containers[0].get(name)]:
        raise ValueError(f"template {path}: its first container, which is the engine's, has no {missing[0]}")
    try:
        engine_pod(ServerSpec("engine", "fleet", 1, ("node/0",), ()), template, "gpu", 8000)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"template {path}: {error}") from None


def pod_name(server_id: str) -> str:
    """A name that Kubernetes accepts: the server's id, or a similar name if the id cannot be one."""
    if _NAME.fullmatch(server_id):
        return server_id
    readable = re.sub(r"[^a-z0-9]+", "-", server_id.lower()).strip("-")[:50]
    return f"{readable}-{hashlib.sha256(server_id.encode()).hexdigest()[:8]}".lstrip("-")


def is_of(pod: Mapping[str, Any], server_id: str) -> bool:
    """Whether a Pod belongs to this server, and not to something else of the same name."""
    return SPEC_ANNOTATION in pod["metadata"].get("annotations", {}) and spec_of(pod).server_id == server_id


def spec_of(pod: Mapping[str, Any]) -> ServerSpec:
    """The server that a Pod was made for."""
    return loaded_spec(json.loads(pod["metadata"]["annotations"][SPEC_ANNOTATION]))


def engines_container(pod: Mapping[str, Any]) -> str:
    """The name of the engine's container. The cluster may have put others before it, such as a proxy."""
    name: str = pod["metadata"]["annotations"].get(CONTAINER_ANNOTATION) or pod["spec"]["containers"][0]["name"]
    return name


def server_of(pod: Mapping[str, Any], last_lines: tuple[str, ...], node_cause: str, port: int) -> Server:
    """The server as its Pod shows it.

    Args:
        node_cause: what happened to its node, in words; "" while the node is well.
    """
    status = pod.get("status") or {}
    state, cause = ServerState.STARTING, ""
    if status.get("phase") in ("Succeeded", "Failed") or _engines_end(pod) is not None:
        state, cause = ServerState.EXITED, _exit_cause(pod)
    elif node_cause:
        state, cause = ServerState.EXITED, node_cause
    elif status.get("phase") == "Running":
        state = ServerState.RUNNING
    address = status.get("podIP")
    host = f"[{address}]" if address and ":" in address else address
    return Server(
        spec_of(pod), state, f"http://{host}:{port}" if host else None, cause, last_lines or _why_it_waits(status)
    )


def _table(of: Json, name: str) -> Json:
    """A table of a manifest, made if it is not there. To Kubernetes one without a value is not: `labels:` with all
    lines below it commented out.
    """
    if of.get(name) is None:
        of[name] = {}
    table: Json = of[name]
    if not isinstance(table, dict):
        raise ValueError(f"{name} must be a table, not {table!r}")
    return table


def _variables(container: Json) -> Json:
    """The entries of a container's `env` by their names."""
    entries = container.get("env") or ()
    if not isinstance(entries, list | tuple) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries
    ):
        raise ValueError("env must be a list of tables, such as - {name: A, value: b}")  # no values: some are secret
    return {entry["name"]: entry for entry in entries}


def _fill_container(container: Json, spec: ServerSpec, resource: str, port: int) -> None:
    # Kubernetes fills in "$(POD_IP)", and takes "$$" for "$"; any other "$" belongs to the engine and must stay.
    escaped = (argument.replace("$", "$$") for argument in spec.command)
    container["command"] = [part.replace("{port}", str(port)).replace("{host}", "$(POD_IP)") for part in escaped]
    container.pop("args", None)
    environment = {"POD_IP": {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}}
    environment |= _variables(container)
    places = {"{host}": "$(POD_IP)", "{kv_port}": str(_KV_PORT)}  # a Pod shares its ports with nobody
    environment |= {
        name: {"name": name, "value": places.get(value) or value.replace("$", "$$")}
        for name, value in spec.environment.items()
    }
    container["env"] = list(environment.values())
    container["ports"] = [{"name": "http", "containerPort": port}]
    container.setdefault("readinessProbe", copy.deepcopy(_READINESS))
    resources = _table(container, "resources")
    # Indivisible resources need equal requests and limits.
    for kind in ("requests", "limits"):
        _table(resources, kind)[resource] = str(len(spec.devices))


def _exit_cause(pod: Mapping[str, Any]) -> str:
    status, ended = pod["status"], _engines_end(pod)
    if ended is not None and not status.get("reason"):
        return _how(ended)
    others = [f"{_how(other)} of {name}" for name, other in _containers(status, "terminated") if other["exitCode"]]
    said = status.get("message") or ", ".join(others) or "no container has run"
    return f"{status.get('reason') or status['phase']}: {said}"


def _how(ended: Mapping[str, Any]) -> str:
    why = ended.get("reason")
    told = f" ({why})" if why not in (None, "Error", "Completed") else ""
    return f"exit status {ended['exitCode']}{told}"


def _engines_end(pod: Mapping[str, Any]) -> Json | None:
    """How the engine's container ended; None if it has not. Others beside it, such as a proxy, may go on for ever, and
    are listed by their names.
    """
    return dict(_containers(pod.get("status") or {}, "terminated")).get(engines_container(pod))


def _why_it_waits(status: Mapping[str, Any]) -> tuple[str, ...]:
    """Kubernetes' reasons why a Pod does not run: no room, no image."""
    conditions = [each for each in status.get("conditions") or () if each["status"] == "False"]
    if status.get("phase") != "Pending":
        return ()
    waiting = [state for _, state in _containers(status, "waiting")]
    given = [each for each in (*conditions, *waiting) if each.get("reason")]
    # Two conditions may say the same, and a container that waits for others says no more than that.
    return tuple(dict.fromkeys(": ".join(filter(None, (each["reason"], each.get("message")))) for each in given))


def _containers(status: Mapping[str, Any], state: str) -> list[tuple[str, Json]]:
    """The names of containers in this state, and the state; those that prepare the Pod come first."""
    listed = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    found = [(each["name"], (each.get("state") or {}).get(state)) for each in listed]
    return [(name, value) for name, value in found if value]
