"""How long plans take: 10,000 trajectories on 64 engines, and fleets for 6,400 trajectories on 64 GPUs; one core.

Run as a script it prints the figures:

    python -m tests.bench.test_partition_speed
"""

import random
from collections.abc import Callable
from time import process_time

import pytest

from scheduling.estimate import Remaining
from scheduling.fleets import GpuBudget
from scheduling.heddle_groups import heddle_groups
from scheduling.partition import Presorted, partition
from scheduling.running_sums import LoadedEngine
from scheduling.scaling import Search, annealed, enumerated, homogeneous, longest_reach
from tests.scheduling.plans import PROFILES, coding_rollout, engines_of

FLEETS = {
    "TP 1": [1] * 64,
    "TP 4": [4] * 64,
    "TP 8": [8] * 64,
    "four kinds": [8] * 4 + [4] * 8 + [2] * 20 + [1] * 32,
}

# Under 100 ms on an idle core; tests run on busy ones.
CEILING_S = 0.5


def seconds(do: Callable[[], object], repeats: int = 3) -> float:
    """The least processor time of several runs."""
    times = []
    for _ in range(repeats):
        started_at = process_time()
        do()
        times.append(process_time() - started_at)
    return min(times)


@pytest.fixture(scope="module")
def rollout() -> list[Remaining]:
    return coding_rollout(10_000, seed=1)


@pytest.mark.parametrize("fleet", FLEETS.values(), ids=FLEETS)
def test_a_partition_takes_less_than_half_a_second(fleet: list[int], rollout: list[Remaining]) -> None:
    """10,000 trajectories on 64 engines: streams do not stall for long meanwhile."""
    assert seconds(lambda: partition(rollout, engines_of(fleet))) < CEILING_S


def fleet_of(rollout: list[Remaining], search: Search, budget: GpuBudget) -> tuple[int, ...]:
    kinds = {tp: LoadedEngine(profile) for tp, profile in PROFILES.items()}
    return search(Presorted(rollout), kinds, budget)


def test_a_fleet_plan_takes_less_than_half_a_second(rollout: list[Remaining]) -> None:
    """64 GPUs for 6,400 trajectories, by the search that plans use by default."""
    assert seconds(lambda: fleet_of(rollout[:6_400], longest_reach, GpuBudget(64))) < CEILING_S


def main() -> None:
    rollout = coding_rollout(10_000, seed=1)
    for name, fleet in FLEETS.items():
        took_s = seconds(lambda fleet=fleet: partition(rollout, engines_of(fleet)))  # type: ignore[misc]
        print(f"partition, 10,000 on 64 engines, {name:11} {1000 * took_s:7.1f} ms")
    for search in (homogeneous, longest_reach, enumerated, annealed(random.Random(1).random)):
        for mixed_nodes in (False, True):
            budget = GpuBudget(64, mixed_nodes=mixed_nodes)
            took_s = seconds(lambda search=search, budget=budget: fleet_of(rollout[:6_400], search, budget))  # type: ignore[misc]
            nodes = "mixed nodes" if mixed_nodes else "64 GPUs"
            print(f"fleet, 6,400 trajectories, {search.__name__:13} {nodes:11} {1000 * took_s:7.1f} ms")
    took_s = seconds(lambda: heddle_groups(rollout[:6_400], [PROFILES[4]] * 16))
    print(f"Heddle's dynamic program, 6,400 on 16     {1000 * took_s:7.1f} ms")


if __name__ == "__main__":
    main()
