"""A rollout in virtual time: its figures, its faults, and that it repeats exactly."""

import random
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engines.profiles import load_profile
from engines.simulated.features import Features, HostTier, Speculation
from predictor.progress import Predictor
from predictor.siblings import SiblingPredictor
from predictor.tabular import TabularPredictor
from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining
from scheduling.limits import Limits
from scheduling.policy import POLICIES
from scheduling.scaling import PlannedEngine, Role
from simulator.agent import Agent, shared_prompts
from simulator.conditions import Conditions, Faults, Reshape, Transfer
from simulator.outcome import Ending, Outcome
from simulator.predictors import Oracle
from simulator.reshape import Change, Reshaper
from simulator.rollout import Rollout
from workloads.laws import draw, law_named
from workloads.trajectories import Trajectory, Turn, Workload

TP4 = load_profile("qwen3-14b-h100-tp4")
PATIENT = Limits(queue_timeout_s=1e6)


def play(
    workload: Workload,
    fleet: list[EngineProfile],
    policy: str = "heddle",
    conditions: Conditions | None = None,
    limits: Limits = PATIENT,
    seed: int = 0,
    predictor: Predictor | None = None,
) -> Outcome:
    return Rollout(
        workload,
        fleet,
        POLICIES[policy],
        limits,
        predictor or SiblingPredictor(),
        conditions=conditions or Conditions(),
        seed=seed,
    ).run()


def coding(number: int, seed: int = 1) -> Workload:
    return draw(law_named("coding"), number, seed)


def single_trajectories(number: int, turn: Turn) -> Workload:
    return Workload("like", tuple(Trajectory(f"t{n}", f"g{n}", 64, (turn,)) for n in range(number)))


def test_a_sibling_with_a_shorter_prompt_leaves_the_longer_one_in_the_cache() -> None:
    """Their prompts agree for the length of the shorter one, and both fit: nothing is computed twice."""
    long, short = (
        Trajectory(name, "g", tokens, (Turn(0, 50, tool_s), Turn(16, 50, 0.0)))
        for name, tokens, tool_s in (("long", 32_000, 9.0), ("short", 8_000, 1.0))
    )
    [engine] = play(Workload("two", (long, short)), [TP4], "verl").engines
    computed = engine.num_prompt_tokens - engine.num_cached_tokens
    assert 32_000 < computed < 32_000 + 4 * (16 + 16)


def test_an_engine_computes_a_preamble_of_all_groups_once() -> None:
    """8,000 tokens of system prompt and tools, then 100 of each group's own and the difference between siblings'
    prompts."""
    alone = tuple(
        Trajectory(f"t{n}", f"g{n // 2}", 8_100 + n % 2 * 16, (Turn(0, 50, 0.0),), preamble_tokens=8_000)
        for n in range(6)
    )
    [engine] = play(Workload("three groups", alone), [replace(TP4, slots=1)], "verl").engines
    computed = engine.num_prompt_tokens - engine.num_cached_tokens
    assert 8_000 + 3 * 100 < computed < 8_000 + 3 * (100 + 16) + 6 * 16


def test_heddle_admits_more_trajectories_that_share_a_preamble() -> None:
    """64 single agents behind 12,000 tokens each: an engine holds 20 such contexts, or all of them if those tokens are
    shared.

    Between turns each agent is in a tool call as long as a turn, so an entrant without room waits for others' tools.
    """
    turns = (Turn(0, 100, 3.0), *[Turn(100, 100, 3.0) for _ in range(9)])
    apart = tuple(Trajectory(f"t{n}", f"g{n}", 12_100, turns) for n in range(64))
    together = tuple(replace(trajectory, preamble_tokens=12_000) for trajectory in apart)
    [tp1] = [load_profile("qwen3-14b-h100-tp1")]
    knows, does_not = (play(Workload("w", them), [tp1]) for them in (together, apart))
    assert knows.makespan_s < does_not.makespan_s / 2
    assert sum(t.queued_s for t in knows.trajectories) < 0.1 * sum(t.queued_s for t in does_not.trajectories)


