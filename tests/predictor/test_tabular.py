"""The tabular predictor: what each source of evidence brings, that it is calibrated, learns, forgets and survives."""

import itertools
import math
import random
import statistics

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.lattice import BINS, CENTRES, EDGES, NUM_BINS, bin_of
from predictor.lengths import Lengths
from predictor.pace import FeatureLaw
from predictor.progress import Progress
from predictor.replay import ReplayedPrediction, play
from predictor.scoring import score
from predictor.tabular import TabularPredictor, TabularSettings
from workloads.laws import CODING, draw
from workloads.trajectories import Trajectory

PROMPTS = [f"p{number}" for number in range(60)]


def live(predictor: TabularPredictor, trajectory_id: str, group_id: str, total: int, prompt_id: str = "") -> None:
    """A trajectory of one turn comes and ends."""
    predictor.predict(Progress(trajectory_id, group_id, prompt_id, 100, 100))
    predictor.ended(Progress(trajectory_id, group_id, prompt_id, 100, 100 + total, total, total, 1))


def mean(predictor: TabularPredictor, progress: Progress) -> float:
    """What is predicted, without being remembered."""
    total = predictor.predict(progress).total_tokens
    predictor.dropped(progress.trajectory_id)
    return total


def crowd(predictor: TabularPredictor, num_groups: int = 60, size: int = 8, seed: int = 1) -> None:
    """Groups as in rollouts: log totals with a spread of 0.8 between groups and 0.5 within."""
    dice = random.Random(seed)
    for group in range(num_groups):
        level = dice.gauss(8.0, 0.8)
        for member in range(size):
            live(predictor, f"{seed}-{group}-{member}", f"{seed}-{group}", round(math.exp(dice.gauss(level, 0.5))))


def asked(trajectories: tuple[Trajectory, ...], predictor: TabularPredictor) -> list[ReplayedPrediction]:
    """What it says of trajectories that all start at once."""

    def ask(progress: Progress) -> tuple[float, tuple[float, float]]:
        forecast = predictor.forecast(progress)
        return forecast.mean(), (forecast.quantile(0.5), forecast.quantile(0.9))

    return list(play(trajectories, predictor, ask, "together"))


def at_step(said: list[ReplayedPrediction], step: int) -> list[ReplayedPrediction]:
    return [one for one in said if one.step == step]


def test_before_anything_is_known_it_says_what_it_assumes() -> None:
    """The median is the typical length."""
    predictor = TabularPredictor(TabularSettings(typical_tokens=1_000))
    assert predictor.forecast(Progress("t")).quantile(0.5) == pytest.approx(1_000, rel=0.1)


def test_a_finished_sibling_moves_its_group_and_hardly_another() -> None:
    """Where siblings are alike, one of 20,000 tokens makes the next expected to be several times the usual."""
    predictor = TabularPredictor()
    crowd(predictor)
    usual = mean(predictor, Progress("x", "another"))
    live(predictor, "a", "g", 20_000)
    assert mean(predictor, Progress("b", "g")) > 2 * usual
    assert mean(predictor, Progress("c", "another")) == pytest.approx(usual, rel=0.1)


def test_a_sibling_that_still_runs_is_evidence_too() -> None:
    """Siblings that have made 15,000 tokens and go on say that this one is long."""
    predictor = TabularPredictor()
    crowd(predictor)
    usual = mean(predictor, Progress("x", "g"))
    for number in range(4):
        predictor.predict(Progress(f"r{number}", "g", output_tokens=15_000, num_turns=9))
    assert mean(predictor, Progress("b", "g")) > 2 * usual
    for number in range(4):
        predictor.dropped(f"r{number}")
    assert mean(predictor, Progress("c", "g")) == pytest.approx(usual, rel=0.05)


def test_how_alike_siblings_are_is_learned() -> None:
    """Where groups have nothing in common, three long siblings say little; where they have all, they say all."""

    def after_three_long(alike: bool) -> float:
        predictor, dice = TabularPredictor(), random.Random(3)
        for group in range(80):
            level = dice.gauss(8.0, 1.0)
            for member in range(8):
                log = level if alike else dice.gauss(8.0, 1.0)
                live(predictor, f"{group}-{member}", str(group), round(math.exp(log)))
        for member in range(3):
            live(predictor, f"long{member}", "g", 30_000)
        return mean(predictor, Progress("t", "g"))

    assert after_three_long(alike=True) > 24_000
    assert after_three_long(alike=False) < 10_000


