"""The baselines: where other systems send a turn and when they move a trajectory, as their sources describe it."""

from dataclasses import replace

import pytest

from scheduling.baselines import (
    cache_aware,
    fewest_trajectories,
    most_free_kv,
    power_of_two,
    round_robin_or_least_loaded,
    steal_kv_load,
    to_least_loaded_if_unbalanced,
)
from scheduling.estimate import Work
from scheduling.limits import Limits
from scheduling.order import TurnFacts, first_come_first_served
from scheduling.placement import UNMEASURED, EngineFacts
from scheduling.policy import CACHE_AWARE, LOAD_STEALING, THUNDERAGENT, VERL_HYBRID, VLLM_ROUTER
from scheduling.types import Dispatch, Fault, Prediction
from tests.scheduling.fleet import Fleet


def engine(engine_id: str, num_turns: int = 0, kv_capacity_tokens: int = 1_000, **changes: object) -> EngineFacts:
    profile = replace(UNMEASURED, slots=100, kv_capacity_tokens=kv_capacity_tokens)
    facts = EngineFacts(engine_id, profile, num_turns, Work())
    for name, value in changes.items():
        setattr(facts, name, value)
    return facts


def turn(ordinal: int = 0, prompt: int = 100, **changes: object) -> TurnFacts:
    return TurnFacts(ordinal, ordinal, 0.0, prompt, 0, Prediction(500.0, 500.0), **changes)  # type: ignore[arg-type]


def test_fewest_trajectories_counts_sessions_not_turns() -> None:
    """vLLM Router's `sticky_least_loaded`: an engine whose trajectories are all in tool calls is not empty."""
    busy, idle = engine("A", num_turns=3, num_trajectories=3), engine("B", num_turns=0, num_trajectories=4)
    assert fewest_trajectories(turn(), [idle, busy]) is busy


def test_vllm_router_keeps_a_trajectory_on_its_first_engine() -> None:
    """The first turn goes to the least loaded engine; later turns stay there, whatever the loads."""
    fleet = Fleet(VLLM_ROUTER)
    for name in "AB":
        fleet.engine(name)
    assert fleet.sent(fleet.arrive("a1", "a")) == [("a1", "A")]
    assert fleet.sent(fleet.arrive("b1", "b")) == [("b1", "B")]
    fleet.finish("b1")
    assert fleet.sent(fleet.arrive("a2", "a")) == [("a2", "A")]


def test_power_of_two_takes_the_less_loaded_of_two_drawn_engines() -> None:
    """Every engine but the most loaded is chosen at some point. A fleet of one engine works, too."""
    fleet = [engine(str(load), load) for load in range(4)]
    chosen = {power_of_two(turn(ordinal), fleet).engine_id for ordinal in range(200)}
    assert chosen == {"0", "1", "2"}
    assert power_of_two(turn(7), fleet[3:]) is fleet[3]


def test_cache_aware_follows_the_longest_cached_prefix() -> None:
    """The home, if it holds enough of the prompt; for a first turn, an engine with the group's prompt; otherwise the
    engine with the least KV."""
    fleet = [engine("A", kv_claimed=500), engine("B", kv_claimed=900, prompts={"g": 50}), engine("C", kv_claimed=100)]
    assert cache_aware(turn(num_turns=1, home="A", context_tokens=90), fleet).engine_id == "A"
    assert cache_aware(turn(num_turns=1, home="A", context_tokens=30), fleet).engine_id == "C"
    assert cache_aware(turn(num_turns=1, home="gone", context_tokens=90), fleet).engine_id == "C"
    assert cache_aware(turn(group_id="g"), fleet).engine_id == "B"
    assert cache_aware(turn(group_id="other"), fleet).engine_id == "C"


def test_cache_aware_balances_loads_beyond_both_thresholds() -> None:
    """Beyond both thresholds the shortest queue wins; beyond only one of them it does not."""
    returning = turn(num_turns=1, home="A", context_tokens=90)
    assert cache_aware(returning, [engine("A", 80), engine("B", 10)]).engine_id == "B"
    assert cache_aware(returning, [engine("A", 60), engine("B", 10)]).engine_id == "A"
    assert cache_aware(returning, [engine("A", 280), engine("B", 210)]).engine_id == "A"


def test_cache_aware_sends_siblings_to_the_engine_with_their_prompt() -> None:
    """An engine remembers the groups whose prompts it saw, but only the latest thousand."""
    fleet = Fleet(CACHE_AWARE)
    for name in "AB":
        fleet.engine(name)
    first = fleet.sent(fleet.arrive("g0-1", "g0", prompt=50, group="g"))[0][1]
    fleet.arrive("x-1", "x", prompt=10, group="x")
    assert fleet.sent(fleet.arrive("g1-1", "g1", prompt=50, group="g")) == [("g1-1", first)]
    engine = fleet.scheduler.engines[first]
    for number in range(1_000):
        engine.remember_prompt(f"later-{number}", 10)
    assert "g" not in engine.prompts and len(engine.prompts) == 1_000


