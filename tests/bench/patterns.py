"""What it is worth that equal engines are not dealt to in turns: `python -m tests.bench.patterns`.

Every n-th trajectory is much longer than the others, and nobody knows it. First rollouts, in virtual time.
"""

from statistics import geometric_mean

from engines.profiles import load_profile
from heddle.trial import simulated_makespan_s
from workloads.trajectories import Trajectory, Turn, Workload

# Trajectories, which of them are long, engines.
PATTERNS = ((128, 2, 2), (120, 3, 2), (120, 20, 2), (100, 10, 3), (128, 4, 4), (120, 6, 4), (96, 8, 8))
# Output tokens of long ones and of the others.
LENGTHS = ((8_000, 2_000), (20_000, 1_000), (100_000, 500))
# Turns of each, and seconds of a tool call.
TURNS = ((1, 0.0), (8, 0.5))
POLICIES = ("heddle", "round-robin", "slime", "power-of-two", "thunderagent", "verl", "cache-aware")


def workload(number: int, period: int, long: int, short: int, num_turns: int, tool_s: float) -> Workload:
    """Trajectories without siblings."""

    def turns(output_tokens: int) -> tuple[Turn, ...]:
        each = max(output_tokens // num_turns, 1)
        return (Turn(0, each, tool_s), *(Turn(200, each, tool_s) for _ in range(num_turns - 1)))

    return Workload(
        f"every {period}th is long",
        tuple(Trajectory(f"t{n}", f"g{n}", 500, turns(short if n % period else long)) for n in range(number)),
    )


def main() -> None:
    profile = load_profile("qwen3-14b-h100-tp1")
    print(f"| turns; every n-th of so many, engines | {' | '.join(POLICIES)} |\n|{'---|' * (len(POLICIES) + 1)}")
    for num_turns, tool_s in TURNS:
        for number, period, num_engines in PATTERNS:
            ratios: dict[str, list[float]] = {policy: [] for policy in POLICIES}
            for long, short in LENGTHS:
                played = workload(number, period, long, short, num_turns, tool_s)
                makespans = {
                    policy: simulated_makespan_s(played, [profile] * num_engines, policy, 0.0) for policy in POLICIES
                }
                for policy, makespan_s in makespans.items():
                    ratios[policy].append(makespan_s / makespans["heddle"])
            cells = " | ".join(f"x{geometric_mean(ratios[policy]):.2f}" for policy in POLICIES)
            print(f"| {num_turns}; {period} of {number}, {num_engines} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
