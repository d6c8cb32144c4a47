"""Residency: whose KV may be on an engine, who gives way, and when a trajectory moves."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from scheduling.admission import Admission
from scheduling.arrival import trajectory_of, turn_of
from scheduling.engine import Engine
from scheduling.limits import Limits
from scheduling.placement import UNMEASURED
from scheduling.policy import HEDDLE, VERL
from scheduling.prompts import Prompts
from scheduling.residency import claims_beyond_capacity
from scheduling.state import Trajectory, Turn, TurnState
from scheduling.types import Dispatch, EngineSpec, Fault, Prediction, TrajectoryDeclared, TurnArrived
from tests.scheduling.fleet import Fleet, record


def fleet_with_one_in_tool(limits: Limits | None = None, kv: int = 100) -> Fleet:
    """Engine A with 4 slots, and `a` in a tool call there with 50 tokens of KV since time 0."""
    fleet = Fleet(limits=limits or Limits(in_tool_lease_s=60, entry_patience_s=300))
    fleet.engine("A", slots=4, kv=kv)
    fleet.arrive("a")
    fleet.finish("a", prompt=40, output=10)
    return fleet


def test_kv_in_a_tool_call_counts_against_entrants() -> None:
    """50 of 100 tokens are kept for a tool call: 40 more stay under the watermark of 90, 41 do not."""
    fleet = fleet_with_one_in_tool()
    assert fleet.claims("A") == {"a": 50}
    assert fleet.arrive("too-big", prompt=41) == []
    fleet.fail("too-big", leg=0, fault=Fault.CLIENT_LEFT)
    assert fleet.sent(fleet.arrive("fits", prompt=40)) == [("fits", "A")]


def test_a_resident_returns_though_the_engine_is_full_of_kv() -> None:
    """Its KV is claimed already; a turn of it that grew the claim over the watermark goes in all the same."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=40)
    assert fleet.sent(fleet.arrive("a2", "a", prompt=60)) == [("a2", "A")]
    assert fleet.claims("A") == {"a": 60, "b": 40}


def test_a_resident_that_returns_beyond_the_capacity_enters_anew() -> None:
    """Its context has grown: with it the engine would hold 101 of 100 tokens and evict all in turn. So it waits."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=40)
    assert fleet.arrive("a2", "a", prompt=61) == []
    assert fleet.claims("A") == {"b": 40}
    assert fleet.sent(fleet.finish("b", prompt=10, output=10)) == [("a2", "A")]


@pytest.mark.parametrize(("predicted", "left"), [(5_000, {"b": 30, "c": 21}), (500, {"a": 50, "c": 21})])
def test_when_contexts_outgrow_an_engine_the_least_urgent_idle_resident_leaves(
    predicted: float, left: dict[str, int]
) -> None:
    """Of two in tool calls the one with less predicted work gives its claim up; the running one keeps its own. So it is
    where the end of a turn tells how long its context has become."""
    for is_end in (False, True):
        fleet = fleet_with_one_in_tool()
        fleet.arrive("b", predicted=predicted, prompt=20)
        fleet.finish("b", prompt=20, output=10)
        fleet.arrive("c", prompt=10, predicted=9_000)
        assert fleet.claims("A") == {"a": 50, "b": 30, "c": 10}
        _ = fleet.finish("c", prompt=10, output=11) if is_end else fleet.progress("c", 1, 11)
        assert fleet.claims("A") == left


def test_who_gave_a_claim_up_enters_wherever_there_is_room() -> None:
    """Its KV is gone from its home, so nothing keeps it there while another engine has room."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=40)
    fleet.engine("B", slots=4, kv=100)
    assert fleet.sent(fleet.arrive("a2", "a", prompt=61)) == [("a2", "B")]


