"""A fleet file that asks for an unusable launcher is refused with one clear line."""

import sys
from pathlib import Path
from typing import Any

import pytest

from controller.fleet_file import FleetFile, FleetFileError
from controller.process import launcher_of


def fleet(launcher: str, **options: Any) -> FleetFile:
    return FleetFile.model_validate({"fleet": "f", "model": "m", "launcher": launcher, "launcher_options": options})


@pytest.mark.parametrize(("launcher", "library"), [("ray", "ray"), ("kubernetes", "kubernetes")])
def test_a_library_that_is_not_installed_is_named(launcher: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message gives the command that installs it."""
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"controller.{launcher}_launcher", raising=False)
    with pytest.raises(FleetFileError, match=rf"pip install 'heddle\[{launcher}\]'"):
        launcher_of(fleet(launcher))


def test_unusable_kubernetes_options_are_reported(tmp_path: Path) -> None:
    """No template, an absent one, one that is not YAML or no Pod, an unknown option, no cluster."""
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
    with pytest.raises(FleetFileError, match=r"template: .* not int"):
        launcher_of(fleet("kubernetes", template=5))
    template.write_text("spec: {containers: [{name: engine, image: vllm}]}")
    with pytest.raises(FleetFileError, match="colour"):
        launcher_of(fleet("kubernetes", template=str(template), colour="blue"))
    with pytest.raises(FleetFileError, match=r"[Ii]nvalid kube-config file"):
        launcher_of(fleet("kubernetes", template=str(template), kubeconfig=config))