def test_heddle_admits_more_branches_of_one_conversation() -> None:
    """The same with prompts that continue each other: each is 50 tokens longer than the one before."""
    turns = (Turn(0, 100, 3.0), *[Turn(100, 100, 3.0) for _ in range(9)])
    apart = tuple(Trajectory(f"t{n}", f"g{n}", 12_000 + 50 * n, turns) for n in range(64))
    branches = tuple(replace(trajectory, group_id="g") for trajectory in apart)
    [tp1] = [load_profile("qwen3-14b-h100-tp1")]
    knows, does_not = (play(Workload("w", them), [tp1]) for them in (branches, apart))
    assert knows.makespan_s < does_not.makespan_s / 2
    assert sum(t.queued_s for t in knows.trajectories) < 0.1 * sum(t.queued_s for t in does_not.trajectories)


def test_siblings_with_ten_thousand_lengths_share_few_pieces() -> None:
    """The cost of a turn grows with the pieces of its context. Tokens that are not shared are the trajectory's own."""
    siblings = [Trajectory(f"t{n}", "g", 100 + n, (Turn(0, 5, 0.0),)) for n in range(10_000)]
    shared = shared_prompts([*siblings, Trajectory("alone", "h", 70, (Turn(0, 5, 0.0),))])
    assert shared["h"] == (("h/0", 70),)
    assert len(shared["g"]) <= 32
    agents = [Agent(sibling, shared["g"]) for sibling in (siblings[0], siblings[5_000], siblings[-1])]
    for agent in agents:
        tokens = agent.trajectory.context_tokens + 5
        pieces = agent.pieces(tokens)
        assert sum(size for _, size in pieces) == tokens and all(size > 0 for _, size in pieces)
    assert agents[0].pieces(100)[0] == agents[2].pieces(9_000)[0] == ("g/0", 100)


def test_a_request_occupies_its_slot_before_the_engine_has_it() -> None:
    """On one slot each turn takes that much longer, although the engine does no work for it, if none is sent ahead."""
    workload = single_trajectories(3, Turn(0, 100, 0.0))
    one_slot, limits = replace(TP4, slots=1), replace(PATIENT, sends_ahead=False)
    plain_s = play(workload, [one_slot]).makespan_s
    far = [replace(one_slot, request_ms=250.0)]
    assert play(workload, far, limits=limits).makespan_s == pytest.approx(plain_s + 3 * 0.25)


@pytest.mark.parametrize(("request_ms", "last_s"), [(0.0, 3.0), (100.0, 3.0), (5_000.0, 7.0)])
def test_requests_that_are_sent_together_reach_an_engine_one_by_one(request_ms: float, last_s: float) -> None:
    """The first gap is a part of what a request takes anyway."""
    slow = replace(TP4, request_ms=request_ms, request_gap_ms=1_000.0)
    outcome = play(single_trajectories(3, Turn(0, 1, 0.0)), [slow], "round-robin")
    step_s = play(single_trajectories(1, Turn(0, 1, 0.0)), [TP4], "round-robin").makespan_s
    assert [one.ended_at - step_s for one in outcome.trajectories] == pytest.approx([last_s - 2, last_s - 1, last_s])


@pytest.mark.parametrize("policy", ["heddle", "slime"])
def test_time_is_queueing_plus_engine_plus_tools(policy: str) -> None:
    """No part of a trajectory's time is lost or counted twice, wherever its turns wait."""
    workload = coding(64)
    outcome = play(workload, [replace(TP4, slots=8)] * 2, policy)
    for trajectory, result in zip(workload.trajectories, outcome.trajectories, strict=True):
        assert result.ending is Ending.FINISHED
        assert result.queued_s + result.engine_s + result.tool_s == pytest.approx(result.ended_at)
        assert result.tool_s == pytest.approx(trajectory.tool_s)
        assert result.output_tokens == trajectory.output_tokens
    assert sum(result.queued_s for result in outcome.trajectories) > 0
    assert outcome.makespan_s == max(result.ended_at for result in outcome.trajectories)
    assert outcome.output_tokens == workload.output_tokens


@pytest.mark.parametrize(("own", "sibling"), [("a", "b"), ("a", None)])
def test_a_trajectory_may_have_the_name_of_its_group(own: str, sibling: str | None) -> None:
    """As one without a group has. The KV of its turns is not taken for its prompt's: names change nothing."""
    turns = (Turn(0, 400, 1.0), Turn(900, 400, 1.0), Turn(900, 400, 0.0))
    names = [own] if sibling is None else [own, sibling]
    same = Workload("same", tuple(Trajectory(name, own, 5_000, turns) for name in names))
    apart = Workload("apart", tuple(Trajectory(name, "group", 5_000, turns) for name in names))
    outcome = play(same, [TP4])
    assert outcome.prefix_hit_share == play(apart, [TP4]).prefix_hit_share
    assert outcome.makespan_s == play(apart, [TP4]).makespan_s