def test_an_entrant_goes_back_to_its_home_if_that_has_room() -> None:
    """Some of its KV may be left there."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=50)
    fleet.tick(60)
    assert fleet.claims("A") == {"b": 50}
    fleet.engine("B", slots=4, kv=100)
    fleet.finish("b", prompt=10, output=10)
    assert fleet.sent(fleet.arrive("a2", "a", prompt=50)) == [("a2", "A")]


def test_a_trajectory_above_the_watermark_enters_an_empty_engine() -> None:
    """Nothing waits for ever for room that cannot be."""
    fleet = Fleet()
    fleet.engine("A", kv=100)
    assert fleet.sent(fleet.arrive("huge", prompt=1_000)) == [("huge", "A")]


def test_an_engine_that_does_not_say_its_kv_takes_all() -> None:
    """Capacity 0 means unknown: KV does not limit entry."""
    fleet = fleet_with_one_in_tool(kv=0)
    assert fleet.sent(fleet.arrive("huge", prompt=10**9)) == [("huge", "A")]


def test_a_claim_in_a_tool_call_gives_way_after_its_lease() -> None:
    """A slow tool loses its place to an entrant, at a tick."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=50)
    assert fleet.tick(59.9) == []
    assert fleet.sent(fleet.tick(0.1)) == [("b", "A")]
    assert fleet.claims("A") == {"b": 50}


def test_only_as_many_claims_give_way_as_are_needed() -> None:
    """The longest idle goes, the next one stays."""
    fleet = fleet_with_one_in_tool()
    fleet.at = 1.0
    fleet.arrive("c")
    fleet.finish("c", prompt=20, output=10)
    fleet.arrive("b", prompt=60)
    assert fleet.sent(fleet.tick(100.0)) == [("b", "A")]
    assert fleet.claims("A") == {"c": 30, "b": 60}


def test_no_claim_gives_way_in_vain() -> None:
    """When all idle claims together do not make room, none is taken."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("runs", prompt=40)
    fleet.arrive("b", prompt=60)
    assert fleet.tick(100.0) == []
    assert fleet.claims("A") == {"a": 50, "runs": 40}


def test_all_claims_give_way_to_one_above_the_watermark() -> None:
    """With everything there idle, the engine is as good as empty."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("huge", prompt=1_000)
    assert fleet.sent(fleet.tick(60.0)) == [("huge", "A")]


def test_a_turn_that_waited_for_its_patience_needs_no_lease_to_end() -> None:
    """Fresh claims in a tool call give way to it, so that nothing starves behind ever new tool calls."""
    fleet = Fleet(limits=Limits(in_tool_lease_s=60, entry_patience_s=20))
    fleet.engine("A", slots=4, kv=100)
    fleet.arrive("a", prompt=50)
    fleet.arrive("b", prompt=50)
    fleet.at = 19.0
    assert fleet.finish("a", prompt=40, output=10) == []
    assert fleet.sent(fleet.tick(1.0)) == [("b", "A")]


def test_residents_pass_an_entrant_that_does_not_fit() -> None:
    """A slot is not left empty for one whose KV has no room, but other entrants do not pass it."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("big", prompt=60, predicted=90_000)
    assert fleet.arrive("small", prompt=10) == []
    assert fleet.sent(fleet.arrive("a2", "a", prompt=50)) == [("a2", "A")]


def test_a_trajectory_that_lost_its_claim_enters_its_home_again() -> None:
    """It waits at its home like an entrant, in its order among those without a home."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=50)
    fleet.tick(60.0)
    assert fleet.arrive("a2", "a", prompt=50, predicted=90_000) == []
    assert fleet.arrive("c", prompt=10) == []
    assert fleet.finish("b", prompt=50, output=10) == []
    assert fleet.sent(fleet.close("b")) == [("a2", "A"), ("c", "A")]


def test_a_claim_grows_with_its_turn_and_is_set_right_at_its_end() -> None:
    """What is claimed is never less than what is known to be there."""
    fleet = Fleet()
    fleet.engine("A")
    fleet.arrive("a", prompt=10)
    fleet.progress("a", 1, 5)
    assert fleet.claims("A") == {"a": 15}
    fleet.progress("a", 1, 3)
    assert fleet.claims("A") == {"a": 15}
    fleet.finish("a", prompt=12, output=1)
    assert fleet.claims("A") == {"a": 13}


def test_a_first_turn_that_fails_leaves_no_claim() -> None:
    """Only a context that was made is worth keeping; its place goes to the next one."""
    fleet = Fleet()
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("a", prompt=60)
    fleet.arrive("b", prompt=60)
    assert fleet.sent(fleet.fail("a", fault=Fault.CLIENT_LEFT)) == [("b", "A")]
    assert fleet.claims("A") == {"b": 60}


