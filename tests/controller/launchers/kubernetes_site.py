"""A Kubernetes cluster of two nodes for tests: our kubelet under the API double, or under a real kube-apiserver."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes
import yaml
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from controller.kubernetes_launcher import KubernetesLauncher
from engines.children import free_port
from tests.controller.launchers.kubelet import Kubelet, api
from tests.controller.launchers.kubernetes_api import ApiDouble, rules_allow

MANIFESTS = Path(__file__).parents[3] / "deploy/kubernetes"
NAMESPACE, NODES = "heddle", {"node-a": 2, "node-b": 2}
START_TIMEOUT_S = 120.0
TOKENS = """admin-token,admin,1,system:masters
controller-token,system:serviceaccount:heddle:heddle-controller,2,system:serviceaccounts
"""


@dataclass
class Cluster:
    """A cluster whose launcher may do what the manifests allow. `used`: what it did, on the double only."""

    url: str
    core: Any
    kubelet: Kubelet
    folder: Path
    used: set[tuple[str, str]] = field(default_factory=set)

    def launcher(self, **options: Any) -> KubernetesLauncher:
        """A launcher with the controller's account and the example fleet's template."""
        kubeconfig = self.folder / "kubeconfig"
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": "controller", "user": {"token": "controller-token"}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "controller"}}],
                    "current-context": "test",
                }
            )
        )
        options = {"namespace": NAMESPACE, "kubeconfig": str(kubeconfig), "owner": "heddle-fleet", **options}
        return KubernetesLauncher(template(), **options)


def manifests(*names: str) -> list[dict[str, Any]]:
    """The objects of these files, or of all files that are to be applied."""
    files = [MANIFESTS / f"{name}.yaml" for name in names or ("gateway", "controller", "fleet")]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def template() -> dict[str, Any]:
    """The example fleet's Pod template."""
    (fleet,) = manifests("fleet")
    read: dict[str, Any] = yaml.safe_load(fleet["data"]["engine-pod.yaml"])
    return read


@contextmanager
def double(folder: Path) -> Iterator[Cluster]:
    """A cluster on the API double."""
    kubelets: list[Kubelet] = []
    roles = [each for each in manifests("controller") if each["kind"] in ("Role", "ClusterRole")]
    server = ApiDouble(
        lambda *asked: rules_allow(roles, *asked),
        lambda name, num_lines: kubelets[0].log_of(name, num_lines),
    )
    url = server.start()
    core = api(url, "admin-token")
    core.create_namespaced_config_map(NAMESPACE, manifests("fleet")[0])
    kubelets.append(Kubelet(core, NAMESPACE, folder))
    with _with_nodes(Cluster(url, core, kubelets[0], folder, server.used)) as cluster:
        yield cluster
    server.stop()


@contextmanager
def real(folder: Path, kube_apiserver: str, etcd: str) -> Iterator[Cluster]:
    """A cluster on the real API server, with all manifests applied as an administrator would."""
    etcd_url, peer_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    port = free_port()
    key, certificate, tokens = folder / "key.pem", folder / "certificate.pem", folder / "tokens.csv"
    tokens.write_text(TOKENS)
    make_key = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test", "-days", "2")
    subprocess.run([*make_key, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    commands = [
        [
            *(etcd, "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", etcd_url, "--advertise-client-urls", etcd_url, "--listen-peer-urls", peer_url),
            *("--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"default={peer_url}"),
        ],
        [
            *(kube_apiserver, "--etcd-servers", etcd_url, "--bind-address", "127.0.0.1", "--secure-port", str(port)),
            *("--cert-dir", str(folder / "certificates"), "--token-auth-file", str(tokens)),
            *("--authorization-mode", "RBAC", "--service-cluster-ip-range", "10.0.0.0/24"),
            *("--service-account-issuer", "https://test", "--service-account-key-file", str(certificate)),
            *("--service-account-signing-key-file", str(key), "--endpoint-reconciler-type", "none"),
            # Without a controller manager, nobody creates the accounts' tokens.
            *("--disable-admission-plugins", "ServiceAccount", "--advertise-address", "10.255.255.1"),
        ],
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((folder / f"{Path(command[0]).name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
            stack.callback(process.wait)
            stack.callback(process.kill)
        core = api(f"https://127.0.0.1:{port}", "admin-token")
        _until_ready(core, folder / "kube-apiserver.log")
        kubernetes.utils.create_from_yaml(core.api_client, yaml_objects=manifests())
        kubelet = Kubelet(core, NAMESPACE, folder, (certificate, key))
        yield stack.enter_context(_with_nodes(Cluster(core.api_client.configuration.host, core, kubelet, folder)))


@contextmanager
def _with_nodes(cluster: Cluster) -> Iterator[Cluster]:
    try:
        for name, num_gpus in NODES.items():
            cluster.kubelet.add_node(name, num_gpus)
        yield cluster
    finally:
        cluster.kubelet.stop()


def _until_ready(core: Any, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            core.list_namespace()
            return
        except (HTTPError, ApiException):
            if time.monotonic() > deadline:
                raise AssertionError(log.read_text()[-2000:]) from None
            time.sleep(0.2)
