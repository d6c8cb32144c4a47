"""A rollout's outcome against the log of the scheduler's events and actions; and what predictors get to know."""

from collections.abc import Container
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from engines.profiles import load_profile
from predictor.progress import Progress
from scheduling.limits import Limits
from scheduling.policy import POLICIES
from scheduling.types import (
    Action,
    Dispatch,
    Event,
    Prediction,
    TrajectoryClosed,
    TurnArrived,
    TurnFinished,
    TurnPaused,
)
from simulator.agent import Agent, shared_prompts
from simulator.conditions import Conditions, Faults, Reshape
from simulator.outcome import PREDICTED_TURNS, Ending
from simulator.predictors import Oracle
from simulator.rollout import Rollout
from workloads.laws import draw, law_named
from workloads.trajectories import Trajectory, Turn, Workload

TP1, TP4 = load_profile("qwen3-14b-h100-tp1"), load_profile("qwen3-14b-h100-tp4")


def contexts_of(trajectory: Trajectory) -> list[int]:
    """The context of each turn: the first prompt, all earlier outputs, and everything that tools added."""
    made = given = 0
    contexts = []
    for number, turn in enumerate(trajectory.turns):
        given += turn.new_tokens if number else 0
        contexts.append(trajectory.context_tokens + made + given)
        made += turn.output_tokens
    return contexts


