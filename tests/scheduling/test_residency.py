"""Residency: whose KV may be on an engine, and whose claims give way."""

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
from scheduling.policy import HEDDLE
from scheduling.residency import claims_beyond_capacity
from scheduling.state import Turn, TurnState
from scheduling.types import EngineSpec, Fault, Prediction, TurnArrived
from tests.scheduling.fleet import Fleet, fleet_with_one_in_tool, record


def test_kv_in_a_tool_call_counts_against_entrants() -> None:
    """A tool call holds 50 of 100 tokens: 40 more stay under the watermark of 90, 41 do not."""
    fleet = fleet_with_one_in_tool()
    assert fleet.claims("A") == {"a": 50}
    assert fleet.arrive("too-big", prompt=41) == []
    fleet.fail("too-big", leg=0, fault=Fault.CLIENT_LEFT)
    assert fleet.sent(fleet.arrive("fits", prompt=40)) == [("fits", "A")]


def test_a_resident_returns_to_an_engine_that_is_full_of_kv() -> None:
    """Its KV is claimed already. Its turn runs even if it grows the claim over the watermark."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=40)
    assert fleet.sent(fleet.arrive("a2", "a", prompt=60)) == [("a2", "A")]
    assert fleet.claims("A") == {"a": 60, "b": 40}


def test_a_resident_that_exceeds_the_capacity_must_enter_again() -> None:
    """With its grown context the engine would hold 101 of 100 tokens and evict all contexts in turn. So the turn
    waits."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=40)
    assert fleet.arrive("a2", "a", prompt=61) == []
    assert fleet.claims("A") == {"b": 40}
    assert fleet.sent(fleet.finish("b", prompt=10, output=10)) == [("a2", "A")]


@pytest.mark.parametrize(("predicted", "left"), [(5_000, {"b": 30, "c": 21}), (500, {"a": 50, "c": 21})])
def test_the_least_urgent_idle_resident_leaves_an_outgrown_engine(predicted: float, left: dict[str, int]) -> None:
    """Of two in tool calls, the one with less predicted work gives up its claim; the running one keeps its own. The
    same happens when the end of a turn reports the longer context."""
    for is_end in (False, True):
        fleet = fleet_with_one_in_tool()
        fleet.arrive("b", predicted=predicted, prompt=20)
        fleet.finish("b", prompt=20, output=10)
        fleet.arrive("c", prompt=10, predicted=9_000)
        assert fleet.claims("A") == {"a": 50, "b": 30, "c": 10}
        _ = fleet.finish("c", prompt=10, output=11) if is_end else fleet.progress("c", 1, 11)
        assert fleet.claims("A") == left


def test_room_that_a_growing_context_leaves_is_used_at_once() -> None:
    """One trajectory gives up its claim so that the engine holds what it runs, and it held more than was lacking."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("grows", prompt=10)
    assert fleet.arrive("waits", prompt=35) == []
    assert fleet.sent(fleet.progress("grows", 1, 41)) == [("waits", "A")]
    assert fleet.claims("A") == {"grows": 51, "waits": 35}


def test_a_trajectory_without_its_claim_enters_any_engine_with_room() -> None:
    """Its KV is gone from its home, so nothing keeps it there."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=40)
    fleet.engine("B", slots=4, kv=100)
    assert fleet.sent(fleet.arrive("a2", "a", prompt=61)) == [("a2", "B")]


def test_an_entrant_returns_to_its_home_if_that_has_room() -> None:
    """Some of its KV may be left there."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=50)
    fleet.tick(60)
    assert fleet.claims("A") == {"b": 50}
    fleet.engine("B", slots=4, kv=100)
    fleet.finish("b", prompt=10, output=10)
    assert fleet.sent(fleet.arrive("a2", "a", prompt=50)) == [("a2", "A")]


def test_a_trajectory_above_the_watermark_enters_an_empty_engine() -> None:
    """Nothing waits forever for room that cannot exist."""
    fleet = Fleet()
    fleet.engine("A", kv=100)
    assert fleet.sent(fleet.arrive("huge", prompt=1_000)) == [("huge", "A")]


def test_an_engine_of_unknown_kv_capacity_takes_every_entrant() -> None:
    """Capacity 0 means unknown: KV does not limit entry."""
    fleet = fleet_with_one_in_tool(kv=0)
    assert fleet.sent(fleet.arrive("huge", prompt=10**9)) == [("huge", "A")]


def test_a_claim_in_a_tool_call_gives_way_after_its_lease() -> None:
    """A trajectory in a slow tool call loses its claim to an entrant, at a tick."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=50)
    assert fleet.tick(59.9) == []
    assert fleet.sent(fleet.tick(0.1)) == [("b", "A")]
    assert fleet.claims("A") == {"b": 50}


