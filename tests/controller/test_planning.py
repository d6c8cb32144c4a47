"""Which fleet the work wants, and whether a change pays."""

from dataclasses import replace

import pytest

from controller.demand import Work
from controller.journal import State
from controller.layout import Floor
from controller.planning import WAKE_S, Proposal, propose, relaunch_s
from controller.steps import DesiredServer, SleepState
from engines.profiles import load_profile
from scheduling.estimate import Remaining
from scheduling.reshaping import COLD_RELAUNCH_S, ReshapeRule

PROFILES = {tp: load_profile(f"qwen3-14b-h100-tp{tp}") for tp in (1, 2, 4, 8)}
DEVICES = tuple(str(number) for number in range(8))
FLOOR = Floor(DEVICES, 8)
RULE = ReshapeRule(0.15, min_correlation=0.9)
SMALL = State(wanted=tuple(DesiredServer(f"s{number}", 1, (device,)) for number, device in enumerate(DEVICES)))
TAIL = Work(tuple(Remaining(60_000.0, 4_000.0) for _ in range(4)), 0, 0.95)


def proposed(work: Work = TAIL, state: State = SMALL, **changed: object) -> Proposal:
    profiles = changed.get("profiles", PROFILES)
    found = propose(work, state, profiles, changed.get("floor", FLOOR), RULE)  # type: ignore[arg-type]
    assert isinstance(found, Proposal), found
    return found


def test_a_long_tail_wants_large_engines() -> None:
    """Four trajectories on eight engines of TP 1 leave half of them idle."""
    found = proposed()
    assert found.is_worth_it and max(found.tps) > 1 and found.gain_s > 0
    assert found.planned_s + found.relaunch_s + found.gain_s == pytest.approx(found.current_s)
    assert "4 trajectories end in" in found.why and f"{found.gain_s / found.current_s:.0%} gained" in found.why


def test_where_no_engine_is_wanted_any_fleet_is_worth_it() -> None:
    """All were given up, or an operator ended them: there is nothing to compare with, nor anyone to have trusted."""
    found = proposed(replace(TAIL, correlation=None), State())
    assert found.is_worth_it and found.why == "there is no fleet" and found.gain_s == float("inf")
    assert found.tps == proposed().tps and found.planned_s == pytest.approx(proposed().planned_s)
    assert found.relaunch_s == COLD_RELAUNCH_S


def test_no_engine_is_planned_larger_than_a_node() -> None:
    """All nodes are used, and an engine has the devices of one."""
    for devices_per_node in (2, 4, 8):
        devices = tuple(map(str, range(16)))
        found = proposed(state=State(), floor=Floor(devices, devices_per_node))
        assert sum(found.tps) == 16 and max(found.tps) <= devices_per_node


def test_so_few_trajectories_are_no_reason_to_plan() -> None:
    """As few as the rule says, and none in any case."""
    for num, least, is_planned in ((4, 4, True), (4, 5, False), (1, 1, True), (1, 0, True), (0, 0, False)):
        work = replace(TAIL, remaining=TAIL.remaining[:num])
        assert isinstance(propose(work, SMALL, PROFILES, FLOOR, RULE, least), Proposal) == is_planned


def test_a_crowd_is_left_where_it_is() -> None:
    """A few percent pay no relaunch; and the best fleet stays without any reckoning."""
    crowd = Work(tuple(Remaining(300.0, 100.0) for _ in range(5_000)), 500, 0.95)
    found = proposed(crowd)
    assert not found.is_worth_it and "15% is the least that pays" in found.why
    best = tuple(DesiredServer(f"b{number}", tp, ()) for number, tp in enumerate(found.tps))
    assert proposed(crowd, State(wanted=best)).why.endswith("the fleet is the best one")


