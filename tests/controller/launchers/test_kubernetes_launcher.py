"""The launcher contract on Kubernetes, and what only this launcher promises.

Everything runs on our own kubelet, under a double of the API. If KUBE_APISERVER and ETCD name their programs, it also
runs under the real kube-apiserver, with the RBAC rules of the manifests.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from controller.kubernetes_pod import engine_pod
from controller.launcher import LaunchFailed, ServerSpec, ServerState

pytest.importorskip("kubernetes")
from tests.controller.launcher_contract import FAIL, PROMISES, SERVE, STUBBORN, Promise, Site
from tests.controller.launchers.kubernetes_site import NAMESPACE, Cluster, double, real, template
from tests.controller.launchers.waiting import serves_models, until
from tests.engines.raw_server import Peer, raw_server

has_real = {"KUBE_APISERVER", "ETCD"} <= os.environ.keys()


@pytest.fixture(scope="module", params=["double", *(["real"] if has_real else [])])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp(f"kubernetes-{request.param}")
    if request.param == "double":
        with double(folder) as cluster:
            yield cluster
    else:
        with real(folder, os.environ["KUBE_APISERVER"], os.environ["ETCD"]) as cluster:
            yield cluster


@pytest.fixture
async def site(cluster: Cluster) -> AsyncIterator[Site]:
    # The device plugin chooses which GPUs of its node a container sees; a test below covers that.
    site = Site(cluster.launcher, sys.executable)
    yield site
    for server in await site.launcher.find(site.fleet_id):
        await site.launcher.stop(server.spec.server_id, 1.0)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_the_kubernetes_launcher_keeps_the_contract(promise: Promise, site: Site) -> None:
    """What every launcher promises."""
    await promise(site)


async def test_a_launch_succeeds_if_another_controller_is_just_ahead(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other creates the same server's Pod after this one saw none, and before this one checks who holds the
    devices."""
    spec, loop = site.spec(), asyncio.get_running_loop()
    inventory = site.launcher.inventory

    def inventory_after_the_other() -> tuple[str, ...]:
        asyncio.run_coroutine_threadsafe(site.connect().launch(spec), loop).result(30)
        return inventory()

    monkeypatch.setattr(site.launcher, "inventory", inventory_after_the_other)
    assert (await site.launcher.launch(spec)).spec.server_id == spec.server_id
    assert len(await site.launcher.find(site.fleet_id)) == 1


async def test_two_servers_on_a_node_see_different_gpus(site: Site) -> None:
    """Each server sees as many GPUs as it has devices, on the devices' node."""
    assert site.launcher.inventory() == ("node-a/0", "node-a/1", "node-b/0", "node-b/1")
    specs = [site.spec(SERVE, *devices) for devices in (["node-a/1"], ["node-a/0"], ["node-b/0", "node-b/1"])]
    seen = []
    for spec in specs:
        await site.launcher.launch(spec)
        about = await site.answer(spec.server_id)
        seen.append(about["environment"]["NVIDIA_VISIBLE_DEVICES"].split(","))
    assert sorted(seen[0] + seen[1]) == ["0", "1"] and seen[2] == ["0", "1"]


async def test_a_simulated_engine_outlives_a_killed_controller(site: Site, cluster: Cluster) -> None:
    """SIGKILL of the process that launched it does not touch it; another controller finds, uses and stops it."""
    engine = (sys.executable, "-m", "heddle", "sim-engine", "--host", "{host}", "--port", "{port}")
    spec = site.spec(command=engine)
    arguments = [str(cluster.folder / "kubeconfig"), spec.server_id, spec.fleet_id, *engine]
    controller = await asyncio.create_subprocess_exec(sys.executable, "-c", LAUNCH, *arguments)
    assert await controller.wait() == -signal.SIGKILL
    found = await site.until(spec.server_id, lambda server: server.state is ServerState.RUNNING)
    assert (found.spec.command, found.spec.devices) == (engine, ("node-a/0",))
    await until(lambda: serves_models(found.url))
    await site.launcher.stop(spec.server_id, 30.0)
    assert await site.is_gone(spec.server_id)


