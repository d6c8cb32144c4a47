"""A fleet file that asks for an unusable launcher is refused with one clear line."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from controller.fleet_file import FleetFile, FleetFileError, load_fleet_file
from controller.process import launcher_of


def fleet(launcher: str, **options: Any) -> FleetFile:
    return FleetFile.model_validate({"fleet": "f", "model": "m", "launcher": launcher, "launcher_options": options})


@pytest.mark.parametrize(
    ("launcher", "option", "said"),
    [
        ("local", {"namespace": "x"}, "launcher_options.namespace: unknown"),
        ("ray", {"across_node": True}, "launcher_options.across_node: unknown, did you mean across_nodes?"),
        ("ray", {"across_nodes": "no"}, "launcher_options.across_nodes: must be true or false, not 'no'"),
        ("ray", {"reserve_timeout_s": True}, "launcher_options.reserve_timeout_s: must be a number, not true"),
        ("ray", {"reserve_timeout_s": 0}, "launcher_options.reserve_timeout_s: must be above 0, not 0"),
        ("kubernetes", {"colour": "blue"}, "launcher_options.colour: unknown"),
        ("kubernetes", {"template": 5}, "launcher_options.template: must be a string, not 5"),
        ("kubernetes", {"port": "8000"}, "launcher_options.port: must be a whole number, not '8000'"),
        ("kubernetes", {"port": 99999}, "launcher_options.port: must be at most 65535, not 99999"),
        ("kubernetes", {"confirm_timeout_s": "x"}, "launcher_options.confirm_timeout_s: must be a number, not 'x'"),
    ],
)
def test_an_option_that_a_launcher_cannot_have_is_named(
    launcher: str, option: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """In the file's one line, before anything starts. Those of `local` were ignored, and the others failed later."""
    path = tmp_path / "fleet.toml"
    gpus = "gpus = 1\n" if launcher == "local" else ""
    (item,) = (f"{name} = {json.dumps(value)}" for name, value in option.items())
    path.write_text(f'fleet = "f"\nmodel = "m"\nlauncher = "{launcher}"\n{gpus}[launcher_options]\n{item}\n')
    with pytest.raises(FleetFileError) as raised:
        load_fleet_file(path)
    assert str(raised.value) == f"{path}: {said}"


@pytest.mark.parametrize(("launcher", "library"), [("ray", "ray"), ("kubernetes", "kubernetes")])
def test_a_library_that_is_not_installed_is_named(launcher: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message gives the command that installs it: what pyproject.toml asks for, by its own name, because `heddle`
    on PyPI is another project."""
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (wanted,) = extras["optional-dependencies"][launcher]
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"controller.{launcher}_launcher", raising=False)
    with pytest.raises(FleetFileError, match=f"pip install '{wanted}'"):
        launcher_of(fleet(launcher))


@pytest.mark.parametrize(
    ("container", "more", "said"),
    [
        ("env: {A: b}", "", "env must be a list of tables, such as - {name: A, value: b}"),
        ("env: [A=b]", "", "env must be a list of tables, such as - {name: A, value: b}"),
        ("env: [{A: b}]", "", "env must be a list of tables, such as - {name: A, value: b}"),
        ("resources: [gpu]", "", "resources must be a table, not ['gpu']"),
        ("resources: {limits: 64Gi}", "", "limits must be a table, not '64Gi'"),
        ("args: []", "metadata: [a]", "metadata must be a table, not ['a']"),
        ("args: []", "metadata: {labels: [a]}", "labels must be a table, not ['a']"),
        ("args: []", "metadata: {annotations: a}", "annotations must be a table, not 'a'"),
    ],
)
def test_a_template_of_which_no_pod_can_be_made_is_refused(
    container: str, more: str, said: str, tmp_path: Path
) -> None:
    """When the file is read. Each launch then failed as a defect to report, once a second, for ever."""
    pytest.importorskip("kubernetes")
    template = tmp_path / "pod.yaml"
    template.write_text(f"{more}\nspec: {{containers: [{{name: engine, image: vllm, {container}}}]}}")
    with pytest.raises(FleetFileError) as raised:
        launcher_of(fleet("kubernetes", template=str(template)))
    assert str(raised.value).endswith(f"template {template}: {said}")


def test_unusable_kubernetes_options_are_reported(tmp_path: Path) -> None:
    """No template, an absent one, one that is not YAML or no Pod, no cluster."""
    pytest.importorskip("kubernetes")
    template = tmp_path / "pod.yaml"
    template.write_text("{a: [")
    absent, config = str(tmp_path / "absent.yaml"), str(tmp_path / "no-kubeconfig")
    for options, message in (
        ({}, "template is missing"),
        ({"template": absent}, "absent.yaml"),
        ({"template": str(template)}, "expected"),
    ):
        with pytest.raises(FleetFileError, match=message):
            launcher_of(fleet("kubernetes", **options))
    for written in ("", "- a", "{}", "spec: []", "spec: {containers: []}", "spec: {containers: [engine]}"):
        template.write_text(written)
        with pytest.raises(FleetFileError, match=r"pod.yaml is not a Pod manifest: it has no spec\.containers"):
            launcher_of(fleet("kubernetes", template=str(template)))
    template.write_text("spec: {containers: [{name: engine}]}")
    with pytest.raises(FleetFileError, match="its first container, which is the engine's, has no image"):
        launcher_of(fleet("kubernetes", template=str(template)))
    template.write_text("spec: {containers: [{name: engine, image: vllm}]}")
    with pytest.raises(FleetFileError, match=r"[Ii]nvalid kube-config file"):
        launcher_of(fleet("kubernetes", template=str(template), kubeconfig=config))
