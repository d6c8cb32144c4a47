"""The tabular predictor: what each source of evidence adds; calibration, learning, forgetting and restarts."""

import itertools
import math
import random
import statistics
from collections.abc import Sequence

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


def teach(predictor: TabularPredictor, trajectory_id: str, group_id: str, total: int, prompt_id: str = "") -> None:
    """A trajectory of one turn comes and ends."""
    predictor.predict(Progress(trajectory_id, group_id, prompt_id, 100, 100))
    predictor.ended(Progress(trajectory_id, group_id, prompt_id, 100, 100 + total, total, total, 1))


def predicted_total(predictor: TabularPredictor, progress: Progress) -> float:
    """The predicted total; the trajectory is then dropped."""
    total = predictor.predict(progress).total_tokens
    predictor.dropped(progress.trajectory_id)
    return total


def teach_groups(predictor: TabularPredictor, num_groups: int = 60, size: int = 8, seed: int = 1) -> None:
    """Groups as in rollouts: log totals with a spread of 0.8 between groups and 0.5 within them."""
    dice = random.Random(seed)
    for group in range(num_groups):
        level = dice.gauss(8.0, 0.8)
        for member in range(size):
            teach(predictor, f"{seed}-{group}-{member}", f"{seed}-{group}", round(math.exp(dice.gauss(level, 0.5))))


def replayed(trajectories: tuple[Trajectory, ...], predictor: TabularPredictor) -> list[ReplayedPrediction]:
    """Predictions for trajectories that all start at once."""

    def ask(progress: Progress) -> tuple[float, tuple[float, float]]:
        forecast = predictor.forecast(progress)
        return forecast.mean(), (forecast.quantile(0.5), forecast.quantile(0.9))

    return list(play(trajectories, predictor, ask, "together"))


def at_step(predictions: list[ReplayedPrediction], step: int) -> list[ReplayedPrediction]:
    return [one for one in predictions if one.step == step]


def test_without_data_the_median_is_the_typical_length() -> None:
    """The typical length is a setting."""
    predictor = TabularPredictor(TabularSettings(typical_tokens=1_000))
    assert predictor.forecast(Progress("t")).quantile(0.5) == pytest.approx(1_000, rel=0.1)


def test_a_finished_sibling_moves_its_group_and_hardly_others() -> None:
    """Where siblings are alike, one of 20,000 tokens more than doubles the prediction for the next."""
    predictor = TabularPredictor()
    teach_groups(predictor)
    usual = predicted_total(predictor, Progress("x", "another"))
    teach(predictor, "a", "g", 20_000)
    assert predicted_total(predictor, Progress("b", "g")) > 2 * usual
    assert predicted_total(predictor, Progress("c", "another")) == pytest.approx(usual, rel=0.1)


def test_running_siblings_are_evidence_too() -> None:
    """Siblings that go on after 15,000 tokens make a long trajectory likely, and no longer do once they are dropped."""
    predictor = TabularPredictor()
    teach_groups(predictor)
    usual = predicted_total(predictor, Progress("x", "g"))
    for number in range(4):
        predictor.predict(Progress(f"r{number}", "g", output_tokens=15_000, num_turns=9))
    assert predicted_total(predictor, Progress("b", "g")) > 2 * usual
    for number in range(4):
        predictor.dropped(f"r{number}")
    assert predicted_total(predictor, Progress("c", "g")) == pytest.approx(usual, rel=0.05)


def test_the_similarity_of_siblings_is_learned() -> None:
    """If groups have nothing in common, three long siblings say little; if siblings are equal, they say everything."""

    def after_three_long(are_equal: bool) -> float:
        predictor, dice = TabularPredictor(), random.Random(3)
        for group in range(80):
            level = dice.gauss(8.0, 1.0)
            for member in range(8):
                log = level if are_equal else dice.gauss(8.0, 1.0)
                teach(predictor, f"{group}-{member}", str(group), round(math.exp(log)))
        for member in range(3):
            teach(predictor, f"long{member}", "g", 30_000)
        return predicted_total(predictor, Progress("t", "g"))

    assert after_three_long(are_equal=True) > 24_000
    assert after_three_long(are_equal=False) < 10_000


