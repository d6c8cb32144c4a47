"""Predictors that know the truth: the oracle exactly, the noisy one as accurately as configured."""

import math
from dataclasses import replace
from statistics import correlation, fmean

import pytest

from engines.profiles import load_profile
from predictor.prefix_tree import TreePredictor
from predictor.progress import Progress
from scheduling.limits import Limits
from scheduling.policy import POLICIES
from scheduling.types import Prediction
from simulator.predictors import LEAST_CORRELATION, Noisy, Oracle
from simulator.rollout import Rollout
from simulator.runs import predictor_named
from workloads.laws import draw, law_named
from workloads.trajectories import Workload

TRAJECTORIES = draw(law_named("coding"), 3_200, 5).trajectories


def at_start(trajectory_id: str) -> Progress:
    return Progress(trajectory_id)


def at_second_turn(trajectory_id: str) -> Progress:
    return Progress(trajectory_id, num_turns=1)


def test_the_oracle_knows_every_total() -> None:
    """At the start and later."""
    oracle = Oracle(TRAJECTORIES)
    for trajectory in TRAJECTORIES[:50]:
        for made in (0, trajectory.output_tokens - 1):
            prediction = oracle.predict(Progress(trajectory.trajectory_id, output_tokens=made))
            assert prediction.total_tokens == prediction.p90_tokens == trajectory.output_tokens


@pytest.mark.parametrize("log_pearson", [0.5, 0.7, 0.9, 0.99])
def test_noise_has_the_configured_strength_and_is_calibrated(log_pearson: float) -> None:
    """Log-Pearson with the truth is the number given. Means are right on average, and the P90 holds nine times in
    ten."""
    noisy = Noisy(TRAJECTORIES, log_pearson, seed=1)
    predictions = [noisy.predict(at_start(t.trajectory_id)) for t in TRAJECTORIES]
    totals = [t.output_tokens for t in TRAJECTORIES]
    found = correlation([math.log(p.total_tokens) for p in predictions], [math.log(total) for total in totals])
    assert found == pytest.approx(log_pearson, abs=0.05)
    assert fmean(p.total_tokens for p in predictions) == pytest.approx(fmean(totals), rel=0.1)
    below = fmean(total <= p.p90_tokens for total, p in zip(totals, predictions, strict=True))
    assert below == pytest.approx(0.9, abs=0.04)


def test_the_weakest_noisy_predictor_predicts_the_mean() -> None:
    """With numbers, not with an overflow."""
    noisy = predictor_named(f"noisy:{LEAST_CORRELATION}", TRAJECTORIES, 1)
    predictions = [noisy.predict(at_start(t.trajectory_id)).total_tokens for t in TRAJECTORIES]
    assert fmean(predictions) == pytest.approx(fmean(t.output_tokens for t in TRAJECTORIES), rel=0.2)
    assert max(predictions) < 1.5 * min(predictions)


def test_noise_is_correlated_across_turns_and_follows_the_seed() -> None:
    """Errors of one trajectory at consecutive turns correlate; another seed gives other errors."""
    noisy, again, other = (Noisy(TRAJECTORIES, 0.7, seed) for seed in (1, 1, 2))
    first = [noisy.predict(at_start(t.trajectory_id)).total_tokens / t.output_tokens for t in TRAJECTORIES]
    second = [noisy.predict(at_second_turn(t.trajectory_id)).total_tokens / t.output_tokens for t in TRAJECTORIES]
    assert 0.9 > correlation([math.log(x) for x in first], [math.log(x) for x in second]) > 0.6
    assert first == [again.predict(at_start(t.trajectory_id)).total_tokens / t.output_tokens for t in TRAJECTORIES]
    assert first != [other.predict(at_start(t.trajectory_id)).total_tokens / t.output_tokens for t in TRAJECTORIES]


def test_policies_are_compared_with_the_same_noise() -> None:
    """A policy that lets another trajectory go first got other predictions for both: a seed compared luck, too."""
    asked = [at(t.trajectory_id) for t in TRAJECTORIES[:20] for at in (at_start, at_second_turn)]
    one, other = (Noisy(TRAJECTORIES, 0.7, seed=1) for _ in range(2))
    in_order = {progress: one.predict(progress) for progress in asked}
    assert in_order == {progress: other.predict(progress) for progress in reversed(asked)}


@pytest.mark.parametrize("name", ["", "noisy", "noisy:", "noisy:0", "noisy:1e-200", "noisy:1.1", "noisy:x", "nobody"])
def test_an_unknown_predictor_is_refused(name: str) -> None:
    """The message names those that exist or the form of the argument."""
    with pytest.raises(ValueError, match="noisy"):
        predictor_named(name, TRAJECTORIES, 0)


def test_a_groups_name_means_nothing() -> None:
    """Tasks of software engineering are named `repository@commit`. All tasks of a repository used to be predicted as
    one prompt, because epochs of a law are told apart by an `@`, too."""
    drawn = TRAJECTORIES[:64]
    outcomes = []
    for sign in "_@":
        trajectories = tuple(replace(t, group_id=t.group_id.replace("coding-5-", f"django{sign}")) for t in drawn)
        fleet = [replace(load_profile("qwen3-14b-h100-tp4"), slots=16)]
        played = Rollout(Workload("named", trajectories), fleet, POLICIES["heddle"], Limits(), TreePredictor()).run()
        outcomes.append([(t.ended_at, t.predictions) for t in played.trajectories])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("reads", [True, False])
def test_a_predictor_is_told_what_the_gateway_would_tell_it(reads: bool) -> None:
    """Tool outcomes only if the predictor reads them, because the gateway does not extract them from messages
    otherwise."""
    told: list[Progress] = []

    class RecordingOracle(Oracle):
        reads_outcomes = reads

        def predict(self, progress: Progress) -> Prediction:
            told.append(progress)
            return super().predict(progress)

        def ended(self, progress: Progress) -> None:
            told.append(progress)

    workload = draw(law_named("coding"), 4, 1)
    fleet = [load_profile("qwen3-14b-h100-tp4")]
    Rollout(workload, fleet, POLICIES["heddle"], Limits(), RecordingOracle(workload.trajectories)).run()
    assert len(told) == workload.num_turns + len(workload.trajectories)
    assert any(progress.outcomes for progress in told) == reads
