"""When to reshape a fleet: decisions with hysteresis.

A new fleet must pay for its relaunches and then still be clearly better. A chosen fleet stays until another one is
better by that margin, so estimates that fluctuate around equality change nothing. Between rollouts, a change pays over
the coming rollouts, and only if lengths have drifted by more than chance. Within a rollout it must pay at once, and
only a trusted predictor may ask for it. In the policy study, reshaping was insurance against a wrong TP size, and never
better than the right fleet from the start.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from scheduling.estimate import Remaining
from scheduling.scaling import FleetPlan, PlannedEngine
from scheduling.types import TrajectoryRecord

# Seconds until a new engine serves.
# vLLM 0.11 starts models of 0.6B to 30B in 38 to 58 s (its post on sleep mode); 45 s with the weights on a local disk.
COLD_RELAUNCH_S = 45.0


@dataclass(frozen=True, slots=True)
class ReshapeRule:
    """What a change must promise.

    Args:
        min_gain_share: the gain that must be left after the relaunch is paid, as a share of the present time.
        num_rollouts: rollouts that the gain is expected to last, over which the relaunch is spread.
        min_correlation: log-Pearson correlation that the predictor must have shown.
    """

    min_gain_share: float
    num_rollouts: int = 1
    min_correlation: float = 0.0


# Libra acts from 5 % on; a drift lasts for several rollouts at least.
BETWEEN_ROLLOUTS = ReshapeRule(min_gain_share=0.05, num_rollouts=4)


def worth_reshaping(current_s: float, planned_s: float, relaunch_s: float, rule: ReshapeRule) -> bool:
    """Whether to change, provided that the predictor can be trusted.

    Args:
        current_s: estimated time of one rollout, or of the rest of it, with the present fleet.
        planned_s: the same after the change.
        relaunch_s: the cost of the change, paid once; 0 if training hides it.
    """
    gain_s = current_s - planned_s - relaunch_s / rule.num_rollouts
    return gain_s > rule.min_gain_share * current_s


def has_drifted(
    before: Sequence[float], now: Sequence[float], *, group_size: int = 16, sibling_correlation: float = 0.65
) -> bool:
    """Whether lengths come from another distribution: a Kolmogorov-Smirnov test at 5 %.

    Siblings are alike, so a group counts for less than its members: the sample is divided by the design effect
    `1 + (group_size - 1) * sibling_correlation`.

    Args:
        before: lengths of the rollout for which the fleet was planned; not empty.
        now: lengths of the last one; not empty.

    Cost: sorts both.
    """
    design_effect = 1 + (group_size - 1) * sibling_correlation
    sample = len(before) * len(now) / (len(before) + len(now)) / design_effect
    return _largest_distance(sorted(before), sorted(now)) > 1.358 / sqrt(sample)


def _largest_distance(before: Sequence[float], now: Sequence[float]) -> float:
    return max(
        abs(bisect_right(before, value) / len(before) - bisect_right(now, value) / len(now))
        for sample in (before, now)
        for value in sample
    )


def renumbered(planned: FleetPlan, current: FleetPlan) -> FleetPlan:
    """The same plan, with nodes numbered so that as many as possible stay as they are."""
    shapes, present = _shapes(planned.engines), _shapes(current.engines)
    number_of: dict[int, int] = {}
    for node, shape in shapes.items():
        taken = set(number_of.values())
        same = (other for other in shapes if other not in taken and present.get(other) == shape)
        if (number := next(same, None)) is not None:
            number_of[node] = number
    others = (node for node in shapes if node not in number_of)
    free = sorted(set(shapes) - set(number_of.values()))
    number_of |= dict(zip(sorted(others), free, strict=False))
    return replace(planned, engines=tuple(replace(one, node=number_of[one.node]) for one in planned.engines))


def nodes_to_relaunch(planned: FleetPlan, current: FleetPlan) -> list[int]:
    """Nodes whose engines differ, and nodes for which the plan has no engines."""
    shapes, present = _shapes(planned.engines), _shapes(current.engines)
    return sorted(node for node in shapes.keys() | present.keys() if shapes.get(node) != present.get(node))


def _shapes(engines: Iterable[PlannedEngine]) -> dict[int, list[tuple[int, str]]]:
    shapes: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for engine in engines:
        shapes[engine.node].append((engine.tp, engine.role))
    return {node: sorted(shape) for node, shape in shapes.items()}


# If tools added more than this per token of output, that does not predict what they will add.
_MAX_ADDED_SHARE = 10.0


def still_needed(record: TrajectoryRecord) -> Remaining:
    """What an active trajectory still needs of a fleet. Tools are assumed to go on adding as much per token of output
    as so far, within a limit. After one turn, tool output cannot be told from the prompt, so nothing is counted."""
    left = max(record.predicted_tokens - record.output_tokens, 1.0)
    added = max(record.context_tokens - record.output_tokens, 0)
    share = (
        min(added / record.output_tokens, _MAX_ADDED_SHARE) if record.num_turns > 1 and record.output_tokens else 0.0
    )
    return Remaining(left, record.context_tokens, share * left)
