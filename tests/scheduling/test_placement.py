"""Placement and moves: the additive cost, and what follows from it."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, exp, hypot, isclose

import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from engines.profiles import load_profile
from scheduling.cost import EngineProfile
from scheduling.estimate import TELLING_RATIO, VAGUE_RATIO, Work, estimate_finish_s, vague_tokens
from scheduling.order import TurnFacts
from scheduling.placement import (
    GUESS_SHARE,
    LARGEST_BURDEN,
    LARGEST_LATENESS,
    LEAST_GAIN,
    NEAR_LATEST_SHARE,
    UNMEASURED,
    EngineFacts,
    least_estimated_finish,
    lower_the_latest,
    prompt_worth_s,
)
from scheduling.policy import HEDDLE
from scheduling.types import Prediction
from tests.scheduling.fleet import Fleet
from tests.scheduling.plans import plus

tokens = st.floats(1, 100_000)
contexts = st.floats(0, 200_000)
trajectories = st.tuples(tokens, contexts)


def work_of(parts: list[tuple[float, float]], vagueness: float = 1.0) -> Work:
    work = Work()
    for remaining, context in parts:
        work = plus(work, remaining, context, vagueness * remaining)
    return work


def facts(engine_id: str = "A", work: Work | None = None, slots: int = 8, kv: int = 200_000) -> EngineFacts:
    return EngineFacts(engine_id, replace(UNMEASURED, slots=slots, kv_capacity_tokens=kv), 0, work or Work())


engines = st.builds(
    lambda parts, slots, kv, base, uncached, vagueness: EngineFacts(
        "",
        replace(UNMEASURED, slots=slots, kv_capacity_tokens=kv, decode_base_ms=base),
        len(parts),
        work_of(parts, vagueness),
        uncached_tokens=uncached,
    ),
    st.lists(trajectories, max_size=6),
    st.integers(1, 64),
    st.one_of(st.just(0), st.integers(1_000, 1_000_000)),
    st.floats(1, 50),
    st.one_of(st.just(0), st.integers(1, 100_000)),
    st.sampled_from([1.0, 1.5, 2.0, 3.0]),
)
fleets = st.lists(engines, min_size=1, max_size=5).map(
    lambda found: [replace(engine, engine_id=str(index)) for index, engine in enumerate(found)]
)


def turn_of(total: float, attained: int = 0, prompt: int = 1_000, vagueness: float = 1.0) -> TurnFacts:
    return TurnFacts(0, 0, 0.0, prompt, attained, Prediction(total, total * vagueness))


turns = st.builds(
    turn_of, tokens, st.integers(0, 50_000), st.integers(1, 100_000), st.sampled_from([1.0, 1.5, 2.0, 3.0])
)


def with_resident(home: EngineFacts, turn: TurnFacts) -> EngineFacts:
    """The home with this trajectory as a resident."""
    return replace(home, work=plus(home.work, *turn.share()), without=lambda: home.work)


@given(engines, trajectories)
def test_more_work_never_takes_less_time(engine: EngineFacts, added: tuple[float, float]) -> None:
    """However short its context, one more trajectory never makes an engine finish sooner."""
    assert estimate_finish_s(engine.profile, plus(engine.work, *added)) >= estimate_finish_s(
        engine.profile, engine.work
    )


@given(engines, trajectories, st.floats(1, 3), st.floats(1, 3))
def test_longer_work_never_takes_less_time(
    engine: EngineFacts, added: tuple[float, float], longer: float, wider: float
) -> None:
    """More remaining output or a larger context of one trajectory costs no less."""
    small, large = plus(engine.work, *added), plus(engine.work, added[0] * longer, added[1] * wider)
    assert estimate_finish_s(engine.profile, large) >= estimate_finish_s(engine.profile, small)


@given(st.lists(trajectories, max_size=5), trajectories)
def test_removing_a_trajectory_restores_all_sums_but_the_longest(
    parts: list[tuple[float, float]], one: tuple[float, float]
) -> None:
    """Sums are exact up to rounding; the longest can only be too large."""
    before = work_of(parts)
    after = plus(before, *one)
    after.remove(*one)
    assert after.total_tokens == pytest.approx(before.total_tokens, abs=1e-3)
    assert after.token_context_products == pytest.approx(before.token_context_products, abs=1e-1)
    assert after.longest_tokens >= before.longest_tokens


@given(turns, fleets)
def test_a_new_trajectory_goes_where_it_ends_soonest(turn: TurnFacts, fleet: list[EngineFacts]) -> None:
    """No other engine would finish sooner with it and the prefills that wait there."""

    def finish(engine: EngineFacts) -> float:
        prefills = replace(engine.work, prefill_tokens=engine.uncached_tokens)
        return estimate_finish_s(engine.profile, plus(prefills, *turn.share()))

    assert finish(least_estimated_finish(turn, fleet)) == pytest.approx(min(map(finish, fleet)))


def test_ties_go_to_the_engine_with_fewer_turns() -> None:
    """Estimates do not include queues."""
    busy, free = replace(facts("A"), num_turns=3), replace(facts("B"), num_turns=2)
    assert least_estimated_finish(turn_of(100.0), [busy, free]) is free


@pytest.mark.parametrize("num_engines", [2, 4, 8])
@pytest.mark.parametrize("period", [2, 4, 8, 16, 20])
def test_every_nth_trajectory_does_not_go_to_the_same_engine(num_engines: int, period: int) -> None:
    """Nobody knows that these are the long ones. Equal trajectories are dealt evenly, and these nearly so; in turns,
    one of four engines had each fourth."""
    fleet = Fleet(HEDDLE)
    names = [f"E{number}" for number in range(num_engines)]
    for name in names:
        fleet.engine(name, slots=1_000, kv=10_000_000)
    for number in range(320):
        fleet.arrive(f"t{number}")
    homes = [fleet.home(f"t{number}") for number in range(320)]
    assert max(homes.count(name) for name in names) == 320 // num_engines
    most = max(homes[::period].count(name) for name in names)
    assert most <= 2 * ceil(320 / period / num_engines)


@pytest.mark.parametrize("is_limit", [False, True])
@pytest.mark.parametrize(("later", "goes_to"), [(0.9, "holds"), (1.1, "other")])
def test_a_siblings_prompt_is_worth_a_later_finish(later: float, goes_to: str, is_limit: bool) -> None:
    """Up to the time it saves and up to a share of the other engine's finish. Without the group, or after the first
    turn, it is worth nothing."""
    other, turn = replace(facts("other"), num_trajectories=1), replace(turn_of(100.0, prompt=20_000), group_id="g")
    holds = replace(facts("holds"), num_trajectories=1, prompts={"g": 30_000})
    if not is_limit:
        holds.work.tool_s = other.work.tool_s = 1e4
    alone_s = estimate_finish_s(other.profile, plus(other.work, *turn.share()))
    worth_s, most_s = prompt_worth_s(turn, holds, num_delayed=1), LARGEST_LATENESS * alone_s
    assert (most_s < worth_s) == is_limit
    holds.work.tool_s += later * min(worth_s, most_s)
    assert least_estimated_finish(turn, [holds, other]).engine_id == goes_to
    for stranger in (replace(turn, group_id="h"), replace(turn, num_turns=1)):
        assert least_estimated_finish(stranger, [holds, other]) is other


def test_siblings_do_not_share_an_engine_beside_an_idle_one() -> None:
    """Four of one group, with a long prompt, get an engine each."""
    fleet = Fleet()
    for name in "ABCD":
        fleet.engine(name, slots=8, kv=250_000)
    for number in range(4):
        fleet.arrive(f"t{number}", group="g", prompt=26_000, predicted=3_500.0)
    assert {fleet.scheduler.trajectories[f"t{number}"].home for number in range(4)} == set("ABCD")


def test_trajectories_without_a_group_are_no_siblings() -> None:
    """A new one goes where it ends sooner, although another one without a group has a long prompt elsewhere."""
    fleet = Fleet()
    fleet.engine("A", slots=8, kv=250_000)
    fleet.arrive("nameless", prompt=20_000, predicted=4_000)
    fleet.engine("B", slots=8, kv=250_000)
    assert fleet.sent(fleet.arrive("named", group="g", prompt=20_000, predicted=3_000)) == [("named", "B")]
    assert fleet.sent(fleet.arrive("new", prompt=20_000, predicted=1_000)) == [("new", "B")]


@given(st.integers(1, 100_000), st.floats(1, 40_000), st.floats(1.01, 4))
def test_a_prompt_is_worth_more_if_long_and_less_if_answers_are_long(prompt: int, answer: float, times: float) -> None:
    """Siblings resemble each other: their answers delay an engine that holds them all."""
    engine = replace(facts(), prompts={"g": 1_000_000})

    def worth_s(prompt: float, answer: float) -> float:
        return prompt_worth_s(replace(turn_of(answer, prompt=int(prompt)), group_id="g"), engine, num_delayed=1)

    assert worth_s(prompt, answer * times) < worth_s(prompt, answer)
    assert worth_s(2 * prompt, answer) > worth_s(prompt, answer)


def test_only_what_is_cached_of_a_prompt_is_worth_something() -> None:
    """A sibling had a shorter or a longer one. If answers take most of the time, twice the prefill is also twice the
    share of it."""
    turn = replace(turn_of(10_000.0, prompt=1_000), group_id="g")

    def worth_s(cached_tokens: int, prompt: int = 1_000) -> float:
        engine = replace(facts(), prompts={"g": cached_tokens})
        return prompt_worth_s(replace(turn, prompt_tokens=prompt), engine, num_delayed=1)

    assert worth_s(500) == pytest.approx(worth_s(1_000) / 4, rel=0.1)
    assert worth_s(9_000) == worth_s(1_000)
    assert worth_s(1_000, prompt=50_000) < worth_s(1_000) / 2, "it reads more KV for each token"


def test_waiting_prefills_delay_an_engine() -> None:
    """Two engines have the same to decode, but one has contexts to prefill first."""
    busy, free = replace(facts("A"), uncached_tokens=10_000), replace(facts("B"), num_turns=3)
    assert least_estimated_finish(turn_of(100.0), [busy, free]) is free


@settings(max_examples=300)
@given(turns, fleets, st.data())
def test_a_trajectory_moves_where_the_soft_maximum_of_the_fleet_is_least(
    turn: TurnFacts, fleet: list[EngineFacts], data: st.DataObject
) -> None:
    """Engines weigh exp(finish / temperature). The test computes the whole sum again for each engine that may be the
    target."""
    latest = max(fleet, key=lambda engine: with_resident(engine, turn).finish_s)
    home = data.draw(st.one_of(st.just(latest), st.sampled_from(fleet)))
    others = set(range(len(fleet))) - {fleet.index(home)}
    candidates = others - data.draw(st.sets(st.integers(0, len(fleet) - 1), max_size=2))
    fleet[fleet.index(home)] = home_with_turn = with_resident(home, turn)
    latest = max(fleet, key=lambda engine: engine.finish_s)
    guessed_s = latest.profile.decode_base_ms * latest.work.vague_tokens / 1000
    temperature = hypot(NEAR_LATEST_SHARE * latest.finish_s, GUESS_SHARE * guessed_s)

    def finish_s(engine: EngineFacts, is_there: bool) -> float:
        """Every engine counts as having a trajectory as long as the vague part of the latest engine's longest."""
        work = plus(engine.work, *turn.share()) if is_there else replace(engine.work)
        work.longest_tokens = max(work.longest_tokens, 1000 * guessed_s / engine.profile.decode_base_ms)
        return estimate_finish_s(engine.profile, work)

    home_s = finish_s(home, is_there=True)
    latest_s = max(latest.finish_s, home_s)
    before = {engine.engine_id: finish_s(engine, is_there=False) for engine in fleet} | {home.engine_id: home_s}
    gone = before | {home.engine_id: finish_s(home, is_there=False)}

    def soft(finishes: dict[str, float]) -> float:
        return sum(exp((finish_s - latest_s) / temperature) for finish_s in finishes.values())

    best, least = None, soft(before) - min(LEAST_GAIN, (1 - LARGEST_BURDEN) * (soft(before) - soft(gone)))
    for engine in [fleet[index] for index in sorted(candidates)]:
        with_it_s = finish_s(engine, is_there=True) + engine.profile.prefill_s(turn.prompt_tokens)
        assume(not isclose(with_it_s, home_s, rel_tol=1e-9))
        if with_it_s < home_s:
            after = soft(gone | {engine.engine_id: with_it_s})
            assume(not isclose(after, least, rel_tol=1e-9))
            if after < least:
                best, least = engine, after
    lag = (latest_s - home_s) / temperature
    assume(not isclose(lag, 3))
    target = lower_the_latest(turn, home_with_turn, [fleet[index] for index in sorted(candidates)], fleet)
    event("moves" if best and lag < 3 else "far from the latest" if lag > 3 else "stays")
    assert target is (best if lag < 3 else None)