def test_a_trajectory_that_made_nothing_has_no_home() -> None:
    """The next turn after a failed first one goes where it ends soonest, though there is room where it was."""
    fleet = Fleet()
    fleet.engine("A", slots=2)
    fleet.arrive("a")
    fleet.fail("a", fault=Fault.CLIENT_LEFT)
    fleet.arrive("b", predicted=90_000)
    fleet.engine("B", slots=2)
    assert fleet.home("b") == "A"
    assert fleet.sent(fleet.arrive("a2", "a")) == [("a2", "B")]


def busy_home() -> Fleet:
    """Trajectory `m` in a tool call at A, whose only slot `hog` has."""
    fleet = Fleet(HEDDLE)
    fleet.engine("A")
    fleet.arrive("m", predicted=20_000)
    fleet.finish("m", prompt=900, output=100)
    fleet.arrive("hog", predicted=50_000)
    return fleet


def test_a_trajectory_moves_from_a_late_engine_to_an_idle_one() -> None:
    """At its tool return, with its home full and setting the makespan, it goes where it ends sooner."""
    fleet = busy_home()
    fleet.engine("B")
    (dispatch,) = fleet.arrive("m2", "m", prompt=1_000, predicted=20_000)
    assert isinstance(dispatch, Dispatch) and (dispatch.engine_id, dispatch.why) == ("B", "moved from A")
    assert set(fleet.claims("A")) == {"hog"} and set(fleet.claims("B")) == {"m"}


def test_a_trajectory_stays_when_a_later_engine_sets_the_makespan() -> None:
    """Relief of an engine that nobody waits for is not worth a prefill, though the later engine is full."""
    fleet = busy_home()
    fleet.engine("Z")
    fleet.arrive("longest", predicted=500_000)
    assert fleet.home("longest") == "Z"
    fleet.engine("B")
    assert fleet.arrive("m2", "m", prompt=1_000, predicted=20_000) == []


def test_two_turns_at_once_do_not_move() -> None:
    """While one runs its KV is in use at home, however late that is. After it, the next one moves."""
    fleet = Fleet()
    fleet.engine("A", slots=2)
    fleet.arrive("m1", "m", predicted=20_000)
    fleet.arrive("hog", predicted=50_000)
    fleet.engine("B", slots=2)
    assert fleet.arrive("m2", "m", predicted=20_000) == []
    assert fleet.sent(fleet.finish("m1")) == [("m2", "A")]
    fleet.finish("m2")
    assert fleet.sent(fleet.arrive("m3", "m", predicted=20_000)) == [("m3", "B")]


def test_a_policy_that_may_not_move_does_not() -> None:
    """Sticky is sticky, however full its home is."""
    fleet = Fleet(VERL)
    fleet.engine("A")
    fleet.arrive("m1", "m")
    fleet.engine("B")
    assert fleet.sent(fleet.arrive("m2", "m")) == [("m2", "A")]


def test_waiting_turns_follow_their_trajectory_to_its_first_home() -> None:
    """Two first turns of one trajectory end up on one engine, not on two."""
    fleet = Fleet()
    fleet.arrive("m1", "m")
    fleet.arrive("m2", "m")
    assert fleet.sent(fleet.engine("A")) == [("m1", "A")]
    assert fleet.engine("B") == []
    assert fleet.sent(fleet.finish("m1")) == [("m2", "A")]


def test_waiting_turns_follow_their_trajectory_to_a_new_home() -> None:
    """When a retry takes a trajectory elsewhere, its other turn neither drags it back nor enters unclaimed."""
    fleet = Fleet(limits=Limits(retry_pause_s=1_000))
    fleet.engine("A", slots=2)
    fleet.arrive("m1", "m")
    fleet.arrive("x")
    assert fleet.arrive("m2", "m") == []
    fleet.engine("B")
    assert fleet.sent(fleet.fail("m1")) == [("m1", "B")]
    assert fleet.sent(fleet.finish("m1", leg=2)) == [("m2", "B")]


