"""What is wanted of a fleet without engines."""

from dataclasses import replace
from pathlib import Path

import pytest

from controller.demand import Work
from controller.desired import DesiredFleet, Refused
from controller.journal import State, fold
from controller.steps import DesiredServer
from engines import profiles
from scheduling.estimate import Remaining
from tests.controller.fleet_site import ENGINE, fleet_file

DEVICES = ("cpu0", "cpu1", "cpu2", "cpu3")
ENDED = State(changed_at=1.0, why="scaled by hand", is_manual=True)
LEFT = State(changed_at=1.0, wanted=(DesiredServer("test-1", 1, ("cpu0",)),), is_manual=True)


def desired(state: State, tmp_path: Path, devices: tuple[str, ...] = DEVICES) -> DesiredFleet:
    fleet = fleet_file(tmp_path, "http://127.0.0.1:9", cpu_slots=4, first=(1, 2, 1))
    return DesiredFleet(fleet, lambda: devices, lambda: state)


@pytest.mark.parametrize(
    ("state", "devices", "command"),
    [
        (ENDED, DEVICES, "heddle fleet scale 1xTP2 2xTP1"),
        (ENDED, (), "heddle fleet scale COUNTxTP"),
        (LEFT, DEVICES, None),
        (State(), DEVICES, None),
    ],
    ids=["ended", "without devices", "with an engine", "without a journal"],
)
def test_an_empty_fleet_names_the_command_that_starts_it(
    state: State, devices: tuple[str, ...], command: str | None, tmp_path: Path
) -> None:
    """It is that of the file's first fleet; before any node has joined, the user chooses one."""
    assert desired(state, tmp_path, devices).command_to_start() == command


def test_a_file_without_first_engines_names_no_command_of_nothing(tmp_path: Path) -> None:
    """The command named was `heddle fleet scale`, which is refused."""
    fleet = fleet_file(tmp_path, "http://127.0.0.1:9", first=())
    made = DesiredFleet(fleet, lambda: DEVICES, lambda: replace(ENDED, why="the first fleet"))
    assert made.command_to_start() == "heddle fleet scale COUNTxTP"


@pytest.mark.parametrize(
    ("state", "tps"),
    [
        (ENDED, [2, 1, 1]),
        (LEFT, [1]),
        (State(changed_at=1.0, is_manual=True, resting=frozenset({"cpu0"})), []),
        (State(changed_at=1.0, blocked_tps=frozenset({2})), []),
    ],
    ids=["ended", "with an engine", "drained by hand", "given up"],
)
def test_an_empty_fleet_that_is_to_be_planned_gets_its_first_engines(
    state: State, tps: list[int], tmp_path: Path
) -> None:
    """Without engines there are no trajectories, and without these no plans. But devices that an operator took out of
    use, and sizes that were given up, come back only with an operator's fleet."""
    (record,) = desired(state, tmp_path).let_plans_decide([])
    after = fold(state, record)
    assert [one.tp for one in after.wanted] == tps and not after.is_manual
    assert (after.resting, after.blocked_tps) == (state.resting, state.blocked_tps)


def test_plans_go_on_when_a_file_of_profiles_is_gone(tmp_path: Path) -> None:
    """The controller read it at its start, as it did the fleet's own file."""
    own = tmp_path / "own.toml"
    own.write_text((Path(profiles.__file__).parent / "profiles/h100.toml").read_text())
    names = {1: f"{own}:qwen3-14b-h100-tp1", 2: f"{own}:qwen3-14b-h100-tp2"}
    fleet = fleet_file(tmp_path, "http://127.0.0.1:9", engine=ENGINE | {"profiles": names})
    made = DesiredFleet(fleet, lambda: DEVICES[:2], State)
    own.unlink()
    work = Work(tuple(Remaining(60_000.0, 4_000.0) for _ in range(4)), 0.95)
    proposal = made.proposed(work, [])
    assert not isinstance(proposal, str) and proposal.tps == (2,)


def test_a_size_that_the_file_does_not_have_is_refused(tmp_path: Path) -> None:
    """Its flags and its profile are unknown, and the next plan would end it."""
    with pytest.raises(Refused, match=r"TP 4 is not among tp_sizes \[1, 2\]"):
        desired(ENDED, tmp_path).scaled([4], ())
