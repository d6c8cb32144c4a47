"""Which fleet the work needs, and whether a change pays."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from controller.demand import Work
from controller.journal import State
from controller.layout import Floor, fitting, lay_out
from controller.planning import WAKE_S, Proposal, propose, relaunch_s
from controller.steps import DesiredServer, SleepState
from engines.profiles import load_profile
from scheduling.estimate import Remaining
from scheduling.partition import PRECISION, Presorted
from scheduling.reshaping import COLD_RELAUNCH_S, ReshapeRule
from scheduling.running_sums import LoadedEngine
from scheduling.scaling import MIXED_FLEET_GAIN, makespan_s

PROFILES = {tp: load_profile(f"qwen3-14b-h100-tp{tp}") for tp in (1, 2, 4, 8)}
DEVICES = tuple(str(number) for number in range(8))
FLOOR = Floor(DEVICES, 8)
RULE = ReshapeRule(0.15, min_correlation=0.9)
SMALL = State(wanted=tuple(DesiredServer(f"s{number}", 1, (device,)) for number, device in enumerate(DEVICES)))
TAIL = Work(tuple(Remaining(60_000.0, 4_000.0) for _ in range(4)), 0.95)


def proposed(work: Work = TAIL, state: State = SMALL, **changed: object) -> Proposal:
    profiles = changed.get("profiles", PROFILES)
    found = propose(work, state, profiles, changed.get("floor", FLOOR), RULE)  # type: ignore[arg-type]
    assert isinstance(found, Proposal), found
    return found


def test_a_long_tail_gets_large_engines() -> None:
    """Four trajectories on eight engines of TP 1 leave half of the engines idle."""
    found = proposed()
    assert found.is_worth_it and max(found.tps) > 1 and found.gain_s > 0
    assert found.planned_s + found.relaunch_s + found.gain_s == pytest.approx(found.current_s)
    assert "4 trajectories end in" in found.why and f"{found.gain_s / found.current_s:.0%} gained" in found.why


def test_any_fleet_is_worth_it_if_none_is_wanted() -> None:
    """All engines were given up, or an operator ended them: there is nothing to compare with, and no prediction to
    distrust."""
    found = proposed(replace(TAIL, correlation=None), State())
    assert found.is_worth_it and found.why == "there is no fleet" and found.gain_s == float("inf")
    assert found.tps == proposed().tps and found.planned_s == pytest.approx(proposed().planned_s)
    assert found.relaunch_s == COLD_RELAUNCH_S


def test_no_engine_is_planned_larger_than_a_node() -> None:
    """All devices are used, and no engine is larger than a node."""
    for devices_per_node in (2, 4, 8):
        devices = tuple(map(str, range(16)))
        found = proposed(state=State(), floor=Floor(devices, devices_per_node))
        assert sum(found.tps) == 16 and max(found.tps) <= devices_per_node


@pytest.mark.parametrize(
    ("nodes", "resting", "tps"),
    [
        ((4, 4), (), (4, 4)),  # as on Kubernetes, whatever gpus_per_node is in the file
        ((4, 8), (), (8,)),
        ((8,), ("node0/0", "node0/4"), (2, 2)),
        ((1, 1, 1), (), (1, 1, 1)),
    ],
)
def test_every_plan_fits_onto_the_devices(
    nodes: tuple[int, ...], resting: tuple[str, ...], tps: tuple[int, ...]
) -> None:
    """Engines were planned that had no block: each plan was refused, and made again for ever."""
    devices = tuple(f"node{node}/{number}" for node, size in enumerate(nodes) for number in range(size))
    assert proposed(state=State(), floor=Floor(devices, 8, frozenset(resting))).tps == tps


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
@settings(max_examples=50, deadline=None)
def test_whatever_is_planned_can_be_laid_out(nodes: list[int], data: st.DataObject) -> None:
    """On nodes of any size, with any devices at rest. If no engine fits, there is no plan."""
    devices = tuple(f"node{node}/{number}" for node, size in enumerate(nodes) for number in range(size))
    resting = frozenset(data.draw(st.sets(st.sampled_from(devices))))
    floor = Floor(devices, 8, resting, spans_nodes=data.draw(st.booleans()))
    profiles = {tp: PROFILES[tp] for tp in data.draw(st.sets(st.sampled_from(sorted(PROFILES)), min_size=1))}
    found = propose(TAIL, State(), profiles, floor, RULE)
    assert isinstance(found, Proposal) == any(floor.blocks(tp) for tp in profiles)
    if isinstance(found, Proposal):
        assert found.tps and lay_out(found.tps, [], floor, str)


def test_what_a_resting_device_leaves_of_a_node_gets_smaller_engines() -> None:
    """One of eight devices rests: 3 x TP 2 left another one idle, and took a sixth longer."""
    crowd = Work(tuple(Remaining(500.0 * (1 + number % 40), 4_000.0, 2_000.0) for number in range(300)), 0.95)
    floor = Floor(DEVICES, 8, frozenset({"0"}))
    found = proposed(crowd, State(), floor=floor)
    assert found.tps == (4, 2, 1)
    assert not proposed(crowd, State(wanted=tuple(lay_out(found.tps, [], floor, str))), floor=floor).is_worth_it


@given(st.lists(st.integers(1, 7), min_size=1, max_size=2).filter(lambda nodes: sum(nodes) < 10), st.data())
@settings(max_examples=60, deadline=None)
def test_no_fleet_that_fits_promises_much_more_than_the_planned_one(nodes: list[int], data: st.DataObject) -> None:
    """Against every fleet that fits. A plan is exactly repeatable, and changes nothing once it is there."""
    devices = tuple(f"node{node}/{number}" for node, size in enumerate(nodes) for number in range(size))
    floor = Floor(devices, 8, frozenset(data.draw(st.sets(st.sampled_from(devices), max_size=2))))
    profiles = {tp: PROFILES[tp] for tp in data.draw(st.sets(st.sampled_from((1, 2, 4)), min_size=1))}
    lengths = data.draw(st.lists(st.floats(100.0, 10_000.0), min_size=1, max_size=20)) * data.draw(st.integers(1, 10))
    trajectories = tuple(Remaining(length, 2_000.0, length / 2) for length in lengths)
    work = Work(trajectories, 0.95)
    found = propose(work, State(), profiles, floor, RULE)
    assume(isinstance(found, Proposal))
    assert isinstance(found, Proposal) and propose(work, State(), profiles, floor, RULE) == found
    there = State(wanted=tuple(lay_out(found.tps, [], floor, str)))
    assert proposed(work, there, floor=floor, profiles=profiles).why.endswith("the fleet is the best one")
    presorted, kinds = Presorted(trajectories), {tp: LoadedEngine(profile) for tp, profile in profiles.items()}
    counts = (range(len(floor.blocks(tp)) + 1) for tp in profiles)
    fleets = {fitting(Counter(dict(zip(profiles, some, strict=True))).elements(), floor) for some in product(*counts)}
    best_s = min(makespan_s(presorted, kinds, fleet) for fleet in fleets - {()})
    assert found.planned_s == pytest.approx(makespan_s(presorted, kinds, found.tps))
    assert found.planned_s * (1 - MIXED_FLEET_GAIN) <= best_s * (1 + 2 * PRECISION)


def test_too_few_trajectories_are_not_planned_for() -> None:
    """The minimum is a parameter; without any trajectory there is no plan."""
    for num, least, is_planned in ((4, 4, True), (4, 5, False), (1, 1, True), (1, 0, True), (0, 0, False)):
        work = replace(TAIL, remaining=TAIL.remaining[:num])
        assert isinstance(propose(work, SMALL, PROFILES, FLOOR, RULE, least), Proposal) == is_planned


def test_a_crowd_of_short_trajectories_keeps_its_fleet() -> None:
    """A few percent do not pay for a relaunch; and the best fleet stays without any estimate."""
    crowd = Work(tuple(Remaining(300.0, 100.0) for _ in range(5_000)), 0.95)
    found = proposed(crowd)
    assert not found.is_worth_it and "15% is the least that pays" in found.why
    best = tuple(DesiredServer(f"b{number}", tp, ()) for number, tp in enumerate(found.tps))
    assert proposed(crowd, State(wanted=best)).why.endswith("the fleet is the best one")


def test_an_untrusted_predictor_changes_nothing() -> None:
    """This holds however large the gain is that it promises."""
    for correlation, shown in ((None, "nothing"), (0.5, "0.50")):
        found = proposed(replace(TAIL, correlation=correlation))
        assert not found.is_worth_it and f"has shown {shown}" in found.why
    blind = propose(replace(TAIL, correlation=-0.3), SMALL, PROFILES, FLOOR, replace(RULE, min_correlation=0.0))
    assert isinstance(blind, Proposal) and blind.is_worth_it, "a rule that needs no correlation accepts any predictor"


def test_a_relaunch_that_takes_too_long_is_not_worth_it() -> None:
    """Its cost is the time that relaunches took here."""
    slow = replace(SMALL, phase_s={("start", tp): (3_000.0,) for tp in PROFILES})
    found = proposed(state=slow)
    assert not found.is_worth_it and found.relaunch_s == 3_000.0


def test_measured_times_replace_the_assumed_ones() -> None:
    """The median of the latest ones counts, and so does the time that the old engines take to end."""
    assert relaunch_s({}, (1, 1), (2,)) == COLD_RELAUNCH_S
    times = {("start", 2): (30.0, 10.0, 20.0), ("stop", 1): (2.0,), ("register", 2): (1.0,)}
    assert relaunch_s(times, (1, 1), (2,)) == 23.0
    assert relaunch_s(times, (2,), (2,)) == 0.0
    several = {("stop", 1): (2.0,), ("stop", 2): (7.0,), ("start", 4): (30.0,), ("start", 8): (50.0,)}
    assert relaunch_s(several, (1, 2), (4,)) == 37.0, "the slowest end, then the slowest start"
    assert relaunch_s(several, (1,), (4, 8)) == 52.0
    assert relaunch_s(several, (8,), (2,)) == 57.0, "a size that was never measured counts as the slowest"


def test_starts_that_take_turns_cost_their_sum() -> None:
    """`limits.max_starting` servers start at once. A change to 64 engines seemed to take as long as one start, not
    eight."""
    assert relaunch_s({}, (8,) * 8, (1,) * 64, max_starting=8) == 8 * COLD_RELAUNCH_S
    times = {("start", 1): (10.0,), ("start", 2): (30.0,), ("start", 4): (20.0,), ("stop", 8): (5.0,)}
    assert relaunch_s(times, (8, 8), (4, 2, 2, 2, 2, 2, 1, 1), max_starting=3) == 5.0 + 30.0 + 30.0 + 10.0
    assert relaunch_s(times, (8, 8), (4, 2, 2, 2, 2, 2, 1, 1), [2] * 5, max_starting=1) == 5.0 + 20.0 + 10.0 + 10.0
    nodes = tuple(f"node{node}/{number}" for node in range(8) for number in range(8))
    large = State(wanted=tuple(DesiredServer(f"l{node}", 8, nodes[8 * node : 8 * node + 8]) for node in range(8)))
    crowd = Work(tuple(Remaining(2_000.0, 2_000.0) for _ in range(6_400)), 0.95)
    found = propose(crowd, large, PROFILES, Floor(nodes, 8), RULE, max_starting=4)
    assert isinstance(found, Proposal) and len(found.tps) > 16
    assert found.relaunch_s == -(-len(found.tps) // 4) * COLD_RELAUNCH_S


def test_a_change_to_sleeping_engines_costs_their_wake_up() -> None:
    """This holds for as many as sleep; one more has to be started. With sleepers, more changes pay."""
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


def test_failed_sizes_and_resting_devices_are_not_planned() -> None:
    """A size that did not start is left out, and so are devices out of use."""
    best = proposed().tps[0]
    assert best not in proposed(state=replace(SMALL, blocked_tps=frozenset({best}))).tps
    rested = Floor(DEVICES, 8, frozenset(DEVICES[4:]))
    four = replace(SMALL, wanted=SMALL.wanted[:4], resting=frozenset(DEVICES[4:]))
    assert sum(proposed(state=four, floor=rested).tps) <= 4


def test_a_resting_device_that_left_the_inventory_is_not_subtracted_twice() -> None:
    """A node is drained by hand and then taken away: the other node's devices are planned."""
    for gone, left in ((DEVICES[4:], DEVICES[:4]), (DEVICES[:4], DEVICES[4:])):
        resting = frozenset(gone)
        found = proposed(state=State(resting=resting), floor=Floor(left, 4, resting))
        assert sum(found.tps) == 4


def test_work_that_takes_no_time_changes_nothing() -> None:
    """Every answer was empty, and the profiles say nothing of prefill. The controller used to end
    with a division by zero, and again after each such rollout."""
    profiles = {tp: replace(one, prefill_per_ktoken_ms=0.0, prefill_per_ktoken2_ms=0.0) for tp, one in PROFILES.items()}
    large = State(wanted=(DesiredServer("l", 8, DEVICES),))
    for state in (large, SMALL):
        assert not proposed(Work((Remaining(0.0, 4_000.0),) * 4, 0.95), state, profiles=profiles).is_worth_it


def test_without_work_or_profiles_there_is_no_plan() -> None:
    """The reason is given."""
    assert "too few" in str(propose(Work((), None), SMALL, PROFILES, FLOOR, RULE))
    assert "no profile of TP 1" in str(propose(TAIL, SMALL, {2: PROFILES[2]}, FLOOR, RULE))