def test_only_as_many_claims_give_way_as_are_needed() -> None:
    """The longest idle one goes, the next one stays."""
    fleet = fleet_with_one_in_tool()
    fleet.at = 1.0
    fleet.arrive("c")
    fleet.finish("c", prompt=20, output=10)
    fleet.arrive("b", prompt=60)
    assert fleet.sent(fleet.tick(100.0)) == [("b", "A")]
    assert fleet.claims("A") == {"c": 30, "b": 60}


def test_no_claim_gives_way_in_vain() -> None:
    """If all idle claims together do not make room, none is taken."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("runs", prompt=40)
    fleet.arrive("b", prompt=60)
    assert fleet.tick(100.0) == []
    assert fleet.claims("A") == {"a": 50, "runs": 40}


def test_all_claims_give_way_to_a_context_above_the_watermark() -> None:
    """If everything there is idle, the engine is as good as empty."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("huge", prompt=1_000)
    assert fleet.sent(fleet.tick(60.0)) == [("huge", "A")]


def test_an_impatient_turn_does_not_wait_for_leases() -> None:
    """Fresh claims in a tool call give way to it, so that it does not starve behind ever new tool calls."""
    fleet = Fleet(limits=Limits(in_tool_lease_s=60, entry_patience_s=20))
    fleet.engine("A", slots=4, kv=100)
    fleet.arrive("a", prompt=50)
    fleet.arrive("b", prompt=50)
    fleet.at = 19.0
    assert fleet.finish("a", prompt=40, output=10) == []
    assert fleet.sent(fleet.tick(1.0)) == [("b", "A")]


def test_a_turn_becomes_impatient_half_way_to_its_timeout() -> None:
    """Unless the patience is set. Contexts that it takes are prefilled again, so it takes them late, yet before it is
    refused."""
    fleet = Fleet(limits=Limits(in_tool_lease_s=1_000, queue_timeout_s=600))
    fleet.engine("A", slots=4, kv=100)
    fleet.arrive("a", prompt=50)
    fleet.finish("a", prompt=40, output=10)
    assert fleet.arrive("b", prompt=50) == []
    assert fleet.tick(299.0) == []
    assert fleet.sent(fleet.tick(1.0)) == [("b", "A")]


def test_residents_pass_an_entrant_that_does_not_fit() -> None:
    """No slot stays empty for a turn whose KV has no room, but other entrants do not pass it."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("big", prompt=60, predicted=90_000)
    assert fleet.arrive("small", prompt=10) == []
    assert fleet.sent(fleet.arrive("a2", "a", prompt=50)) == [("a2", "A")]


def test_a_trajectory_that_lost_its_claim_enters_its_home_again() -> None:
    """It waits like an entrant, in its order among the homeless turns."""
    fleet = fleet_with_one_in_tool()
    fleet.arrive("b", prompt=50)
    fleet.tick(60.0)
    assert fleet.arrive("a2", "a", prompt=50, predicted=90_000) == []
    assert fleet.arrive("c", prompt=10) == []
    assert fleet.finish("b", prompt=50, output=10) == []
    assert fleet.sent(fleet.close("b")) == [("a2", "A"), ("c", "A")]


def test_a_claim_grows_with_its_turn_and_is_corrected_at_its_end() -> None:
    """A claim never shrinks while its turn runs."""
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
    """Only a finished turn's context is worth keeping; the room goes to the next turn."""
    fleet = Fleet()
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("a", prompt=60)
    fleet.arrive("b", prompt=60)
    assert fleet.sent(fleet.fail("a", fault=Fault.CLIENT_LEFT)) == [("b", "A")]
    assert fleet.claims("A") == {"b": 60}


def test_a_claim_without_a_finished_turn_ends_wherever_its_last_turn_ran() -> None:
    """The room at the home is used at once, although the turn ended on another engine."""
    fleet = Fleet()
    fleet.engine("A", slots=2, kv=100)
    fleet.arrive("m1", "m", prompt=50)
    fleet.arrive("m2", "m", prompt=50)
    fleet.engine("B", kv=100)
    assert fleet.sent(fleet.fail("m2")) == [("m2", "B")]
    assert fleet.sent(fleet.arrive("other", prompt=20)) == [("other", "A")]
    fleet.fail("m2", leg=2, fault=Fault.CLIENT_LEFT)
    assert fleet.arrive("waits", prompt=80) == []
    assert fleet.sent(fleet.fail("m1", fault=Fault.CLIENT_LEFT)) == [("waits", "B")]