@pytest.mark.parametrize("seed", [1, 2])
def test_agents_with_unknown_lengths_stay_on_their_engines(seed: int) -> None:
    """All agents are alike, but a first rollout's predictions differ by chance, and moves that rely on them cost
    prefills for nothing. The rollout took 21 % longer than with each agent pinned to an engine, with 500 moves."""
    dice = random.Random(seed)
    workload = Workload(
        "alike",
        tuple(
            Trajectory(
                f"t{n}", f"g{n // 4}", 1_000, tuple(Turn(60 if k else 0, dice.randint(30, 90), 0.0) for k in range(100))
            )
            for n in range(48)
        ),
    )
    fleet = [load_profile("qwen3-14b-h100-tp1")] * 8
    heddle, pinned = (play(workload, fleet, policy, predictor=TabularPredictor()) for policy in ("heddle", "verl"))
    assert heddle.makespan_s < 1.01 * pinned.makespan_s
    assert sum(trajectory.num_moves for trajectory in heddle.trajectories) < 10


def test_full_slots_make_waves() -> None:
    """Twice as many like trajectories as slots take twice as long, and half of them wait for one wave."""
    shape = replace(TP4, slots=4, decode_per_kv_ktoken_ms=0.0)
    one = play(single_trajectories(4, Turn(0, 1000, 0.0)), [shape])
    two = play(single_trajectories(8, Turn(0, 1000, 0.0)), [shape])
    assert two.makespan_s == pytest.approx(2 * one.makespan_s, rel=0.01)
    assert sorted(round(t.queued_s / one.makespan_s) for t in two.trajectories) == [0] * 4 + [1] * 4


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    number=st.integers(1, 48),
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["heddle", "remaining-first", "slime", "verl", "round-robin"]),
    slots=st.sampled_from([2, 50]),
    faults=st.builds(
        Faults,
        leaving_share=st.sampled_from([0.0, 0.3, 1.0]),
        deaths_per_hour=st.sampled_from([0.0, 200.0]),
        relaunch_s=st.sampled_from([1.0, 60.0]),
        slow_start_s=st.sampled_from([0.0, 90.0]),
        tool_timeout_share=st.sampled_from([0.0, 0.2]),
        tool_timeout_s=st.just(5.0),
        turn_retries=st.integers(0, 2),
    ),
    transfer=st.sampled_from([None, Transfer(), Transfer(1.0, 1e9)]),
    host=st.sampled_from([None, HostTier(200_000)]),
)
def test_with_any_faults_every_trajectory_ends_with_its_own_tokens(
    number: int,
    seed: int,
    policy: str,
    slots: int,
    faults: Faults,
    transfer: Transfer | None,
    host: HostTier | None,
) -> None:
    """Finished ones have all their turns; those that left or failed have the turns that ended. The run repeats
    exactly."""
    workload = coding(number, seed)
    conditions = Conditions(Features(Speculation(), host), transfer, faults)
    fleet = [replace(TP4, slots=slots, kv_capacity_tokens=90_000)] * 2
    outcome = play(workload, fleet, policy, conditions, Limits(queue_timeout_s=300.0), seed)
    assert len(outcome.trajectories) == number
    for trajectory, result in zip(workload.trajectories, outcome.trajectories, strict=True):
        made = sum(turn.output_tokens for turn in trajectory.turns[: result.num_turns])
        assert result.output_tokens == made
        assert (result.ending is Ending.FINISHED) == (result.num_turns == len(trajectory.turns))
        assert result.ended_at <= outcome.makespan_s
        if not faults.leaving_share:
            assert result.ending is not Ending.LEFT
    assert outcome == play(workload, fleet, policy, conditions, Limits(queue_timeout_s=300.0), seed)


