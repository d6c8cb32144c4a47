"""The launcher contract on a real Ray cluster, two nodes of two logical GPUs, and what only this launcher promises."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from controller.launcher import LaunchFailed, ServerState
from tests.controller.launcher_contract import FAIL, PROMISES, SERVE, STUBBORN, Promise, Site
from tests.controller.launchers.waiting import serves_models, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ray = pytest.importorskip("ray", reason="make ray installs it")

NODE: dict[str, Any] = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    # Ray keeps its sockets and logs there for ever. Sockets have short paths. Unlike the option of a node, the variable
    # holds for all that Ray writes: the cluster's address goes into a folder that might not exist.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        cluster.add_node(**NODE)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
async def site(cluster: Any, tmp_path: Path) -> AsyncIterator[Site]:
    from controller.ray_launcher import RayLauncher

    # Ray chooses which GPUs of its node a server gets; a test below covers that.
    site = Site(lambda: RayLauncher(cluster.address, log_dir=str(tmp_path)), sys.executable)
    yield site
    await site.stop_all()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_the_ray_launcher_keeps_the_contract(promise: Promise, site: Site) -> None:
    """What every launcher promises."""
    await promise(site)


async def test_the_inventory_lists_each_nodes_gpus_together(site: Site) -> None:
    """Two nodes have two GPUs each; neighbours in the list share a node."""
    first, second, third, fourth = (device.rpartition("/")[0] for device in site.launcher.inventory())
    assert first == second != third == fourth


async def test_a_server_gets_as_many_gpus_of_its_node_as_it_has_devices(site: Site) -> None:
    """CUDA_VISIBLE_DEVICES names them. Two servers of a node never share one, and the node is the devices' node."""
    devices = site.launcher.inventory()
    alone, pair = site.spec(SERVE, devices[3]), site.spec(SERVE, *devices[:2])
    beside = site.spec(SERVE, devices[2])
    for spec in (alone, pair, beside):
        await site.launcher.launch(spec)
    visible = {}
    for spec in (alone, pair, beside):
        about = await site.answer(spec.server_id)
        visible[spec.server_id] = set(about["environment"]["CUDA_VISIBLE_DEVICES"].split(","))
    assert visible[pair.server_id] == {"0", "1"}
    assert visible[alone.server_id] | visible[beside.server_id] == {"0", "1"}
    assert len(visible[alone.server_id]) == len(visible[beside.server_id]) == 1


async def test_a_server_over_two_nodes_is_refused_unless_asked_for(site: Site, cluster: Any, tmp_path: Path) -> None:
    """If the option is set, its command runs on each node, and every rank knows where the first one is."""
    from controller.ray_launcher import RayLauncher

    _, left, right, _ = site.launcher.inventory()
    with pytest.raises(LaunchFailed, match="span 2 nodes"):
        await site.launcher.launch(site.spec(SERVE, left, right))
    wide = RayLauncher(cluster.address, across_nodes=True, log_dir=str(tmp_path))
    place = "print('rank', '{node_rank}', 'of {num_nodes}, head', '{head_host}:{head_port}', flush=True)"
    spec = site.spec(place + SERVE, left, right)
    await wide.launch(spec)
    await site.answer(spec.server_id)
    head, other = (tmp_path / f"{spec.server_id}.{rank}.log" for rank in (0, 1))
    await until(lambda: "listens" in other.read_text())
    meeting_point = head.read_text().splitlines()[0].removeprefix("rank 0 of 2, head ")
    assert other.read_text().splitlines()[0] == f"rank 1 of 2, head {meeting_point}"
    await wide.stop(spec.server_id, 10.0)
    assert await site.is_gone(spec.server_id)
    await site.launcher.launch(site.spec(SERVE, right))


async def test_a_server_over_two_nodes_ends_when_one_part_does(site: Site, cluster: Any, tmp_path: Path) -> None:
    """Half a model does not answer; the GPUs of both nodes are free."""
    from controller.ray_launcher import RayLauncher

    _, left, right, _ = site.launcher.inventory()
    wide = RayLauncher(cluster.address, across_nodes=True, log_dir=str(tmp_path))
    spec = site.spec("if {node_rank}:\n    raise SystemExit(7)\n" + SERVE, left, right)
    await wide.launch(spec)
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert ended.exit_cause == "exit status 7 (node 1 of 2)"
    for device in (left, right):
        await site.launcher.launch(site.spec(SERVE, device))


async def test_a_server_whose_actor_on_a_later_node_was_killed_has_ended(
    site: Site, cluster: Any, tmp_path: Path
) -> None:
    """Its part there died with the actor. The rest went on, and counted as a server that runs."""
    from controller.ray_launcher import RayLauncher

    _, left, right, _ = site.launcher.inventory()
    wide = RayLauncher(cluster.address, across_nodes=True, log_dir=str(tmp_path))
    spec = site.spec(SERVE, left, right)
    await wide.launch(spec)
    pid = (await site.answer(spec.server_id))["pid"]
    ray.kill(ray.get_actor(f"{spec.server_id}#1", "heddle"))
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert "actor died" in ended.exit_cause
    await site.launcher.launch(site.spec(SERVE, left))
    await until(lambda: not Path(f"/proc/{pid}").exists())


