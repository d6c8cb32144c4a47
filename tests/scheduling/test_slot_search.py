"""How many turns an engine runs at once that does not tell."""

from dataclasses import replace
from functools import cache
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.profiles import load_profile
from heddle.trial import simulated_makespan_s
from scheduling.policy import HEDDLE
from scheduling.slot_search import FIRST_SLOTS, SlotSearch
from scheduling.types import EngineLoad, EngineReported, EngineSpec
from simulator.conditions import Conditions
from tests.scheduling.fleet import Fleet
from workloads.laws import draw, law_named

NAMES = ("told", "silent")


def seen(search: SlotSearch, limit: int, num_turns: int, num_looks: int = 1) -> list[int]:
    """Looks at an engine of this limit that gets as many turns as the search allows; the slots after each."""
    slots = []
    for _ in range(num_looks):
        num_sent = min(num_turns, search.slots)
        search.look(EngineLoad(min(num_sent, limit), max(num_sent - limit, 0)))
        slots.append(search.slots)
    return slots


@pytest.mark.parametrize("limit", [128, 129, 200, 256, 300, 512, 1_000, 1_024, 4_096])
def test_the_limit_is_found(limit: int) -> None:
    """In half a minute within 2 %, of 1,024 half in four seconds. Then it rests, but for two looks in thirty."""
    search = SlotSearch()
    first = seen(search, limit, 10_000, 30)
    assert limit <= first[-1] <= 1.03 * limit + 1
    rest = seen(search, limit, 10_000, 300)
    assert sum(slots not in (limit, first[-1]) for slots in rest) <= 2 * 300 / 30
    assert max(rest) <= 1.06 * limit + 1
    if limit == 1_024:
        assert first[3] >= 512


def test_the_limit_is_found_although_some_have_just_ended() -> None:
    """What an engine tells is what it runs at the end of a step."""
    search = SlotSearch()
    for number in range(40):
        num_sent = min(400, search.slots)
        running = min(num_sent, 300) - number % 3
        search.look(EngineLoad(running, max(num_sent - 300, 0)))
    assert 300 <= search.slots <= 310


def test_an_engine_that_is_not_full_tells_nothing() -> None:
    """Nor does one whose turns wait for something else: KV, or the prefills of others."""
    search = SlotSearch()
    assert set(seen(search, 1_024, 100, 50)) == {FIRST_SLOTS}
    dice = Random(3)
    for _ in range(200):
        search.look(EngineLoad(dice.randint(20, 120), dice.randint(1, 60)))
    assert search.slots == FIRST_SLOTS
    assert seen(search, 1_024, 10_000, 20)[-1] == pytest.approx(1_024, rel=0.02)


def test_it_is_never_below_the_first() -> None:
    """An engine of 64 slots has others wait in it: the search does not take KV that is full for a limit."""
    search = SlotSearch()
    assert set(seen(search, 64, 10_000, 50)) == {FIRST_SLOTS}
    assert set(seen(search, 3, 5, 50)) == {FIRST_SLOTS}


def test_prefills_in_between_do_not_end_the_search() -> None:
    """Turns that begin wait for their prefill while more and more run."""
    search, running, dice = SlotSearch(), 0, Random(7)
    for _ in range(60):
        running = min(search.slots, 1_024, running + dice.randint(10, 60))
        search.look(EngineLoad(running, min(search.slots, 1_024) - running))
    assert search.slots >= 1_000


@pytest.mark.parametrize(("prefills", "life"), [(8, 120), (40, 30), (100, 30)])
def test_turns_that_wait_for_their_prefill_hide_no_slots(prefills: int, life: int) -> None:
    """Prompts are long, so some always wait for their prefill; what runs grows for minutes, now and then a little less.
    An engine of 1,024 slots that could run 960 turns, or 1,024, was held to 150 to 500 for ever."""
    search, dice, ends_at, waiting = SlotSearch(), Random(5), list[int](), 0
    for look in range(900):
        ends_at = [one for one in ends_at if one > look]
        waiting += max(0, search.slots - len(ends_at) - waiting)
        num_begun = min(waiting, 1_024 - len(ends_at), dice.randint(prefills // 2, prefills * 3 // 2))
        ends_at += [look + max(1, round(dice.expovariate(1 / life))) for _ in range(num_begun)]
        waiting -= num_begun
        search.look(EngineLoad(len(ends_at), waiting))
    assert search.slots > 0.9 * min(1_024, prefills * life)


def test_turns_that_wait_get_the_slots_that_are_found() -> None:
    """With those that it says, an engine of 128 slots gets 128."""
    fleet = Fleet(HEDDLE)
    told, silent = (EngineSpec(name, frozenset({name}), 128, 0, slots_are_assumed=name == "silent") for name in NAMES)
    for spec in (told, silent):
        fleet.handle(EngineReported(fleet.at, spec))
        for number in range(300):
            fleet.arrive(f"{spec.engine_id} {number}", model=spec.engine_id)
    engines = fleet.scheduler.engines
    for expected in (128, 193, 290, 300):
        assert [len(engines[name].running) for name in NAMES] == [128, expected]
        for spec in (told, silent):
            fleet.at += 0.5
            fleet.handle(EngineReported(fleet.at, spec, EngineLoad(len(engines[spec.engine_id].running), 0)))
    fleet.handle(EngineReported(fleet.at, replace(silent, kv_capacity_tokens=10**7)))
    assert engines["silent"].slots == engines["silent"].facts(fleet.at).profile.slots > 300
    fleet.handle(EngineReported(fleet.at, replace(silent, slots_are_assumed=False)))
    assert engines["silent"].slots == 128


def test_a_rollout_takes_as_long_as_with_slots_that_are_told() -> None:
    """With 128 slots instead of 1,024 these took 1.10 times as long."""
    engine = replace(load_profile("qwen3-8b-h100-tp1"), slots=1_024)
    workloads = [draw(law_named("coding"), 800, seed, scale=0.1) for seed in (1, 2)]

    @cache
    def mean_s(slots: int, tells_slots: bool) -> float:
        profiles, conditions = [replace(engine, slots=slots)], Conditions(tells_slots=tells_slots)
        return fmean(simulated_makespan_s(one, profiles, "heddle", 0.0, conditions=conditions) for one in workloads)

    assert mean_s(1_024, tells_slots=False) < 1.02 * mean_s(1_024, tells_slots=True)
    assert mean_s(128, tells_slots=True) > 1.07 * mean_s(1_024, tells_slots=True)


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 50)), max_size=60))
def test_whatever_it_sees_it_stays_near_what_ran(loads: list[tuple[int, int]]) -> None:
    """Between the first slots and one and a half times as many as ever ran."""
    search, most = SlotSearch(), 0
    for num_running, num_waiting in loads:
        search.look(EngineLoad(num_running, num_waiting))
        most = max(most, num_running)
        assert FIRST_SLOTS <= search.slots <= max(FIRST_SLOTS, 1.5 * max(most, most / 0.9) + 1)