def test_a_turn_whose_engine_died_runs_again_elsewhere() -> None:
    """Deaths cost time and legs but lose nothing. The engine comes back under another id."""
    workload = coding(64)
    calm = play(workload, [TP4] * 2)
    faults = Faults(deaths_per_hour=150.0, relaunch_s=20.0)
    rough = play(workload, [TP4] * 2, conditions=Conditions(faults=faults), limits=replace(PATIENT, max_attempts=50))
    assert rough.num_relaunches > 0
    assert all(result.ending is Ending.FINISHED for result in rough.trajectories)
    assert rough.makespan_s > calm.makespan_s
    num_turns = workload.num_turns
    assert (
        sum(result.num_legs for result in calm.trajectories) == num_turns < sum(t.num_legs for t in rough.trajectories)
    )
    dead = [engine for engine in rough.engines if engine.ended_at is not None]
    assert len(dead) == rough.num_relaunches
    assert len({engine.engine_id for engine in rough.engines}) == len(rough.engines)
    for result in rough.trajectories:
        assert result.queued_s + result.engine_s + result.tool_s == pytest.approx(result.ended_at)


def test_a_preempted_turn_continues_from_its_last_token() -> None:
    """The longest takes a short one's slot; no token is generated twice and no prefix is computed again."""
    short = [Trajectory(f"s{n}", f"s{n}", 512, (Turn(0, 6_000, 0.0),)) for n in range(2)]
    long = [Trajectory("long", "long", 512, (Turn(0, 20, 10.0), Turn(16, 30_000, 0.0)))]
    workload = Workload("urgent last", (*long, *short))
    shape = replace(TP4, slots=2, decode_per_kv_ktoken_ms=0.0)
    policy = replace(POLICIES["heddle"], preempts=True)
    outcome = Rollout(workload, [shape], policy, PATIENT, Oracle(workload.trajectories)).run()
    by_id = {result.trajectory_id: result for result in outcome.trajectories}
    assert sum(result.num_pauses for result in outcome.trajectories) == 1
    assert by_id["long"].num_pauses == 0 and by_id["long"].queued_s < 1
    assert outcome.output_tokens == workload.output_tokens
    # The engine generated exactly the trajectories' tokens, so none was generated twice.
    assert sum(engine.num_generated_tokens for engine in outcome.engines) == workload.output_tokens
    computed = sum(engine.num_prompt_tokens - engine.num_cached_tokens for engine in outcome.engines)
    assert computed < 3 * 512 + 64
    for result in outcome.trajectories:
        assert result.queued_s + result.engine_s + result.tool_s == pytest.approx(result.ended_at)


def test_the_same_clients_leave_under_every_policy() -> None:
    """The seed decides which."""
    conditions = Conditions(faults=Faults(leaving_share=0.25))
    left = [
        {
            result.trajectory_id: result.num_turns
            for result in play(coding(64), [TP4] * 2, policy, conditions, seed=7).trajectories
            if result.ending is Ending.LEFT
        }
        for policy in ("heddle", "slime")
    ]
    assert 4 < len(left[0]) < 32
    assert left[0].keys() == left[1].keys()


def test_a_fleet_with_the_wrong_tp_size_is_reshaped_during_the_rollout() -> None:
    """Few long trajectories on many small engines get a large one. No token is lost, and it pays."""
    family = [replace(load_profile(f"qwen3-14b-h100-tp{tp}"), slots=100 * tp) for tp in (1, 8)]
    long = [Trajectory(f"t{n}", f"g{n}", 256, (Turn(0, 20, 1.0), Turn(16, 30_000, 0.0))) for n in range(4)]
    workload = Workload("few", tuple(long))
    reshape = Reshape(every_s=10.0, relaunch_s=5.0)
    outcomes = {}
    for name, setting in (("never", None), ("after 10 s", reshape), ("after 2 s", replace(reshape, first_s=2.0))):
        rollout = Rollout(
            workload,
            [family[0]] * 8,
            POLICIES["heddle"],
            PATIENT,
            Oracle(workload.trajectories),
            conditions=Conditions(reshape=setting),
            family=family,
        )
        outcomes[name] = rollout.run()
    for name in ("after 10 s", "after 2 s"):
        assert outcomes[name].num_relaunches == 1
        assert [engine.tp for engine in outcomes[name].engines if engine.ended_at is None] == [8]
        assert all(result.ending is Ending.FINISHED for result in outcomes[name].trajectories)
        made = sum(engine.num_generated_tokens for engine in outcomes[name].engines)
        assert made == pytest.approx(workload.output_tokens, abs=4)
        assert outcomes[name].makespan_s < 0.7 * outcomes["never"].makespan_s
    assert outcomes["after 2 s"].makespan_s < outcomes["after 10 s"].makespan_s - 3.0