LAUNCH = """
import asyncio, os, signal, sys
from controller.launcher import ServerSpec
from controller.ray_launcher import RayLauncher
address, log_dir, command = sys.argv[1], sys.argv[2], sys.argv[3:]
launcher = RayLauncher(address, log_dir=log_dir)
spec = ServerSpec("engine-1", "killed-driver", 1, launcher.inventory()[:1], tuple(command))
asyncio.run(launcher.launch(spec))
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_simulated_engine_outlives_a_killed_driver(site: Site, cluster: Any, tmp_path: Path) -> None:
    """SIGKILL of the controller that launched it does not touch it; another driver finds, uses and stops it."""
    site.fleet_id = "killed-driver"
    engine = (sys.executable, "-m", "heddle", "sim-engine", "--host", "{host}", "--port", "{port}")
    arguments = (sys.executable, "-c", LAUNCH, cluster.address, str(tmp_path), *engine)
    driver = await asyncio.create_subprocess_exec(*arguments)
    assert await driver.wait() == -signal.SIGKILL
    found = await site.until("engine-1", lambda server: server.url is not None)
    assert found.state is ServerState.RUNNING and found.spec.command == engine
    await until(lambda: serves_models(found.url))
    await site.launcher.stop("engine-1", 30.0)
    assert await site.is_gone("engine-1")


async def test_a_server_whose_actor_was_killed_has_ended(site: Site) -> None:
    """Its processes die with the actor, and its GPU is free again."""
    spec = site.spec()
    await site.launcher.launch(spec)
    pid = (await site.answer(spec.server_id))["pid"]
    ray.kill(ray.get_actor(spec.server_id, "heddle"))
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert "actor died" in ended.exit_cause
    await until(lambda: not Path(f"/proc/{pid}").exists())
    successor = site.spec()
    await site.launcher.launch(successor)
    await site.answer(successor.server_id)


async def test_a_server_that_was_stopped_says_so(site: Site) -> None:
    """As on one machine. Its exit cause was the signal that the launcher itself had sent."""
    spec = site.spec()
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)
    await site.launcher.stop(spec.server_id, 10.0)
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert ended.exit_cause == "stopped"


async def test_a_cluster_of_another_version_is_refused_with_one_line(site: Site, cluster: Any, tmp_path: Path) -> None:
    """It names both versions. The controller ended with a traceback."""
    from ray.experimental import internal_kv

    key, namespace = b"CLUSTER_METADATA", b"cluster"  # where Ray's head keeps its version
    written = internal_kv._internal_kv_get(key, namespace=namespace)
    other = written.replace(ray.__version__.encode(), b"2.9.0")
    fleet = tmp_path / "fleet.toml"
    options = f'launcher = "ray"\nlauncher_options = {{ address = "{cluster.address}" }}'
    fleet.write_text(f'fleet = "f"\nmodel = "m"\n{options}\n')
    command = (sys.executable, "-m", "heddle", "controller", "--fleet", str(fleet), "--dry-run")
    internal_kv._internal_kv_put(key, other, True, namespace=namespace)
    try:
        controller = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, said = await controller.communicate()
    finally:
        internal_kv._internal_kv_put(key, written, True, namespace=namespace)
    last = said.decode().splitlines()[-1]
    assert (controller.returncode, b"Traceback" in said) == (2, False)
    assert last.startswith("heddle controller: launcher ray: Version mismatch") and "2.9.0" in last, said


async def test_the_fleet_can_be_observed_while_a_server_ends(site: Site) -> None:
    """Its stop kept one of few threads until then, and the look waited for that."""
    spec = site.spec(STUBBORN)
    await site.launcher.launch(spec)
    await site.answer(spec.server_id)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    stopping = asyncio.create_task(site.launcher.stop(spec.server_id, 10.0))
    await asyncio.sleep(0)
    found = await site.server(spec.server_id)
    assert found is not None and not stopping.done(), "the look waited for the stop"
    await stopping


async def test_a_failed_servers_last_lines_outlive_its_log(site: Site, tmp_path: Path) -> None:
    """The exit cause and the last lines are kept at Ray's head."""
    spec = site.spec(FAIL)
    await site.launcher.launch(spec)
    await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    (tmp_path / f"{spec.server_id}.0.log").unlink()
    ended = await site.until(spec.server_id, lambda _: True)
    assert (ended.exit_cause, ended.last_lines) == ("exit status 3", ("loading", "no such model"))


async def test_a_launch_fails_if_ray_does_not_give_the_gpus(site: Site, cluster: Any, tmp_path: Path) -> None:
    """Another job of the cluster has them: nothing is launched, and nothing waits for them."""
    from controller.ray_launcher import RayLauncher

    group = ray.util.placement_group([{"GPU": 2}, {"GPU": 2}])
    assert group.wait(60)
    try:
        hasty = RayLauncher(cluster.address, log_dir=str(tmp_path), reserve_timeout_s=0.5)
        with pytest.raises(LaunchFailed, match="Ray has not given"):
            await hasty.launch(site.spec())
        assert await site.launcher.find(site.fleet_id) == []
    finally:
        ray.util.remove_placement_group(group)


async def test_a_lost_node_is_an_exit_cause(site: Site, cluster: Any) -> None:
    """The server is found as ended, with the node's name, and can be stopped."""
    before = set(site.launcher.inventory())
    node = cluster.add_node(**NODE)
    await until(lambda: set(site.launcher.inventory()) - before)
    (device, _) = set(site.launcher.inventory()) - before
    spec = site.spec(SERVE, device)
    await site.launcher.launch(spec)
    pid = (await site.answer(spec.server_id))["pid"]
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    ended = await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
    assert f"its node {node.node_id} is lost" in ended.exit_cause
    assert set(site.launcher.inventory()) == before
    await site.launcher.stop(spec.server_id, 1.0)
    assert await site.is_gone(spec.server_id)
    await until(lambda: not Path(f"/proc/{pid}").exists())
