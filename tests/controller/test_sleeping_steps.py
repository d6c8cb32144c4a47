"""Servers that sleep beside others on the same devices: any fleet becomes any other, with no harm on the way."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.itinerary import is_reachable, itinerary
from controller.layout import Floor, lay_out
from controller.spares import SpareRule, spares_beside
from controller.steps import (
    DesiredServer,
    Drain,
    Launch,
    MakeReady,
    MoveKv,
    ObservedServer,
    Register,
    Remove,
    Sleep,
    SleepState,
    Stop,
    Wake,
    is_reached,
    next_steps,
)
from tests.controller.test_steps import DEVICES, FLOOR, serving, sizes
from tests.controller.world import World

ONES = [DesiredServer("a", 1, ("0",)), DesiredServer("b", 1, ("1",))]
TWO = DesiredServer("c", 2, ("0", "1"))


def asleep(*servers: DesiredServer) -> list[ObservedServer]:
    return [ObservedServer(one.server_id, one.tp, one.devices, sleep_state=SleepState.ASLEEP) for one in servers]


def test_a_change_of_shape_sleeps_and_wakes_and_starts_nothing() -> None:
    """Two engines fall asleep and one wakes; nothing is stopped or launched, in either direction."""
    there = itinerary([TWO], [*serving(*ONES), *asleep(TWO)], spares=ONES)
    assert there == [
        [Drain("a"), Drain("b")],
        [MoveKv("a"), MoveKv("b")],
        [Sleep("a"), Sleep("b")],
        [Wake("c")],
        [MakeReady("c")],
        [Register("c")],
        [Remove("a"), Remove("b")],
    ]
    back = itinerary(ONES, [*serving(TWO), *asleep(*ONES)], spares=[TWO])
    assert back[2:4] == [[Sleep("c")], [Wake("a"), Wake("b")]]
    assert not any(isinstance(step, (Stop, Launch)) for steps in back for step in steps)


def test_the_first_fleet_waits_until_its_spares_sleep() -> None:
    """Shapes are started one after the other, each asleep before the next one begins."""
    assert itinerary(ONES, [], spares=[TWO]) == [
        [Launch(TWO)],
        [MakeReady("c")],
        [Sleep("c")],
        [Launch(ONES[0]), Launch(ONES[1])],
        [MakeReady("a"), MakeReady("b")],
        [Register("a"), Register("b")],
    ]


def test_no_serving_engine_gives_way_to_a_spare() -> None:
    """A wanted engine does not wait for a spare either."""
    assert next_steps(ONES, serving(*ONES), spares=[TWO]) == []
    four = DesiredServer("d", 4, ("0", "1", "2", "3"))
    more = [*ONES, DesiredServer("e", 1, ("2",))]
    assert next_steps(more, serving(*ONES), spares=[four]) == [Launch(more[2])]


def test_a_server_wakes_only_when_all_its_devices_are_free() -> None:
    """One of the two servers there has fallen asleep; turns still run on the other."""
    left = replace(serving(ONES[1])[0], is_cordoned=True, is_serving=False, was_drained=True, num_turns=1)
    assert next_steps([TWO], [*asleep(ONES[0]), left, *asleep(TWO)], spares=ONES) == []
    assert next_steps([TWO], [*asleep(*ONES), *asleep(TWO)], spares=ONES) == [Wake("c")]


def test_a_server_in_an_unknown_sleep_state_holds_its_devices() -> None:
    """The controller was killed while the server woke: it is told again, and nobody else gets its devices before."""
    between = [replace(one, sleep_state=SleepState.BETWEEN) for one in asleep(TWO)]
    assert next_steps([TWO], [*between, *asleep(*ONES)], spares=ONES) == [Wake("c")]
    assert next_steps(ONES, [*between, *asleep(*ONES)], spares=[TWO]) == [Sleep("c")]
    assert next_steps(ONES, [*between, *asleep(*ONES)]) == [Stop("c")]


@given(
    st.data(),
    sizes().filter(bool),
    st.lists(sizes(), min_size=1, max_size=4),
    st.sets(st.sampled_from((1, 2, 4, 8))),
    st.booleans(),
    st.integers(0, 2),
)
@settings(max_examples=300)
def test_any_fleet_becomes_any_other_with_sleepers_beside_it(
    data: st.DataObject, first: list[int], plans: list[list[int]], tps: set[int], is_ahead: bool, min_engines: int
) -> None:
    """Steps are taken singly, in any order, twice or not at all, or break off with the server already asleep or not
    yet. Turns come and go, servers die, plans change. The world asserts that no device has two servers awake, that no
    sleeping server gets a turn, and that none is stopped under turns. In the end, the wanted servers serve, and all
    others sleep or are gone."""
    world = World()
    rule = SpareRule(frozenset(tps), is_ahead)
    wanted = lay_out(first, [], FLOOR, world.new_id)
    spares = spares_beside(wanted, [], FLOOR, rule, world.new_id)
    for plan in [first, *plans]:
        alive = [one for one in world.seen() if one.is_alive]
        sleeping = [DesiredServer(one.server_id, one.tp, one.devices) for one in alive if not one.held]
        holding = [one for one in wanted if one.server_id not in {other.server_id for other in sleeping}]
        there = [DesiredServer(one.server_id, one.tp, one.devices) for one in alive]
        if plan is not first:
            wanted = lay_out(plan, holding, FLOOR, world.new_id, sleeping)
            spares = spares_beside(wanted, there, FLOOR, replace(rule, is_ahead=False), world.new_id)
        for _ in range(data.draw(st.integers(0, 12))):
            assert is_reachable(wanted, world.seen(), spares=spares), "no minimum forbids it"
            num_before = len(world.serving())
            steps = next_steps(wanted, world.seen(), spares=spares, min_engines=min_engines)
            for step in data.draw(st.permutations(steps)):
                if isinstance(step, Launch) and data.draw(st.integers(0, 3)) == 0:
                    world.launch_breaks_off(step)
                    continue
                if isinstance(step, (Sleep, Wake)) and data.draw(st.integers(0, 3)) == 0:
                    world.breaks_off(step, is_done=data.draw(st.booleans()))
                    continue
                for _ in range(data.draw(st.integers(0, 2))):
                    world.perform(step)
            assert len(world.serving()) >= min(min_engines, num_before)
            gone = world.something_happens(data)
            wanted = world.replaced(wanted, gone)
            spares = [one for one in spares if one.server_id != gone]
    world.lift_cordons()
    world.settle(wanted, spares)
    assert is_reached(wanted, world.seen())
    left = {one.server_id for one in world.seen() if one.is_alive}
    wanted_ids, spare_ids = ({one.server_id for one in each} for each in (wanted, spares))
    assert wanted_ids <= left <= wanted_ids | spare_ids and left - wanted_ids <= world.asleep, "an orphan is left"
    assert {one.server_id for one in world.seen() if one.is_member} == wanted_ids


@given(sizes().filter(bool), st.sets(st.sampled_from((1, 2, 4, 8))), st.sets(st.sampled_from(DEVICES), max_size=3))
def test_each_block_of_a_size_that_sleeps_has_one_server(tps: list[int], sleeping: set[int], resting: set[str]) -> None:
    """Awake or asleep, none is on resting devices. There are no spares beside an empty fleet, which an operator
    ended."""
    world = World()
    wanted = lay_out(tps, [], FLOOR, world.new_id)
    floor = Floor(DEVICES, 8, frozenset(resting))
    rule = SpareRule(frozenset(sleeping), is_ahead=True)
    spares = spares_beside(wanted, [], floor, rule, world.new_id)
    blocks = [one.devices for one in (*wanted, *spares)]
    assert len(blocks) == len(set(blocks)) and not any(resting & set(one.devices) for one in spares)
    for tp in sleeping:
        assert set(floor.blocks(tp)) <= set(blocks)
    assert spares_beside([], wanted, floor, rule, world.new_id) == []


def test_a_sleeper_on_the_right_devices_is_woken_instead_of_a_launch() -> None:
    """Its id comes back. A size without a sleeper gets a new server, on free devices if there are any."""
    floor = Floor(("0", "1", "2", "3"), 4)
    world = World()
    assert lay_out([2], ONES, floor, world.new_id, [TWO]) == [TWO]
    (new,) = lay_out([2], ONES, floor, world.new_id)
    assert new.devices == ("2", "3") and new.server_id != TWO.server_id
