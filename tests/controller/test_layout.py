"""Where the engines of a fleet go, on floors of several nodes: what can stay stays, and what fits is placed."""

from collections import Counter
from itertools import combinations, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.layout import DoesNotFit, Floor, lay_out
from controller.steps import DesiredServer

SIZES = (1, 2, 4, 8)


@st.composite
def floors(draw: st.DrawFn) -> Floor:
    """Nodes given by name, with unequal sizes, or by number alone; some devices rest."""
    if draw(st.booleans()):
        nodes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        devices = tuple(f"node{number}/{device}" for number, size in enumerate(nodes) for device in range(size))
    else:
        devices = tuple(f"gpu{number}" for number in range(draw(st.integers(1, 20))))
    resting = draw(st.one_of(st.just(set()), st.sets(st.sampled_from(devices), max_size=4)))
    return Floor(devices, draw(st.sampled_from([4, 8])), frozenset(resting))


def on_first_blocks(tps: list[int], floor: Floor, taken: set[str]) -> list[tuple[str, ...]] | None:
    """Each engine on its first free block, the largest first; None if one has none."""
    taken, blocks = set(taken), []
    for tp in sorted(tps, reverse=True):
        block = next((block for block in floor.blocks(tp) if not taken & set(block)), None)
        if block is None:
            return None
        taken |= set(block)
        blocks.append(block)
    return blocks


@st.composite
def fleets(draw: st.DrawFn, floor: Floor) -> list[DesiredServer]:
    """Servers anywhere on a floor, each on a block."""
    there: list[DesiredServer] = []
    taken: set[str] = set()
    for tp in draw(st.lists(st.sampled_from(SIZES), max_size=12)):
        free = [block for block in floor.blocks(tp) if not taken & set(block)]
        if free:
            block = draw(st.sampled_from(free))
            taken |= set(block)
            there.append(DesiredServer(f"old-{len(there)}", tp, block))
    return there


def laid_out(
    tps: list[int], there: list[DesiredServer], floor: Floor, asleep: list[DesiredServer] | None = None
) -> list[DesiredServer]:
    numbers = count()
    return lay_out(tps, there, floor, lambda: f"new-{next(numbers)}", asleep or [])


def devices_of(servers: list[DesiredServer]) -> list[str]:
    return [device for one in servers for device in one.devices]


@given(st.data(), floors(), st.lists(st.sampled_from(SIZES), max_size=12))
@settings(max_examples=300)
def test_a_fleet_that_fits_is_laid_out_whatever_is_there(data: st.DataObject, floor: Floor, tps: list[int]) -> None:
    """Engines get blocks of their own, none of them at rest. Only a fleet that does not fit is refused."""
    there = data.draw(fleets(Floor(floor.devices, floor.devices_per_node)))
    if on_first_blocks(tps, floor, set()) is None:
        with pytest.raises(DoesNotFit):
            laid_out(tps, there, floor)
        return
    found = laid_out(tps, there, floor)
    assert Counter(one.tp for one in found) == Counter(tps)
    used = devices_of(found)
    assert len(used) == len(set(used)) and not floor.resting & set(used)
    assert all(one.devices in floor.blocks(one.tp) for one in found)
    assert all(one in there for one in found if one.server_id.startswith("old"))


@given(st.data(), floors())
def test_a_smaller_fleet_starts_nothing(data: st.DataObject, floor: Floor) -> None:
    """Wherever the engines that stay are, removing one is no reason to start another."""
    there = data.draw(fleets(floor))
    staying = data.draw(st.lists(st.sampled_from(there), unique=True)) if there else []
    assert all(one in there for one in laid_out([one.tp for one in staying], there, floor))


@given(st.data(), floors(), st.lists(st.sampled_from(SIZES), min_size=1, max_size=4))
def test_engines_that_join_move_nobody_if_there_is_room(data: st.DataObject, floor: Floor, more: list[int]) -> None:
    """The engines that are there stay, and keep serving meanwhile."""
    there = data.draw(fleets(floor))
    found_room = on_first_blocks(more, floor, set(devices_of(there))) is not None
    if found_room:
        assert set(there) <= set(laid_out([one.tp for one in there] + more, there, floor))


