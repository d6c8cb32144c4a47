"""Predicts a trajectory's total output from its finished siblings and from the output it has made so far.

Sibling lengths are by far the best predictor (log-Pearson 0.67 to 0.86 from one sibling, MCPMark trajectories); prompt
length is worthless (0.12). Totals are assumed log-normal with a spread between groups and a spread within. A group's
log-mean is shrunk towards that of all groups, and the prediction is conditioned on the output already made.
"""

import math
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from statistics import NormalDist

import orjson

from predictor.progress import Progress
from scheduling.types import Prediction

_NORMAL = NormalDist()
_P90 = _NORMAL.inv_cdf(0.9)
_SQRT_2 = math.sqrt(2)
_LEAST = 1e-300  # 37 deviations up: an unpredicted total; the output already made then tells more


@dataclass(frozen=True, slots=True)
class SiblingSettings:
    """Assumptions until data replace them, and limits.

    Args:
        typical_tokens: median total output before any trajectory has ended.
        spread: standard deviation of log totals; 0.97 in long-tailed rollouts (policy study).
        within_share: share of that variance between siblings; 0.35 at a within-group correlation of 0.65.
        prior_weight: finished trajectories that `typical_tokens` counts as, so that the first one does not replace it.
        memory: finished trajectories over which the global mean is an exponential average, so that it follows drift.
        max_groups: groups remembered; the longest unused goes first.
    """

    typical_tokens: float = 2_000.0
    spread: float = 0.97
    within_share: float = 0.35
    prior_weight: int = 8
    memory: int = 500
    max_groups: int = 50_000


class SiblingPredictor:
    """Learns from each finished trajectory; predicts at every turn."""

    reads_outcomes = False

    def __init__(self, settings: SiblingSettings | None = None) -> None:
        self._settings = settings or SiblingSettings()
        self._global_log = math.log(self._settings.typical_tokens)
        self._num_seen = 0
        self._groups: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def predict(self, progress: Progress) -> Prediction:
        """Predicted total output of this trajectory."""
        variance = self._settings.spread**2
        within = variance * self._settings.within_share
        between = variance - within
        num, log_sum = self._groups.get(progress.group_id, (0, 0.0))
        # The normal posterior of the group's log-mean after `num` siblings.
        precision = 1 / between + num / within
        mean = (self._global_log / between + log_sum / within) / precision
        return _above(mean, math.sqrt(within + 1 / precision), progress.output_tokens)

    def ended(self, progress: Progress) -> None:
        """Learn from a trajectory that ended; one without output is ignored."""
        if not progress.output_tokens:
            return
        group_id, log_total = progress.group_id, math.log(progress.output_tokens)
        self._num_seen += 1
        weight = min(self._num_seen + self._settings.prior_weight, self._settings.memory)
        self._global_log += (log_total - self._global_log) / weight
        num, log_sum = self._groups.pop(group_id, (0, 0.0))
        self._groups[group_id] = (num + 1, log_sum + log_total)
        if len(self._groups) > self._settings.max_groups:
            self._groups.popitem(last=False)

    def dropped(self, trajectory_id: str) -> None:
        """Nothing to forget: running trajectories are not remembered here."""

    def dump(self) -> bytes:
        """What was learned, to be stored."""
        return orjson.dumps(
            {"global_log": self._global_log, "num_seen": self._num_seen, "groups": list(self._groups.items())}
        )

    def restore(self, dumped: bytes, running: Container[str] = ()) -> None:
        """Restore what an earlier process learned. Raises ValueError if the dump is of another kind."""
        state = orjson.loads(dumped)
        try:
            groups = OrderedDict((group_id, (int(num), float(total))) for group_id, (num, total) in state["groups"])
            self._global_log, self._num_seen = float(state["global_log"]), int(state["num_seen"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not what a sibling predictor learned: {error!r}") from None
        self._groups = groups


def _above(mean: float, spread: float, floor: int) -> Prediction:
    """Mean and 90th percentile of a log-normal, given that it is above `floor`."""
    if floor <= 0:
        return Prediction(math.exp(mean + spread**2 / 2), math.exp(mean + _P90 * spread))
    cut = (math.log(floor) - mean) / spread
    tail = max(_beyond(cut), _LEAST)
    expected = math.exp(mean + spread**2 / 2) * _beyond(cut - spread) / tail
    p90 = math.exp(mean - spread * _NORMAL.inv_cdf(0.1 * tail))
    expected = max(expected, floor + 1.0)
    return Prediction(expected, max(p90, expected))


def _beyond(z: float) -> float:
    """The probability of a normal above `z`; 1 minus the distribution function has no digits left from 6 on."""
    return math.erfc(z / _SQRT_2) / 2