def test_verl_hybrid_gives_up_affinity_beyond_32_times_the_load() -> None:
    """Sticky up to that ratio; beyond it, old and new trajectories go to the least loaded engine."""
    even, uneven = [engine("A", 32), engine("B", 1)], [engine("A", 33), engine("B", 1)]
    assert to_least_loaded_if_unbalanced(turn(), even[0], even[1:], even) is None
    assert to_least_loaded_if_unbalanced(turn(), uneven[0], uneven[1:], uneven) is uneven[1]
    assert to_least_loaded_if_unbalanced(turn(), uneven[1], uneven[:1], uneven) is None
    assert to_least_loaded_if_unbalanced(turn(), uneven[0], [], uneven) is None
    beside_idle = [even[0], engine("B")]
    assert to_least_loaded_if_unbalanced(turn(), beside_idle[0], beside_idle[1:], beside_idle) is None
    assert round_robin_or_least_loaded(turn(0), even) is even[0]
    assert round_robin_or_least_loaded(turn(0), uneven) is uneven[1]


def test_verl_hybrid_moves_a_trajectory_from_an_engine_with_room() -> None:
    """Engines accept every turn, so only the load ratio makes a trajectory leave."""
    fleet = Fleet(VERL_HYBRID)
    fleet.engine("A")
    for number in range(34):
        fleet.arrive(f"t{number}-1", f"t{number}")
    fleet.engine("B")
    fleet.arrive("new")
    assert fleet.home("new") == "B"
    fleet.finish("t0-1")
    assert fleet.sent(fleet.arrive("t0-2", "t0")) == [("t0-2", "B")], "33 turns against 1"
    fleet.finish("t1-1")
    assert fleet.sent(fleet.arrive("t1-2", "t1")) == [("t1-2", "A")], "32 turns against 2"


def test_the_engine_with_the_least_kv_load_steals() -> None:
    """Only if the home's share of KV is clearly above the thief's share with the trajectory."""
    home, thief = engine("A", kv_claimed=800), engine("B", kv_claimed=500)
    assert steal_kv_load(turn(prompt=160), home, [engine("C", kv_claimed=600), thief], [home, thief]) is thief
    assert steal_kv_load(turn(prompt=170), home, [thief], [home, thief]) is None
    assert steal_kv_load(turn(prompt=100), home, [], [home]) is None


def test_load_is_stolen_even_from_a_home_with_a_free_slot() -> None:
    """At a tool return."""
    fleet = Fleet(LOAD_STEALING)
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("a1", "a", prompt=40)
    fleet.finish("a1", prompt=40)
    fleet.engine("B", slots=2, kv=200)
    (dispatch,) = fleet.arrive("a2", "a", prompt=50)
    assert isinstance(dispatch, Dispatch) and (dispatch.engine_id, dispatch.why) == ("B", "moved from A")


def pausing_fleet() -> Fleet:
    """Engine A with 100 KV tokens under ThunderAgent's rules; `small` (30 tokens) and `large` (60) are in tool
    calls."""
    fleet = Fleet(THUNDERAGENT)
    fleet.engine("A", slots=8, kv=100)
    fleet.arrive("small1", "small", prompt=20)
    fleet.arrive("large1", "large", prompt=50)
    fleet.finish("small1", prompt=20)
    fleet.finish("large1", prompt=50)
    return fleet


def test_a_new_program_waits_while_active_contexts_fill_the_engine() -> None:
    """A context in a tool call counts less each second: half, a quarter, and so on."""
    fleet = pausing_fleet()
    assert fleet.arrive("new", prompt=60) == []
    assert fleet.tick(1.0) == []
    assert fleet.sent(fleet.tick(1.0)) == [("new", "A")]


def test_a_program_beyond_an_engines_kv_enters_it_if_it_is_empty() -> None:
    """It would wait half an hour for room that cannot exist."""
    fleet = Fleet(THUNDERAGENT)
    fleet.engine("A", kv=100)
    assert fleet.sent(fleet.arrive("huge", prompt=150)) == [("huge", "A")]


def test_a_waiting_program_holds_back_all_programs_behind_it() -> None:
    """ThunderAgent has one queue: a program that would fit does not pass one that does not."""
    fleet = Fleet(replace(THUNDERAGENT, order=first_come_first_served))
    fleet.engine("A", slots=8, kv=100)
    fleet.arrive("runs", prompt=50)
    assert fleet.arrive("large", prompt=60) == []
    assert fleet.arrive("small", prompt=10) == []
    assert fleet.tick(1.0) == []
    assert fleet.sent(fleet.close("runs", abort=True)) == []
    assert fleet.sent(fleet.fail("runs", fault=Fault.CLOSED)) == [("large", "A"), ("small", "A")]


def test_a_program_that_avoids_an_engine_holds_back_none_there() -> None:
    """The engine has just failed it, so it will not run there for a while: the next one need not wait for a tick."""
    fleet = Fleet(replace(THUNDERAGENT, order=first_come_first_served))
    fleet.engine("A", slots=8, kv=100)
    fleet.arrive("first")
    assert fleet.fail("first") == []
    assert fleet.sent(fleet.arrive("second")) == [("second", "A")]