def test_the_same_prompt_in_an_earlier_rollout_tells_of_the_first_turn() -> None:
    """Groups of a later rollout, with other names, are predicted from their prompts before any of them has ended."""
    predictor, dice = TabularPredictor(), random.Random(5)
    levels = {f"p{number}": dice.gauss(8.0, 0.9) for number in range(60)}
    for epoch in range(2):
        for prompt, level in levels.items():
            for member in range(8):
                total = round(math.exp(dice.gauss(level, 0.4)))
                live(predictor, f"{prompt}-{epoch}-{member}", f"{prompt}-{epoch}", total, prompt)
    said = {prompt: mean(predictor, Progress("t", f"{prompt}-new", prompt)) for prompt in levels}
    names = sorted(levels, key=lambda prompt: levels[prompt])
    assert sum(said[name] for name in names[-15:]) > 4 * sum(said[name] for name in names[:15])
    assert mean(predictor, Progress("t", "unheard-of", "unheard-of-too")) == pytest.approx(
        sum(said.values()) / len(said), rel=0.5
    )


def test_a_pace_that_goes_with_length_is_learned() -> None:
    """When long trajectories write long turns, one long turn is enough to tell."""
    predictor, dice = TabularPredictor(), random.Random(7)
    for number in range(300):
        total = round(math.exp(dice.gauss(8.0, 1.0)))
        name, turn = f"t{number}", max(1, round(total / 10 * dice.uniform(0.7, 1.4)))
        predictor.predict(Progress(name, name))
        predictor.predict(Progress(name, name, output_tokens=turn, last_output_tokens=turn, num_turns=1))
        predictor.ended(Progress(name, name, output_tokens=total, last_output_tokens=turn, num_turns=10))

    def after(turn: int) -> float:
        return mean(predictor, Progress(f"x{turn}", "x", output_tokens=turn, last_output_tokens=turn, num_turns=1))

    assert after(2_000) > 2.5 * after(300) and after(2_000) == pytest.approx(20_000, rel=0.5)


def test_a_late_stage_speaks_for_lengths_that_nobody_has_ended_at_yet() -> None:
    """Only the longest tenth of those that ended came so far. Whoever is longer than all of them comes so far too: that
    it did says no more for the longest seen than for a length that was not seen yet."""
    dice = random.Random(5)
    looks = FeatureLaw(Lengths(2_000, 1.2, 2.0, 4_000), 1, 4_000)
    for _ in range(1_000):
        in_bin = round(dice.triangular(18, 50, 36))
        looks.learn([dice.gauss(6.0, 0.5)] if in_bin >= 45 else None, in_bin)
    likelihood = looks.likelihood([6.0])
    assert likelihood is not None
    assert likelihood[30] < 0.1 * likelihood[47]
    assert likelihood[60] > 0.5 * likelihood[47]


def test_trajectories_that_run_count_before_any_has_ended() -> None:
    """While all have made 6,000 tokens and none has ended, a new one is not expected to be of 2,000."""
    predictor = TabularPredictor()
    for number in range(200):
        predictor.predict(Progress(f"r{number}", f"g{number}", output_tokens=6_000, num_turns=5))
    assert predictor.forecast(Progress("t", "new")).quantile(0.1) > 4_000


def test_what_ends_first_does_not_pass_for_all() -> None:
    """In the middle of a first rollout the law of lengths is right, though only the short half has ended."""
    lengths, dice = Lengths(2_000, 1.2, 2.0, 4_000), random.Random(11)
    totals = sorted(round(math.exp(dice.gauss(8.5, 0.9))) for _ in range(1_000))
    for number, total in enumerate(totals[:500]):
        lengths.came(0, bin_of(total))
        lengths.ended(bin_of(total), 1_000 - number)
    for _ in totals[500:]:
        lengths.came(0, bin_of(totals[500]))
    for _ in range(1_000):  # all report once more, and ends are counted
        lengths.came(bin_of(totals[500]), bin_of(totals[500]))
    lengths.refresh()
    middle = bin_of(totals[500])
    truth = sum(bin_of(total) < middle for total in totals) / len(totals)
    assert sum(lengths.shares[:middle]) == pytest.approx(truth, abs=0.01)


@given(st.lists(st.tuples(st.integers(0, NUM_BINS - 1), st.booleans(), st.integers(0, 3)), max_size=40))
def test_the_law_of_lengths_is_kaplan_and_meiers(lives: list[tuple[int, bool, int]]) -> None:
    """In each bin: of those that came through it, the share that ended there. Who runs counts in what it has passed,
    what is assumed as two. An end is known once as many have reported as ran then, or at a restart."""
    assumed, lengths = Lengths(2_000, 1.2, 2.0, 4_000), Lengths(2_000, 1.2, 2.0, 4_000)
    due_after: list[int] = []
    for in_bin, has_ended, num_running in lives:
        lengths.came(0, in_bin)
        due_after = [reports - 1 for reports in due_after]
        while due_after and due_after[0] <= 0:
            due_after.pop(0)  # in the order of their ends
        if has_ended:
            lengths.ended(in_bin, num_running)
            due_after.append(num_running)
        assert len(lengths.dump()["held"]) == len(due_after)
    told = Lengths(2_000, 1.2, 2.0, 4_000)
    told.restore(lengths.dump())
    surviving = 1.0
    for index in range(NUM_BINS):
        num_ended = sum(has_ended for in_bin, has_ended, _ in lives if in_bin == index)
        num_passed = sum(in_bin > index for in_bin, _, _ in lives) + num_ended
        hazard = (2 * assumed.shares[index] / assumed.surviving[index] + num_ended) / (2 + num_passed)
        assert told.surviving[index] == pytest.approx(surviving)
        if index < NUM_BINS - 1:  # the last one takes the rest
            assert told.shares[index] == pytest.approx(surviving * hazard)
            surviving *= 1 - hazard
    assert told.shares[-1] == pytest.approx(surviving)
    assert told.mean == pytest.approx(BINS @ told.shares)
    assert told.variance == pytest.approx((BINS - told.mean) ** 2 @ told.shares)