def test_earlier_rollouts_of_a_prompt_predict_its_first_turn() -> None:
    """Groups of a later rollout, with other ids, are predicted from their prompts before any of them has ended."""
    predictor, dice = TabularPredictor(), random.Random(5)
    levels = {f"p{number}": dice.gauss(8.0, 0.9) for number in range(60)}
    for epoch in range(2):
        for prompt, level in levels.items():
            for member in range(8):
                total = round(math.exp(dice.gauss(level, 0.4)))
                teach(predictor, f"{prompt}-{epoch}-{member}", f"{prompt}-{epoch}", total, prompt)
    predicted = {prompt: predicted_total(predictor, Progress("t", f"{prompt}-new", prompt)) for prompt in levels}
    names = sorted(levels, key=lambda prompt: levels[prompt])
    assert sum(predicted[name] for name in names[-15:]) > 4 * sum(predicted[name] for name in names[:15])
    assert predicted_total(predictor, Progress("t", "unheard-of", "unheard-of-too")) == pytest.approx(
        sum(predicted.values()) / len(predicted), rel=0.5
    )


def test_a_correlation_of_turn_and_total_length_is_learned() -> None:
    """When long trajectories write long turns, one long turn is enough evidence."""
    predictor, dice = TabularPredictor(), random.Random(7)
    for number in range(300):
        total = round(math.exp(dice.gauss(8.0, 1.0)))
        name, turn = f"t{number}", max(1, round(total / 10 * dice.uniform(0.7, 1.4)))
        predictor.predict(Progress(name, name))
        predictor.predict(Progress(name, name, output_tokens=turn, last_output_tokens=turn, num_turns=1))
        predictor.ended(Progress(name, name, output_tokens=total, last_output_tokens=turn, num_turns=10))

    def after(turn: int) -> float:
        return predicted_total(
            predictor, Progress(f"x{turn}", "x", output_tokens=turn, last_output_tokens=turn, num_turns=1)
        )

    assert after(2_000) > 2.5 * after(300) and after(2_000) == pytest.approx(20_000, rel=0.5)


def test_reaching_a_late_stage_does_not_rule_out_unseen_lengths() -> None:
    """Only the longest tenth of the ended trajectories reached this stage. A trajectory longer than all of them would
    reach it, too, so lengths not seen yet stay about as likely as the longest ones seen."""
    dice = random.Random(5)
    law = FeatureLaw(Lengths(2_000, 1.2, 2.0, 4_000), 1, 4_000)
    for _ in range(1_000):
        in_bin = round(dice.triangular(18, 50, 36))
        law.learn([dice.gauss(6.0, 0.5)] if in_bin >= 45 else None, in_bin)
    likelihood = law.likelihood([6.0])
    assert likelihood is not None
    assert likelihood[30] < 0.1 * likelihood[47]
    assert likelihood[60] > 0.5 * likelihood[47]


def test_running_trajectories_count_before_any_has_ended() -> None:
    """While all have made 6,000 tokens and none has ended, even the 10th percentile of a new one is above 4,000."""
    predictor = TabularPredictor()
    for number in range(200):
        predictor.predict(Progress(f"r{number}", f"g{number}", output_tokens=6_000, num_turns=5))
    assert predictor.forecast(Progress("t", "new")).quantile(0.1) > 4_000


def test_early_ends_do_not_bias_the_law_of_lengths() -> None:
    """In the middle of a first rollout only the shorter half has ended, and the law of lengths is right all the
    same."""
    lengths, dice = Lengths(2_000, 1.2, 2.0, 4_000), random.Random(11)
    totals = sorted(round(math.exp(dice.gauss(8.5, 0.9))) for _ in range(1_000))
    for number, total in enumerate(totals[:500]):
        lengths.came(0, bin_of(total))
        lengths.ended(bin_of(total), 1_000 - number)
    for _ in totals[500:]:
        lengths.came(0, bin_of(totals[500]))
    for _ in range(1_000):  # everyone reports once more, so the ends are counted
        lengths.came(bin_of(totals[500]), bin_of(totals[500]))
    lengths.refresh()
    middle = bin_of(totals[500])
    truth = sum(bin_of(total) < middle for total in totals) / len(totals)
    assert sum(lengths.shares[:middle]) == pytest.approx(truth, abs=0.01)