class RecordingPredictor:
    """Knows the lengths and records what it is told."""

    reads_outcomes = True

    def __init__(self, workload: Workload) -> None:
        self._oracle = Oracle(workload.trajectories)
        self.told: list[Progress] = []
        self.ends: list[Progress] = []
        self.drops: list[str] = []

    def predict(self, progress: Progress) -> Prediction:
        self.told.append(progress)
        return self._oracle.predict(progress)

    def ended(self, progress: Progress) -> None:
        self.ends.append(progress)

    def dropped(self, trajectory_id: str) -> None:
        self.drops.append(trajectory_id)

    def dump(self) -> bytes:
        return b""

    def restore(self, dumped: bytes, running: Container[str] = ()) -> None: ...


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    number=st.integers(1, 32),
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["heddle", "remaining-first", "heddle-paper", "slime", "verl"]),
    slots=st.sampled_from([1, 3, 50]),
    faults=st.sampled_from([Faults(), Faults(leaving_share=0.5), Faults(deaths_per_hour=300.0, relaunch_s=9.0)]),
    reshape=st.sampled_from([None, Reshape(every_s=15.0, min_gain_share=0.0), Reshape(7.0, 20.0, 0.0)]),
    least_tokens=st.sampled_from([0, 20_000]),
)
@example(  # the last trajectory fails when its turn is rejected
    number=17,
    seed=10589,
    policy="heddle",
    slots=3,
    faults=Faults(deaths_per_hour=300.0, relaunch_s=9.0),
    reshape=Reshape(every_s=15.0, min_gain_share=0.0),
    least_tokens=0,
)
def test_an_outcome_agrees_with_the_log(
    number: int, seed: int, policy: str, slots: int, faults: Faults, reshape: Reshape | None, least_tokens: int
) -> None:
    """Turns, tokens, contexts, legs, moves and pauses of each trajectory, and the contexts that were asked for. Engines
    never have more GPUs than the fleet, and a new engine starts only when a relaunch is over."""
    workload = draw(law_named("coding"), number, seed)
    log: list[tuple[Event, list[Action]]] = []
    predictor: Any = RecordingPredictor(workload)
    outcome = Rollout(
        workload,
        [replace(TP1, slots=slots, prefill_least_tokens=least_tokens)] * 4,
        POLICIES[policy],
        Limits(queue_timeout_s=1e6),
        predictor,
        conditions=Conditions(faults=faults, reshape=reshape),
        family=[TP1, TP4],
        seed=seed,
        log=lambda event, actions: log.append((event, actions)),
    ).run()
    dispatched = [action for _, actions in log for action in actions if isinstance(action, Dispatch)]
    for trajectory, result in zip(workload.trajectories, outcome.trajectories, strict=True):
        name, contexts = trajectory.trajectory_id, contexts_of(trajectory)
        homes = [one.engine_id for one in dispatched if one.turn_id.rpartition("/")[0] == name]
        assert result.num_legs == len(homes)
        assert result.num_moves == sum(one != other for one, other in pairwise(homes))
        assert result.engine_id == (homes[-1] if homes else None)
        ends = [
            event for event, _ in log if isinstance(event, TurnFinished) and event.turn_id.rpartition("/")[0] == name
        ]
        assert result.num_turns == len(ends) and result.output_tokens == sum(event.output_tokens for event in ends)
        assert [event.prompt_tokens for event in ends] == contexts[: len(ends)]
        asked = {
            event.turn_id: event.prompt_tokens  # some turns are asked for again
            for event, _ in log
            if isinstance(event, TurnArrived) and event.trajectory_id == name
        }
        assert list(asked.values()) == contexts[: len(asked)]
        pauses = [
            event for event, _ in log if isinstance(event, TurnPaused) and event.turn_id.rpartition("/")[0] == name
        ]
        assert result.num_pauses == len(pauses)
        if result.ending is Ending.FINISHED:
            assert result.context_tokens == contexts[-1] + trajectory.turns[-1].output_tokens
            assert result.ended_at == ends[-1].at
            assert result.queued_s + result.engine_s + result.tool_s == pytest.approx(result.ended_at)
        closes = [event for event, _ in log if isinstance(event, TrajectoryClosed) and event.trajectory_id == name]
        assert len(closes) == (result.ending is not Ending.LEFT), "a client that leaves closes nothing"
        assert [prediction.turn for prediction in result.predictions] == [
            turn for turn in PREDICTED_TURNS if turn < len(asked)
        ]
        for prediction in result.predictions:
            assert prediction.made_tokens == sum(turn.output_tokens for turn in trajectory.turns[: prediction.turn])
            assert prediction.total_tokens == prediction.p90_tokens == trajectory.output_tokens
    relaunch_s = {faults.relaunch_s, reshape.relaunch_s if reshape else faults.relaunch_s}
    for engine in outcome.engines:
        at = engine.began_at
        there = [one for one in outcome.engines if one.began_at <= at and (one.ended_at is None or one.ended_at > at)]
        assert sum(one.tp for one in there) <= 4
        gone_at = [one.ended_at for one in outcome.engines if one.ended_at is not None]
        assert not at or any(at == pytest.approx(end + takes_s) for end in gone_at for takes_s in relaunch_s)
    finished = {result.trajectory_id for result in outcome.trajectories if result.ending is Ending.FINISHED}
    assert sorted(progress.trajectory_id for progress in predictor.ends) == sorted(finished)
    assert sorted([*predictor.drops, *finished]) == sorted(result.trajectory_id for result in outcome.trajectories)
    for percent in (95, 99):
        at, ends_at = outcome.summary()[f"p{percent}_trajectory_s"], [one.ended_at for one in outcome.trajectories]
        num_ended, num_before = sum(end <= at for end in ends_at), sum(end < at for end in ends_at)
        assert num_before < percent / 100 * number <= num_ended
    num_generated = sum(engine.num_generated_tokens for engine in outcome.engines)
    assert num_generated >= outcome.output_tokens
    assert faults != Faults() or reshape is not None or num_generated == outcome.output_tokens


def test_engines_die_at_the_configured_rate() -> None:
    """Some 300 times an hour, not once, and each engine that died is relaunched."""
    workload = draw(law_named("coding"), 64, 1)
    conditions = Conditions(faults=Faults(deaths_per_hour=300.0, relaunch_s=1.0, turn_retries=1_000))
    outcomes = [
        Rollout(
            workload,
            [replace(TP1, slots=8)] * 4,
            POLICIES["slime"],
            Limits(queue_timeout_s=1e6),
            Oracle(workload.trajectories),
            conditions=conditions,
            seed=seed,
        ).run()
        for seed in range(4)
    ]
    expected = sum(outcome.makespan_s for outcome in outcomes) / 3_600 * 300
    num_died = sum(engine.ended_at is not None for outcome in outcomes for engine in outcome.engines)
    assert abs(num_died - expected) < 4 * expected**0.5 and expected > 30
    assert all(sum(engine.ended_at is None for engine in outcome.engines) in (3, 4) for outcome in outcomes)


