"""What the docs name exists: settings, links, commits, commands, metrics and routes."""

import argparse
import importlib
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from controller.fleet_file import FleetFile, load_fleet_file
from gateway import metrics
from gateway.api.openapi import declare_hot_routes
from gateway.config import Settings
from gateway.passthrough import PASSTHROUGH_ROUTES
from gateway.turns.turns import TURN_ROUTES
from heddle.cli import _VERBS as VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[([^]]*)\]\(([^)\s]+)\)")
METRIC = re.compile(r"heddle_[a-z_]+")
FOLDERS = (
    "controller|deploy|engines|examples|gateway|heddle|keeper|loadtest|predictor|scenarios|scheduling|simulator|store|"
    "tests"
)
COMMIT = re.compile(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7}\b")


def settings_table() -> list[str]:
    """The rows that docs/operating.md must have; `python -m tests.docs.test_docs` prints them."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = "none" if field.default in (None, ()) else field.default
        rows.append(f"| `{name}` | `{default}` | {(field.description or '').replace('|', '/')} |")
    return rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_has_a_target(page: Path) -> None:
    """A link goes to a file, a heading of a page, or a name that its file defines."""
    for text, target in LINK.findall(page.read_text()):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        if heading:
            assert heading in _headings(linked), f"{page.name}: {target}"
        if text.startswith("`") and linked.suffix == ".py":
            for name in text.strip("`").split("."):
                assert _defines(linked, name), f"{page.name}: {text} is not in {path}"


@pytest.fixture(scope="module")
def commits() -> set[str]:
    """The commits of this checkout's history, as their first seven digits."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    log = subprocess.run(
        ["git", "log", "--format=%h", "--abbrev=7"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = {name[:7] for name in log.stdout.split()}
    if len(found) < 100:
        pytest.skip("the checkout has no history")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_commit_exists(page: Path, commits: set[str]) -> None:
    """A figure of a commit that nobody has cannot be reproduced."""
    assert set(COMMIT.findall(page.read_text())) - commits == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_command_and_file_exists(page: Path) -> None:
    """Targets of make, our modules, verbs of `heddle` and their flags, and files of the repository."""
    text = page.read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)) <= targets
    for name, words in re.findall(rf"python\s-m\s((?:{FOLDERS})[.a-z_]+)([^`#|>]*)", text):
        source = (ROOT / f"{name.replace('.', '/')}.py").read_text()
        given = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", words.partition("\n\n")[0]))
        assert given <= set(re.findall(r'"(--[a-z][a-z-]*)"', source)), f"python -m {name}"
        assert set(re.findall(r'"(--[a-z][a-z-]*)"[^()]*required=True', source)) <= given, f"python -m {name}"
    for path in re.findall(rf"(?<![\w/.-])(?:\.\./)?((?:{FOLDERS})/[\w/.-]+\.(?:toml|py|sh|csv|yaml))", text):
        assert (ROOT / path).exists(), path
    modules = {verb: module for verb, _, module in VERBS}
    for verb, words in re.findall(r"(?:`|^)heddle ([a-z-]+)([^`|#\n]*)", text, re.MULTILINE):
        known = flags_of(modules[verb])
        for flag in re.findall(r"(?<= )--[a-z][a-z-]*", words.partition(" -- ")[0]):
            assert flag in known, f"heddle {verb} {flag}"


@lru_cache
def flags_of(module: str) -> frozenset[str]:
    """The flags of a verb and its own verbs."""
    parsers, flags = [argparse.ArgumentParser()], set[str]()
    importlib.import_module(module).add_arguments(parsers[0])
    while parsers:
        for action in parsers.pop()._actions:
            flags |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return frozenset(flags)


def test_a_target_that_rewrites_a_page_says_so() -> None:
    """`make results` did not."""
    makefile = (ROOT / "Makefile").read_text()
    rewriting = re.findall(r"^([a-z]+):.*\n(?:\t.*\n)*?\t.*--write .*?(docs/[\w.-]+)", makefile, re.MULTILINE)
    assert rewriting
    for target, page in rewriting:
        assert re.search(rf"^## make {target} .*writes {page}", makefile, re.MULTILINE), target