@given(st.lists(st.tuples(st.integers(0, NUM_BINS - 1), st.booleans(), st.integers(0, 3)), max_size=40))
def test_the_law_of_lengths_is_the_kaplan_meier_estimate(lives: list[tuple[int, bool, int]]) -> None:
    """A bin's hazard is the number of ends in it, divided by that number plus the number of trajectories known to have
    passed it. A running trajectory counts in the bins that it has passed; the assumed law counts as two trajectories.
    An end counts once as many reports have followed as trajectories ran then, or at a restart."""
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
    restored = Lengths(2_000, 1.2, 2.0, 4_000)
    restored.restore(lengths.dump())
    surviving = 1.0
    for index in range(NUM_BINS):
        num_ended = sum(has_ended for in_bin, has_ended, _ in lives if in_bin == index)
        num_passed = sum(in_bin > index for in_bin, _, _ in lives) + num_ended
        hazard = (2 * assumed.shares[index] / assumed.surviving[index] + num_ended) / (2 + num_passed)
        assert restored.surviving[index] == pytest.approx(surviving)
        if index < NUM_BINS - 1:  # the last one takes the rest
            assert restored.shares[index] == pytest.approx(surviving * hazard)
            surviving *= 1 - hazard
    assert restored.shares[-1] == pytest.approx(surviving)
    assert restored.mean == pytest.approx(BINS @ restored.shares)
    assert restored.variance == pytest.approx((BINS - restored.mean) ** 2 @ restored.shares)


def test_a_prediction_is_the_forecasts_mean_and_90th_percentile() -> None:
    """If a very long tail lifts the mean above the 90th percentile, the mean stands for both."""
    predictor, again = TabularPredictor(), TabularPredictor()
    for number in range(40):
        length = 2**17 if number % 16 == 0 else 64  # a sixteenth is 2,000 times as long as the others
        for one in (predictor, again):
            teach(one, f"t{number}", "g", length)
    for progress in (Progress("a"), Progress("b", "g"), Progress("c", "g", "", 100, 300, 200, 200, 1)):
        prediction, forecast = predictor.predict(progress), again.forecast(progress)
        assert prediction.total_tokens == forecast.mean()
        assert prediction.p90_tokens == max(forecast.quantile(0.9), forecast.mean())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_second_rollout_is_calibrated_and_its_longest_are_found(seed: int) -> None:
    """After another rollout, quantiles are calibrated at the fourth turn, and over 90 % of the longest hundredth are in
    the longest tenth by prediction."""
    predictor = TabularPredictor()
    replayed(draw(CODING, 800, seed + 100).trajectories, predictor)
    predictions = replayed(draw(CODING, 800, seed).trajectories, predictor)
    after_four = score(at_step(predictions, 4))
    assert after_four.under_p50 == pytest.approx(0.5, abs=0.1)
    assert after_four.under_p90 == pytest.approx(0.9, abs=0.07)
    assert after_four.pearson > 0.8 and after_four.in_top_10 > 0.9


def test_a_first_rollout_is_calibrated_too() -> None:
    """With nothing learned before, quantiles are wide, not wrong."""
    predictions = replayed(draw(CODING, 800, 3).trajectories, TabularPredictor())
    for step in (4, 8):
        cold = score(at_step(predictions, step))
        assert cold.under_p50 is not None and 0.3 < cold.under_p50 < 0.7
        assert cold.under_p90 is not None and 0.75 < cold.under_p90 < 0.99


def test_predictions_follow_drift() -> None:
    """When trajectories grow from 500 to 8,000 tokens, a new group's prediction follows."""
    predictor = TabularPredictor(TabularSettings(memory=50))
    for number in range(200):
        teach(predictor, f"a{number}", f"old{number}", 500)
    early = predicted_total(predictor, Progress("t", "new"))
    for number in range(300):
        teach(predictor, f"b{number}", f"late{number}", 8_000)
    assert predicted_total(predictor, Progress("t", "newer")) > 6 * early


def test_a_prompts_past_is_relative_to_all_trajectories() -> None:
    """When all trajectories have grown, a prompt that was average before is predicted to be average now."""
    predictor = TabularPredictor()
    for number in range(40):
        for member in range(4):
            teach(predictor, f"{number}-{member}", f"g{number}", 1_000, f"p{number}")
    for number in range(2_000):
        teach(predictor, f"late{number}", f"late{number}", 8_000)
    usual = predicted_total(predictor, Progress("t", "new"))
    assert predicted_total(predictor, Progress("u", "newer", "p7")) == pytest.approx(usual, rel=0.15)


