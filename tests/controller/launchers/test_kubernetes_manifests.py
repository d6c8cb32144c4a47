"""deploy/kubernetes is what Kubernetes accepts and the controller needs.

`python -m tests.controller.launchers.test_kubernetes_manifests` prints deploy/kubernetes/created-engine-pod.yaml.
"""

import copy
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.commands import server_spec
from controller.fleet_file import FleetFile, load_fleet_file
from controller.kubernetes_pod import engine_pod, pod_name, server_of, spec_of
from controller.launcher import ServerSpec, ServerState
from controller.steps import DesiredServer

pytest.importorskip("kubernetes")
from tests.controller.launcher_contract import FAIL, Site
from tests.controller.launchers.kubernetes_api import schema_problems
from tests.controller.launchers.kubernetes_site import MANIFESTS, double, manifests, template

SPEC = ServerSpec("engine-1", "fleet", 2, ("node-a/0", "node-a/1"), ("serve", "--port", "{port}"), {"A": "b"})


def example_fleet(folder: Path) -> FleetFile:
    """The fleet as the controller reads it from the ConfigMap."""
    path = folder / "fleet.toml"
    path.write_text(manifests("fleet")[0]["data"]["fleet.toml"])
    return load_fleet_file(path)


def created_pod(fleet: FleetFile) -> dict[str, Any]:
    """The Pod that the controller creates for an engine of the example fleet."""
    spec = server_spec(fleet, DesiredServer("qwen3-7", 2, ("gpu-node-1/4", "gpu-node-1/5")))
    return engine_pod(spec, template(), "nvidia.com/gpu", 8000)


@pytest.mark.parametrize(
    "manifest", manifests(), ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}"
)
def test_each_manifest_matches_the_published_schema(manifest: dict[str, Any]) -> None:
    """No field is misspelt, missing or of the wrong type. All objects but the cluster's own are in the namespace."""
    assert schema_problems(manifest, f"V1{manifest['kind']}") == []
    is_of_cluster = manifest["kind"] in ("Namespace", "ClusterRole", "ClusterRoleBinding")
    assert manifest["metadata"].get("namespace") == (None if is_of_cluster else "heddle")


def test_the_schema_check_finds_mistakes() -> None:
    """It finds an unknown field, a missing field and a wrong type."""
    pod = engine_pod(SPEC, template(), "nvidia.com/gpu", 8000)
    assert schema_problems(pod, "V1Pod") == []
    for path, value in (("restartpolicy", "Never"), ("tolerations", "all"), ("containers", [{"image": "x"}])):
        broken = copy.deepcopy(pod)
        broken["spec"][path] = value
        assert schema_problems(broken, "V1Pod") != [], path