def test_a_trajectory_that_goes_elsewhere_makes_room_at_its_old_home() -> None:
    """What waited for its KV to go is sent at once (found by the machine of test_any_order)."""
    fleet = Fleet()
    fleet.engine("A", kv=100)
    fleet.arrive("a", prompt=90)
    fleet.fail("a")
    assert fleet.arrive("b", prompt=1) == []
    assert fleet.sent(fleet.engine("B", kv=100)) == [("a", "B"), ("b", "A")]


def test_a_turn_that_follows_its_trajectory_claims_its_prompt_before_others_enter() -> None:
    """Its KV is as sure to come as that of the turn which went first (found by the machine of test_any_order)."""
    fleet = Fleet()
    fleet.arrive("t1", "t", prompt=90, predicted=1)
    fleet.arrive("t2", "t", prompt=1, predicted=300)
    fleet.arrive("u", prompt=1, predicted=300)
    assert fleet.sent(fleet.engine("A", slots=3, kv=100)) == [("t2", "A"), ("t1", "A")]


def test_the_answer_that_is_usual_is_claimed_in_advance() -> None:
    """The prior at first, then the mean of the trajectory's own answers with it; set right when the turn ends."""
    fleet = Fleet(answer_tokens=500)
    fleet.engine("A", kv=10_000)
    fleet.arrive("m1", "m", prompt=100)
    assert fleet.claims("A") == {"m": 600}
    fleet.finish("m1", prompt=100, output=1_100)
    assert fleet.claims("A") == {"m": 1_200}
    fleet.arrive("m2", "m", prompt=1_250)
    assert fleet.claims("A") == {"m": 1_250 + (500 + 1_100) // 2}


def test_a_trajectory_moves_from_a_free_slot_when_that_lowers_the_latest_finish() -> None:
    """The default: at its home another one, in a tool call now, has much more to do than anybody elsewhere."""
    fleet = busy_home()
    fleet.engine("B")
    fleet.finish("hog")
    assert fleet.sent(fleet.arrive("m2", "m", prompt=1_000, predicted=20_000)) == [("m2", "B")]


@pytest.mark.parametrize("last", ["m1", "m2"])
def test_a_claim_is_kept_for_the_tool_call_wherever_the_last_turn_ran(last: str) -> None:
    """The home's claim becomes one of a tool call, or it would never give way."""
    fleet = Fleet(limits=Limits(in_tool_lease_s=5))
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("m1", "m", prompt=50)
    fleet.arrive("m2", "m", prompt=50)
    fleet.engine("B", kv=100)
    assert fleet.sent(fleet.fail("m2")) == [("m2", "B")]
    ends = [("m2", 2), ("m1", 1)] if last == "m1" else [("m1", 1), ("m2", 2)]
    for turn_id, leg in ends:
        fleet.finish(turn_id, leg=leg, prompt=50)
    fleet.arrive("on-a", prompt=80)
    assert fleet.home("on-a") == "A" and fleet.claims("B") == {"m": 60}
    fleet.arrive("on-b", prompt=80)
    assert fleet.sent(fleet.tick(5.0)) == [("on-b", "B")]


def test_claims_of_an_earlier_process_give_way_longest_idle_first() -> None:
    """Records come from a store in any order; who is idle since when decides."""
    records = [
        record("young", "A", last_at=50.0, context_tokens=40),
        record("old", "A", last_at=1.0, context_tokens=40),
    ]
    fleet = Fleet(HEDDLE, Limits(in_tool_lease_s=30), records)
    fleet.at = 60.0
    fleet.engine("A", slots=2, kv=100)
    assert fleet.claims("A") == {"old": 40, "young": 40}
    assert fleet.sent(fleet.arrive("b", prompt=50)) == [("b", "A")]
    assert set(fleet.claims("A")) == {"young", "b"}


@pytest.mark.parametrize(("num_running", "lease_s"), [(0, 5.0), (1, 5.0), (2, 10.0)])
def test_a_claim_is_kept_for_as_long_as_prefilling_what_runs_would_take(num_running: int, lease_s: float) -> None:
    """By default, by the engine's profile: contexts of 50 tokens at 100 ms each are 5 s for each turn that runs. The
    more runs, the more each second of prefill costs; with one context more it would be that of one turn."""
    slow = replace(UNMEASURED, prefill_per_ktoken_ms=100_000.0, prefill_per_ktoken2_ms=0.0)
    fleet = Fleet()
    fleet.engine("A", slots=4, kv=60 * (num_running + 1), profile=slow)
    for number in range(num_running):
        fleet.arrive(f"runs{number}", prompt=50)
    fleet.arrive("a", prompt=40)
    fleet.finish("a", prompt=40, output=10)
    assert fleet.arrive("b", prompt=55) == fleet.tick(lease_s - 0.1) == []
    assert fleet.sent(fleet.tick(0.2)) == [("b", "A")]


@pytest.mark.parametrize("lease_s", [0.0, 3.0])
def test_a_number_of_seconds_overrules_it(lease_s: float) -> None:
    fleet = Fleet(limits=Limits(in_tool_lease_s=lease_s))
    fleet.engine("A", slots=4, kv=100)
    fleet.arrive("a", prompt=40)
    fleet.finish("a", prompt=40, output=10)
    entered = fleet.arrive("b", prompt=60)
    if lease_s:
        assert entered == fleet.tick(lease_s - 0.1) == []
        entered = fleet.tick(0.2)
    assert fleet.sent(entered) == [("b", "A")]


def siblings(*prompts: int, kv: int = 100) -> Fleet:
    """Engine A with 8 slots; siblings `s0`, `s1` and so on in tool calls there, which answered with nothing yet."""
    fleet = Fleet(limits=Limits(answer_tokens=0, in_tool_lease_s=60, entry_patience_s=300))
    fleet.engine("A", slots=8, kv=kv)
    for number, prompt in enumerate(prompts):
        fleet.arrive(f"s{number}", prompt=prompt, group="g")
        fleet.finish(f"s{number}", prompt=prompt, output=5)
    return fleet


def test_the_prompt_of_siblings_is_held_once() -> None:
    """Three times 45 tokens of which 40 are the same prompt are 55 of 90: the fourth sibling enters, at 40 + 4 * 5."""
    fleet = siblings(40, 40, 40)
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (135, 55)
    assert fleet.sent(fleet.arrive("s3", prompt=40, group="g")) == [("s3", "A")]
    assert fleet.sent(fleet.arrive("other", prompt=35)) == [("other", "A")]
    assert fleet.arrive("another", prompt=1) == []


def test_prompts_of_other_groups_and_unlike_ones_are_held_each() -> None:
    """A group's name alone makes no prompt the same; nobody's group is nobody's sibling."""
    fleet = siblings(40)
    assert fleet.arrive("elsewhere", prompt=46, group="h") == []
    assert fleet.arrive("unlike", prompt=46, group="g") == []
    nameless = siblings()
    for name in ("a", "b"):
        nameless.arrive(name, prompt=40, preamble=("", 30))
    assert nameless.scheduler.engines["A"].kv_held == 80
    alone = fleet_with_one_in_tool()
    assert alone.arrive("b", prompt=41) == []


def test_a_preamble_of_many_groups_is_held_once() -> None:
    """Two groups of two, prompts of 40 of which 30 are system prompt and tools: 30 + 2 * 10 + 4 * 5 of 90. A third one
    needs 10 more, and one with another preamble 40, for which the first two must leave."""
    fleet = siblings()
    for number in range(4):
        fleet.arrive(f"t{number}", prompt=40, group=f"g{number // 2}", preamble=("p", 30))
        fleet.finish(f"t{number}", prompt=40, output=5)
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (180, 70)
    assert fleet.arrive("unlike", prompt=40, group="g9", preamble=("q", 30)) == []
    assert fleet.sent(fleet.arrive("alike", prompt=40, group="g8", preamble=("p", 30), priority=-1)) == [("alike", "A")]
    assert engine.kv_held == 80
    for name in ("t0", "t1", "t2", "t3"):
        fleet.close(name)
    assert set(fleet.claims("A")) == {"alike", "unlike"}
    assert engine.kv_held == 80 and engine.uncached_tokens == 10 + 40


def test_a_preamble_without_a_group_is_held_once_too() -> None:
    """Single trajectories, each with its own task behind the same 30 tokens. Who has but 20 of them has no more."""
    fleet = siblings()
    for number in range(3):
        fleet.arrive(f"t{number}", prompt=40, preamble=("p", 30))
    fleet.arrive("bare", prompt=20, group="g", preamble=("p", 30))
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (140, 20 + 3 * 20)


def test_a_preamble_of_no_tokens_is_none() -> None:
    """Behind one that has some, the same group goes on from elsewhere (found by the property below)."""
    fleet = siblings(kv=1_000)
    fleet.arrive("bare", prompt=200, group="g", preamble=("q", 0))
    fleet.arrive("behind", prompt=200, group="g", preamble=("q", 150))
    assert fleet.scheduler.engines["A"].kv_held == 400


def test_adapters_of_one_engine_share_no_prompt() -> None:
    """The same words under another model are other keys and values."""
    fleet = Fleet(limits=Limits(answer_tokens=0))
    fleet.engine("A", slots=8, kv=100, models=("x", "y"))
    for name, model in (("a", "x"), ("b", "y"), ("c", "y")):
        fleet.arrive(name, prompt=30, group="g", preamble=("p", 20), model=model)
    assert fleet.scheduler.engines["A"].kv_held == 60


def test_the_group_that_was_declared_is_that_of_the_prompt() -> None:
    """A client that declared its trajectory need not name its group again; one that did not may name it then."""
    fleet = siblings(40)
    fleet.declare("declared")  # of group g
    fleet.handle(TrajectoryDeclared(fleet.at, "named", Prediction(1_000.0, 1_000.0)))
    fleet.arrive("declared-1", "declared", prompt=40)
    fleet.arrive("named-1", "named", prompt=40, group="g")
    engine = fleet.scheduler.engines["A"]
    assert (engine.kv_claimed, engine.kv_held) == (125, 45)


def test_a_prompt_that_was_estimated_too_long_is_cut_in_proportion() -> None:
    """Engines count 36 where 40 were guessed, 30 of them preamble: 27 are what others find."""
    fleet = siblings()
    for name in ("a", "b"):
        fleet.arrive(name, prompt=40, group=name, preamble=("p", 30))
    fleet.finish("a", prompt=36, output=0)
    engine = fleet.scheduler.engines["A"]
    assert engine.kv_held == 36 + 40 - 27


def test_a_prompt_stays_until_its_last_holder_leaves() -> None:
    """Of two siblings one leaves: what it frees is its own part, and the other one frees the rest."""
    fleet = siblings(40, 40)
    engine = fleet.scheduler.engines["A"]
    assert engine.kv_held == 50
    fleet.close("s0")
    assert engine.kv_held == engine.kv_claimed == 45
    fleet.close("s1")
    assert engine.kv_held == engine.kv_claimed == 0


def test_siblings_that_give_way_free_only_what_is_their_own() -> None:
    """After their lease: an entrant of 45 needs 5 of s0 and then all that s1 has; one of their own keeps the prompt."""
    fleet = siblings(40, 40)
    fleet.tick(61)
    assert fleet.sent(fleet.arrive("b", prompt=45)) == [("b", "A")]
    assert fleet.claims("A") == {"s1": 45, "b": 45}
    fleet = siblings(80)
    fleet.tick(61)
    assert fleet.sent(fleet.arrive("s1", prompt=80, group="g")) == [("s1", "A")]
    assert fleet.scheduler.engines["A"].kv_held == 85


def test_contexts_that_outgrow_an_engine_count_their_prompt_once() -> None:
    """Four siblings claim 180 of 100 tokens and hold 60, so nobody leaves; at 101 the least urgent one does."""
    fleet = siblings(40, 40, 40, 40)
    assert len(fleet.claims("A")) == 4
    fleet.arrive("s0-1", "s0", prompt=80)
    assert len(fleet.claims("A")) == 4
    fleet.progress("s0-1", 1, 6)
    assert len(fleet.claims("A")) == 3 and fleet.scheduler.engines["A"].kv_held == 96


def test_a_prefill_waits_until_its_turn_has_grown_or_ended() -> None:
    """What a sibling's prompt brought is not prefilled again."""
    fleet = siblings()
    engine = fleet.scheduler.engines["A"]
    fleet.arrive("s0", prompt=40, group="g")
    assert engine.uncached_tokens == 40
    fleet.arrive("s1", prompt=41, group="g")
    fleet.arrive("other", prompt=10, group="h")
    assert engine.uncached_tokens == 40 + 1 + 10
    fleet.progress("s0", 1, 6)
    assert engine.uncached_tokens == 1 + 10
    fleet.finish("s1", prompt=41, output=5)
    assert engine.uncached_tokens == 10
    fleet.finish("other", prompt=10, output=5)
    assert engine.uncached_tokens == 0


def test_an_agent_that_cut_its_context_down_shares_no_prompt() -> None:
    """Half of it is gone: that is another context. A little less is an estimate that was too long, for all of them."""
    fleet = siblings(40, 40)
    engine = fleet.scheduler.engines["A"]
    fleet.arrive("s1-1", "s1", prompt=20)
    fleet.finish("s1-1", prompt=10, output=5)
    assert fleet.claims("A") == {"s0": 45, "s1": 15} and engine.kv_held == 60
    fleet = siblings(40, 40, 40)
    engine = fleet.scheduler.engines["A"]
    fleet.arrive("s1-1", "s1", prompt=36)
    fleet.finish("s1-1", prompt=31, output=5)
    assert fleet.claims("A") == {"s0": 45, "s1": 36, "s2": 45} and engine.kv_held == 36 + 9 + 9


@given(st.data())
def test_siblings_claim_their_prompt_once_and_free_it_with_the_last(data: st.DataObject) -> None:
    """Whoever comes, grows, is cut down and goes, in any order: against a count of each prompt from the beginning."""
    prompts, residents = Prompts(), {}
    for number in range(data.draw(st.integers(1, 25))):
        if residents and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(residents)))
            trajectory, context = residents[name]
            if data.draw(st.booleans()):
                prompts.remove(name)
                del residents[name]
            else:
                context = data.draw(st.integers(1, 300))
                prompts.fit(name, context)
                residents[name] = trajectory, min(context, residents[name][1])
        else:
            name = f"t{number}"
            trajectory = Trajectory(name, number, "", None, 0.0, 0.0, Prediction(1.0, 1.0))
            tokens = data.draw(st.sampled_from([0, 96, 99, 100, 101, 200, 203]))
            group = data.draw(st.sampled_from(["", "g", "h"]))
            preamble = data.draw(st.sampled_from([("", 0), ("p", 50), ("p", 55), ("q", 150), ("", 10), ("q", 0)]))
            asked = TurnArrived(0.0, name, name, "model", tokens, Prediction(1.0, 1.0), group, None, 0, *preamble)
            trajectory.note_first_prompt(asked, group)
            found = prompts.found_by(trajectory)
            assert 0 <= found <= trajectory.first_prompt_tokens <= tokens
            before = prompts.shared_tokens
            prompts.add(trajectory)
            assert prompts.shared_tokens - before <= found, "what others hold of a part may turn out to be less"
            residents[name] = trajectory, trajectory.first_prompt_tokens
        claims = [context for _, context in residents.values()]
        assert 0 <= prompts.shared_tokens <= sum(claims) - max(claims, default=0)
        alone = {name for name, (one, _) in residents.items() if not one.prompt}
        assert not any(prompts.left_by(alone))
    leaving = data.draw(st.permutations(sorted(residents)))
    for name, left in zip(leaving, list(prompts.left_by(leaving)), strict=True):
        before = prompts.shared_tokens
        prompts.remove(name)
        assert before - prompts.shared_tokens == left
    assert prompts.shared_tokens == 0