def test_an_engine_that_cannot_win_is_not_checked() -> None:
    """Where nothing is known of lengths, each tool return would otherwise check and estimate every engine. One whose
    longest trajectory has left may be earlier than it looks, so it is checked."""
    turn = replace(turn_of(2_000.0, prompt=8_000), prediction=Prediction(2_000.0, 5_000.0))
    crowd = work_of([])
    for _ in range(100):
        crowd = plus(crowd, *turn.share())
    home = with_resident(facts("home", crowd, slots=200, kv=10**7), turn)
    fleet = [home, *(facts(f"{number}", crowd, slots=200, kv=10**7) for number in range(20))]
    idle = facts("idle", slots=200, kv=10**7)
    asked: list[str] = []

    class Free(list[EngineFacts]):
        def __iter__(self) -> Iterator[EngineFacts]:
            for engine in super().__iter__():
                asked.append(engine.engine_id)
                yield engine

        def __contains__(self, engine: object) -> bool:
            assert isinstance(engine, EngineFacts)
            asked.append(engine.engine_id)
            return True

    assert lower_the_latest(turn, home, Free(fleet[1:]), fleet) is None
    assert not asked
    fleet[7].is_stale = True
    assert lower_the_latest(turn, home, Free([*fleet[1:], idle]), [*fleet, idle]) is idle
    assert asked == ["6", "idle"]


