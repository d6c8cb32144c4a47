"""How long legs are on their way, from what an engine says that it has."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.transit import Transit


def looked(transit: Transit, legs_per_s: float, num_on_way: float, num_looks: int, at: float = 0.0) -> Transit:
    """Looks a second apart, which find the whole numbers around `num_on_way` in turns, so that it is their mean."""
    due_legs = due = 0.0
    transit.look(at, 0)
    for number in range(1, num_looks + 1):
        due_legs, due = due_legs + legs_per_s, due + num_on_way
        while due_legs >= 1.0:
            transit.note_end()
            due_legs -= 1.0
        seen = round(due)
        due -= seen
        transit.look(at + number, seen)
    return transit


@pytest.mark.parametrize(
    ("legs_per_s", "transit_s"), [(100.0, 0.01), (20.0, 0.2), (2.0, 1.5), (0.2, 6.0), (1_000.0, 0.0005)]
)
def test_it_is_what_is_on_the_way_by_what_begins(legs_per_s: float, transit_s: float) -> None:
    """Little's law, whether many legs are on their way or mostly none, and whether some begin before each look or
    before each fifth. At low rates what was assumed counts longer.
    """
    transit = looked(Transit(), legs_per_s, legs_per_s * transit_s, 200)
    assert transit.leg_s == pytest.approx(transit_s * 25 * legs_per_s / (25 * legs_per_s + 10), rel=0.1)


def test_legs_that_come_and_go_at_random() -> None:
    """40 a second, each on its way for 5 to 95 ms; looks are at fixed instants, and see who happens to be there."""
    dice, transit = Random(5), Transit()
    sent_at, arrives_at, look_at = 0.0, list[float](), 1.0
    while look_at < 300.0:
        sent_at += dice.expovariate(40.0)
        while look_at < sent_at:
            transit.look(look_at, sum(one > look_at for one in arrives_at[-100:]))
            look_at += 1.0
        transit.note_end()
        arrives_at.append(sent_at + dice.uniform(0.005, 0.095))
    assert transit.leg_s == pytest.approx(0.05, rel=0.25)


def test_a_profile_counts_until_looks_tell_more() -> None:
    """And a new time is known after half a minute."""
    transit = Transit(0.006)
    assert transit.leg_s == 0.006
    assert looked(transit, 50.0, 1.0, 1).leg_s == pytest.approx((1 + 0.06) / 60)
    assert looked(transit, 50.0, 1.0, 100, at=1.0).leg_s == pytest.approx(0.02, rel=0.03)
    assert looked(transit, 50.0, 4.0, 30, at=101.0).leg_s == pytest.approx(0.08 - 0.06 * 0.96**30, rel=0.05)


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=400))
def test_it_does_not_matter_when_it_is_looked_at(pauses_s: list[float]) -> None:
    """A look that follows another at once, because an operator cordoned the engine, counts for little."""
    transit, at, num_ended = Transit(), 0.0, 0.0
    transit.look(at, 0)
    for pause_s in pauses_s:
        at += pause_s
        while num_ended + 1 <= 40.0 * at:
            transit.note_end()
            num_ended += 1
        transit.look(at, 2)
        assert transit.leg_s <= 0.052 and transit.legs_per_s <= 44.0
    if at > 60.0:
        assert transit.leg_s == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("pause_s", [20.0, 300.0])
def test_a_pause_of_looks_does_not_count_as_one_look(pause_s: float) -> None:
    """No leg began while weights were loaded; those that waited for it are all on their way at the look that follows.
    It counted for the whole pause: 46 legs were on their way for 6 s, and twice the slots were sent for a minute."""
    transit = looked(Transit(), 20.0, 1.0, 60)
    transit.note_end()
    transit.look(60.0 + pause_s, 46)
    assert transit.leg_s < 0.3 and transit.num_ahead(40) <= 5
    assert looked(transit, 20.0, 1.0, 10, at=60.0 + pause_s).num_ahead(40) <= 10
    assert looked(transit, 20.0, 1.0, 60, at=70.0 + pause_s).leg_s == pytest.approx(0.05, rel=0.25)


@given(
    st.floats(0.0, 1.0),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 5), st.integers(-300, 300)), max_size=30),
)
def test_it_is_never_negative(assumed_s: float, looks: list[tuple[float, int, int]]) -> None:
    """Nor, before a look found a leg on its way, more than what was assumed."""
    transit, at, has_found = Transit(assumed_s), 0.0, False
    for pause_s, num_legs, num_on_way in looks:
        at, has_found = at + pause_s, has_found or num_on_way > 0
        for _ in range(num_legs):
            transit.note_end()
        transit.look(at, num_on_way)
        assert transit.leg_s >= 0.0
        assert has_found or transit.leg_s <= assumed_s
