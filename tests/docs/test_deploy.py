"""The files in deploy/ match the product: alerts, alarms, the dashboard, units, the image and its manifests."""

import configparser
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import controller.api
from gateway import metrics
from gateway.config import Settings, load_settings
from gateway.front import OPEN_PATHS
from heddle.cli import main
from store import StoreSettings
from tests.support.gateway import running_gateway

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMAGE = "heddle:" + PYPROJECT["project"]["version"]
BOARD = json.loads((ROOT / "deploy/grafana/heddle.json").read_text())
COMPOSE = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())
_PARTS = ("bucket", "sum", "count")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def exported_metrics() -> set[str]:
    """Names of the series of gateway and controller; counters have the suffix that Prometheus adds."""
    source = Path(metrics.__file__).read_text()
    counters = set(re.findall(r'(?:Counter|_Counts|_counter)\(\s*"(\w+)"', source))
    of_gateway = {name + "_total" if name in counters else name for name in re.findall(r'"(heddle_\w+)"', source)}
    return of_gateway | set(re.findall(r"heddle_\w+", (ROOT / "controller/api.py").read_text()))


def test_alerts_use_existing_metrics_and_are_documented() -> None:
    """Each alert names a metric of gateway or controller (or Prometheus' own `up`), and has a row in operating.md."""
    assert len(rules()) > 5
    page = (ROOT / "docs/operating.md").read_text()
    for rule in rules():
        named = set(re.findall(r"heddle_\w+", rule["expr"]))
        assert named or rule["expr"].startswith("up{"), rule["alert"]
        assert named <= exported_metrics(), rule["alert"]
        assert f"| `{rule['alert']}` |" in page, rule["alert"]
    assert set(re.findall(r"^\| `(Heddle\w+)` \|", page, re.MULTILINE)) == {rule["alert"] for rule in rules()}


def test_alerts_are_for_each_gateway_by_itself() -> None:
    """Of two gateways on one Prometheus, one without engines or with failing turns was hidden by the other: the alerts
    added both up."""
    for rule in rules():
        aggregated = re.findall(r"\b(sum|avg|min|max|count|absent)\b(?! without \(api, outcome\))", rule["expr"])
        assert not aggregated, rule["alert"]