@given(st.data(), st.lists(st.sampled_from((1, 2, 4)), max_size=6))
@settings(max_examples=300)
def test_as_many_devices_as_possible_keep_their_engine(data: st.DataObject, tps: list[int]) -> None:
    """Compared with every choice of engines that stay, on two nodes of four devices."""
    floor = Floor(tuple(f"gpu{number}" for number in range(8)), 4)
    there = data.draw(fleets(floor))
    if on_first_blocks(tps, floor, set()) is None:
        return
    most = max(
        sum(one.tp for one in staying)
        for number in range(len(there) + 1)
        for staying in combinations(there, number)
        if not (Counter(one.tp for one in staying) - Counter(tps))
        and on_first_blocks(
            list((Counter(tps) - Counter(one.tp for one in staying)).elements()), floor, set(devices_of(list(staying)))
        )
        is not None
    )
    assert sum(one.tp for one in laid_out(tps, there, floor) if one in there) == most


@pytest.mark.parametrize(
    ("there", "stay"),
    [
        ([(1, 0), (1, 2), (2, 4)], {4}),  # TP 4 ends two of TP 1 rather than TP 2, which would need a block again
        ([(1, 5), (1, 7), (1, 2), (1, 3)], {2, 3}),  # and two far apart, so that TP 2 finds a block beside the others
    ],
)
def test_the_largest_engine_leaves_room_for_the_next_one(there: list[tuple[int, int]], stay: set[int]) -> None:
    """Two nodes of four devices; 4, 2, 1 and 1 are wanted. Two blocks cost the largest as many devices, but one of them
    costs the second largest an engine more."""
    devices = tuple(f"gpu{number}" for number in range(8))
    servers = [DesiredServer(f"old-{first}", tp, devices[first : first + tp]) for tp, first in there]
    found = laid_out([4, 2, 1, 1], servers, Floor(devices, 4))
    assert {first for (_, first), one in zip(there, servers, strict=True) if one in found} == stay


def test_an_engine_that_is_larger_than_a_node_gets_whole_nodes_if_it_may_span_them() -> None:
    """They are of equal size, and smaller engines stay within a node. No floor had such a block, whatever the file
    said."""
    devices = tuple(f"node{node}/{number}" for node, size in enumerate((2, 4, 4, 4)) for number in range(size))
    wide = Floor(devices, 4, spans_nodes=True)
    (engine,) = laid_out([8], [], wide)
    assert engine.devices == devices[2:10], "nodes 1 and 2"
    assert [one.devices for one in laid_out([8, 4, 2], [engine], wide)] == [devices[2:10], devices[10:], devices[:2]]
    assert [one.devices for one in laid_out([4, 4, 4], [], wide)] == [devices[2:6], devices[6:10], devices[10:]]
    assert wide.blocks(8) == [devices[2:10]] and wide.blocks(16) == []
    with pytest.raises(DoesNotFit):
        laid_out([8], [], Floor(devices, 4))


def test_a_sleeper_is_woken_if_no_staying_engine_has_to_go() -> None:
    """A start takes longer than a wake-up, but two starts in place of the engines on its devices take longest."""
    floor = Floor(("0", "1", "2", "3"), 4)
    ones = [DesiredServer("a", 1, ("0",)), DesiredServer("b", 1, ("1",))]
    sleeper = DesiredServer("c", 2, ("0", "1"))
    assert laid_out([2], ones, floor, [sleeper]) == [sleeper]
    assert laid_out([2, 1], ones[1:], floor, [sleeper]) == [DesiredServer("new-0", 2, ("2", "3")), ones[1]]
    assert laid_out([2, 2], [], floor, [sleeper]) == [sleeper, DesiredServer("new-0", 2, ("2", "3"))]


def test_an_engine_across_two_blocks_stays_while_there_is_room_beside_it() -> None:
    """It was started under another inventory. If it is in the way of what is wanted, it goes."""
    floor = Floor(tuple(f"gpu{number}" for number in range(8)), 8)
    across = DesiredServer("across", 2, ("gpu1", "gpu2"))
    assert across in laid_out([4, 2], [across], floor)
    assert [one.devices for one in laid_out([4, 2, 2], [across], floor)] == [
        ("gpu0", "gpu1", "gpu2", "gpu3"),
        ("gpu4", "gpu5"),
        ("gpu6", "gpu7"),
    ]
    elsewhere = DesiredServer("elsewhere", 1, ("gpu8",))
    assert [one.devices for one in laid_out([1], [elsewhere], floor)] == [("gpu0",)], "its device no longer exists"
