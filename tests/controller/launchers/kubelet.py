"""Nodes for a cluster that has none: one scheduler and one kubelet for all nodes, which run containers as local
processes.

It talks to the API server with the official client, as the real ones do, so it works under the API double and under a
real kube-apiserver alike. Each Pod has its own address (127.0.x.y), so all may use the same port.
"""

import contextlib
import datetime
import http.server
import itertools
import os
import re
import signal
import ssl
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes
from kubernetes.client import ApiException

Json = dict[str, Any]
RESOURCE = "nvidia.com/gpu"
_LOOK_EVERY_S = 0.05


@dataclass
class Running:
    """A Pod's container as a process group."""

    process: "subprocess.Popen[bytes]"
    log: Path
    address: str
    gpus: tuple[str, ...]
    stop_at: float | None = None


class Kubelet:
    """Args:
    core: the API, as an administrator.
    tls: certificate and key files, for a real kube-apiserver that asks for logs.
    """

    def __init__(self, core: Any, namespace: str, folder: Path, tls: tuple[Path, Path] | None = None) -> None:
        self._core, self._namespace, self._folder = core, namespace, folder
        self._running: dict[str, Running] = {}
        self._num_gpus: dict[str, int] = {}
        self._dark: dict[str, threading.Event] = {}
        # Its process's own: tests run beside each other, and all containers listen on one port.
        network = f"127.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250}"
        self._addresses = (f"{network}.{i % 250 + 1}" for i in itertools.count())
        self._ending = threading.Event()
        self._port = self._serve_logs(tls) if tls else 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add_node(self, name: str, num_gpus: int) -> None:
        """Add a node that is ready."""
        self._num_gpus[name] = num_gpus
        capacity = {"pods": "110", RESOURCE: str(num_gpus)}
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"capacity": capacity, "allocatable": capacity, "conditions": conditions}
        status["addresses"] = [{"type": "InternalIP", "address": "127.0.0.1"}]
        status["daemonEndpoints"] = {"kubeletEndpoint": {"Port": self._port}}
        self._core.create_node({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status})

    def lose_node(self, name: str) -> None:
        """The node is suddenly gone, with everything that runs there."""
        for pod in self._pods():
            if pod["spec"].get("nodeName") == name and (running := self._running.pop(pod["metadata"]["name"], None)):
                _kill(running)
            if pod["spec"].get("nodeName") == name and (is_over := self._dark.pop(pod["metadata"]["name"], None)):
                is_over.set()
        self._core.delete_node(name)

    def freeze_node(self, name: str) -> None:
        """The node is no longer heard from; nobody knows what runs there."""
        self._num_gpus.pop(name)
        self._core.patch_node_status(name, {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})

    def cut_power(self, name: str) -> None:
        """The node stops working, but counts as ready; whoever asks it for a log waits until it is lost."""
        self._num_gpus.pop(name)
        is_over = threading.Event()
        on_node = [pod["metadata"]["name"] for pod in self._pods() if pod["spec"].get("nodeName") == name]
        self._dark |= dict.fromkeys(on_node, is_over)

    def log_of(self, pod_name: str, num_lines: int) -> str | None:
        """The end of a container's output; None if none was started."""
        if pod_name in self._dark:
            self._dark[pod_name].wait()
        log = self._folder / f"{pod_name}.log"
        if not log.exists():
            return None
        return "".join(f"{line}\n" for line in log.read_text(errors="replace").splitlines()[-num_lines:])

    def stop(self) -> None:
        """End, and kill all containers."""
        self._ending.set()
        self._thread.join()
        for running in self._running.values():
            _kill(running)

    def _run(self) -> None:
        while not self._ending.wait(_LOOK_EVERY_S):
            for pod in self._pods():
                with contextlib.suppress(ApiException):  # It may change or go meanwhile; the next look sees that.
                    self._tend(pod)

    def _pods(self) -> list[Json]:
        listed = self._core.list_namespaced_pod(self._namespace)
        pods: list[Json] = self._core.api_client.sanitize_for_serialization(listed)["items"]
        return pods

    def _tend(self, pod: Json) -> None:
        name, phase = pod["metadata"]["name"], pod["status"]["phase"]
        running = self._running.get(name)
        if not pod["spec"].get("nodeName"):
            self._schedule(pod)
        elif pod["spec"]["nodeName"] not in self._num_gpus:
            return
        elif running is None and phase == "Pending" and not pod["metadata"].get("deletionTimestamp"):
            self._start(pod)
        elif running is not None and running.process.poll() is not None and phase == "Running":
            _kill(running)
            self._report_ended(pod, running)
        if pod["metadata"].get("deletionTimestamp"):
            self._end(pod, running)

    def _schedule(self, pod: Json) -> None:
        name = pod["metadata"]["name"]
        terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (node,) = terms["nodeSelectorTerms"][0]["matchFields"][0]["values"]
        if len(self._free_gpus(node)) >= _num_wanted(pod):
            binding = {"metadata": {"name": name}, "target": {"apiVersion": "v1", "kind": "Node", "name": node}}
            self._core.create_namespaced_pod_binding(name, self._namespace, binding, _preload_content=False)
        elif not pod["status"].get("conditions"):
            message = f"0/{len(self._num_gpus)} nodes are available: Insufficient {RESOURCE}."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            self._patch(name, {"conditions": [condition]})

    def _free_gpus(self, node: str) -> list[str]:
        on_node = {pod["metadata"]["name"] for pod in self._pods() if pod["spec"].get("nodeName") == node}
        held = {gpu for name in on_node & self._running.keys() for gpu in self._running[name].gpus}
        return [str(i) for i in range(self._num_gpus.get(node, 0)) if str(i) not in held]

    def _start(self, pod: Json) -> None:
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        address = next(self._addresses)
        gpus = tuple(self._free_gpus(pod["spec"]["nodeName"])[: _num_wanted(pod)])
        environment = {"PATH": os.environ["PATH"], "NVIDIA_VISIBLE_DEVICES": ",".join(gpus)}
        for entry in container.get("env", ()):
            value = address if "valueFrom" in entry else entry.get("value", "")
            environment[entry["name"]] = _expanded(value, environment)
        command = [_expanded(part, environment) for part in container["command"]]
        log = self._folder / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self._running[name] = Running(process, log, address, gpus)
        state = {"running": {"startedAt": _now()}, "waiting": None, "terminated": None}
        self._patch(name, {"phase": "Running", "podIP": address, "containerStatuses": [_container(container, state)]})

    def _report_ended(self, pod: Json, running: Running) -> None:
        status = running.process.returncode
        code = status if status >= 0 else 128 - status
        terminated = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": _now()}
        state = {"terminated": terminated, "running": None, "waiting": None}
        containers = [_container(pod["spec"]["containers"][0], state)]
        phase = "Failed" if code else "Succeeded"
        self._patch(pod["metadata"]["name"], {"phase": phase, "containerStatuses": containers})
        running.gpus = ()

    def _end(self, pod: Json, running: Running | None) -> None:
        name = pod["metadata"]["name"]
        if running is not None and running.process.poll() is None:
            if running.stop_at is None:
                running.process.terminate()
                running.stop_at = time.monotonic() + pod["metadata"]["deletionGracePeriodSeconds"]
            elif time.monotonic() >= running.stop_at:
                _kill(running)
            return
        if running is not None:
            _kill(running)
            del self._running[name]
        self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0)

    def _patch(self, name: str, status: Json) -> None:
        self._core.patch_namespaced_pod_status(name, self._namespace, {"status": status})

    def _serve_logs(self, tls: tuple[Path, Path]) -> int:
        """Serve /containerLogs/NAMESPACE/POD/CONTAINER, as the kubelet does."""
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                asked = parse_qs(url.query)
                log = kubelet.log_of(url.path.split("/")[3], int(asked.get("tailLines", ["100000"])[0]))
                self.send_response(404 if log is None else 200)
                self.end_headers()
                self.wfile.write((log or "").encode()[: int(asked.get("limitBytes", ["100000000"])[0])])

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.server_port


def _expanded(text: str, environment: dict[str, str]) -> str:
    """`$(NAME)` as Kubernetes expands it; `$$(` is a literal `$(`, and an unknown name stays."""

    def value(found: "re.Match[str]") -> str:
        if found[0].startswith("$$"):
            return found[0][1:]
        return environment.get(found[1], found[0])

    return re.sub(r"\$?\$\(([A-Za-z_][A-Za-z0-9_]*)\)|\$\$", lambda found: value(found) if found[1] else "$", text)


def _container(container: Json, state: Json) -> Json:
    about = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
    return {**about, "ready": "running" in state and state["running"] is not None, "state": state}


def _num_wanted(pod: Json) -> int:
    return int(pod["spec"]["containers"][0]["resources"]["limits"][RESOURCE])


def _kill(running: Running) -> None:
    """Kill a container's processes together."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def api(url: str, token: str, verify_ssl: bool = False) -> Any:
    """The API for the holder of a token."""
    configuration = kubernetes.client.Configuration()
    configuration.host, configuration.verify_ssl = url, verify_ssl
    configuration.api_key = {"authorization": f"Bearer {token}"}
    return kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(configuration))
