"""From any fleet to any fleet, with the controller killed anywhere: no harm on the way, and it gets there."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.itinerary import after, is_reachable, itinerary
from controller.layout import DoesNotFit, Floor, lay_out
from controller.steps import (
    DesiredServer,
    Drain,
    Launch,
    MakeReady,
    MoveKv,
    ObservedServer,
    Register,
    Remove,
    Reopen,
    Stop,
    is_reached,
    next_steps,
)
from tests.controller.world import World

DEVICES = tuple(f"gpu{number}" for number in range(8))
FLOOR = Floor(DEVICES, 8)


def serving(*wanted: DesiredServer) -> list[ObservedServer]:
    flags = {"is_ready": True, "is_registered": True, "is_member": True, "is_serving": True, "has_served": True}
    return [ObservedServer(one.server_id, one.tp, one.devices, **flags) for one in wanted]


@st.composite
def sizes(draw: st.DrawFn) -> list[int]:
    """TP sizes that fit onto eight devices, with some devices left or none."""
    left, tps = 8, []
    for tp in draw(st.lists(st.sampled_from((1, 2, 4, 8)), max_size=8)):
        if tp <= left:
            left -= tp
            tps.append(tp)
    return tps


def test_two_engines_become_one_and_back() -> None:
    """Drain, move, stop, launch, make ready, register; the old ones are forgotten only when another serves."""
    ones = [DesiredServer("a", 1, ("0",)), DesiredServer("b", 1, ("1",))]
    two = [DesiredServer("c", 2, ("0", "1"))]
    assert itinerary(two, serving(*ones)) == [
        [Drain("a"), Drain("b")],
        [MoveKv("a"), MoveKv("b")],
        [Stop("a"), Stop("b")],
        [Launch(two[0])],
        [MakeReady("c")],
        [Register("c")],
        [Remove("a"), Remove("b")],
    ]
    back = itinerary(ones, serving(*two))
    assert back[3] == [Launch(ones[0]), Launch(ones[1])]
    assert back[-1] == [Remove("c")]


def test_nothing_is_done_to_a_fleet_that_is_as_wanted() -> None:
    """Nothing is done either while turns of leaving servers still run."""
    ones = [DesiredServer("a", 1, ("0",)), DesiredServer("b", 1, ("1",))]
    assert next_steps(ones, serving(*ones)) == []
    draining = [
        replace(one, is_cordoned=True, was_drained=True, is_serving=False, num_turns=1) for one in serving(*ones)
    ]
    assert next_steps([DesiredServer("c", 2, ("0", "1"))], draining) == []


def test_engines_leave_in_sets_while_enough_others_serve() -> None:
    """Four of eight leave while four stay; the others follow when the new one serves, and stay if too few would be
    left."""
    ones = [DesiredServer(f"one-{number}", 1, (device,)) for number, device in enumerate(DEVICES)]
    fours = [DesiredServer("four-0", 4, DEVICES[:4]), DesiredServer("four-1", 4, DEVICES[4:])]
    first, *later = itinerary(fours, serving(*ones), min_engines=1)
    assert first == [Drain(f"one-{number}") for number in range(4)]
    assert [Register("four-0")] in later and later.index([Register("four-0")]) < next(
        place for place, steps in enumerate(later) if Drain("one-4") in steps
    )
    assert is_reachable(fours, serving(*ones), min_engines=1)
    assert not is_reachable(fours, serving(*ones), min_engines=2)
    assert next_steps(fours, serving(*ones), min_engines=5) == []


def test_engines_that_make_no_room_leave_only_when_the_new_ones_have_served() -> None:
    """The new engine has free devices of its own: if the old ones left at once, nothing would serve while it starts.
    One that does not serve leaves at once, and so do all if nothing is wanted."""
    ones = [DesiredServer("a", 1, ("0",)), DesiredServer("b", 1, ("1",))]
    two = [DesiredServer("c", 2, ("2", "3"))]
    assert itinerary(two, serving(*ones)) == [
        [Launch(two[0])],
        [MakeReady("c")],
        [Register("c")],
        [Drain("a"), Drain("b")],
        [MoveKv("a"), MoveKv("b")],
        [Stop("a"), Stop("b")],
        [Remove("a"), Remove("b")],
    ]
    (new,) = serving(*two)
    waits = replace(new, is_serving=False, has_served=False)  # for weights, as an example
    assert next_steps(two, [*serving(*ones), waits]) == []
    assert next_steps(two, [*serving(*ones), replace(waits, has_served=True)]) == [Drain("a"), Drain("b")]
    hangs = replace(serving(ones[0])[0], is_serving=False)
    assert next_steps(two, [hangs, *serving(ones[1]), waits]) == [Drain("a")]
    assert next_steps([], serving(*ones)) == [Drain("a"), Drain("b")]


def test_an_engine_that_is_drained_by_hand_waits_for_no_other() -> None:
    """One that failed to start is tried again after a pause, and may take minutes. The minimum still holds."""
    a, b, failing = (DesiredServer(name, 1, (device,)) for name, device in zip("abc", "012", strict=True))
    steps = [Drain("a")]
    assert next_steps([b, failing], serving(a, b), held_back={"c"}, resting={"0"}) == steps
    assert next_steps([b, failing], serving(a, b), min_engines=1, held_back={"c"}, resting={"0"}) == steps
    assert next_steps([b, failing], serving(a, b), min_engines=2, held_back={"c"}, resting={"0"}) == []
    assert next_steps([b, failing], serving(a, b), held_back={"c"}) == [], "a plan's change keeps what serves"


def test_engines_that_do_not_serve_forbid_no_change_of_others() -> None:
    """They were said to violate the minimum, also a minimum of 0. They do not count as serving, either."""
    ones = [DesiredServer(device, 1, (device,)) for device in DEVICES[:4]]
    seen = serving(*ones)
    ended = replace(seen[0], is_alive=False, is_ready=False, is_serving=False)
    for idle in (replace(seen[0], is_serving=False), replace(seen[0], is_serving=False, is_cordoned=True), ended):
        for stays in (ones[:3], ones[1:], [ones[0], *ones[2:]]):
            assert is_reachable(stays, [idle, *seen[1:]], min_engines=2)
        assert not is_reachable(ones[:3], [idle, *seen[1:]], min_engines=3)


@given(sizes(), sizes(), st.integers(0, 8))
def test_a_new_plan_is_reachable_while_turns_still_run(first: list[int], second: list[int], num_rounds: int) -> None:
    """From any point of a change to another fleet, or to the same: drains take as long as their turns."""
    ids = map(str, itertools.count())
    there = lay_out([1] * 8, [], FLOOR, lambda: next(ids))
    now = [replace(one, num_turns=1) for one in serving(*there)]
    wanted = lay_out(first, there, FLOOR, lambda: next(ids))
    for steps in itinerary(wanted, now)[:num_rounds]:
        for step in steps:
            now = after(step, now)
        now = [replace(one, num_turns=int(one.is_member and not one.was_moved)) for one in now]
        assert is_reachable(wanted, now)
        assert is_reachable(lay_out(second, wanted, FLOOR, lambda: next(ids)), now)


def test_a_restarted_gateway_is_told_of_leaving_servers_too() -> None:
    """They serve until others do: a gateway that does not know them is no reason to stop them."""
    wanted = [DesiredServer("c", 2, ("2", "3"))]
    leaving = serving(DesiredServer("a", 1, ("0",)), DesiredServer("b", 1, ("1",)))
    forgotten = [replace(one, is_member=False, is_serving=False) for one in leaving]
    steps = next_steps(wanted, forgotten, min_engines=1)
    assert steps == [Register("a"), Register("b"), Launch(wanted[0])]
    unobserved = [replace(one, is_starting=True, is_serving=False) for one in leaving]
    assert next_steps(wanted, unobserved, min_engines=1) == [Launch(wanted[0])], (
        "the gateway has not looked at them yet"
    )
    assert next_steps(wanted, [*leaving, *serving(*wanted)], min_engines=1) == [Drain("a"), Drain("b")]
    drained = [replace(one, was_drained=True) for one in forgotten]
    assert next_steps(wanted, drained, min_engines=0) == [Stop("a"), Stop("b"), Launch(wanted[0])]


def test_an_operators_cordon_is_left_alone() -> None:
    """Only a server that this controller drained is reopened."""
    (one,) = serving(DesiredServer("a", 1, ("0",)))
    cordoned = replace(one, is_cordoned=True, is_serving=False)
    assert next_steps([DesiredServer("a", 1, ("0",))], [cordoned]) == []
    assert next_steps([DesiredServer("a", 1, ("0",))], [replace(cordoned, was_drained=True)]) == [Reopen("a")]


def test_an_operators_cordon_does_not_replace_a_drain() -> None:
    """A cordon may be lifted at any time, and turns come. The controller's own may be lifted, too, and is then
    repeated."""
    (one,) = serving(DesiredServer("a", 1, ("0",)))
    cordoned = replace(one, is_cordoned=True, is_serving=False)
    assert next_steps([], [cordoned]) == [Drain("a")]
    assert next_steps([], [replace(cordoned, was_drained=True)]) == [MoveKv("a")]
    lifted = replace(one, was_drained=True, was_moved=True)
    assert next_steps([], [lifted]) == [Drain("a")]


def test_an_engine_that_does_not_serve_may_leave_though_few_serve() -> None:
    """An engine that hangs is replaced. One that the gateway has not observed yet is waited for only if a minimum must
    serve."""
    (one,) = serving(DesiredServer("a", 1, ("0",)))
    hangs = replace(one, is_serving=False)
    assert next_steps([DesiredServer("b", 1, ("0",))], [hangs], min_engines=1) == [Drain("a")]
    assert next_steps([], [replace(hangs, is_starting=True)]) == [Drain("a")]
    assert next_steps([], [replace(hangs, is_starting=True)], min_engines=1) == []


def test_ended_and_held_back_servers_are_left_alone() -> None:
    """Their replacements, and when these may start, are decided elsewhere."""
    (one,) = serving(DesiredServer("a", 1, ("0",)))
    assert next_steps([DesiredServer("a", 1, ("0",))], [replace(one, is_alive=False, is_ready=False)]) == []
    ones = [DesiredServer("a", 1, ("0",)), DesiredServer("b", 1, ("1",))]
    assert next_steps(ones, [], held_back={"a"}) == [Launch(ones[1])]


@given(st.data(), sizes(), st.lists(sizes(), min_size=1, max_size=3), st.integers(0, 2), st.integers(1, 8))
@settings(max_examples=300)
def test_any_fleet_becomes_any_other(
    data: st.DataObject, first: list[int], plans: list[list[int]], min_engines: int, max_starting: int
) -> None:
    """Steps are taken singly, in any order, some twice and some not at all (the controller was killed before or after
    them, or in the middle of a launch). Turns come and go, the gateway restarts, servers die, operators cordon them,
    and the plan changes on the way. The world asserts that no device is held twice and no server stopped with turns.
    This test asserts that the controller never causes fewer engines than the minimum, and leaves no orphan. What can be
    reached with the minimum is reached."""
    world = World()
    wanted = lay_out(first, [], FLOOR, world.new_id)
    for one in wanted:
        world.servers[one.server_id] = serving(one)[0]
        world.turns[one.server_id] = data.draw(st.integers(0, 2))
    for tps in plans:
        wanted = lay_out(tps, wanted, FLOOR, world.new_id)
        for _ in range(data.draw(st.integers(0, 12))):
            assert is_reachable(wanted, world.seen(), max_starting=max_starting), "no minimum forbids it"
            num_before, num_able = len(world.serving()), len(world.able_to_serve())
            steps = next_steps(wanted, world.seen(), min_engines=min_engines, max_starting=max_starting)
            starting = sum(one.is_alive and not one.is_ready for one in world.seen())
            launches = [step for step in steps if isinstance(step, Launch) and step.server_id not in world.servers]
            assert starting + len(launches) <= max(max_starting, starting)
            for step in data.draw(st.permutations(steps)):
                if isinstance(step, Launch) and data.draw(st.integers(0, 3)) == 0:
                    world.launch_breaks_off(step)
                    continue
                for _ in range(data.draw(st.integers(0, 2))):
                    world.perform(step)
            assert len(world.serving()) >= min(min_engines, num_before)
            assert len(world.able_to_serve()) >= min(min_engines, num_able)
            wanted = world.replaced(wanted, world.something_happens(data))
    world.lift_cordons()
    if is_reachable(wanted, world.seen(), min_engines=min_engines, max_starting=max_starting):
        world.settle(wanted, max_starting=max_starting, min_engines=min_engines)
        assert is_reached(wanted, world.seen()), "a fleet that is reachable is reached"
    world.settle(wanted, max_starting=max_starting)
    assert is_reached(wanted, world.seen())
    assert {one.server_id for one in world.seen() if one.is_alive or one.is_member} == {
        one.server_id for one in wanted
    }, "an orphan is left"
    wanted_ids = {one.server_id for one in wanted}
    assert all(one.was_stopped for one in world.seen() if one.server_id not in wanted_ids), (
        "the remains of an ended server are left"
    )


@given(sizes(), sizes(), st.sets(st.sampled_from(DEVICES), max_size=3))
@settings(max_examples=300)
def test_a_layout_is_sound_and_the_same_sizes_move_nobody(
    first: list[int], second: list[int], resting: set[str]
) -> None:
    """Blocks are aligned and disjoint, and resting devices are left out."""
    world = World()
    current = lay_out(first, [], FLOOR, world.new_id)
    assert lay_out(first, current, FLOOR, world.new_id) == sorted(current, key=lambda one: -one.tp)
    try:
        laid = lay_out(second, current, Floor(DEVICES, 8, frozenset(resting)), world.new_id)
    except DoesNotFit:
        assert resting or sum(second) > 8
        return
    assert sorted(one.tp for one in laid) == sorted(second)
    used = [device for one in laid for device in one.devices]
    assert len(used) == len(set(used)) and not resting & set(used)
    for one in laid:
        start = DEVICES.index(one.devices[0])
        assert start % one.tp == 0 and one.devices == DEVICES[start : start + one.tp]


def test_nodes_that_need_not_change_do_not() -> None:
    """One of four nodes is reshaped. The others keep every engine, whatever their numbers are in the plan."""
    devices = tuple(f"gpu{number}" for number in range(32))
    world = World()
    floor = Floor(devices, 8)
    current = lay_out([1] * 32, [], floor, world.new_id)
    laid = lay_out([4, 4] + [1] * 24, current, floor, world.new_id)
    kept = {one.server_id for one in laid} & {one.server_id for one in current}
    assert len(kept) == 24 and len(laid) == 26


def test_no_engine_is_split_over_named_nodes() -> None:
    """Nodes of three and five GPUs have room for engines of TP 2 and 4, but not for two of TP 4."""
    devices = (*(f"a/{number}" for number in range(3)), *(f"b/{number}" for number in range(5)))
    laid = lay_out([4, 2], [], Floor(devices, 8), World().new_id)
    assert sorted(one.devices for one in laid) == [("a/0", "a/1"), ("b/0", "b/1", "b/2", "b/3")]
    with pytest.raises(DoesNotFit):
        lay_out([4, 4], [], Floor(devices, 8), World().new_id)


def test_a_fleet_that_does_not_fit_is_refused() -> None:
    """The message states the sizes and the number of devices."""
    with pytest.raises(DoesNotFit, match=r"^1 x TP 8 \+ 1 x TP 1 do not fit onto 8 devices$"):
        lay_out([8, 1], [], FLOOR, World().new_id)