@pytest.fixture
def promtool() -> str:
    """Prometheus' own checks; none of what the other tests check depends on it."""
    if (program := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed")
    return program


def test_alerts_fire_when_they_should(promtool: str) -> None:
    """See alerts.yaml. `HeddleNoEngine` did not fire when turns waited because all ready engines were cordoned."""
    subprocess.run([promtool, "test", "rules", str(Path(__file__).with_name("alerts.yaml"))], check=True)


def test_the_dashboard_of_grafana_shows_existing_metrics() -> None:
    """The panels' queries name every series that gateway and controller export (histograms: a part), and no other."""
    shown: set[str] = set()
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            assert target["expr"].count("(") == target["expr"].count(")"), panel["title"]
            shown |= set(re.findall(r"heddle_\w+", target["expr"]))
    parts = {f"{name}_{part}": name for name in exported_metrics() if name.endswith("_seconds") for part in _PARTS}
    assert shown <= exported_metrics() | parts.keys()
    assert exported_metrics() == {parts.get(name, name) for name in shown}


def test_the_panels_of_grafana_do_not_overlap() -> None:
    """Each cell of the grid belongs to one panel at most, and each panel has a number of its own."""
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


@pytest.mark.parametrize("name", ["gateway", "controller"])
def test_the_units_of_systemd_start_a_command_that_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag of the unit's command is one of that command."""
    command = unit(name)["ExecStart"].split()
    assert Path(command[0]).name == "heddle"
    with pytest.raises(SystemExit) as ended:
        main([command[1], "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and all(word in shown for word in command if word.startswith("--"))


def test_systemd_gives_a_gateway_time_and_room() -> None:
    """Its turns may end before SIGKILL, and it has descriptors for those that systemd keeps besides its own."""
    shutdown_s = Settings.model_fields["shutdown_timeout_s"].default + StoreSettings().close_timeout_s
    of_gateway = unit("gateway")
    assert float(of_gateway["TimeoutStopSec"]) >= shutdown_s + 10
    assert int(of_gateway["LimitNOFILE"]) > 2 * int(of_gateway["FileDescriptorStoreMax"]) > 0


def test_who_keeps_descriptors_has_the_turns_that_need_them() -> None:
    """Only token legs are kept: without them, a kill cost each running turn all of its tokens."""
    keeps = [pod_of("gateway")["containers"][0]["command"], COMPOSE["services"]["gateway"]["command"]]
    assert all("keep" in command for command in keeps) and "FileDescriptorStoreMax" in unit("gateway")
    variable = {"name": "HEDDLE_TOKEN_LEGS", "value": "auto"}
    assert variable in pod_of("gateway")["containers"][0]["env"]
    assert load_settings(str(ROOT / "deploy/compose/heddle.toml")).token_legs == "auto"
    assert unit("gateway")["Environment"] == "HEDDLE_TOKEN_LEGS=auto"


def test_systemd_leaves_engines_alone_when_the_controller_is_restarted() -> None:
    """Its engines are in its control group, which a stop would end with it."""
    assert unit("controller")["KillMode"] == "process"


def test_every_alarm_of_the_controller_is_documented() -> None:
    """The table of docs/controller.md has each, and no other."""
    raised = set()
    for path in (ROOT / "controller").glob("*.py"):
        raised |= set(re.findall(r'(?:_alarm(?:_while)?\(|found\[|alarm, why = )"(\w+)"', path.read_text()))
    table = (ROOT / "docs/controller.md").read_text().partition("## Alarms")[2].partition("\n## ")[0]
    assert raised and set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == raised


def test_pyproject_lists_every_package() -> None:
    """An image has only the packages in pyproject.toml; a checkout would hide a missing one."""
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    tops = {name.partition(".")[0] for name in listed}
    existing = {
        str(path.parent.relative_to(ROOT)).replace("/", ".") for top in tops for path in ROOT.glob(f"{top}/**/*.py")
    }
    assert existing == listed


def test_the_image_leaves_the_sources_behind() -> None:
    """A layer keeps what a later one removes, so they stay in a stage of their own."""
    _, build, image = (ROOT / "deploy/images/Dockerfile").read_text().split("\nFROM ")
    assert "COPY . /src" in build and "COPY --from=build" in image and "/src" not in image


async def test_gateway_and_controller_report_the_version_of_pyproject() -> None:
    """In health, metrics and their descriptions; two of these had a copy of it, two none."""
    version = PYPROJECT["project"]["version"]
    async with running_gateway(start_timeout_s=0) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        assert (await client.get("/healthz")).json()["version"] == version
        assert (await client.get("/openapi.json")).json()["info"]["version"] == version
        assert f'heddle_build_info{{version="{version}"}} 1.0\n' in (await client.get("/metrics")).text
    unasked: Any = None
    assert controller.api.build_api(unasked, None).version == version


def test_an_image_is_made_of_the_packages_and_nothing_else() -> None:
    """Settings with keys, a fleet's journal and other files that users leave in a checkout got into a layer of the
    image."""
    tops = {name.partition(".")[0] for name in PYPROJECT["tool"]["setuptools"]["packages"]}
    first, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    taken = {line.removeprefix("!") for line in rest if line.startswith("!")}
    assert taken == tops | {"LICENSE", "README.md", "constraints.txt", "pyproject.toml"}


def test_the_license_is_the_one_that_is_named() -> None:
    """Its standard text, in every wheel; pyproject.toml named it, and no file had it."""
    project = PYPROJECT["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    # Of https://www.apache.org/licenses/LICENSE-2.0.txt.
    digest = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("name", ["gateway", "controller"])
def test_the_manifests_match_the_image(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Image, command and user match the Dockerfile, and the user may write to the volume."""
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
def test_kubernetes_service_variables_are_not_taken_for_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, Kubernetes tells each Pod about Services with variables such as HEDDLE_GATEWAY_PORT. The gateway once
    took them for unknown settings and did not start."""
    services = [one["metadata"]["name"] for one in manifests("gateway", "controller") if one["kind"] == "Service"]
    assert services
    if pod_of(name).get("enableServiceLinks", True):
        for service in services:
            monkeypatch.setenv(f"{service.upper().replace('-', '_')}_PORT", "tcp://10.0.0.1:8080")
    load_settings()


def test_a_gateway_has_time_to_end_its_turns_before_sigkill() -> None:
    """Kubernetes' default of 30 s ends together with the turns' own timeout, before clients would get
    `shutting_down`."""
    shutdown_s = Settings.model_fields["shutdown_timeout_s"].default + StoreSettings().close_timeout_s
    assert pod_of("gateway").get("terminationGracePeriodSeconds", 30) >= shutdown_s + 10


@pytest.mark.parametrize("name", ["gateway", "controller"])
def test_probes_are_patient_and_ask_a_route_that_needs_no_key(name: str) -> None:
    """By default a probe waits for 1 s, which a busy process may need. A restart costs running turns, so it must follow
    minutes of silence only, and a start must fit in."""
    (container,) = pod_of(name)["containers"]
    # A fenced gateway is not healthy, but a restart would fence the one that took over.
    paths = {"readinessProbe": "/healthz", "livenessProbe": "/metrics" if name == "gateway" else "/healthz"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
        assert container[probe]["timeoutSeconds"] >= 10
        assert path in OPEN_PATHS
    fields, liveness = Settings.model_fields, container["livenessProbe"]
    start_s = fields["start_timeout_s"].default + fields["store_start_timeout_s"].default
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= max(120, 5 * start_s)


def test_compose_starts_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Image, flags, files and the engine's address; and turns may end before SIGKILL."""
    for name in ("gateway", "engine"):
        service = COMPOSE["services"][name]
        words = service["command"]
        command = words[words.index("heddle") + 1 :] if "heddle" in words else words
        with pytest.raises(SystemExit) as ended:
            main([command[0], "--help"])
        shown = capsys.readouterr().out
        assert ended.value.code == 0 and all(word in shown for word in command if word.startswith("--"))
        assert service["image"] == IMAGE
    engine = COMPOSE["services"]["engine"]["command"]
    settings = load_settings(str(ROOT / "deploy/compose/heddle.toml"))
    assert [one.url for one in settings.engines] == [f"http://engine:{engine[engine.index('--port') + 1]}"]
    gateway = COMPOSE["services"]["gateway"]
    assert gateway["command"][-1] in mounts("gateway").values()
    assert settings.store.removeprefix("sqlite:").startswith(mounts("gateway")["record"])
    shutdown_s = Settings.model_fields["shutdown_timeout_s"].default + StoreSettings().close_timeout_s
    assert int(gateway["stop_grace_period"].removesuffix("s")) >= shutdown_s + 10


@pytest.mark.parametrize("name", ["gateway", "engine", "prometheus", "grafana"])
def test_compose_mounts_files_of_the_checkout(name: str) -> None:
    """Docker makes a directory of a file that is not there."""
    for source in mounts(name):
        assert source in COMPOSE["volumes"] or (ROOT / "deploy/compose" / source).is_file()


def test_the_prometheus_of_compose_asks_the_gateway_and_finds_the_alerts() -> None:
    """Under the job's name that the alerts have, and beside its settings, where its container has them."""
    config = yaml.safe_load((ROOT / "deploy/compose/prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"]
    port = COMPOSE["services"]["gateway"]["ports"][0].rpartition(":")[2]
    assert target["targets"] == [f"gateway:{port}"]
    assert f'job="{job["job_name"]}"' in str(rules())
    there = mounts("prometheus")
    alerts = Path(there["./prometheus.yaml"]).parent / config["rule_files"][0]
    assert str(alerts) == there["../prometheus/alerts.yaml"]


def test_prometheus_accepts_the_settings_of_compose(tmp_path: Path, promtool: str) -> None:
    """With files where its container has them."""
    for source, there in mounts("prometheus").items():
        if source not in COMPOSE["volumes"]:
            shutil.copy(ROOT / "deploy/compose" / source, tmp_path / Path(there).name)
    subprocess.run([promtool, "check", "config", str(tmp_path / "prometheus.yml")], check=True)


def test_the_grafana_of_compose_finds_prometheus_and_the_dashboard() -> None:
    """Where the other services and mounts are."""
    (source,) = yaml.safe_load((ROOT / "deploy/compose/grafana.yaml").read_text())["datasources"]
    assert source["url"].removeprefix("http://") == "prometheus:" + COMPOSE["services"]["prometheus"]["ports"][0][-4:]
    (provider,) = yaml.safe_load((ROOT / "deploy/compose/dashboards.yaml").read_text())["providers"]
    board = Path(mounts("grafana")["../grafana/heddle.json"])
    assert str(board.parent) == provider["options"]["path"]
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == str(board)


def mounts(service: str) -> dict[str, str]:
    """Where a service's container has its volumes, by what they are outside."""
    found = [volume.split(":") for volume in COMPOSE["services"][service].get("volumes", ())]
    return {source: there for source, there, *_ in found}


def unit(name: str) -> dict[str, str]:
    """The settings of a unit's service; none is repeated."""
    units = configparser.ConfigParser(interpolation=None)
    units.optionxform = str  # type: ignore[assignment,method-assign]
    units.read(ROOT / f"deploy/systemd/heddle-{name}.service")
    return dict(units["Service"])


def manifests(*names: str) -> list[dict[str, Any]]:
    return [one for name in names for one in yaml.safe_load_all((ROOT / f"deploy/kubernetes/{name}.yaml").read_text())]


def pod_of(name: str) -> dict[str, Any]:
    """The Pod specification of a Deployment."""
    (deployment,) = (one for one in manifests(name) if one["kind"] == "Deployment")
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return pod