def test_every_page_is_reachable_from_the_readme() -> None:
    """By links from page to page."""
    found, new = set(), {ROOT / "README.md"}
    while new:
        found |= new
        links = {(page, target.partition("#")[0]) for page in new for _, target in LINK.findall(page.read_text())}
        new = {(page.parent / path).resolve() for page, path in links if path.endswith(".md")} - found
    assert set(PAGES) <= found


def test_the_settings_table_is_up_to_date() -> None:
    """The table of docs/operating.md has each setting's name, default and reason, and no other."""
    page = (ROOT / "docs/operating.md").read_text()
    table = page.partition("## Settings")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows == settings_table(), "paste what `python -m tests.docs.test_docs` prints"


def test_every_key_of_a_fleet_file_is_documented() -> None:
    """The table of docs/controller.md has each key, and no other. `.name` is short for a key of the same TOML table as
    the key before it."""
    section = (ROOT / "docs/controller.md").read_text().partition("\n## fleet.toml")[2]
    named, table = set(), ""
    for cell in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE):
        for key in re.findall(r"`([^`]+)`", cell):
            table = table if key.startswith(".") else key.rpartition(".")[0]
            named.add(table + key if key.startswith(".") else key)
    assert named == _fleet_keys() - {"admin_key"}, "the admin key is never in the file"


def test_whole_fleet_files_can_be_used_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That for simulated engines was a list of keys, which put into the file above them made one that is refused."""
    monkeypatch.setenv("HEDDLE_ADMIN_KEY", "key")
    text = (ROOT / "docs/controller.md").read_text()
    kinds = set()
    for content in re.findall(r"^```toml\n(fleet = .+?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / "fleet.toml").write_text(content)
        kinds.add(load_fleet_file(tmp_path / "fleet.toml").engine.kind)
    assert kinds == {"vllm", "sim"}


def test_documented_metrics_match_the_existing_ones() -> None:
    """Every metric is in docs/operating.md, and each metric named in any page exists."""
    existing = _metrics()
    documented = set(METRIC.findall((ROOT / "docs/operating.md").read_text()))
    assert documented == existing
    fleet = set(METRIC.findall((ROOT / "controller/api.py").read_text()))
    assert fleet <= set(METRIC.findall((ROOT / "docs/controller.md").read_text()))
    for page in PAGES:
        assert set(METRIC.findall(page.read_text())) <= existing | fleet, page.name


def test_every_served_route_is_documented() -> None:
    """Routes of turns and of requests without a trajectory are in docs/api.md, and at `/docs` of a running gateway."""
    page = (ROOT / "docs/api.md").read_text()
    app = FastAPI()
    declare_hot_routes(app)
    for route in (*TURN_ROUTES, *PASSTHROUGH_ROUTES):
        assert route in page
        assert route in app.openapi()["paths"]


def _fleet_keys() -> set[str]:
    """As they are written in the file: `limits.max_tries`."""
    keys = set()
    for name, field in FleetFile.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys |= {f"{name}.{key}" for key in inner.model_fields}
        else:
            keys.add(name)
    return keys


def _headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def _defines(source: Path, name: str) -> bool:
    pattern = rf"^\s*(?:async )?(?:def|class) {re.escape(name)}\b|^{re.escape(name)}\b.* = "
    return re.search(pattern, source.read_text(), re.MULTILINE) is not None


def _metrics() -> set[str]:
    """The names of all series; counters have the suffix that Prometheus adds."""
    source = Path(metrics.__file__).read_text()
    counters = set(re.findall(r'(?:Counter|_Counts|_counter)\(\s*"(\w+)"', source))
    return {name + "_total" if name in counters else name for name in re.findall(r'"(heddle_\w+)"', source)}


if __name__ == "__main__":
    print("\n".join(settings_table()))
