"""What deploy/ says fits what is there: alerts, alarms, the image and its manifests."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import metrics
from gateway.config import Settings, load_settings
from heddle.cli import main
from store import StoreSettings

ROOT = Path(__file__).parents[2]
IMAGE = "heddle:" + tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def told_metrics() -> set[str]:
    """Names of series that gateway and controller show, counters with the suffix that Prometheus gives them."""
    source = Path(metrics.__file__).read_text()
    counters = set(re.findall(r'(?:Counter|_Counts)\(\s*"(\w+)"', source))
    of_gateway = {name + "_total" if name in counters else name for name in re.findall(r'"(heddle_\w+)"', source)}
    return of_gateway | set(re.findall(r"heddle_\w+", (ROOT / "controller/api.py").read_text()))


def test_alerts_are_on_metrics_that_exist_and_are_explained() -> None:
    """Each alert names a metric of gateway or controller (or Prometheus' own `up`), and has a row in operating.md."""
    assert len(rules()) > 5
    page = (ROOT / "docs/operating.md").read_text()
    for rule in rules():
        named = set(re.findall(r"heddle_\w+", rule["expr"]))
        assert named or rule["expr"].startswith("up{"), rule["alert"]
        assert named <= told_metrics(), rule["alert"]
        assert f"| `{rule['alert']}` |" in page, rule["alert"]
    assert set(re.findall(r"^\| `(Heddle\w+)` \|", page, re.MULTILINE)) == {rule["alert"] for rule in rules()}


def test_every_alarm_of_the_controller_is_explained() -> None:
    """The table of docs/controller.md has each, and no other."""
    raised = set()
    for path in (ROOT / "controller").glob("*.py"):
        raised |= set(re.findall(r'(?:_alarm\(|found\[)"(\w+)"', path.read_text()))
    table = (ROOT / "docs/controller.md").read_text().partition("## Alarms")[2].partition("\n## ")[0]
    assert raised and set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == raised


def test_what_is_installed_has_every_package() -> None:
    """An image has what pyproject.toml lists; a checkout would hide what is missing there."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    tops = {name.partition(".")[0] for name in listed}
    there = {
        str(path.parent.relative_to(ROOT)).replace("/", ".") for top in tops for path in ROOT.glob(f"{top}/**/*.py")
    }
    assert there == listed


@pytest.mark.parametrize("name", ["gateway", "controller"])
def test_the_image_of_the_manifests_has_their_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the one that the Dockerfile says how to build, and its user may write where the volume is."""
    dockerfile = (ROOT / "deploy/images/Dockerfile").read_text()
    pod = pod_of(name)
    (container,) = pod["containers"]
    assert container["image"] == IMAGE and f"-t {IMAGE} " in dockerfile
    user = re.search(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    assert user and pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user[1])
    program, verb, *_ = container["command"]
    assert program == shlex.split(dockerfile.partition("ENTRYPOINT ")[2].partition("\n")[0].strip("[]"))[0]
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0 and verb in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gateway", "controller"])
def test_services_of_the_manifests_are_no_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes tells each Pod of the Services beside it by variables like HEDDLE_GATEWAY_PORT, unless it is told not
    to; the gateway takes them for settings that it does not know, and did not start."""
    services = [one["metadata"]["name"] for one in manifests("gateway", "controller") if one["kind"] == "Service"]
    assert services
    if pod_of(name).get("enableServiceLinks", True):
        for service in services:
            monkeypatch.setenv(f"{service.upper().replace('-', '_')}_PORT", "tcp://10.0.0.1:8080")
    load_settings()


def test_a_gateway_has_time_to_end_its_turns_before_it_is_killed() -> None:
    """Kubernetes' own 30 s are over when those of the turns are, and nobody would be told to come back."""
    shutdown_s = Settings.model_fields["shutdown_timeout_s"].default + StoreSettings().close_timeout_s
    assert pod_of("gateway").get("terminationGracePeriodSeconds", 30) >= shutdown_s + 10


def manifests(*names: str) -> list[dict[str, Any]]:
    return [one for name in names for one in yaml.safe_load_all((ROOT / f"deploy/kubernetes/{name}.yaml").read_text())]


def pod_of(name: str) -> dict[str, Any]:
    """What a Deployment's Pods are."""
    (deployment,) = (one for one in manifests(name) if one["kind"] == "Deployment")
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return pod
