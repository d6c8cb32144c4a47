"""What it is worth that turns begin together (scheduling/gathering.py): `python -m tests.bench.gathering [SEEDS]`.

Simulated rollouts on the H200 of docs/gpu.md, of Heddle with and without it and of two baselines, with what a prefill
costs others there, with what it may cost where prefills have graphs, too, and with nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import geometric_mean

from heddle.trial import simulated_makespan_s
from scheduling.cost import EngineProfile
from scheduling.limits import Limits
from tests.simulator.test_h200 import h200
from workloads.laws import draw, law_named

# Of the coding law: lengths, trajectories, engines and KV tokens of each.
WORKLOADS = ((0.1, 128, 1, 30_000), (0.1, 400, 4, 30_000), (0.3, 256, 2, 100_000), (1.0, 128, 1, 300_000))
TOGETHER = Limits()
AT_ONCE = Limits(gather_max_s=0.0)


def engines() -> dict[str, EngineProfile]:
    """The engines, by what a prefill costs others."""
    eager = h200().profile
    free = replace(eager, prefill_least_tokens=0)
    return {"as measured": eager, "4 ms a step": replace(free, prefill_step_ms=4.0), "nothing": free}


def ratios(engine: EngineProfile, scale: float, number: int, num_engines: int, seeds: Sequence[int]) -> list[float]:
    """Makespans of each seed without it, of thunderagent and of round-robin, divided by those with it; and the mean."""
    fleet = [engine] * num_engines
    columns: list[list[float]] = [[], [], [], []]
    for seed in seeds:
        workload = draw(law_named("coding"), number, seed, scale=scale)
        base_s = simulated_makespan_s(workload, fleet, "heddle", 0.0, TOGETHER)
        columns[0].append(base_s)
        columns[1].append(simulated_makespan_s(workload, fleet, "heddle", 0.0, AT_ONCE) / base_s)
        columns[2].append(simulated_makespan_s(workload, fleet, "thunderagent", 0.0) / base_s)
        columns[3].append(simulated_makespan_s(workload, fleet, "round-robin", 0.0) / base_s)
    return [geometric_mean(column) for column in columns] + [min(columns[1]), max(columns[1])]


def main() -> None:
    seeds = range(1, 1 + (int(sys.argv[1]) if sys.argv[1:] else 5))
    print("| a prefill costs others | lengths, agents, engines | Heddle | at once | thunderagent | round-robin |")
    print("|---|---|---|---|---|---|")
    for (name, engine), (scale, number, num_engines, kv_tokens) in product(engines().items(), WORKLOADS):
        sized = replace(engine, kv_capacity_tokens=kv_tokens)
        base_s, once, paused, robin, least, most = ratios(sized, scale, number, num_engines, seeds)
        figures = f"{base_s:.0f} s | x{once:.2f} ({least:.2f} to {most:.2f}) | x{paused:.2f} | x{robin:.2f}"
        print(f"| {name} | {scale}, {number}, {num_engines} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