def test_what_is_predicted_is_the_mean_and_the_90th_percentile_of_what_is_known() -> None:
    """And never less than the mean, where the law has so long a tail that it is further up."""
    predictor, again = TabularPredictor(), TabularPredictor()
    for number in range(40):
        length = 2**17 if number % 16 == 0 else 64  # a sixteenth is 2,000 times as long as the others
        for one in (predictor, again):
            live(one, f"t{number}", "g", length)
    for progress in (Progress("a"), Progress("b", "g"), Progress("c", "g", "", 100, 300, 200, 200, 1)):
        told, forecast = predictor.predict(progress), again.forecast(progress)
        assert told.total_tokens == forecast.mean()
        assert told.p90_tokens == max(forecast.quantile(0.9), forecast.mean())


@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_calibrated_and_finds_the_longest_on_a_rollout(seed: int) -> None:
    """Having seen another rollout, its quantiles keep their word after four turns, and nearly all of the longest
    hundredth are among its longest tenth."""
    predictor = TabularPredictor()
    asked(draw(CODING, 800, seed + 100).trajectories, predictor)
    said = asked(draw(CODING, 800, seed).trajectories, predictor)
    after_four = score(at_step(said, 4))
    assert after_four.under_p50 == pytest.approx(0.5, abs=0.1)
    assert after_four.under_p90 == pytest.approx(0.9, abs=0.07)
    assert after_four.pearson > 0.8 and after_four.in_top_10 > 0.9


def test_a_first_rollout_is_calibrated_too() -> None:
    """With nothing learned before, quantiles are wide, not wrong."""
    said = asked(draw(CODING, 800, 3).trajectories, TabularPredictor())
    for step in (4, 8):
        cold = score(at_step(said, step))
        assert cold.under_p50 is not None and 0.3 < cold.under_p50 < 0.7
        assert cold.under_p90 is not None and 0.75 < cold.under_p90 < 0.99


def test_it_follows_drift() -> None:
    """When trajectories grow from 500 to 8,000 tokens, a new group's prediction follows."""
    predictor = TabularPredictor(TabularSettings(memory=50))
    for number in range(200):
        live(predictor, f"a{number}", f"old{number}", 500)
    early = mean(predictor, Progress("t", "new"))
    for number in range(300):
        live(predictor, f"b{number}", f"late{number}", 8_000)
    assert mean(predictor, Progress("t", "newer")) > 6 * early


def test_a_prompts_past_is_taken_relative_to_all() -> None:
    """When all trajectories have grown, a prompt whose group was usual before is expected to be usual now."""
    predictor = TabularPredictor()
    for number in range(40):
        for member in range(4):
            live(predictor, f"{number}-{member}", f"g{number}", 1_000, f"p{number}")
    for number in range(2_000):
        live(predictor, f"late{number}", f"late{number}", 8_000)
    usual = mean(predictor, Progress("t", "new"))
    assert mean(predictor, Progress("u", "newer", "p7")) == pytest.approx(usual, rel=0.15)