def test_a_clear_gain_moves_a_trajectory() -> None:
    """From two long trajectories on one slot to an idle engine. Without another engine there is no move."""
    turn = turn_of(20_000.0)
    home = with_resident(facts("A", work_of([(20_000, 1_000)]), slots=1), turn)
    idle = facts("B")
    assert lower_the_latest(turn, home, [idle], [home, idle]) is idle
    assert lower_the_latest(turn, home, [], [home, idle]) is None


def test_many_small_trajectories_move_to_an_idle_engine_one_by_one() -> None:
    """Although each makes hardly a difference. Otherwise, the first of several engines that join one after another
    takes all that waits, and the rollout ends a quarter later than with an even share for each."""
    lengths = [5_000.0 + ordinal for ordinal in range(800)]
    here, there = work_of([(length, 1_000 + length / 2) for length in lengths]), Work()
    for length in lengths:
        turn, rest = turn_of(length), replace(here)
        rest.remove(*turn.share()[:2])
        home, idle = with_resident(facts("A", rest, 800, 4_000_000), turn), facts("B", there, 800, 4_000_000)
        if lower_the_latest(turn, home, [idle], [home, idle]) is idle:
            here, there = rest, plus(there, *turn.share())
    late, early = facts("A", here, 800, 4_000_000).finish_s, facts("B", there, 800, 4_000_000).finish_s
    assert 0.6 * late < early < late