LAUNCH = """
import asyncio, os, signal, sys
from controller.kubernetes_launcher import KubernetesLauncher
from controller.launcher import ServerSpec
from tests.controller.launchers.kubernetes_site import template
kubeconfig, server_id, fleet_id, *command = sys.argv[1:]
spec = ServerSpec(server_id, fleet_id, 1, ("node-a/0",), tuple(command))
asyncio.run(KubernetesLauncher(template(), namespace="heddle", kubeconfig=kubeconfig).launch(spec))
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_server_without_room_reports_what_it_waits_for(site: Site, cluster: Cluster) -> None:
    """Another Pod has the GPUs: until they are free, Kubernetes' message is the server's last line."""
    stranger, spec = site.spec(SERVE, "node-a/0", "node-a/1"), site.spec(SERVE, "node-a/0")
    pod = engine_pod(stranger, template(), "nvidia.com/gpu", 8000)
    del pod["metadata"]["labels"]
    cluster.core.create_namespaced_pod(NAMESPACE, pod)
    await until(lambda: cluster.core.read_namespaced_pod(stranger.server_id, NAMESPACE).status.phase == "Running")
    await site.launcher.launch(spec)
    waiting = await site.until(spec.server_id, lambda server: bool(server.last_lines))
    assert waiting.state is ServerState.STARTING
    assert waiting.last_lines[0].startswith("Unschedulable: 0/2 nodes are available")
    cluster.core.delete_namespaced_pod(stranger.server_id, NAMESPACE, grace_period_seconds=1)
    await site.answer(spec.server_id)


async def test_a_pod_that_the_api_refuses_is_a_failed_launch(site: Site, cluster: Cluster) -> None:
    """The API's message is passed on, and nothing is left."""
    with pytest.raises(LaunchFailed, match="403 Forbidden"):
        await cluster.launcher(namespace="elsewhere").launch(site.spec())
    broken = cluster.launcher(resource="no resource")
    with pytest.raises(LaunchFailed):
        await broken.launch(site.spec())
    assert await site.launcher.find(site.fleet_id) == []


async def test_somebody_elses_pod_of_the_same_name_is_left_alone(site: Site, cluster: Cluster) -> None:
    """It is neither taken for the server nor deleted."""
    spec = site.spec()
    pod = engine_pod(spec, template(), "nvidia.com/gpu", 8000)
    del pod["metadata"]["labels"], pod["metadata"]["annotations"]
    cluster.core.create_namespaced_pod(NAMESPACE, pod)
    try:
        with pytest.raises(LaunchFailed, match="is another one"):
            await site.launcher.launch(spec)
        await site.launcher.stop(spec.server_id, 1.0)
        assert cluster.core.read_namespaced_pod(spec.server_id, NAMESPACE).metadata.deletion_timestamp is None
    finally:
        cluster.core.delete_namespaced_pod(spec.server_id, NAMESPACE, grace_period_seconds=1)


async def test_an_api_server_that_is_away_is_reported(site: Site, cluster: Cluster, tmp_path: Path) -> None:
    """Finding, launching, stopping and the inventory raise ConnectionError, which is safe to retry."""
    away = replace(cluster, url="http://127.0.0.1:1", folder=tmp_path).launcher()
    for call in (away.find(site.fleet_id), away.launch(site.spec()), away.stop("engine", 1.0)):
        with pytest.raises(ConnectionError, match="Kubernetes"):
            await call
    with pytest.raises(ConnectionError, match="Kubernetes"):
        away.inventory()


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"500 Internal Server Error", b"503 Service Unavailable"])
async def test_an_overloaded_api_server_has_refused_no_pod(status: bytes, cluster: Cluster, tmp_path: Path) -> None:
    """Its etcd is without a leader, or an admission webhook is away: the launch may be repeated."""

    async def overloaded(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")

    async with raw_server(overloaded) as api:
        launcher = replace(cluster, url=api.url, folder=tmp_path).launcher()
        with pytest.raises(ConnectionError, match=status.decode()):
            await launcher.launch(ServerSpec("engine", "fleet", 1, ("node-a/0",), ("serve",)))


async def serving_on(site: Site, cluster: Cluster, node: str) -> ServerSpec:
    """A server that serves on a new node of one GPU."""
    cluster.kubelet.add_node(node, 1)
    spec = site.spec(SERVE, f"{node}/0")
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)
    return spec


async def test_a_lost_node_is_an_exit_cause(site: Site, cluster: Cluster) -> None:
    """Its servers are found as ended, and its devices are no longer in the inventory."""
    spec = await serving_on(site, cluster, "node-c")
    await asyncio.to_thread(cluster.kubelet.lose_node, "node-c")
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert ended.exit_cause == "its node node-c is gone"
    assert "node-c/0" not in site.launcher.inventory()
    # The cluster's garbage collector does this with Pods of nodes that are gone.
    cluster.core.delete_namespaced_pod(spec.server_id, NAMESPACE, grace_period_seconds=0)