def test_a_fleet_is_not_reshaped_into_engines_that_cannot_hold_every_trajectory() -> None:
    """Small engines would suit the many short contexts of the beginning, and not what a tool returns later."""
    large, small = (replace(load_profile(f"qwen3-14b-h100-tp{tp}"), slots=32) for tp in (8, 1))
    turns = (Turn(0, 4_000, 1.0), Turn(40_000, 100, 0.0))
    workload = Workload("grows", tuple(Trajectory(f"t{n}", f"g{n}", 256, turns) for n in range(200)))
    outcomes = [
        Rollout(
            workload,
            [large],
            POLICIES["heddle"],
            PATIENT,
            SiblingPredictor(),
            conditions=Conditions(reshape=Reshape(every_s=5.0, relaunch_s=3.0)),
            family=[replace(small, kv_capacity_tokens=kv), large],
        ).run()
        for kv in (50_000, 40_000)
    ]
    assert outcomes[0].num_relaunches > 0 == outcomes[1].num_relaunches
    assert all(result.ending is Ending.FINISHED for outcome in outcomes for result in outcome.trajectories)


def test_a_plan_uses_the_expected_relaunch_time() -> None:
    """The planner may not know the true time. That is what a relaunch then takes, but it does not affect the
    decision."""
    few = [Remaining(30_000.0, 256.0)] * 4
    family = [load_profile(f"qwen3-14b-h100-tp{tp}") for tp in (1, 8)]
    present = [PlannedEngine(1, 0, Role.BULK)] * 8
    for expected_s, is_changed in ((None, False), (5.0, True)):
        reshaper = Reshaper(Reshape(relaunch_s=1_000.0, expected_s=expected_s), family, 8)
        assert (reshaper.change(few, present) is not None) == is_changed
    assert Reshaper(Reshape(relaunch_s=5.0, expected_s=1_000.0), family, 8).change(few, present) is None


def few_long_on_two_engines(reshape: Reshape | None, features: Features) -> Outcome:
    """Four long trajectories on two engines of one node; the family has only their profile."""
    trajectories = [Trajectory(f"t{n}", f"g{n}", 256, (Turn(0, 20, 1.0), Turn(16, 30_000, 0.0))) for n in range(4)]
    return Rollout(
        Workload("few", tuple(trajectories)),
        [TP4] * 2,
        POLICIES["heddle"],
        PATIENT,
        Oracle(trajectories),
        conditions=Conditions(features, reshape=reshape),
        family=[TP4],
    ).run()


def test_only_engines_launched_for_the_tail_speculate() -> None:
    """If speculation is a role, no engine has it until engines are launched for that role; then the rest is faster."""
    reshape = Reshape(every_s=10.0, relaunch_s=5.0, roles=True)
    speculation = Features(Speculation(speed_up=1.6, max_batch=8))
    plain_s = few_long_on_two_engines(None, Features()).makespan_s
    assert few_long_on_two_engines(replace(reshape, min_gain_share=0.9), speculation).makespan_s == plain_s
    launched = few_long_on_two_engines(reshape, speculation)
    assert launched.num_relaunches == 2 and {engine.tp for engine in launched.engines} == {4}
    left_s = plain_s - 10.0
    # The first of the two engines that is up takes all four, whose KV makes its steps some 10 % longer.
    assert launched.makespan_s == pytest.approx(10.0 + 5.0 + left_s / 1.6, rel=0.1)
    assert (
        few_long_on_two_engines(replace(reshape, roles=False), speculation).num_relaunches == 0
    )  # all engines have it already


def test_engines_are_launched_for_the_tail_only_if_speculation_is_a_role() -> None:
    """Otherwise all engines are alike, so that no role is a reason to launch one again."""
    few, present = [Remaining(30_000.0, 256.0)] * 4, [PlannedEngine(1, 0, Role.BULK)] * 8
    family = [load_profile(f"qwen3-14b-h100-tp{tp}") for tp in (1, 8)]
    for roles, role in ((True, Role.TAIL), (False, Role.BULK)):
        reshaper = Reshaper(Reshape(relaunch_s=5.0, roles=roles), family, 8, Speculation(speed_up=1.6, max_batch=8))
        change = reshaper.change(few, present)
        assert change is not None and {one.role for one in change.launches} == {role}


