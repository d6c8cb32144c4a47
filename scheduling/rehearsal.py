"""Which fleet would have been best for a rollout that is over, had it been placed by the predictions made before it.

A plan that takes predictions at their word is wrong in two ways. Predictions are means, so they hide how long the
longest will be, and small TP sizes look better than they are; and a mixed fleet looks best to one who believes to know
who is long. A rehearsal cuts the groups by what was predicted and judges them by what came true. So a weak predictor
gets one TP size, a better one more large engines for its surprises, and only a good one a mixed fleet.

It serves the next rollout: between rollouts, with `reshaping.has_drifted` and `reshaping.worth_reshaping`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining
from scheduling.fleets import GpuBudget, TPs, largest_first
from scheduling.partition import Presorted
from scheduling.row import Row, Speculation
from scheduling.scaling import MIXED_FLEET_GAIN, FleetPlan, planned, preferred, usable_kinds


def rehearse(
    predicted: Sequence[Remaining],
    realised: Sequence[Remaining],
    profiles: Mapping[int, EngineProfile],
    budget: GpuBudget,
    *,
    speculation: Speculation | None = None,
    min_gain_share: float = MIXED_FLEET_GAIN,
) -> FleetPlan:
    """The best of all fleets for what came true, groups cut by what was predicted; moves on the way not counted.

    Args:
        predicted: what was predicted of each trajectory before its first turn; at least one.
        realised: what each needed, in the same order.
        min_gain_share: what a mixed fleet must gain over the best of one TP size.

    Cost: 165 fleets and 6,400 trajectories take 2 s: not between two turns.
    """
    presorted = Presorted(predicted)
    row = Row([realised[index] for index in presorted.order])
    kinds = usable_kinds(realised, profiles, budget, speculation)

    def makespan_s(fleet: TPs) -> float:
        engines = [kinds[tp] for tp in fleet]
        ends = pairwise([0, *presorted.cuts(engines)])
        return max(row.finish_s(engine, start, end) for engine, (start, end) in zip(engines, ends, strict=True))

    def best(fleets: Iterator[TPs]) -> tuple[TPs, float]:
        return min(((fleet, makespan_s(fleet)) for fleet in fleets), key=lambda found: found[1])

    sizes = largest_first(kinds)
    fleet, why = preferred(best(budget.uniform_fleets(sizes)), best(budget.fleets(sizes)), min_gain_share)
    return planned(presorted, row, kinds, budget, fleet, "rehearsed", why)