def test_a_trajectory_without_a_finished_turn_has_no_home() -> None:
    """After a failed first turn, the next one goes where it ends soonest, although its old engine has room."""
    fleet = Fleet()
    fleet.engine("A", slots=2)
    fleet.arrive("a")
    fleet.fail("a", fault=Fault.CLIENT_LEFT)
    fleet.arrive("b", predicted=90_000)
    fleet.engine("B", slots=2)
    assert fleet.home("b") == "A"
    assert fleet.sent(fleet.arrive("a2", "a")) == [("a2", "B")]


def test_the_usual_answer_is_claimed_in_advance() -> None:
    """At first the prior, later its mean with the trajectory's own answers. The claim is corrected when the turn
    ends."""
    fleet = Fleet(answer_tokens=500)
    fleet.engine("A", kv=10_000)
    fleet.arrive("m1", "m", prompt=100)
    assert fleet.claims("A") == {"m": 600}
    fleet.finish("m1", prompt=100, output=1_100)
    assert fleet.claims("A") == {"m": 1_200}
    fleet.arrive("m2", "m", prompt=1_250)
    assert fleet.claims("A") == {"m": 1_250 + (500 + 1_100) // 2}


@pytest.mark.parametrize("last", ["m1", "m2"])
def test_a_claim_is_kept_for_the_tool_call_wherever_the_last_turn_ran(last: str) -> None:
    """The home's claim becomes one in a tool call; otherwise it would never give way."""
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
    """A store returns records in any order; the time of last use decides."""
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
def test_the_default_lease_is_the_time_to_prefill_the_running_contexts(num_running: int, lease_s: float) -> None:
    """By the engine's profile: contexts of 50 tokens at 100 ms each are 5 s for each turn that runs, because a second
    of prefill costs more the more turns run. If none runs, the lease is that of one turn."""
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
def test_a_configured_lease_overrides_the_prefill_time(lease_s: float) -> None:
    """At 0 s a claim in a tool call gives way at once, although its prefill would take some time."""
    fleet = Fleet(limits=Limits(in_tool_lease_s=lease_s))
    fleet.engine("A", slots=4, kv=100)
    fleet.arrive("a", prompt=40)
    fleet.finish("a", prompt=40, output=10)
    entered = fleet.arrive("b", prompt=60)
    if lease_s:
        assert entered == fleet.tick(lease_s - 0.1) == []
        entered = fleet.tick(0.2)
    assert fleet.sent(entered) == [("b", "A")]


@settings(max_examples=500)
@given(st.data())
def test_claims_that_give_way_make_just_enough_room(data: st.DataObject) -> None:
    """For any residents, shared prompts and tool calls: the claims that give way make room, and without the last of
    them there would be none. If the turn may not enter, all candidates together make no room. The cheap test never
    rejects a turn that may enter."""
    at, limits = 100.0, Limits(answer_tokens=0, in_tool_lease_s=60, entry_patience_s=90)
    capacity_tokens = data.draw(st.sampled_from([100, 130, 0]))
    are_exact = data.draw(st.booleans())
    prompts = st.sampled_from([30, 40, 95] if are_exact else [30, 40, 41, 95])
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
    elif are_exact:  # otherwise a shorter estimate shortens a prompt for all its holders
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
def test_just_enough_residents_leave_an_outgrown_engine(
    kv: int, drawn: list[tuple[int, str, int]], running: set[int]
) -> None:
    """Least urgent first, never a running one, and none once the rest fit, with shared prompts counted once."""
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
    """An engine with residents `r0` and so on: prompt, group, claim, and the time at which its tool call began."""
    engine = Engine(EngineSpec("A", frozenset({"model"}), 8, kv), True)
    for number, (prompt, group, claim, since) in enumerate(residents):
        resident = waiting(f"r{number}", prompt, group, 0.0, limits).trajectory
        engine.claim(resident, claim)
        if since is not None:
            engine.in_tool[resident.trajectory_id] = since
    return engine


def waiting(name: str, prompt: int, group: str, at: float, limits: Limits) -> Turn:
    """The first turn of a trajectory, not yet placed."""
    # 40 and 41 are estimates of one prompt, which is one of the group's.
    parts = (("p", 25), (f"p{group}{prompt // 5}", max(prompt - 25, 0))) if group else ()
    arrived = TurnArrived(at, name, name, "model", prompt, Prediction(1_000.0, 1_000.0), group, None, 0, parts)
    trajectory = trajectory_of(arrived, 0, at)
    trajectory.note_first_prompt(arrived)
    return turn_of(arrived, trajectory, 0, at, HEDDLE.order, limits)
