"""Launches servers as Pods of a Kubernetes cluster, with the official client.

Rules:

- A device is one of a node's GPUs, "node/number". The controller chooses the node and the number of GPUs; the node's
  device plugin chooses which ones.
- A Pod is its server's only record: its specification is an annotation, and its labels name the fleet. There is no
  Service, because a Pod that is never restarted keeps its address.
- A Pod is never deleted by force. If a lost node cannot confirm its end, that is reported, and a person decides.
"""

import asyncio
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from controller.kubernetes_pod import (
    FLEET_LABEL,
    MANAGED,
    Json,
    check_template,
    engine_pod,
    engines_container,
    is_of,
    pod_name,
    server_of,
)
from controller.launcher import Launcher, LaunchFailed, Server, ServerSpec, check_free

try:
    import kubernetes
except ModuleNotFoundError:
    message = "launcher = \"kubernetes\" needs its client: pip install 'kubernetes>=36'"
    raise ModuleNotFoundError(message, name="kubernetes") from None
import yaml
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

NUM_LAST_LINES = 30  # enough to show a Python traceback's end
_TAIL_BYTES = 16 * 1024
REQUEST_TIMEOUT_S = 30.0
# Of one log. The API server gets it from the node's kubelet, and waits for one without power until the client leaves.
LOG_TIMEOUT_S = 3.0
_MAX_LOGS_AT_ONCE = 32  # so that the engines of a few dead nodes cost one timeout together, not one each
_POLL_S = 0.5  # of each Pod that is to end: a whole fleet must not crowd out others at the API server
_SELECTOR = ",".join(f"{name}={value}" for name, value in MANAGED.items())