def test_one_of_many_late_engines_gives_work_away() -> None:
    """Although the fleet's latest finish stays the same."""
    turn = turn_of(20_000.0)
    home = with_resident(facts("A", work_of([(20_000, 1_000)]), slots=1), turn)
    equal, idle = facts("C", work_of([(20_000, 1_000)] * 2), slots=1), facts("B")
    assert lower_the_latest(turn, home, [idle], [home, equal, idle]) is idle


def test_an_engine_far_from_the_latest_keeps_its_trajectories() -> None:
    """The makespan is that of the whole fleet, not that of the engines with room."""
    turn = turn_of(20_000.0)
    home = with_resident(facts("A", work_of([(20_000, 1_000)]), slots=1), turn)
    later = facts("Z", work_of([(500_000, 1_000)]))
    idle = facts("B")
    assert lower_the_latest(turn, home, [idle], [home, idle, later]) is None


@pytest.mark.parametrize(("mean", "moves"), [(20_000, True), (12_000, True), (9_000, False)])
def test_a_vague_prediction_moves_no_trajectory(mean: float, moves: bool) -> None:
    """The longest of a slightly later engine moves if its length is known or predicted within a factor. Otherwise
    another one may as well be the longest."""
    turn = replace(turn_of(mean), prediction=Prediction(mean, 20_000.0))
    home = with_resident(facts("A", work_of([(10_000, 1_000)] * 40), slots=100, kv=10**6), turn)
    earlier = facts("B", work_of([(10_000, 1_000)] * 30), slots=100, kv=10**6)
    assert (lower_the_latest(turn, home, [earlier], [home, earlier]) is earlier) == moves


