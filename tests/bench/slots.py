"""What it costs not to know an engine's slots: `python -m tests.bench.slots`, simulated (scheduling/slot_search.py)."""

from dataclasses import replace
from statistics import geometric_mean

from engines.profiles import load_profile
from heddle.trial import simulated_makespan_s
from scheduling.slot_search import FIRST_SLOTS
from simulator.conditions import PLAIN, Conditions
from workloads.laws import draw, law_named

# vLLM's default on an H100, on an A100, and fewer than the search begins with.
LIMITS = (1_024, 256, 64)
CASES = (("coding", 0.1), ("math", 0.25), ("search", 0.1), ("coding", 0.3))
NUM_TRAJECTORIES = 800
SEEDS = (1, 2)
SEARCHED = Conditions(tells_slots=False)


def main() -> None:
    print("| slots; law, lengths | told | searched for | 128 | round-robin |\n|---|---|---|---|---|")
    for limit in LIMITS:
        engine = replace(load_profile("qwen3-8b-h100-tp1"), slots=limit)
        first = replace(engine, slots=min(limit, FIRST_SLOTS))
        for law, scale in CASES:
            workloads = [draw(law_named(law), NUM_TRAJECTORIES, seed, scale=scale) for seed in SEEDS]
            cells = [
                geometric_mean(simulated_makespan_s(one, [profile], policy, 0.0, conditions=how) for one in workloads)
                for profile, policy, how in (
                    (engine, "heddle", PLAIN),
                    (engine, "heddle", SEARCHED),
                    (first, "heddle", PLAIN),
                    (engine, "round-robin", PLAIN),
                )
            ]
            print(f"| {limit:,}; {law}, {scale} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