@settings(max_examples=500)
@given(st.data())
def test_as_many_claims_give_way_as_are_needed(data: st.DataObject) -> None:
    """Whoever lives there, shares a prompt, and is in a tool call: who gives way makes room, the last of them too; when
    nobody may, all who might would make none. And a bound for all entrants turns away nobody of these."""
    at, limits = 100.0, Limits(answer_tokens=0, in_tool_lease_s=60, entry_patience_s=90)
    capacity_tokens = data.draw(st.sampled_from([100, 130, 0]))
    are_alike = data.draw(st.booleans())
    prompts = st.sampled_from([30, 40, 95] if are_alike else [30, 40, 41, 95])
    groups, sinces = st.sampled_from(["", "g", "h"]), st.sampled_from([0.0, 40.0, 41.0, None])
    drawn = data.draw(st.lists(st.tuples(prompts, groups, st.integers(1, 60), sinces), max_size=5))
    drawn.sort(key=lambda resident: inf if resident[3] is None else resident[3])
    engine, admission = resident_engine(capacity_tokens, drawn, limits), Admission(HEDDLE, limits, at)
    turn = waiting(data.draw(st.sampled_from(["e", "f", "r0"])), data.draw(prompts), data.draw(groups), 5.0, limits)
    turn.queued_at = data.draw(st.sampled_from([9.0, 10.0, 11.0]))

    def fits_without(leaving: list[str]) -> bool:
        there = resident_engine(capacity_tokens, drawn, limits)
        for name in leaving:
            there.release(name)
        is_alone = not there.claims
        there.claim(turn.trajectory, turn.claim_tokens)
        return is_alone or not capacity_tokens or there.kv_held <= capacity_tokens * limits.kv_watermark

    giving_way = admission.claims_giving_way(engine, turn)
    event(f"giving way: {giving_way and len(giving_way)}")
    assert giving_way is None or not admission.claims_too_much(engine, turn, admission.most_tokens(engine))
    if turn.trajectory.trajectory_id in engine.claims:
        assert giving_way == []
    elif are_alike:  # a shorter estimate of a prompt makes it shorter for all that hold it
        is_patient = at - turn.queued_at < limits.entry_patience_s
        idle = [name for name, since in engine.in_tool.items() if not is_patient or at - since >= 60]
        assert giving_way is None or giving_way == idle[: len(giving_way)]
        assert fits_without(idle if giving_way is None else giving_way) == (giving_way is not None)
        assert not giving_way or not fits_without(giving_way[:-1])