@given(
    st.integers(0, 10**7),
    st.integers(0, 10**6),
    st.integers(0, 300),
    st.integers(0, 10**7),
    st.lists(st.integers(1, 10**6), max_size=4),
)
def test_whatever_it_is_told_its_answer_makes_sense(
    made: int, last: int, turns: int, context: int, siblings: list[int]
) -> None:
    """More than was made, finite, and no mean above the 90th percentile."""
    predictor = TabularPredictor()
    for number, total in enumerate(siblings):
        live(predictor, f"s{number}", "g", total)
    said = predictor.predict(Progress("t", "g", "p", context // 2, context, made, last, turns))
    assert made < said.total_tokens <= said.p90_tokens < math.inf


def test_what_was_learned_survives_and_memory_is_bounded() -> None:
    """A restored predictor says the same; of too many groups the longest unused is forgotten."""
    predictor = TabularPredictor(TabularSettings(max_groups=2))
    asked(draw(CODING, 160, 4).trajectories, predictor)
    for group in ("a", "b", "a", "c"):
        live(predictor, f"t-{group}", group, 30_000, f"p-{group}")
    restored, again = (TabularPredictor(TabularSettings(max_groups=2)) for _ in range(2))
    restored.restore(predictor.dump())
    again.restore(restored.dump())
    for group in ("a", "c", "new"):
        for turns in (0, 3):
            progress = Progress("t", group, "", 900, 5_000, 300 * turns, 300, turns)
            assert mean(restored, progress) == mean(again, progress)
    assert mean(restored, Progress("t", "c")) > 1.3 * mean(restored, Progress("t", "newer"))
    assert mean(predictor, Progress("t", "b")) == pytest.approx(mean(predictor, Progress("t", "new")), rel=1e-6)


def rolled_out(restart_at: int | None, seed: int) -> TabularPredictor:
    """A first rollout of 60 groups of 16, 400 tokens a turn, in rounds; the process is another one from a round on."""
    dice, predictor = random.Random(seed), TabularPredictor()
    left: dict[tuple[int, int], int] = {}
    for group in range(60):
        level = dice.gauss(8.0, 0.8)
        left |= {(group, member): round(math.exp(dice.gauss(level, 0.5))) + 1 for member in range(16)}
    for num_turns in itertools.count():
        if num_turns == restart_at:
            learned = predictor.dump()
            predictor = TabularPredictor()
            predictor.restore(learned, {f"{group}-{member}" for group, member in left})
        if not left:
            return predictor
        for (group, member), total in list(left.items()):
            made = min(400 * num_turns, total)
            told = Progress(f"{group}-{member}", f"g{group}", f"p{group}", 100, 100 + made, made, 400, num_turns)
            if made < total:
                predictor.predict(told)
            else:
                predictor.ended(told)
                del left[group, member]
    raise AssertionError("it counts for ever")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("restart_at", [3, 6, 12, 24])
def test_a_restart_in_the_middle_of_a_rollout_changes_little(restart_at: int, seed: int) -> None:
    """Nobody's tokens count twice, no prompt is told of its late siblings alone, and no end counts before its time.

    The law of lengths is tabulated at other moments, which is worth some percent.
    """
    here, there = rolled_out(None, seed), rolled_out(restart_at, seed)
    new, *known = ([mean(one, Progress("t", "g", prompt)) for one in (here, there)] for prompt in ["new", *PROMPTS])
    assert new[1] == pytest.approx(new[0], rel=0.06)
    assert statistics.median(abs(math.log(again / once)) for once, again in known) < 0.06


def test_running_trajectories_are_bounded() -> None:
    """Those whose end nobody tells are forgotten, the oldest first; they no longer speak for their group."""
    predictor = TabularPredictor(TabularSettings(max_running=2))
    for name in "abc":
        predictor.predict(Progress(name, name, output_tokens=30_000, num_turns=2))
    usual = mean(predictor, Progress("t", "new"))
    assert mean(predictor, Progress("t", "a")) == pytest.approx(usual, rel=1e-6)
    assert mean(predictor, Progress("t", "c")) > 1.5 * usual


@pytest.mark.parametrize("dumped", [b"nonsense", b"{}", b"[]", b'{"kind":"tabular-1","lengths":{"passed":[1]}}'])
def test_a_dump_of_another_kind_changes_nothing(dumped: bytes) -> None:
    """It is refused, and what was learned stays."""
    predictor = TabularPredictor()
    live(predictor, "t", "g", 30_000)
    before = mean(predictor, Progress("u", "g"))
    with pytest.raises(ValueError):
        predictor.restore(dumped)
    assert mean(predictor, Progress("u", "g")) == before


@pytest.mark.parametrize("part", ["passed", "ended"])
def test_a_dump_of_another_lattice_changes_nothing(part: str) -> None:
    """Its bins mean other lengths."""
    predictor = TabularPredictor()
    crowd(predictor, num_groups=2)
    dumped = predictor.dump()
    other = orjson.loads(dumped)
    other["lengths"][part].append(1.0)
    with pytest.raises(ValueError, match="lattice"):
        predictor.restore(orjson.dumps(other))
    assert predictor.dump() == dumped


def test_the_lattice_covers_every_length() -> None:
    """Bins follow each other without gaps, and a length lies in its own."""
    assert len(EDGES) == NUM_BINS + 1 and len(CENTRES) == NUM_BINS
    for tokens in (4, 5, 17, 400, 2_000, 39_999, 40_000, 900_000):
        assert EDGES[bin_of(tokens)] <= tokens < EDGES[bin_of(tokens) + 1]
    assert bin_of(0) == bin_of(1) == 0 and bin_of(10**9) == NUM_BINS - 1
