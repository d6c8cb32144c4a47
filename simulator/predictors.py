"""Predictors that know the truth, wholly or in part: the references for what prediction is worth."""

import math
import random
from collections.abc import Container, Sequence
from statistics import fmean, pvariance

from predictor.progress import Progress
from scheduling.types import Prediction
from workloads.trajectories import Trajectory

MEMORY_OF_NOISE = 0.7
"""Correlation of the error from one turn to the next."""

LEAST_CORRELATION = 0.01
"""With less, the noise that makes it exceeds all numbers; this little predicts nothing already."""

_P90 = 1.2815515655446004


class Oracle:
    """Predicts the true totals."""

    reads_outcomes = False

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._totals = {t.trajectory_id: float(t.output_tokens) for t in trajectories}

    def predict(self, progress: Progress) -> Prediction:
        """The true total output."""
        total = self._totals[progress.trajectory_id]
        return Prediction(total, total)

    def ended(self, progress: Progress) -> None:
        """Nothing is learned."""

    def dropped(self, trajectory_id: str) -> None:
        """Nothing is learned."""

    def dump(self) -> bytes:
        """Nothing."""
        return b""

    def restore(self, dumped: bytes, running: Container[str] = ()) -> None:
        """Nothing."""


class Noisy(Oracle):
    """Predicts remaining work with a simulated error.

    The log of the remaining output is observed through normal noise, with a spread such that truth and observation
    correlate by `correlation`. The prediction is the mean of the truth given the observation, so it is calibrated and
    shrunk towards the mean of all. A trajectory's noise carries over from turn to turn (autoregressive, 0.7). That of a
    turn depends on nothing else, so policies are compared with the same errors.

    Args:
        correlation: log-Pearson of observed and true remaining work, from `LEAST_CORRELATION` to 1.
        max_tokens: no trajectory makes more.
    """

    def __init__(self, trajectories: Sequence[Trajectory], correlation: float, seed: int) -> None:
        super().__init__(trajectories)
        logs = [math.log(total) for total in self._totals.values()]
        self._mean, self._variance = fmean(logs), max(pvariance(logs), 1e-9)
        self._correlation = correlation
        self._max_tokens = max(self._totals.values())
        self._seed = seed
        self._noise: dict[str, list[float]] = {}

    def predict(self, progress: Progress) -> Prediction:
        """The output already made, plus the expected remaining output given the observation."""
        share = self._correlation**2  # of the variance that is explained
        remaining = max(self._totals[progress.trajectory_id] - progress.output_tokens, 1.0)
        noise = self._noise_at(progress.trajectory_id, progress.num_turns)
        seen = math.log(remaining) + noise * math.sqrt(self._variance * (1 / share - 1))
        mean = self._mean + share * (seen - self._mean)
        spread = math.sqrt(self._variance * (1 - share))
        made, most = progress.output_tokens, max(self._max_tokens, progress.output_tokens + 1.0)
        total = min(made + math.exp(mean + spread**2 / 2), most)
        return Prediction(total, max(total, min(made + math.exp(mean + _P90 * spread), most)))

    def _noise_at(self, trajectory_id: str, turn: int) -> float:
        noise = self._noise.setdefault(trajectory_id, [])
        while len(noise) <= turn:
            fresh = random.Random(f"noise/{self._seed}/{trajectory_id}/{len(noise)}").gauss(0.0, 1.0)
            new = math.sqrt(1 - MEMORY_OF_NOISE**2) * fresh
            noise.append(MEMORY_OF_NOISE * noise[-1] + new if noise else fresh)
        return noise[turn]
