"""Single features as predictors: what a predictor must beat."""

import math
from collections.abc import Callable, Container
from statistics import fmean

from predictor.progress import Progress
from scheduling.types import Prediction

Feature = Callable[[Progress, list[int]], float]
"""From what is known of a trajectory, and from the totals of its siblings that have ended, oldest first."""


def one_sibling(_: Progress, siblings: list[int]) -> float:
    """The sibling that ended last."""
    return float(siblings[-1])


def three_siblings(_: Progress, siblings: list[int]) -> float:
    """The geometric mean of the three that ended last."""
    return math.exp(fmean(map(math.log, siblings[-3:])))


def all_siblings(_: Progress, siblings: list[int]) -> float:
    """The geometric mean of all that ended."""
    return math.exp(fmean(map(math.log, siblings)))


FEATURES: dict[str, Feature] = {
    "one sibling": one_sibling,
    "three siblings": three_siblings,
    "all siblings": all_siblings,
    "prompt length": lambda progress, _: float(progress.prompt_tokens),
    "context length": lambda progress, _: float(progress.context_tokens),
    "tokens so far": lambda progress, _: float(progress.output_tokens),
    "last turn": lambda progress, _: float(progress.last_output_tokens),
    "tool output": lambda progress, _: float(progress.context_tokens - progress.prompt_tokens - progress.output_tokens),
}


class SingleFeature:
    """Uses one feature as the total, unchanged. If the feature is not available, the geometric mean of all
    that ended."""

    reads_outcomes = False

    def __init__(self, feature: Feature) -> None:
        self._feature = feature
        self._siblings: dict[str, list[int]] = {}
        self._log_sum = 0.0
        self._num_ended = 0

    def predict(self, progress: Progress) -> Prediction:
        """The feature; never less than 1."""
        siblings = self._siblings.get(progress.group_id, [])
        try:
            value = self._feature(progress, siblings)
        except (IndexError, ValueError):
            value = math.exp(self._log_sum / max(self._num_ended, 1))
        return Prediction(max(value, 1.0), max(value, 1.0))

    def ended(self, progress: Progress) -> None:
        """Remember its total for its siblings."""
        self._siblings.setdefault(progress.group_id, []).append(max(progress.output_tokens, 1))
        self._log_sum += math.log(max(progress.output_tokens, 1))
        self._num_ended += 1

    def dropped(self, trajectory_id: str) -> None:
        """Nothing to forget: running trajectories are not remembered here."""

    def dump(self) -> bytes:
        """Nothing: it is for comparison only."""
        return b""

    def restore(self, dumped: bytes, running: Container[str] = ()) -> None:
        """Nothing."""