def test_a_node_launched_for_the_tail_keeps_its_role() -> None:
    """If roles changed back, each change would cost a relaunch and gain nothing."""
    speculation = Speculation(speed_up=1.6, max_batch=8)
    reshaper = Reshaper(Reshape(relaunch_s=5.0, roles=True), [TP4], 8, speculation)
    crowd, few = [Remaining(2_000.0, 256.0)] * 300, [Remaining(30_000.0, 256.0)] * 4
    bulk, tail = ([PlannedEngine(4, 0, role)] * 2 for role in (Role.BULK, Role.TAIL))
    assert reshaper.change(crowd, bulk) is None
    assert reshaper.change(few, bulk) == Change(frozenset({0}), tuple(tail))
    assert reshaper.change(few, tail) is None and reshaper.change(crowd, tail) is None


def test_tools_that_hang_end_at_their_timeout() -> None:
    """If all tools hang, every tool call takes the timeout instead of its own time."""
    conditions = Conditions(faults=Faults(tool_timeout_share=1.0, tool_timeout_s=33.0))
    workload = coding(4)
    for trajectory, result in zip(
        workload.trajectories, play(workload, [TP4], conditions=conditions).trajectories, strict=True
    ):
        assert result.tool_s == pytest.approx(33.0 * (len(trajectory.turns) - 1))


def test_engines_that_start_late_delay_the_rollout() -> None:
    """Turns wait until there is an engine."""
    outcome = play(coding(4), [TP4], conditions=Conditions(faults=Faults(slow_start_s=100.0)), seed=3)
    assert outcome.engines[0].began_at > 1
    assert all(result.queued_s >= outcome.engines[0].began_at for result in outcome.trajectories)


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if not policy.holds_turns])
def test_a_slow_start_costs_no_baseline_more_than_its_time(policy: str) -> None:
    """Policies that pin trajectories begin when all engines are there; otherwise the first engine would get them
    all."""
    fleet, workload = [replace(TP4, slots=20)] * 4, coding(160)
    plain = play(workload, fleet, policy)
    slow = play(workload, fleet, policy, Conditions(faults=Faults(slow_start_s=60.0)), seed=3)
    began_at = max(engine.began_at for engine in slow.engines)
    assert began_at > 30
    if POLICIES[policy].is_sticky:
        assert slow.makespan_s == pytest.approx(plain.makespan_s + began_at)
        result = slow.trajectories[0]
        assert result.queued_s >= began_at
        assert result.queued_s + result.engine_s + result.tool_s == pytest.approx(result.ended_at)
    else:
        assert slow.makespan_s < (plain.makespan_s + began_at) * 1.1


@pytest.mark.parametrize("policy", ["verl", "vllm-router", "verl-hybrid", "cmlfq", "thunderagent", "slime", "heddle"])
def test_a_fleet_is_reshaped_only_under_policies_that_use_new_engines(policy: str) -> None:
    """A router that pins trajectories sends nothing to an engine that comes late, so its fleet stays as it is."""
    fleet = [load_profile("qwen3-14b-h100-tp1")] * 16
    family = [load_profile(f"qwen3-14b-h100-tp{tp}") for tp in (1, 2, 4, 8)]
    conditions = Conditions(reshape=Reshape(every_s=20.0, relaunch_s=3.0))
    outcome, plain = (
        Rollout(coding(160), fleet, POLICIES[policy], PATIENT, SiblingPredictor(), conditions=one, family=family).run()
        for one in (conditions, Conditions())
    )
    is_reshaped = policy in ("thunderagent", "slime", "heddle")
    assert (outcome.num_relaunches > 0) == is_reshaped
    assert is_reshaped or outcome == plain


def test_a_rejected_turn_is_retried_and_then_given_up() -> None:
    """A client retries as often as configured, after the pause it was given. Then its trajectory has failed."""
    workload = single_trajectories(2, Turn(0, 30_000, 0.0))
    limits = Limits(queue_timeout_s=10.0)
    shape = replace(TP4, slots=1)
    outcome = play(workload, [shape], conditions=Conditions(faults=Faults(turn_retries=1)), limits=limits)
    failed = [result for result in outcome.trajectories if result.ending is Ending.FAILED]
    assert len(failed) == 1
    assert 25 <= failed[0].ended_at < 30  # ten seconds in the queue, five of pause, ten seconds in the queue
    patient = play(workload, [shape], conditions=Conditions(faults=Faults(turn_retries=100)), limits=limits)
    assert all(result.ending is Ending.FINISHED for result in patient.trajectories)


