"""Predicts a trajectory's total output from its siblings, its prompt's past, and its own progress.

Everything is learned while it serves, by Bayes' rule on a lattice of lengths, in four factors:

- the distribution of all lengths, by hazards, so that running trajectories count (lengths.py);
- its siblings, finished and running, and the same prompt in earlier rollouts (groups.py);
- the trajectory's own pace (pace.py);
- its length is more than the output it has made.
"""

import math
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np
import orjson

from predictor.forecast import Forecast
from predictor.groups import Group, Groups
from predictor.lattice import BINS_FROM, EDGES, PerBin, bin_of, dumped_bin
from predictor.lengths import Lengths
from predictor.pace import NUM_FEATURES, NUM_STAGES, FeatureLaw, Look, dumped_look, features_of, look_of, stage_of
from predictor.progress import Progress
from scheduling.types import Prediction

_KIND = "tabular-1"
# The share of trajectories that are nothing like their siblings: one hangs, or its tool is broken.
_ODD = 0.02
# No estimate is more certain than about one bin.
_MIN_VARIANCE = 0.3


@dataclass(frozen=True, slots=True)
class TabularSettings:
    """Assumptions until data replace them, and limits.

    Args:
        typical_tokens: median total output before anything is known.
        spread: standard deviation of log totals before anything is known; long-tailed rollouts have about 1.
        prior_weight: trajectories that these two count as, in each bin of lengths.
        memory: trajectories that count in each bin; older ones fade, so that drift is followed.
        max_groups: groups and prompts remembered; the longest unused goes first.
        max_running: running trajectories remembered, in case their end is never reported.
        uses_siblings, uses_pace: a part can be left out, to see what it is worth.
    """

    typical_tokens: float = 2_000.0
    spread: float = 1.2
    prior_weight: float = 2.0
    memory: float = 4_000.0
    max_groups: int = 20_000
    max_running: int = 100_000
    uses_siblings: bool = True
    uses_pace: bool = True


@dataclass(slots=True)
class _Running:
    group: Group
    prompt_id: str
    prompt_tokens: int
    in_bin: int = 0
    message: tuple[float, float] = (0.0, 0.0)
    from_prompt: PerBin | None = None
    looks: list[Look] = field(default_factory=list)  # when it was first seen at each stage