class KubernetesLauncher:
    """Pods of one namespace.

    Args:
        template: a Pod manifest; see `kubernetes_pod`.
        kubeconfig: file. None: inside a cluster the Pod's own account, else ~/.kube/config.
        context: of the kubeconfig; None is its current one.
        resource: the device plugin's name for a GPU.
        nodes: label selector of the nodes to use, such as "pool=rollout"; "" is all that have the resource.
        port: of each server.
        owner: name of a ConfigMap whose deletion also deletes the engines. "": none.
        confirm_timeout_s: how long a node may take beyond a server's grace: unmounting a network disk, or freeing GPU
            memory, takes a while.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        namespace: str = "default",
        kubeconfig: str | None = None,
        context: str | None = None,
        resource: str = "nvidia.com/gpu",
        nodes: str = "",
        port: int = 8000,
        owner: str = "",
        confirm_timeout_s: float = 120.0,
    ) -> None:
        self._template, self._namespace = template, namespace
        self._resource, self._nodes, self._port, self._owner = resource, nodes, port, owner
        self._confirm_timeout_s = confirm_timeout_s
        configuration = kubernetes.client.Configuration()
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            kubernetes.config.load_incluster_config(client_configuration=configuration)
        else:
            kubernetes.config.load_kube_config(kubeconfig, context, configuration)
        configuration.retries = False  # The client must not silently repeat a request that changes something.
        self._client = kubernetes.client.ApiClient(configuration)
        self._core = kubernetes.client.CoreV1Api(self._client)

    def inventory(self) -> tuple[str, ...]:
        """The GPUs of each node that is ready and accepts Pods, node by node. Queries the API server.

        Raises:
            ConnectionError: the API server cannot be reached; safe to repeat.
        """
        devices = []
        try:
            nodes = self._read_nodes(self._nodes)
        except (HTTPError, ApiException) as error:
            raise ConnectionError(f"Kubernetes: {_words(error)}") from error
        for name, node in sorted(nodes.items()):
            if _is_ready(node) and not (node.get("spec") or {}).get("unschedulable"):
                num_gpus = int(node["status"].get("allocatable", {}).get(self._resource, 0))
                devices += [f"{name}/{number}" for number in range(num_gpus)]
        return tuple(devices)

    async def launch(self, spec: ServerSpec) -> Server:
        """Create a server's Pod, or return the existing one of this id.

        Raises:
            LaunchFailed: a device is unknown or held, or the API server refused the Pod.
            ConnectionError: the API server cannot be reached, or not do it now; safe to repeat.
        """
        try:
            return await asyncio.to_thread(self._launch, spec)
        except (ValueError, HTTPError, ApiException) as error:
            kind = ConnectionError if _may_pass(error) else LaunchFailed
            raise kind(f"Kubernetes: {_words(error)}") from error

    async def find(self, fleet_id: str) -> list[Server]:
        """All servers of a fleet whose Pods exist, oldest first.

        Last lines are those of servers that have ended or are not ready, on nodes that answer.

        Raises:
            ConnectionError: the API server cannot be reached; safe to repeat.
        """
        try:
            return await asyncio.to_thread(self._find, f"{FLEET_LABEL}={fleet_id}")
        except (HTTPError, ApiException) as error:
            raise ConnectionError(f"Kubernetes: {_words(error)}") from error

    async def stop(self, server_id: str, grace_s: float) -> None:
        """Delete a server's Pod and wait until its node confirms that it has ended.

        Raises:
            TimeoutError: the node has not confirmed it; safe to repeat.
            ConnectionError: the API server cannot be reached; safe to repeat.
        """
        # A grace of 0 would be a forced deletion: the Pod is forgotten while it still runs.
        grace = max(1, math.ceil(grace_s))
        deadline = time.monotonic() + grace + self._confirm_timeout_s
        try:
            pod = await asyncio.to_thread(self._delete, server_id, grace)
            # A thread that waited for a lost node would be missing where others look at the fleet.
            while pod is not None and await asyncio.to_thread(self._is_there, pod):
                if time.monotonic() > deadline:
                    name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
                    raise TimeoutError(f"node {node} does not say that Pod {name} has ended; is the node lost?")
                await asyncio.sleep(_POLL_S)
        except (HTTPError, ApiException) as error:
            raise ConnectionError(f"Kubernetes: {_words(error)}") from error

    def _launch(self, spec: ServerSpec) -> Server:
        pod = engine_pod(spec, self._template, self._resource, self._port)
        if (there := self._read_pod(pod["metadata"]["name"])) is None:
            if unknown := set(spec.devices) - set(self.inventory()):
                raise LaunchFailed(f"no such device, or its node is not ready: {', '.join(sorted(unknown))}")
            # This server may be among them by now: then another controller was first, which is found out below.
            check_free(spec, (server_of(pod, (), "", self._port) for pod in self._read_pods(_SELECTOR)))
            if self._owner:
                pod["metadata"]["ownerReferences"] = [self._owner_reference()]
            try:
                created = self._core.create_namespaced_pod(self._namespace, pod, _request_timeout=REQUEST_TIMEOUT_S)
                there = self._as_json(created)
            except ApiException as error:
                if error.status != 409:
                    raise
                there = self._read_pod(pod["metadata"]["name"])  # Another controller was first.
        if there is None or not is_of(there, spec.server_id):
            raise LaunchFailed(f"the Pod {pod['metadata']['name']} is another one, or goes away")
        return server_of(there, (), "", self._port)

    def _find(self, selector: str) -> list[Server]:
        pods = sorted(self._read_pods(f"{_SELECTOR},{selector}"), key=lambda pod: pod["metadata"]["creationTimestamp"])
        nodes = self._read_nodes() if pods else {}
        with ThreadPoolExecutor(_MAX_LOGS_AT_ONCE) as pool:
            lines = list(pool.map(lambda pod: self._last_lines(pod) if _is_log_needed(pod, nodes) else (), pods))
        return [
            server_of(pod, last_lines, _node_cause(pod, nodes), self._port)
            for pod, last_lines in zip(pods, lines, strict=True)
        ]

    def _delete(self, server_id: str, grace_s: int) -> Json | None:
        """Ask for the end of a server's Pod, and return it; None if there is none."""
        name = pod_name(server_id)
        pod = self._read_pod(name)
        if pod is None or not is_of(pod, server_id):
            return None
        # All in the body: if there is one, the API server ignores the query.
        how = {"gracePeriodSeconds": grace_s, "preconditions": {"uid": pod["metadata"]["uid"]}}
        try:
            self._core.delete_namespaced_pod(name, self._namespace, body=how, _request_timeout=REQUEST_TIMEOUT_S)
        except ApiException as error:
            if error.status not in (404, 409):  # It is already gone.
                raise
        return pod

    def _is_there(self, pod: Json) -> bool:
        """Whether this Pod, and not a later one of its name, exists."""
        there = self._read_pod(pod["metadata"]["name"])
        return there is not None and there["metadata"]["uid"] == pod["metadata"]["uid"]

    def _last_lines(self, pod: Json) -> tuple[str, ...]:
        """The end of a Pod's output; nothing if it cannot be had now."""
        # A limit cuts off the end, so it is one that holds them all: container runtimes split lines at 16 KB.
        limit = NUM_LAST_LINES * _TAIL_BYTES
        options = {"tail_lines": NUM_LAST_LINES, "limit_bytes": limit, "_request_timeout": LOG_TIMEOUT_S}
        container = engines_container(pod)
        try:
            answer = self._core.read_namespaced_pod_log(
                pod["metadata"]["name"], self._namespace, container=container, _preload_content=False, **options
            )
            return tuple(answer.data[-_TAIL_BYTES:].decode(errors="replace").splitlines())
        except (HTTPError, ApiException):
            return ()  # Its node does not answer, or the container's log is gone with it.

    def _owner_reference(self) -> Json:
        owner = self._core.read_namespaced_config_map(self._owner, self._namespace, _request_timeout=REQUEST_TIMEOUT_S)
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": self._owner, "uid": owner.metadata.uid}

    def _read_pod(self, name: str) -> Json | None:
        try:
            return self._as_json(
                self._core.read_namespaced_pod(name, self._namespace, _request_timeout=REQUEST_TIMEOUT_S)
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def _read_pods(self, selector: str) -> list[Json]:
        options = {"label_selector": selector, "_request_timeout": REQUEST_TIMEOUT_S}
        pods: list[Json] = self._as_json(self._core.list_namespaced_pod(self._namespace, **options))["items"]
        return pods

    def _read_nodes(self, selector: str = "") -> dict[str, Json]:
        nodes = self._core.list_node(label_selector=selector, _request_timeout=REQUEST_TIMEOUT_S)
        return {node["metadata"]["name"]: node for node in self._as_json(nodes)["items"]}

    def _as_json(self, model: Any) -> Json:
        value: Json = self._client.sanitize_for_serialization(model)
        return value


def kubernetes_launcher(options: Mapping[str, Any]) -> Launcher:
    """The launcher of a fleet file with launcher = "kubernetes"; the options are KubernetesLauncher's arguments.

    `template` there is the path of a YAML file.

    Raises:
        ValueError: the template or the kubeconfig cannot be used.
    """
    if "template" not in options:
        raise ValueError("template is missing: the path of a Pod manifest")
    path = Path(options["template"])
    try:
        template = yaml.safe_load(path.read_bytes())  # whatever the locale is
        check_template(template, path)
        return KubernetesLauncher(**{**options, "template": template})
    except (OSError, yaml.YAMLError, kubernetes.config.ConfigException) as error:
        raise ValueError(str(error)) from None


def _node_cause(pod: Json, nodes: Mapping[str, Json]) -> str:
    """What happened to a Pod's node, once Kubernetes has given the Pod up; a node may be unreachable for a while."""
    name = pod["spec"].get("nodeName")
    if name and name not in nodes:
        return f"its node {name} is gone"
    if name and pod["metadata"].get("deletionTimestamp") and not _is_ready(nodes[name]):
        return f"its node {name} is lost; Kubernetes has given it up"
    return ""


def _is_log_needed(pod: Json, nodes: Mapping[str, Json]) -> bool:
    """Whether a Pod has run and may have failed. A node that is not ready is not asked: it would not answer."""
    has_run = (pod.get("status") or {}).get("phase") not in (None, "Pending")
    return has_run and not _is_ready(pod) and _is_ready(nodes.get(pod["spec"].get("nodeName"), {}))


def _is_ready(it: Json) -> bool:
    """Whether a node, or a Pod, has the condition `Ready`."""
    conditions = (it.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _may_pass(error: Exception) -> bool:
    """Whether the API server did not answer, or could not do what it was asked to."""
    if isinstance(error, ApiException):
        return error.status in (0, 429) or error.status >= 500  # 0: TLS failed
    return isinstance(error, HTTPError)


def _words(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}: {error.body}"
    return str(error)