async def test_a_silent_node_is_not_taken_for_lost(site: Site, cluster: Cluster) -> None:
    """Its server still counts as running. Stopping it fails and forces nothing; afterwards it counts as ended."""
    spec = await serving_on(site, cluster, "node-d")
    await asyncio.to_thread(cluster.kubelet.freeze_node, "node-d")
    assert "node-d/0" not in site.launcher.inventory()
    silent = await site.until(spec.server_id, lambda _: True)
    assert (silent.state, silent.last_lines) == (ServerState.RUNNING, ()), "its log was asked for"
    with pytest.raises(TimeoutError, match="node node-d does not say"):
        await cluster.launcher(confirm_timeout_s=0.5).stop(spec.server_id, 1.0)
    given_up = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert given_up.exit_cause == "its node node-d is lost; Kubernetes has given it up"
    assert cluster.core.read_namespaced_pod(spec.server_id, NAMESPACE).metadata.deletion_grace_period_seconds == 1
    await asyncio.to_thread(cluster.kubelet.lose_node, "node-d")
    cluster.core.delete_namespaced_pod(spec.server_id, NAMESPACE, grace_period_seconds=0)


async def test_the_fleet_can_be_observed_while_a_stop_waits_for_a_lost_node(site: Site, cluster: Cluster) -> None:
    """Each stop took a thread for minutes, of as few as six: a lost node with six engines blinded the controller."""
    spec = await serving_on(site, cluster, "node-f")
    await asyncio.to_thread(cluster.kubelet.freeze_node, "node-f")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    stopping = asyncio.create_task(cluster.launcher(confirm_timeout_s=30.0).stop(spec.server_id, 1.0))
    try:
        ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
        assert ended.exit_cause == "its node node-f is lost; Kubernetes has given it up"
        assert not stopping.done(), "the look waited for the stop"
    finally:
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        await asyncio.to_thread(cluster.kubelet.lose_node, "node-f")
        cluster.core.delete_namespaced_pod(spec.server_id, NAMESPACE, grace_period_seconds=0)


async def test_a_node_without_power_hides_no_other_server(site: Site, cluster: Cluster) -> None:
    """Until Kubernetes notices, after 40 s, requests for logs of its Pods hang. The fleet could not be observed then,
    and an engine that died elsewhere was not replaced."""
    cluster.kubelet.add_node("node-e", 2)
    dark, failed = [site.spec(SERVE, f"node-e/{number}") for number in range(2)], site.spec(FAIL, "node-a/0")
    for spec in dark:
        await site.launcher.launch(spec)
        await site.answer(spec.server_id)
    await asyncio.to_thread(cluster.kubelet.cut_power, "node-e")
    try:
        await site.launcher.launch(failed)
        ended = await site.until(failed.server_id, lambda server: server.state is ServerState.EXITED)
        assert ended.last_lines == ("loading", "no such model")
        for spec in dark:
            found = await site.server(spec.server_id)
            assert found is not None and (found.state, found.last_lines) == (ServerState.RUNNING, ())
    finally:
        await asyncio.to_thread(cluster.kubelet.lose_node, "node-e")
        for spec in dark:
            cluster.core.delete_namespaced_pod(spec.server_id, NAMESPACE, grace_period_seconds=0)


async def test_the_log_of_a_server_that_is_ready_is_not_read(site: Site, cluster: Cluster) -> None:
    """Each look would cost a request to its node. A real kubelet sets this condition by the readiness probe."""
    spec = site.spec()
    await site.launcher.launch(spec)
    await site.until(spec.server_id, lambda server: "it listens" in server.last_lines)
    for is_ready, lines in (("True", ()), ("False", ("it listens",))):
        status = {"conditions": [{"type": "Ready", "status": is_ready}]}
        cluster.core.patch_namespaced_pod_status(spec.server_id, NAMESPACE, {"status": status})
        found = await site.server(spec.server_id)
        assert found is not None and found.last_lines == lines


async def test_the_grace_period_is_the_one_asked_for(site: Site, cluster: Cluster) -> None:
    """It replaces the template's."""
    spec = site.spec(STUBBORN)
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)
    stopping = asyncio.create_task(site.launcher.stop(spec.server_id, 2.2))
    read = cluster.core.read_namespaced_pod
    await until(lambda: read(spec.server_id, NAMESPACE).metadata.deletion_grace_period_seconds == 3)
    await stopping
    assert await site.is_gone(spec.server_id)


async def test_an_engine_pod_is_owned_by_its_fleets_config_map(site: Site, cluster: Cluster) -> None:
    """The controller does not own it, because the controller's Pod comes and goes."""
    spec = site.spec()
    await site.launcher.launch(spec)
    (owner,) = cluster.core.read_namespaced_pod(spec.server_id, NAMESPACE).metadata.owner_references
    fleet = cluster.core.read_namespaced_config_map("heddle-fleet", NAMESPACE)
    assert (owner.kind, owner.name, owner.uid) == ("ConfigMap", "heddle-fleet", fleet.metadata.uid)


async def test_a_killed_program_reports_its_status(site: Site) -> None:
    """The status is 128 plus the signal's number, as container runtimes count."""
    spec = site.spec("import os, signal; print('so long', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    await site.launcher.launch(spec)
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert (ended.exit_cause, ended.last_lines) == ("exit status 137", ("so long",))