@given(
    st.integers(0, 10**7),
    st.integers(0, 10**6),
    st.integers(0, 300),
    st.integers(0, 10**7),
    st.lists(st.integers(1, 10**6), max_size=4),
)
def test_every_prediction_is_finite_and_above_the_output_so_far(
    made: int, last: int, turns: int, context: int, siblings: list[int]
) -> None:
    """This holds whatever was reported, and the 90th percentile is never below the mean."""
    predictor = TabularPredictor()
    for number, total in enumerate(siblings):
        teach(predictor, f"s{number}", "g", total)
    prediction = predictor.predict(Progress("t", "g", "p", context // 2, context, made, last, turns))
    assert made < prediction.total_tokens <= prediction.p90_tokens < math.inf


def test_a_dump_keeps_what_was_learned_and_memory_is_bounded() -> None:
    """Restoring a second time changes no prediction. Of too many groups, the least recently used is forgotten."""
    predictor = TabularPredictor(TabularSettings(max_groups=2))
    replayed(draw(CODING, 160, 4).trajectories, predictor)
    for group in ("a", "b", "a", "c"):
        teach(predictor, f"t-{group}", group, 30_000, f"p-{group}")
    restored, again = (TabularPredictor(TabularSettings(max_groups=2)) for _ in range(2))
    restored.restore(predictor.dump())
    again.restore(restored.dump())
    for group in ("a", "c", "new"):
        for turns in (0, 3):
            progress = Progress("t", group, "", 900, 5_000, 300 * turns, 300, turns)
            assert predicted_total(restored, progress) == predicted_total(again, progress)
    assert predicted_total(restored, Progress("t", "c")) > 1.3 * predicted_total(restored, Progress("t", "newer"))
    assert predicted_total(predictor, Progress("t", "b")) == pytest.approx(
        predicted_total(predictor, Progress("t", "new")), rel=1e-6
    )


def rolled_out(restart_at: int | None, seed: int) -> TabularPredictor:
    """A first rollout of 60 groups of 16 in rounds, 400 tokens a turn; a new process continues from round
    `restart_at`."""
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
            progress = Progress(f"{group}-{member}", f"g{group}", f"p{group}", 100, 100 + made, made, 400, num_turns)
            if made < total:
                predictor.predict(progress)
            else:
                predictor.ended(progress)
                del left[group, member]
    raise AssertionError("the rollout never ends")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("restart_at", [3, 6, 12, 24])
def test_a_restart_in_the_middle_of_a_rollout_changes_little(restart_at: int, seed: int) -> None:
    """No tokens count twice, no prompt is judged by its late siblings alone, and no end counts before its time.

    The law of lengths is tabulated at other moments, which changes predictions by some percent.
    """
    unbroken, restarted = rolled_out(None, seed), rolled_out(restart_at, seed)
    new, *known = (
        [predicted_total(one, Progress("t", "g", prompt)) for one in (unbroken, restarted)]
        for prompt in ["new", *PROMPTS]
    )
    assert new[1] == pytest.approx(new[0], rel=0.06)
    assert statistics.median(abs(math.log(again / once)) for once, again in known) < 0.06


@pytest.mark.parametrize("restart_at", [3, 12])
def test_a_restart_in_the_middle_of_a_rollout_does_not_shorten_the_next_one(restart_at: int) -> None:
    """Trajectories that go on had their first turns in the earlier process. They count as ones that had them."""
    unbroken, restarted = rolled_out(None, 1), rolled_out(restart_at, 1)
    for turns in (1, 2, 4, 8):
        progress = Progress("t", "g", "new", 100, 100 + 400 * turns, 400 * turns, 400, turns)
        once, again = (predicted_total(one, progress) for one in (unbroken, restarted))
        assert again == pytest.approx(once, rel=0.06)


@pytest.mark.parametrize("seen", [range(2), [0, 1, *range(8, 25)]])
def test_turns_that_nobody_saw_are_not_learned_as_absent(seen: Sequence[int]) -> None:
    """A process that was killed before it stored what it had learned took them with it."""
    predictor, unbroken = rolled_out(None, 1), rolled_out(None, 1)
    for one, turns_seen in ((predictor, seen), (unbroken, range(25))):
        for number in range(300):
            name = f"t{number}"
            for turns in turns_seen:
                made = 400 * turns
                one.predict(Progress(name, name, "", 100, 100 + made, made, 400, turns))
            one.ended(Progress(name, name, "", 0, 10_100, 10_000, 400, 25))
    progress = Progress("t", "t", "", 100, 1_700, 1_600, 400, 4)
    assert predicted_total(predictor, progress) == pytest.approx(predicted_total(unbroken, progress), rel=0.1)


def test_a_prompts_past_includes_a_group_that_ended_in_another_process() -> None:
    """Its members ran during the restart, and told their prompt at their first turns only."""
    predictor, restarted = TabularPredictor(), TabularPredictor()
    teach_groups(predictor)
    for number in range(8):
        predictor.predict(Progress(f"t{number}", "g", "p", 100, 100))
        predictor.predict(Progress(f"t{number}", "g", "", 100, 500, 400, 400, 1))
    restarted.restore(predictor.dump(), {f"t{number}" for number in range(8)})
    for number in range(8):
        restarted.ended(Progress(f"t{number}", "g", "", 0, 40_100, 40_000, 400, 100))
    new, known = (predicted_total(restarted, Progress("t", f"next-{prompt}", prompt)) for prompt in ("new", "p"))
    assert known > 3 * new


def test_running_trajectories_are_bounded() -> None:
    """Trajectories whose end nobody reports are forgotten, oldest first, and no longer count for their group."""
    predictor = TabularPredictor(TabularSettings(max_running=2))
    for name in "abc":
        predictor.predict(Progress(name, name, output_tokens=30_000, num_turns=2))
    usual = predicted_total(predictor, Progress("t", "new"))
    assert predicted_total(predictor, Progress("t", "a")) == pytest.approx(usual, rel=1e-6)
    assert predicted_total(predictor, Progress("t", "c")) > 1.5 * usual
    assert set(orjson.loads(predictor.dump())["running"]) == {"c"}


def test_a_dump_of_an_earlier_version_is_restored() -> None:
    """It has what is known of a group in one list of numbers."""
    predictor = TabularPredictor()
    for number in range(40):
        predictor.ended(Progress(f"t{number}", f"g{number % 3}", "p", output_tokens=100 * (number + 1), num_turns=1))
    dumped = predictor.dump()
    earlier = orjson.loads(dumped)
    groups = earlier["groups"]["groups"]
    earlier["groups"]["groups"] = {name: [*past, *finished] for name, (past, finished) in groups.items()}
    restored, again = TabularPredictor(), TabularPredictor()
    restored.restore(dumped)
    again.restore(orjson.dumps(earlier))
    assert len(groups) == 3 and again.dump() == restored.dump()


@pytest.mark.parametrize("dumped", [b"nonsense", b"{}", b"[]", b'{"kind":"tabular-1","lengths":{"passed":[1]}}'])
def test_a_dump_of_another_kind_changes_nothing(dumped: bytes) -> None:
    """It is refused, and what was learned stays."""
    predictor = TabularPredictor()
    teach(predictor, "t", "g", 30_000)
    before = predicted_total(predictor, Progress("u", "g"))
    with pytest.raises(ValueError):
        predictor.restore(dumped)
    assert predicted_total(predictor, Progress("u", "g")) == before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("lengths", "passed", 3), 0),
        (("lengths", "ended", 3), 1e300),
        (("lengths", "held", 0), 1e300),
        (("lengths", "held", 0), NUM_BINS),
        (("groups", "groups", "1-0"), []),
        (("groups", "groups", "1-0", 1, 0), 1e300),
        (("groups", "groups", "1-0", 1, 0), -1),
        (("heard", "runs"), 1e300),
        (("running", "runs"), []),
        (("running", "runs", 2), -1),
        (("running", "runs", 3, 0), []),
        (("running", "runs", 3, 0, 0), 0),
        (("looks", 0, 2), []),
    ],
)
def test_a_damaged_dump_changes_nothing(path: tuple[str | int, ...], value: object) -> None:
    """It is refused with the error that callers expect, and not later, when a trajectory reports."""
    predictor = TabularPredictor()
    teach_groups(predictor, num_groups=4)
    predictor.predict(Progress("runs", "1-0", "", 100, 200, 100, 100, 1))
    teach(predictor, "ended", "1-0", 100)
    dumped = predictor.dump()
    state = part = orjson.loads(dumped)
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    with pytest.raises(ValueError):
        predictor.restore(orjson.dumps(state), {"runs"})
    assert predictor.dump() == dumped


@pytest.mark.parametrize("part", ["passed", "ended"])
def test_a_dump_of_another_lattice_changes_nothing(part: str) -> None:
    """Its bins stand for other lengths."""
    predictor = TabularPredictor()
    teach_groups(predictor, num_groups=2)
    dumped = predictor.dump()
    other = orjson.loads(dumped)
    other["lengths"][part].append(1.0)
    with pytest.raises(ValueError, match="lattice"):
        predictor.restore(orjson.dumps(other))
    assert predictor.dump() == dumped


def test_the_lattice_covers_every_length() -> None:
    """Bins follow each other without gaps, and each length lies in its bin."""
    assert len(EDGES) == NUM_BINS + 1 and len(CENTRES) == NUM_BINS
    for tokens in (4, 5, 17, 400, 2_000, 39_999, 40_000, 900_000):
        assert EDGES[bin_of(tokens)] <= tokens < EDGES[bin_of(tokens) + 1]
    assert bin_of(0) == bin_of(1) == 0 and bin_of(10**9) == NUM_BINS - 1