def test_speculation_a_host_tier_and_transfers_shorten_a_rollout() -> None:
    """Speculation anywhere, a host tier if contexts are evicted, and transfers if turns move."""
    small = [replace(TP4, kv_capacity_tokens=150_000)] * 2
    workload = coding(96)
    plain = play(workload, small, "slime").makespan_s
    tier = play(workload, small, "slime", Conditions(Features(host_tier=HostTier(10**7, 100e9)))).makespan_s
    sent = play(workload, small, "slime", Conditions(transfer=Transfer())).makespan_s
    drafted = play(workload, small, "slime", Conditions(Features(Speculation(1.6, 64)))).makespan_s
    assert tier < 0.95 * plain
    assert sent < plain
    assert drafted < 0.8 * plain


def test_a_timeline_has_consistent_samples_of_every_engine() -> None:
    """Columns of equal length, in order of time, with shares between 0 and 1."""
    outcome = play(coding(32), [TP4] * 2)
    for engine in outcome.engines:
        line = engine.timeline
        columns = (line.at, line.num_running, line.num_waiting, line.kv_share, line.kv_claimed_share)
        assert len({len(column) for column in columns}) == 1
        assert line.at == sorted(line.at)
        assert line.at[-1] <= outcome.makespan_s
        assert max(line.num_running) > 0
        assert all(0 <= share <= 1 for share in line.kv_share)


def siblings_of_long_prompts(shares: bool) -> Workload:
    """Four groups of 16 with prompts of 20,000 tokens; or the same lengths, with no two prompts the same."""
    turns = tuple(Turn(300 if number else 0, 200, 1.0) for number in range(6))
    names = [(f"g{number % 4}", f"g{number % 4}-{number // 4}") for number in range(64)]
    return Workload("long", tuple(Trajectory(name, group if shares else name, 20_000, turns) for group, name in names))


def test_a_prompt_shared_by_siblings_takes_room_once() -> None:
    """By the engine's own count: most run at once, none is preempted, and each prompt is prefilled once."""
    engine = replace(TP4, kv_capacity_tokens=300_000)
    shared, apart = (play(siblings_of_long_prompts(shares), [engine]) for shares in (True, False))
    [played] = shared.engines
    assert played.num_preemptions == 0 and max(played.timeline.kv_share) <= 1
    assert max(played.timeline.num_running) > 40 and max(apart.engines[0].timeline.num_running) < 14
    # Each prompt once, and for each trajectory its tools' outputs and its earlier answers.
    distinct_tokens = 4 * 20_000 + 64 * 5 * (300 + 200)
    assert played.num_prompt_tokens - played.num_cached_tokens < 1.05 * distinct_tokens
    assert shared.makespan_s < 0.4 * apart.makespan_s


def long_prompts(number: int, seed: int) -> Workload:
    """Groups of 16 with prompts of 30,000 tokens, before answers of about 1,200 in all."""
    dice = random.Random(seed)
    return Workload(
        "long prompts",
        tuple(
            Trajectory(
                f"t{n}",
                f"g{n // 16}",
                30_000,
                tuple(Turn(200 if k else 0, dice.randint(100, 300), 1.0) for k in range(6)),
            )
            for n in range(number)
        ),
    )


def prefilled_tokens(outcome: Outcome) -> int:
    return sum(engine.num_prompt_tokens - engine.num_cached_tokens for engine in outcome.engines)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_siblings_with_a_long_prompt_share_engines(seed: int) -> None:
    """Their prompt is prefilled on some engines, not on all eight, and the rollout ends sooner; if the lengths of
    answers are unknown, not later."""
    workload, fleet = long_prompts(128, seed), [load_profile("qwen3-14b-h100-tp2")] * 8
    pinned = play(workload, fleet, "verl")
    for predictor, share in ((Oracle(workload.trajectories), 0.97), (TabularPredictor(), 1.01)):
        heddle = play(workload, fleet, predictor=predictor)
        assert prefilled_tokens(heddle) < 0.75 * prefilled_tokens(pinned)
        assert heddle.makespan_s < share * pinned.makespan_s


@pytest.mark.parametrize("number", [8, 16, 32])
def test_few_siblings_leave_no_engine_idle_for_a_shared_prompt(number: int) -> None:
    """On one engine they would save a prefill, but decode in one batch beside idle engines."""
    workload, fleet = long_prompts(number, 1), [load_profile("qwen3-14b-h100-tp2")] * 8
    heddle = play(workload, fleet, predictor=Oracle(workload.trajectories))
    assert heddle.makespan_s < 1.02 * play(workload, fleet, "verl").makespan_s
