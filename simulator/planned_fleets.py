"""Fleets that are planned before a rollout, as a controller would plan them: for the work of the previous rollout.

The plan uses the true lengths of that rollout, which had other prompts. So it knows the distribution of lengths, but
not which trajectories of the coming rollout will be long.
"""

from scheduling.estimate import Remaining
from scheduling.fleets import GpuBudget
from scheduling.running_sums import Speculation
from scheduling.scaling import MIXED_FLEET_GAIN, plan
from simulator.scenario import Fleet, Scenario
from workloads.trajectories import Trajectory

PLANNED, MIXED = "planned", "mixed"

_LEAST_GAIN = {PLANNED: MIXED_FLEET_GAIN, MIXED: 0.0}
"""What a mixed fleet must promise over the best homogeneous one: what a controller requires, or nothing."""


def planned_fleet(scenario: Scenario, kind: str, seed: int) -> Fleet:
    """The fleet that `scheduling.scaling.plan` makes of the scenario's GPUs.

    Args:
        kind: PLANNED, or MIXED: whatever fleet promises most.

    Raises:
        ValueError: the scenario has no earlier rollout, or no GPUs to divide.
    """
    earlier, gpus = scenario.earlier_workloads(seed), scenario.fleet.gpus
    if not earlier or gpus is None:
        raise ValueError(f"{scenario.name}: a planned fleet needs `earlier` rollouts and `gpus`")
    profiles = {fleet.profiles[0].tp: fleet.profiles[0] for fleet in scenario.fleets()}
    modelled = scenario.features.speculation
    chosen = plan(
        [_all_of(trajectory) for trajectory in earlier[-1].trajectories],
        profiles,
        GpuBudget(gpus),
        speculation=Speculation(modelled.speed_up, modelled.max_batch) if modelled else None,
        min_gain_share=_LEAST_GAIN[kind],
    )
    return scenario.fleet_of(chosen.tps)


def _all_of(trajectory: Trajectory) -> Remaining:
    """Everything that it needs, from its start."""
    return Remaining(
        trajectory.output_tokens,
        trajectory.context_tokens,
        new_tokens=trajectory.prompt_tokens - trajectory.context_tokens,
        uncached_tokens=trajectory.context_tokens,
        tool_s=trajectory.tool_s,
    )