def test_a_program_too_large_for_an_engine_holds_back_none_there() -> None:
    """It waits for the engine that can hold it: the next one need not wait for a tick beside the idle smaller one."""
    fleet = Fleet(replace(THUNDERAGENT, order=first_come_first_served))
    fleet.engine("A", slots=8, kv=100)
    fleet.arrive("runs", prompt=50)
    fleet.engine("B", slots=8, kv=50)
    assert fleet.arrive("first", prompt=60) == []
    assert fleet.sent(fleet.arrive("second", prompt=40)) == [("second", "B")]


def test_residents_are_checked_although_no_turn_waits() -> None:
    """A tick is due as soon as any engine has a resident."""
    fleet = Fleet(THUNDERAGENT)
    fleet.engine("A")
    fleet.engine("B")
    assert fleet.scheduler.next_wakeup() is None
    fleet.arrive("runs")
    assert fleet.scheduler.next_wakeup() == 1.0


def test_a_program_enters_a_full_engine_after_half_an_hour() -> None:
    """Even if running programs fill the engine; this is ThunderAgent's own rule, whatever Heddle's patience is."""
    fleet = Fleet(THUNDERAGENT, Limits(entry_patience_s=1, queue_timeout_s=10_000))
    fleet.at = 5_000.0
    fleet.engine("A", kv=100)
    fleet.arrive("runs", prompt=90)
    assert fleet.arrive("new", prompt=60) == []
    assert fleet.tick(1_799.0) == []
    assert fleet.sent(fleet.tick(1.0)) == [("new", "A")]


def test_programs_in_a_tool_call_are_paused_and_running_ones_are_not() -> None:
    """At the check every five seconds, if active contexts exceed the engine's KV. A paused program resumes on any
    engine."""
    fleet = pausing_fleet()
    fleet.arrive("runs1", "runs", prompt=10)
    fleet.arrive("large2", "large", prompt=60)
    fleet.progress("runs1", 1, 65)
    assert fleet.claims("A") == {"small": 30, "large": 60, "runs": 75}
    assert fleet.scheduler.next_wakeup() == 1.0
    fleet.tick(5.0)
    assert fleet.claims("A") == {"large": 60, "runs": 75}, "the others are running"
    assert fleet.arrive("small2", "small", prompt=30) == [], "a paused program waits in the global queue"
    fleet.engine("B", slots=8, kv=100)
    assert fleet.home("small") == "B", "and resumes wherever there is room"


def test_programs_are_paused_only_at_checks_the_shortest_context_first() -> None:
    """Contexts may exceed the KV for up to five seconds; if its capacity is unknown, forever."""
    fleet = pausing_fleet()
    fleet.tick(5.0)
    fleet.arrive("small2", "small", prompt=120)
    fleet.arrive("large2", "large", prompt=60)
    fleet.finish("large2", prompt=60)
    fleet.tick(4.9)
    assert set(fleet.claims("A")) == {"small", "large"}
    fleet.at += 0.1
    fleet.finish("small2", prompt=120)
    fleet.tick()
    assert set(fleet.claims("A")) == {"small"}, "large has the shorter context"
    unknown = Fleet(THUNDERAGENT)
    unknown.engine("A", slots=8)
    unknown.arrive("huge", prompt=10**9)
    unknown.tick(5.0)
    assert set(unknown.claims("A")) == {"huge"}


def test_paused_programs_resume_before_new_ones_shortest_first() -> None:
    """The order in which ThunderAgent restores programs."""
    fleet = pausing_fleet()
    fleet.arrive("runs", prompt=5)
    fleet.progress("runs", 1, 200)
    fleet.tick(5.0)
    assert fleet.claims("A") == {"runs": 205}
    assert fleet.arrive("new", prompt=10) == []
    assert fleet.arrive("large2", "large", prompt=60) == []
    assert fleet.arrive("small2", "small", prompt=30) == []
    sent = fleet.sent(fleet.fail("runs", fault=Fault.CLIENT_LEFT))
    assert sent == [("small2", "A"), ("large2", "A"), ("new", "A")]


def test_a_program_starts_on_the_engine_with_the_most_free_kv() -> None:
    """Counted in tokens, not as a share."""
    small, large = engine("A", kv_claimed=100), engine("B", kv_claimed=900, kv_capacity_tokens=2_000)
    assert most_free_kv(turn(), [small, large]) is large
    emptier = engine("C", kv_claimed=500, kv_capacity_tokens=2_000)
    assert most_free_kv(turn(), [small, large, emptier]) is emptier


@pytest.mark.parametrize(("kv_claimed", "share"), [(0, 0.0), (250, 0.25)])
def test_kv_load_is_a_share_of_the_engines_capacity(kv_claimed: int, share: float) -> None:
    """So unequal engines compare. If the capacity is unknown, the load is in tokens."""
    assert engine("A", kv_claimed=kv_claimed).kv_share == share
    assert engine("A", kv_claimed=kv_claimed, kv_capacity_tokens=0).kv_share == kv_claimed
