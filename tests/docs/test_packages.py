"""The versions of packages that pyproject.toml allows, and those that the tests ran with (constraints.txt)."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
TESTED = {canonicalize_name(name): version for name, version in PINS.items()}


def own_requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    kinds = [PROJECT["dependencies"], *(extras[name] for name in extras if name != "text")]  # torch has no pin
    return [Requirement(line) for lines in kinds for line in lines]


def test_every_package_that_is_installed_with_heddle_has_a_version() -> None:
    """What the packages need themselves, too. Nine were missing, of which an image got whatever was newest."""
    left, seen = own_requirements(), set[tuple[str, frozenset[str]]]()
    while left:
        needed = left.pop()
        name = canonicalize_name(needed.name)
        if (name, frozenset(needed.extras)) in seen:
            continue
        seen.add((name, frozenset(needed.extras)))
        assert name in TESTED, name
        try:
            further = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue  # of an extra that is not installed
        extras = needed.extras or {""}
        left += [one for one in further if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]


def test_the_versions_that_the_tests_ran_with_are_allowed() -> None:
    """uvicorn's has an upper bound: a pin beyond it could not be installed."""
    for needed in own_requirements():
        assert needed.specifier.contains(TESTED[canonicalize_name(needed.name)]), needed


def test_every_dependency_has_a_lowest_version_and_uvicorn_a_highest() -> None:
    """`make lowest` installs these, and an unbounded one would be its first release."""
    for line in PROJECT["dependencies"]:
        bounds = {one.operator for one in Requirement(line).specifier}
        assert ">=" in bounds, line
        assert ("<" in bounds) == (Requirement(line).name == "uvicorn"), line