def test_manifests_refer_to_objects_that_exist() -> None:
    """These are accounts, roles, volumes, ConfigMaps and the fleet's options."""
    named = {(each["kind"], each["metadata"]["name"]): each for each in manifests()}
    for binding in (each for each in manifests() if each["kind"].endswith("Binding")):
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in named
        assert all((subject["kind"], subject["name"]) in named for subject in binding["subjects"])
    for deployment in (each for each in manifests() if each["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        for volume in pod["spec"].get("volumes", ()):
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in named
            if content := volume.get("configMap"):
                assert ("ConfigMap", content["name"]) in named
        assert ("ServiceAccount", pod["spec"].get("serviceAccountName", "heddle-controller")) in named
    options = tomllib.loads(named["ConfigMap", "heddle-fleet"]["data"]["fleet.toml"])["launcher_options"]
    assert ("ConfigMap", options["owner"]) in named and ("Namespace", options["namespace"]) in named
    assert Path(options["template"]).name in named["ConfigMap", "heddle-fleet"]["data"]


async def test_the_controller_has_exactly_the_rights_that_it_uses(tmp_path: Path) -> None:
    """Each right in the roles is used by a launch, a look or a stop; anything beyond them is refused (403)."""
    with double(tmp_path) as cluster:
        site = Site(cluster.launcher, sys.executable)
        spec = site.spec(FAIL)
        await site.launcher.launch(spec)
        await site.until(spec.server_id, lambda server: server.state is ServerState.EXITED)
        await site.launcher.stop(spec.server_id, 1.0)
        roles = [each for each in manifests("controller") if each["kind"] in ("Role", "ClusterRole")]
        rules = [rule for role in roles for rule in role["rules"]]
        given = {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}
        assert cluster.used == given


def test_the_example_of_a_created_pod_is_current(tmp_path: Path) -> None:
    """It is what the controller's own code makes of the example fleet."""
    shown = yaml.safe_load((MANIFESTS / "created-engine-pod.yaml").read_text())
    assert shown == created_pod(example_fleet(tmp_path)), f"replace it with what `python -m {__spec__.name}` prints"
    assert schema_problems(shown, "V1Pod") == []


def test_a_pod_keeps_the_templates_fields() -> None:
    """The operator's volumes, tolerations, labels and environment stay; the launcher's own fields replace the
    template's."""
    ours = template()
    container = ours["spec"]["containers"][0]
    container |= {"env": [{"name": "A", "value": "x"}, {"name": "B", "value": "y"}], "args": ["--unused"]}
    container["resources"] = {"limits": {"memory": "64Gi"}}
    pod = engine_pod(SPEC, ours, "nvidia.com/gpu", 8000)
    made = pod["spec"]["containers"][0]
    assert {each["name"]: each.get("value") for each in made["env"]} == {"POD_IP": None, "A": "b", "B": "y"}
    assert made["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "2"}
    assert made["command"] == ["serve", "--port", "8000"] and "args" not in made
    assert pod["spec"]["volumes"] == ours["spec"]["volumes"] and pod["spec"]["restartPolicy"] == "Never"
    assert spec_of(pod) == SPEC


def test_a_templates_tables_without_a_value_are_not_there() -> None:
    """As for Kubernetes. No Pod could be made of such a template, and the alarm told of a `NoneType`."""
    theirs = template()
    theirs["metadata"] |= {"labels": None, "annotations": None}
    theirs["spec"]["affinity"] = None
    theirs["spec"]["containers"][0] |= {"env": None, "args": None, "resources": {"limits": None}}
    ours = template()
    del ours["metadata"]["labels"]
    pods = [engine_pod(SPEC, one, "nvidia.com/gpu", 8000) for one in (theirs, ours)]
    assert pods[0] == pods[1]


def test_text_that_looks_like_a_kubernetes_variable_is_escaped() -> None:
    """`$(...)` in a command is meant for the engine, not for Kubernetes. Nor is `$$`: the engine got `$`."""
    spec = ServerSpec("e", "f", 1, ("n/0",), ("sh", "-c", "echo $(date) $$ {host}"), {"A": "$(B)", "KEY": "pa$$word"})
    container = engine_pod(spec, template(), "nvidia.com/gpu", 8000)["spec"]["containers"][0]
    assert container["command"] == ["sh", "-c", "echo $$(date) $$$$ $(POD_IP)"]
    assert {"name": "A", "value": "$$(B)"} in container["env"]
    assert {"name": "KEY", "value": "pa$$$$word"} in container["env"]


def test_ids_that_are_not_pod_names_get_distinct_valid_ones() -> None:
    """Servers keep their ids; only their Pods are named differently."""
    names = [pod_name(server_id) for server_id in ("qwen-1", "Qwen_1", "qwen_1", "x" * 80, "_")]
    assert names[0] == "qwen-1" and len(set(names)) == 5
    assert all(len(name) <= 63 and name == name.lower() and name.strip("-_") == name for name in names)


@pytest.mark.parametrize(
    ("status", "state", "cause"),
    [
        ({"phase": "Pending"}, ServerState.STARTING, ""),
        ({"phase": "Running"}, ServerState.RUNNING, ""),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "low on disk"},
            ServerState.EXITED,
            "Evicted: low on disk",
        ),
        ({"phase": "Failed"}, ServerState.EXITED, "Failed: no container has run"),
        (
            {
                "phase": "Failed",
                "containerStatuses": [
                    {"name": "engine", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
                ],
            },
            ServerState.EXITED,
            "exit status 137 (OOMKilled)",
        ),
    ],
)
def test_a_pods_status_gives_the_servers_state(status: dict[str, Any], state: ServerState, cause: str) -> None:
    """The exit cause is in Kubernetes' words."""
    pod = engine_pod(SPEC, template(), "nvidia.com/gpu", 8000) | {"status": status}
    server = server_of(pod, (), "", 8000)
    assert (server.state, server.exit_cause) == (state, cause)


def _ended(exit_code: int, reason: str) -> dict[str, Any]:
    return {"terminated": {"exitCode": exit_code, "reason": reason}}


@pytest.mark.parametrize(
    ("phase", "proxy", "engine", "state", "cause"),
    [
        ("Running", {"running": {}}, {"running": {}}, ServerState.RUNNING, ""),
        ("Running", _ended(1, "Error"), {"running": {}}, ServerState.RUNNING, ""),
        ("Running", {"running": {}}, _ended(137, "OOMKilled"), ServerState.EXITED, "exit status 137 (OOMKilled)"),
        ("Failed", _ended(0, "Completed"), _ended(2, "Error"), ServerState.EXITED, "exit status 2"),
    ],
)
def test_a_server_ends_with_the_engines_container(
    phase: str, proxy: dict[str, Any], engine: dict[str, Any], state: ServerState, cause: str
) -> None:
    """Whatever the template or the cluster has put beside it. A proxy that went on kept the server of a dead engine
    running, which was never replaced; and one that had ended well was the cause of a failed engine's end."""
    statuses = [{"name": "a-proxy", "state": proxy}, {"name": "engine", "state": engine}]
    pod = engine_pod(SPEC, template(), "nvidia.com/gpu", 8000)
    pod["spec"]["containers"].append({"name": "a-proxy", "image": "proxy"})
    server = server_of(pod | {"status": {"phase": phase, "containerStatuses": statuses}}, (), "", 8000)
    assert (server.state, server.exit_cause) == (state, cause)


def test_a_proxy_that_the_cluster_puts_first_is_not_the_engine() -> None:
    """As Linkerd does, and Istio if it is told to. The server of a dead engine counted as running, and was never
    replaced."""
    pod = engine_pod(SPEC, template(), "nvidia.com/gpu", 8000)
    pod["spec"]["containers"].insert(0, {"name": "linkerd-proxy", "image": "proxy"})
    states: dict[str, Any] = {"linkerd-proxy": {"running": {}}, "engine": _ended(137, "OOMKilled")}
    statuses = [{"name": name, "state": state} for name, state in states.items()]
    server = server_of(pod | {"status": {"phase": "Running", "containerStatuses": statuses}}, (), "", 8000)
    assert (server.state, server.exit_cause) == (ServerState.EXITED, "exit status 137 (OOMKilled)")


def test_a_container_that_prepares_the_pod_and_does_not_is_named() -> None:
    """Such as a template's download of the model. Its failure was "no container has run", and why it waited was not
    told."""
    waiting: dict[str, Any] = {"waiting": {"reason": "PodInitializing"}}
    pod = engine_pod(SPEC, template(), "nvidia.com/gpu", 8000)
    pod["status"] = {
        "phase": "Pending",
        "initContainerStatuses": [
            {"name": "download", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
        ],
        "containerStatuses": [{"name": "engine", "state": waiting}],
    }
    assert server_of(pod, (), "", 8000).last_lines[0] == "ImagePullBackOff: no such image"
    pod["status"] |= {"phase": "Failed", "initContainerStatuses": [{"name": "download", "state": _ended(3, "Error")}]}
    assert server_of(pod, (), "", 8000).exit_cause == "Failed: exit status 3 of download"


def test_an_ipv6_address_becomes_a_url() -> None:
    """The URL has it in brackets."""
    pod = engine_pod(SPEC, template(), "nvidia.com/gpu", 8000) | {"status": {"phase": "Running", "podIP": "fd00::7"}}
    assert server_of(pod, (), "", 8000).url == "http://[fd00::7]:8000"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        print("# Made by the controller, of the fleet of fleet.yaml; nobody applies it.")
        print(yaml.safe_dump(created_pod(example_fleet(Path(folder))), sort_keys=False), end="")