def test_a_predictor_knows_nothing_of_the_future() -> None:
    """At each turn it gets what two trajectories that differ only later have in common, including the length of the
    last answer."""
    turns = tuple(Turn(50 * number if number else 0, 100 + number, 1.0) for number in range(6))
    for known in range(6):
        later = tuple(Turn(9_999, 8_888, 7.0) for _ in range(3))
        whole, other = (
            Agent(Trajectory("t", "g@2", 700, all_turns, prompt_id="g"), ())
            for all_turns in (turns, (*turns[:known], *later))
        )
        for agent in (whole, other):
            for number in range(known):
                agent.take_prompt(0.0)
                agent.finish_turn(0.0, 5.0 if number == 1 else None)
        progress = whole.progress(True)
        # A tool's result is known with the turn that it leads to.
        kept = known - 1 if known else 0
        assert replace(progress, outcomes=progress.outcomes[:kept]) == replace(
            other.progress(True), outcomes=other.progress(True).outcomes[:kept]
        )
        assert progress.num_turns == known and progress.prompt_id == "g" and progress.prompt_tokens == 700
        assert progress.output_tokens == sum(turn.output_tokens for turn in turns[:known])
        assert progress.last_output_tokens == (turns[known - 1].output_tokens if known else 0)
        assert whole.progress(False).outcomes == ()
    assert [outcome.rpartition(":")[2] for outcome in progress.outcomes] == ["?", "timeout", "?", "?", "?"]
    assert [outcome.split(":")[1] for outcome in progress.outcomes] == ["small", "small", "medium", "medium", "medium"]


def test_retries_are_counted_for_each_turn() -> None:
    """A client counts how often it asked for one turn, not for all turns."""
    turns = tuple(Turn(16 if number else 0, 12_000, 0.0) for number in range(4))
    workload = Workload("two", tuple(Trajectory(name, name, 64, turns) for name in "ab"))
    limits = Limits(queue_timeout_s=60.0)
    conditions = Conditions(faults=Faults(turn_retries=2))
    shape = replace(TP4, slots=1)
    outcome = Rollout(
        workload, [shape], POLICIES["fcfs"], limits, Oracle(workload.trajectories), conditions=conditions
    ).run()
    assert [result.ending for result in outcome.trajectories] == [Ending.FINISHED] * 2
    assert sum(result.queued_s for result in outcome.trajectories) > 3 * 60.0


@pytest.mark.parametrize("lengths", [(100, 60), (60, 100)])
def test_siblings_share_the_shorter_preamble(lengths: tuple[int, int]) -> None:
    """Siblings with preambles of 100 and 60 tokens share 60 of the preamble that other groups have as well; the rest is
    the group's own."""
    siblings = [
        Trajectory(f"t{number}", "g", 200, (Turn(0, 5, 0.0),), preamble_tokens=length)
        for number, length in enumerate(lengths)
    ]
    (first, *rest) = shared_prompts(siblings)["g"]
    assert first == ("preamble of 60", 60) and sum(size for _, size in rest) == 140


@given(
    lengths=st.lists(st.integers(50, 400), min_size=2, max_size=8),
    preambles=st.lists(st.sampled_from([0, 40]), min_size=2, max_size=2),
    growths=st.lists(st.integers(0, 500), min_size=8, max_size=8),
)
def test_siblings_share_the_shorter_prompt_and_nothing_else(
    lengths: list[int], preambles: list[int], growths: list[int]
) -> None:
    """However long contexts grow, a sibling's answer and the rest of a longer prompt are not found as another's. Groups
    share their preamble if it is the same."""
    trajectories = [
        Trajectory(f"t{n}", f"g{n % 2}", length, (Turn(0, 1, 0.0),), preamble_tokens=preambles[n % 2])
        for n, length in enumerate(lengths)
    ]
    prompts = shared_prompts(trajectories)
    contexts = [
        Agent(one, prompts[one.group_id]).pieces(one.context_tokens + more)
        for one, more in zip(trajectories, growths, strict=False)
    ]
    for one, context, more in zip(trajectories, contexts, growths, strict=False):
        assert sum(size for _, size in context) == one.context_tokens + more and all(size > 0 for _, size in context)
        for other, other_context in zip(trajectories, contexts, strict=True):
            if one is other:
                continue
            common_pieces = takewhile(lambda pair: pair[0] == pair[1], zip(context, other_context, strict=False))
            common_tokens = sum(piece[1] for piece, _ in common_pieces)
            if one.group_id == other.group_id:
                assert common_tokens == min(one.context_tokens, other.context_tokens)
            else:
                assert common_tokens == (one.preamble_tokens if one.preamble_tokens == other.preamble_tokens else 0)