@settings(max_examples=300)
@given(
    st.sampled_from([60, 100, 0]),
    st.lists(st.tuples(st.sampled_from([30, 40, 95]), st.sampled_from(["", "g", "h"]), st.integers(1, 60)), max_size=6),
    st.sets(st.integers(0, 5)),
)
def test_as_many_residents_leave_as_have_outgrown_an_engine(
    kv: int, drawn: list[tuple[int, str, int]], running: set[int]
) -> None:
    """Least urgent first, none that runs, and nobody once the rest of them, with prompts counted once, fits."""
    limits = Limits(answer_tokens=0)
    trajectories = {}
    engine = resident_engine(kv, [(*resident, None) for resident in drawn], limits)
    for number, (prompt, group, _) in enumerate(drawn):
        turn = waiting(f"r{number}", prompt, group, 0.0, limits)
        turn.trajectory.key = 0, -float(number), number
        if number in running:
            turn.become(TurnState.RUNNING)
            turn.trajectory.turns["turn"] = turn
        trajectories[f"r{number}"] = turn.trajectory
    leaving = claims_beyond_capacity(engine, trajectories, 0.0)
    idle = [f"r{number}" for number in range(len(drawn)) if number not in running]
    assert leaving == idle[: len(leaving)]
    for name in leaving:
        assert engine.kv_held > kv > 0
        engine.release(name)
    assert leaving == idle or not kv or engine.kv_held <= kv


def resident_engine(kv: int, residents: list[tuple[int, str, int, float | None]], limits: Limits) -> Engine:
    """An engine with residents `r0` and so on: prompt, group, claim, and since when each is in a tool call."""
    engine = Engine(EngineSpec("A", frozenset({"model"}), 8, kv), True)
    for number, (prompt, group, claim, since) in enumerate(residents):
        resident = waiting(f"r{number}", prompt, group, 0.0, limits).trajectory
        engine.claim(resident, claim)
        if since is not None:
            engine.in_tool[resident.trajectory_id] = since
    return engine


def waiting(name: str, prompt: int, group: str, at: float, limits: Limits) -> Turn:
    """The first turn of a trajectory, which nobody has placed yet."""
    preamble = ("p", 25) if group else ("", 0)
    arrived = TurnArrived(at, name, name, "model", prompt, Prediction(1_000.0, 1_000.0), group, None, 0, *preamble)
    trajectory = trajectory_of(arrived, 0, at)
    trajectory.note_first_prompt(arrived, group)
    return turn_of(arrived, trajectory, 0, at, HEDDLE.order, limits)
