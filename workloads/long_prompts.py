"""Trajectories whose siblings share long prompts, as a trace: what docs/studies.md says of them can be played again.

    python -m workloads.long_prompts "24 of 16" --seed 1 > trace.jsonl
    heddle simulate --trace trace.jsonl --fleet FLEET.toml --policy heddle --policy cache-aware

Totals are log-normal, and siblings alike in them; the number of turns and the times of tools are exponential. All that
differs from the laws (laws.py) is what decides here: long prompts, and answers that are short beside them.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SIGMA = 0.8
SIBLING_CORRELATION = 0.65
PROMPT_SIGMA = 0.1
MIN_OUTPUT_TOKENS = 50
MAX_TURNS = 30


@dataclass(frozen=True, slots=True)
class Shape:
    """A trace: tokens of a prompt and of a trajectory's output, its turns, seconds of a tool call and tokens from it;
    all on average. With one turn on average, each trajectory has one.
    """

    num_groups: int
    group_size: int
    prompt_tokens: int
    output_tokens: int
    num_turns: int
    tool_s: int
    new_tokens: int = 200


SHAPES = {
    "24 of 16": Shape(24, 16, 15_000, 3_000, 8, 2),
    "40 of 8": Shape(40, 8, 28_000, 1_600, 6, 2),
    "12 of 16": Shape(12, 16, 20_000, 6_000, 10, 1),
    "60 of 5": Shape(60, 5, 20_000, 2_500, 10, 10),
    "8 of 16": Shape(8, 16, 12_000, 200, 1, 0),
    "6 of 16": Shape(6, 16, 60_000, 1_350, 5, 1),
    "2 of 8": Shape(2, 8, 12_000, 450, 15, 1, new_tokens=2_000),
}


def lines(shape: Shape, seed: int) -> Iterator[dict[str, Any]]:
    """The trajectories of a trace, in the form of workloads/traces.py."""
    dice = random.Random(seed)
    for group in range(shape.num_groups):
        common = dice.gauss(0, SIGMA * math.sqrt(SIBLING_CORRELATION))
        prompt_tokens = int(shape.prompt_tokens * math.exp(dice.gauss(0, PROMPT_SIGMA)))
        for member in range(shape.group_size):
            own = dice.gauss(0, SIGMA * math.sqrt(1 - SIBLING_CORRELATION))
            total = max(MIN_OUTPUT_TOKENS, int(shape.output_tokens * math.exp(common + own - SIGMA * SIGMA / 2)))
            num_turns = 1
            if shape.num_turns > 1:
                num_turns = min(MAX_TURNS, int(dice.expovariate(1 / shape.num_turns)) + 1)
            turns = [
                {
                    "new_tokens": shape.new_tokens if turn else 0,
                    "output_tokens": max(1, total // num_turns),
                    "tool_s": dice.expovariate(1 / shape.tool_s) if turn < num_turns - 1 else 0.0,
                }
                for turn in range(num_turns)
            ]
            name = f"{group}-{member}"
            yield {"trajectory_id": name, "group_id": f"g{group}", "context_tokens": prompt_tokens, "turns": turns}


def main() -> None:
    """Write a trace to standard output."""
    parser = argparse.ArgumentParser(prog="python -m workloads.long_prompts", description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=SHAPES, help="number of groups, and of siblings in each")
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args()
    for line in lines(SHAPES[parsed.shape], parsed.seed):
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