class TabularPredictor:
    """Learns from each trajectory at each turn; predicts at every turn."""

    reads_outcomes = False  # they add nothing to the pace (docs/simulating.md)

    def __init__(self, settings: TabularSettings | None = None) -> None:
        self._settings = settings = settings or TabularSettings()
        self._lengths = Lengths(settings.typical_tokens, settings.spread, settings.prior_weight, settings.memory)
        self._groups = Groups(self._lengths, settings.memory, settings.max_groups)
        self._pace = [FeatureLaw(self._lengths, NUM_FEATURES, settings.memory) for _ in range(NUM_STAGES)]
        self._prompts = FeatureLaw(self._lengths, 1, settings.memory)
        self._running: OrderedDict[str, _Running] = OrderedDict()
        # The bins that trajectories have reported, those of an earlier process included: the distribution of lengths
        # has them already.
        self._bins: dict[str, int] = {}
        # What a later process must know of each running trajectory: group, prompt, tokens of the prompt, looks.
        self._told: dict[str, tuple[str, str, int, list[Look]]] = {}

    def predict(self, progress: Progress) -> Prediction:
        """Mean and 90th percentile of the total output."""
        forecast = self.forecast(progress)
        mean, p90 = forecast.mean(), forecast.quantile(0.9)
        return Prediction(mean, p90 if p90 > mean else mean)

    def forecast(self, progress: Progress) -> Forecast:
        """The distribution of the total output, as known now."""
        running = self._progressed(progress)
        group = running.group
        if self._lengths.refresh():
            self._groups.refresh()
        mean, variance = self._groups.expectation(group, running.message)
        weights = self._prior(running.in_bin, mean, variance)
        if running.from_prompt is not None:
            weights *= running.from_prompt[running.in_bin :]
        if progress.num_turns and self._settings.uses_pace:
            stage, look = stage_of(progress.num_turns), look_of(progress)
            if not running.looks or stage_of(running.looks[-1][0]) < stage:
                running.looks.append(look)
            likelihood = self._pace[stage].likelihood(features_of(look), running.in_bin)
            if likelihood is not None:
                weights *= likelihood
        if progress.output_tokens:
            low, high = EDGES[running.in_bin], EDGES[running.in_bin + 1]
            left = (high - progress.output_tokens) / (high - low)
            if left < 1.0:
                weights[0] *= left if left > 0.01 else 0.01
        forecast = Forecast(progress.output_tokens, running.in_bin, weights)
        if progress.output_tokens:
            running.message = self._groups.message(group, running.message, *_own_evidence(forecast, mean, variance))
        return forecast

    def ended(self, progress: Progress) -> None:
        """Learn from a trajectory that ended; one without output is ignored."""
        if not progress.output_tokens:
            self.dropped(progress.trajectory_id)
            return
        was_seen = progress.trajectory_id in self._running
        running = self._progressed(progress)
        self._lengths.ended(running.in_bin, len(self._bins) - 1)
        self._groups.ended(running.group, running.in_bin)
        if was_seen:
            self._learn_pace(running, progress.num_turns)
        if running.prompt_tokens:
            self._prompts.learn([math.log(running.prompt_tokens)], running.in_bin)
        self.dropped(progress.trajectory_id)

    def dropped(self, trajectory_id: str) -> None:
        """Forget a trajectory that did not end by itself. What it reported so far still counts."""
        self._bins.pop(trajectory_id, None)
        self._told.pop(trajectory_id, None)
        running = self._running.pop(trajectory_id, None)
        if running is not None:
            self._groups.message(running.group, running.message, 0.0, 0.0)
            self._groups.left(running.group, running.prompt_id)

    def dump(self) -> bytes:
        """What was learned."""
        return orjson.dumps(
            {
                "kind": _KIND,
                "lengths": self._lengths.dump(),
                "groups": self._groups.dump(),
                "looks": [law.dump() for law in self._pace],
                "prompts": self._prompts.dump(),
                "heard": self._bins,
                "running": self._told,
            }
        )

    def restore(self, dumped: bytes, running: Container[str] = ()) -> None:
        """Restore a dump. Raises ValueError, with nothing changed, if it is of another kind or damaged."""
        state = orjson.loads(dumped)
        if not isinstance(state, dict) or state.get("kind") != _KIND:
            raise ValueError(f"not what a {_KIND} predictor learned")
        fresh = TabularPredictor(self._settings)
        try:
            before = state.get("heard", {})  # an older one has none
            bins = {name: dumped_bin(in_bin) for name, in_bin in before.items() if name in running}
            fresh._lengths.restore(state["lengths"], goes_on=bool(bins))
            fresh._groups.restore(state["groups"])
            for law, dumped_law in zip(fresh._pace, state["looks"], strict=True):
                law.restore(dumped_law)
            fresh._prompts.restore(state["prompts"])
            for name, (group_id, prompt_id, prompt_tokens, looks) in state.get("running", {}).items():
                if name in bins:
                    one = fresh._add(name, str(group_id), str(prompt_id), int(prompt_tokens))
                    one.in_bin = bins[name]
                    one.looks += [dumped_look(look) for look in looks]
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"not what a {_KIND} predictor learned: {error!r}") from None
        self._lengths, self._groups = fresh._lengths, fresh._groups
        self._pace, self._prompts = fresh._pace, fresh._prompts
        self._running, self._bins, self._told = fresh._running, bins, fresh._told

    def _progressed(self, progress: Progress) -> _Running:
        in_bin = bin_of(progress.output_tokens)
        running = self._running.get(progress.trajectory_id)
        if running is None:
            running = self._begun(progress)
            running.in_bin = min(self._bins.get(progress.trajectory_id, 0), in_bin)
        elif in_bin < running.in_bin:
            in_bin = running.in_bin
        self._lengths.came(running.in_bin, in_bin)
        running.in_bin = self._bins[progress.trajectory_id] = in_bin
        return running

    def _learn_pace(self, running: _Running, num_turns: int) -> None:
        """Learn how a trajectory that ended had looked at each stage. One that passed unseen, as in a process that was
        killed before it stored it, is not one that was not reached."""
        looks = {stage_of(look[0]): look for look in running.looks}
        for stage, law in enumerate(self._pace):
            if stage in looks:
                law.learn(features_of(looks[stage]), running.in_bin)
            elif num_turns <= 1 << stage:
                law.learn(None, running.in_bin)

    def _begun(self, progress: Progress) -> _Running:
        prompt_id = progress.prompt_id if self._settings.uses_siblings else ""
        group_id = progress.group_id if self._settings.uses_siblings else progress.trajectory_id
        prompt_tokens = progress.prompt_tokens if self._settings.uses_pace else 0
        running = self._add(progress.trajectory_id, group_id, prompt_id, prompt_tokens)
        if len(self._running) > self._settings.max_running:
            self.dropped(next(iter(self._running)))
        return running

    def _add(self, trajectory_id: str, group_id: str, prompt_id: str, prompt_tokens: int) -> _Running:
        group = self._groups.get(group_id, prompt_id)
        group.num_running += 1
        running = self._running[trajectory_id] = _Running(group, prompt_id, prompt_tokens)
        self._told[trajectory_id] = (group_id, prompt_id, prompt_tokens, running.looks)
        if prompt_tokens:
            running.from_prompt = self._prompts.likelihood([math.log(prompt_tokens)])
        return running

    def _prior(self, from_bin: int, mean: float, variance: float) -> PerBin:
        """Share of each bin from `from_bin` on, given the mean and variance that the siblings give.

        The distribution of all lengths, times what the siblings tell: the normal distribution that turns the mean and
        variance of all into theirs. So without siblings it is the distribution of all, whatever its shape.
        """
        lengths = self._lengths
        shares = lengths.shares[from_bin:]
        precision = 1.0 / variance - 1.0 / lengths.variance
        if precision < 1e-6:
            return shares.copy()
        peak = (mean / variance - lengths.mean / lengths.variance) / precision
        # One array from here to the end: allocating another takes as long as the computation.
        weights: PerBin = BINS_FROM[from_bin] - peak
        weights *= weights
        weights *= -0.5 * precision
        np.exp(weights, weights)
        alike = float(weights.dot(shares))
        weights += _ODD * (alike if alike > 1e-9 else 1e-9) / lengths.surviving[from_bin]
        weights *= shares
        return weights


def _own_evidence(forecast: Forecast, mean: float, variance: float) -> tuple[float, float]:
    """What a trajectory's own progress adds to what its siblings tell of its bin.

    Returns: precision, and mean times precision, of the normal distribution that turns N(mean, variance) into the
    forecast.
    """
    total, first, second, _ = forecast.sums
    first /= total
    narrowed = second / total - first * first
    if narrowed < _MIN_VARIANCE:
        narrowed = _MIN_VARIANCE
    if narrowed >= variance:
        return 0.0, 0.0
    return 1.0 / narrowed - 1.0 / variance, first / narrowed - mean / variance
