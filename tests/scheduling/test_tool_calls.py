"""What is learned of tool calls, and how long contexts are kept for them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.limits import Limits
from scheduling.placement import UNMEASURED
from scheduling.tool_calls import LEARNS_EVERY, MOST_CALLS, ToolCalls
from tests.scheduling.fleet import Fleet

SLOW = replace(UNMEASURED, prefill_per_ktoken_ms=100_000.0, prefill_per_ktoken2_ms=0.0)  # 50 tokens in 5 s


def learned(calls_s: Sequence[float], turn_s: float = 1.0) -> ToolCalls:
    calls = ToolCalls()
    calls.note_turn(turn_s)
    for call_s in calls_s:
        calls.note(call_s)
    return calls


def play_calls(*calls_s: float, limits: Limits | None = None, turn_s: float = 0.0) -> Fleet:
    """An agent whose turns take so long and whose tool calls take these times in turns; its context of 50 tokens fills
    the engine in the last one."""
    fleet = Fleet(limits=limits)
    fleet.engine("A", slots=4, kv=60, profile=SLOW)
    for number in range(LEARNS_EVERY + 1):
        fleet.at += calls_s[number % len(calls_s)] if number else 0.0
        fleet.arrive(f"a{number}", "a", prompt=40)
        fleet.at += turn_s
        fleet.finish(f"a{number}", prompt=40, output=10)
    return fleet


def test_nothing_is_known_of_a_few_calls() -> None:
    """A lease is chosen after the sixteenth call."""
    assert learned([1.0] * (LEARNS_EVERY - 1)).lease_s(10.0) is None
    assert learned([1.0] * LEARNS_EVERY).lease_s(10.0) is not None


@pytest.mark.parametrize(("call_s", "lease_s"), [(2.0, 2.27), (4.0, 4.53), (8.0, 0.0)])
def test_a_context_is_kept_if_its_call_ends_before_it_could_be_prefilled(call_s: float, lease_s: float) -> None:
    """Prefilling it takes 5 s. For a call of 8 s it is not kept at all; one that lasts longer than the others gives
    its context up."""
    fleet = play_calls(call_s)
    entered = fleet.arrive("b", prompt=55)
    if lease_s:
        assert entered == fleet.tick(lease_s - 0.1) == []
        entered = fleet.tick(0.1)
    assert fleet.sent(entered) == [("b", "A")]


def test_the_lease_depends_on_how_long_turns_take() -> None:
    """Half of the calls end in 4 s, and a prefill takes 5 s. If turns took a while, no context would be kept: those
    kept in vain, for calls of 100 s, take room from them."""
    fleet = play_calls(4.0, 100.0)
    assert fleet.arrive("b", prompt=55) == fleet.tick(4.4) == []
    assert fleet.sent(fleet.tick(0.2)) == [("b", "A")]
    assert fleet.sent(play_calls(4.0, 100.0, turn_s=2.0).arrive("b", prompt=55)) == [("b", "A")]
    calls_s = [4.0, 100.0] * (LEARNS_EVERY // 2)
    assert learned(calls_s, turn_s=1.0).lease_s(5.0) == pytest.approx(4.53, abs=0.01)
    assert learned(calls_s, turn_s=2.0).lease_s(5.0) == 0.0


def test_a_configured_lease_overrides_what_was_learned() -> None:
    """Claims are safe for that long, however long calls take."""
    fleet = play_calls(8.0, limits=Limits(in_tool_lease_s=3.0))
    assert fleet.arrive("b", prompt=55) == fleet.tick(2.9) == []
    assert fleet.sent(fleet.tick(0.2)) == [("b", "A")]


def test_a_trajectory_that_ended_and_goes_on_was_in_no_tool_call() -> None:
    """The time since its end tells nothing about tools, so the lease stays that of an engine that knows none: 5 s."""
    fleet = Fleet()
    fleet.engine("A", slots=4, kv=60, profile=SLOW)
    for number in range(LEARNS_EVERY + 1):
        fleet.arrive(f"a{number}", "a", prompt=40)
        fleet.finish(f"a{number}", prompt=40, output=10)
        if number < LEARNS_EVERY:
            fleet.close("a")
    assert fleet.arrive("b", prompt=55) == fleet.tick(4.9) == []
    assert fleet.sent(fleet.tick(0.2)) == [("b", "A")]


def test_calls_that_outlast_all_leases_are_not_waited_for() -> None:
    """Calls of a day: no context is kept, whatever its prefill costs."""
    assert learned([86_400.0] * LEARNS_EVERY).lease_s(1e4) == 0.0


def test_a_context_that_costs_nothing_to_prefill_is_not_kept() -> None:
    """An engine whose prefill takes no time has no use for a lease."""
    assert learned([1.0] * LEARNS_EVERY).lease_s(0.0) == 0.0


def test_new_calls_outweigh_old_ones() -> None:
    """After short calls, as many long ones as are remembered end the wait for them."""
    calls = learned([1.0] * (2 * MOST_CALLS))
    assert calls.lease_s(10.0) == pytest.approx(1.13, abs=0.01)
    for _ in range(6 * MOST_CALLS):
        calls.note(100.0)
    assert calls.lease_s(10.0) == 0.0


def test_many_equal_calls_teach_what_a_few_do() -> None:
    """What is forgotten of them, and of the turns between them, is forgotten alike."""
    for call_s, refill_s in ((8.0, 6.0), (4.0, 6.0)):
        few, many = learned([call_s] * LEARNS_EVERY), learned([call_s] * (4 * MOST_CALLS + LEARNS_EVERY))
        assert few.lease_s(refill_s) == many.lease_s(refill_s)


def cycle_s(lease_s: float, calls_s: Sequence[float], turn_s: float, refill_s: float) -> float:
    """The cycle whose turns are as much longer as prefills take of it, found by bisection."""
    kept_s = sum(min(call_s, lease_s) for call_s in calls_s) / len(calls_s)
    refilled_s = refill_s * sum(not lease_s or call_s > lease_s for call_s in calls_s) / len(calls_s)
    low, high = max(refilled_s, kept_s), refilled_s + kept_s + turn_s
    for _ in range(100):
        middle = (low + high) / 2
        if (middle - kept_s) * (middle - refilled_s) < turn_s * middle:
            low = middle
        else:
            high = middle
    return high


@given(
    st.lists(st.floats(0.0, 5_000.0), min_size=LEARNS_EVERY, max_size=LEARNS_EVERY),
    st.floats(0.0, 100.0),
    st.floats(0.01, 1_000.0),
)
def test_no_other_lease_has_a_shorter_cycle(calls_s: list[float], turn_s: float, refill_s: float) -> None:
    """For any calls and turns, to the 10 % that rounding the cost of a refill may take."""
    lease_s = learned(calls_s, turn_s).lease_s(refill_s)
    assert lease_s is not None
    chosen_s = cycle_s(lease_s, calls_s, turn_s, refill_s)
    for index in range(36):
        assert chosen_s <= 1.1 * cycle_s(0.05 * 2 ** (index / 2), calls_s, turn_s, refill_s) + 1e-6
    assert chosen_s <= 1.1 * cycle_s(0.0, calls_s, turn_s, refill_s) + 1e-6