def test_certain_work_is_balanced_although_the_longest_is_vague() -> None:
    """One of a hundred trajectories of unknown length moves to an idle engine: whichever is the longest, its home has
    less to do."""
    turn = replace(turn_of(2_000.0, prompt=8_000), prediction=Prediction(2_000.0, 5_000.0))
    rest = Work()
    for _ in range(100):
        rest = plus(rest, *turn.share())
    home = with_resident(facts("A", rest, slots=200, kv=10**7), turn)
    idle = facts("B", slots=200, kv=10**7)
    assert lower_the_latest(turn, home, [idle], [home, idle]) is idle


@given(tokens, st.floats(0.5, 10), st.floats(1, 3))
@example(17.0, VAGUE_RATIO, 1.0)
def test_vague_tokens_grow_with_the_90th_percentile(mean: float, ratio: float, further: float) -> None:
    """Nothing of a certain prediction is vague, all of a vague one is, and never more than that."""
    p90, later = mean * ratio, mean * ratio * further
    assert 0 <= vague_tokens(mean, p90) <= vague_tokens(mean, later) <= later
    assert vague_tokens(mean, p90) == 0 or ratio > TELLING_RATIO
    assert vague_tokens(mean, p90) == p90 or ratio < VAGUE_RATIO
    assert vague_tokens(mean, p90) < p90 or ratio > 0.999 * VAGUE_RATIO


def test_a_move_that_gains_almost_nothing_is_not_made() -> None:
    """A small trajectory on the latest engine, and a large one that would make another engine as late."""
    turn = turn_of(10.0)
    home = with_resident(facts("A", work_of([(20_000, 1_000)])), turn)
    other = facts("B", work_of([(19_000, 1_000)]))
    assert lower_the_latest(turn, home, [other], [home, other]) is None
    large = turn_of(19_990.0)
    home = with_resident(facts("A", work_of([(20_000, 1_000)]), slots=1), large)
    as_late = facts("B", work_of([(20_000, 1_000)] * 2), slots=1)
    assert lower_the_latest(large, home, [as_late], [home, as_late]) is None


def test_no_engine_becomes_later_by_a_move_than_the_home_is() -> None:
    """Though the home would end in half the time, and the other engine only a little later than by itself."""
    turn = turn_of(20_000.0)
    home = with_resident(facts("A", work_of([(20_000, 1_000)]), slots=1), turn)
    late, earlier = facts("B", work_of([(39_950, 1_000)])), facts("C", work_of([(39_000, 1_000)]))
    assert late.finish_s < home.finish_s
    assert lower_the_latest(turn, home, [late], [home, late]) is None
    assert lower_the_latest(turn, home, [earlier], [home, earlier]) is earlier


def test_an_unmeasured_engine_counts_as_a_14b_on_one_h100() -> None:
    """It has the coefficients of the profile that ships with Heddle."""
    measured = load_profile("qwen3-14b-h100-tp1")
    names = {"name": "unmeasured", "model": "", "gpu": "", "source": UNMEASURED.source}
    assert replace(measured, **names) == UNMEASURED


@given(st.integers(0, 100), st.floats(0, 100_000), st.floats(0, 100_000), st.floats(0, 100_000))
def test_costs_are_monotone(num: int, kv: float, new: float, cached: float) -> None:
    """A larger batch, more KV or a longer prompt never takes less time. A cached prefix is not prefilled."""
    profile: EngineProfile = UNMEASURED
    assert profile.decode_step_s(num + 1, kv) > profile.decode_step_s(num, kv)
    assert profile.decode_step_s(num, kv + 1) >= profile.decode_step_s(num, kv)
    assert profile.prefill_s(new + 1, cached) > profile.prefill_s(new, cached)
    assert profile.prefill_s(0, cached) == 0.0


@given(st.floats(0.1, 10), st.integers(0, 100), st.floats(0, 100_000), st.floats(0, 100_000))
def test_a_slower_engine_takes_as_many_times_as_long_for_everything(
    ratio: float, num: int, tokens: float, cached: float
) -> None:
    """Steps of either kind, launches of prefills, and what requests wait for beside steps."""
    profile = replace(UNMEASURED, request_ms=20.0, request_gap_ms=2.0, prefill_step_ms=3.0, prefill_least_tokens=50_000)

    def times_s(one: EngineProfile) -> list[float]:
        steps_s = [one.decode_step_s(num, tokens), one.prefill_s(tokens, cached), one.prefill_launch_s(tokens)]
        return [*steps_s, one.request_ms, one.request_gap_ms]

    assert times_s(profile.slower(ratio)) == pytest.approx([ratio * time_s for time_s in times_s(profile)])