def test_an_untrusted_predictor_moves_nothing() -> None:
    """However large the gain is that it promises."""
    for correlation, shown in ((None, "nothing"), (0.5, "0.50")):
        found = proposed(replace(TAIL, correlation=correlation))
        assert not found.is_worth_it and f"has shown {shown}" in found.why
    blind = propose(replace(TAIL, correlation=-0.3), SMALL, PROFILES, FLOOR, replace(RULE, min_correlation=0.0))
    assert isinstance(blind, Proposal) and blind.is_worth_it, "who asks for no trust gets plans from any predictor"


def test_a_relaunch_that_takes_too_long_is_not_worth_it() -> None:
    """Its cost is what relaunches took here."""
    slow = replace(SMALL, phase_s={("start", tp): (3_000.0,) for tp in PROFILES})
    found = proposed(state=slow)
    assert not found.is_worth_it and found.relaunch_s == 3_000.0


def test_measured_times_take_the_place_of_known_ones() -> None:
    """The median of the last; the old engines' end counts too."""
    assert relaunch_s({}, (1, 1), (2,)) == COLD_RELAUNCH_S
    times = {("start", 2): (30.0, 10.0, 20.0), ("stop", 1): (2.0,), ("register", 2): (1.0,)}
    assert relaunch_s(times, (1, 1), (2,)) == 23.0
    assert relaunch_s(times, (2,), (2,)) == 0.0
    several = {("stop", 1): (2.0,), ("stop", 2): (7.0,), ("start", 4): (30.0,), ("start", 8): (50.0,)}
    assert relaunch_s(several, (1, 2), (4,)) == 37.0, "the last one to end, and then to start"
    assert relaunch_s(several, (1,), (4, 8)) == 52.0
    assert relaunch_s(several, (8,), (2,)) == 57.0, "a size that was never measured takes as long as the slowest did"


def test_a_change_to_engines_that_sleep_costs_their_waking() -> None:
    """As many as sleep; one more has to be started. So more changes pay."""
    times = {("start", 2): (60.0,), ("stop", 1): (5.0,), ("sleep", 1): (2.0,), ("register", 2): (1.0,)}
    assert relaunch_s(times, (1, 1), (2,), [2]) == 2.0 + WAKE_S + 1.0
    times |= {("wake", 2): (3.0,)}
    assert relaunch_s(times, (1, 1), (2,), [2, 4]) == 6.0
    assert relaunch_s(times, (1,) * 4, (2, 2), [2]) == 63.0
    slow = {("start", tp): (3_000.0,) for tp in PROFILES} | {("wake", tp): (3.0,) for tp in PROFILES}
    best = proposed().tps
    asleep = tuple(DesiredServer(f"a{number}", tp, DEVICES[:tp]) for number, tp in enumerate(best))
    rest = {one.server_id: SleepState.ASLEEP.value for one in asleep}
    found = proposed(state=replace(SMALL, phase_s=slow, spares=asleep, rest=rest))
    assert found.is_worth_it and found.relaunch_s == 3.0
    between = dict.fromkeys(rest, SleepState.BETWEEN.value)
    assert not proposed(state=replace(SMALL, phase_s=slow, spares=asleep, rest=between)).is_worth_it


def test_what_failed_or_rests_is_not_planned() -> None:
    """Sizes that did not start, and devices out of use."""
    best = proposed().tps[0]
    assert best not in proposed(state=replace(SMALL, blocked_tps=frozenset({best}))).tps
    rested = Floor(DEVICES, 8, frozenset(DEVICES[4:]))
    four = replace(SMALL, wanted=SMALL.wanted[:4], resting=frozenset(DEVICES[4:]))
    assert sum(proposed(state=four, floor=rested).tps) <= 4


def test_without_work_or_profiles_there_is_no_plan() -> None:
    """And it says why."""
    assert "too few" in str(propose(Work((), 0, None), SMALL, PROFILES, FLOOR, RULE))
    assert "no profile of TP 1" in str(propose(TAIL, SMALL, {2: PROFILES[2]}, FLOOR, RULE))
