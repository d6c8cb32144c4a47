"""Workloads drawn from laws: lengths of trajectories, similarity of siblings, times of tools.

A trajectory's total output is log-normal (or Pareto) and capped. Siblings share a prompt and part of their length: the
intraclass correlation of log length. The number of turns follows the length. One seed gives one workload.

The agents (coding, search, math) are those that Heddle (arXiv 2603.28101) and Libra (arXiv 2606.03077) measure. The
figures are this project's own, for its simulations and its load tests alike.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Literal, assert_never

from workloads.trajectories import Trajectory, Turn, Workload

Tail = Literal["lognormal", "pareto"]


@dataclass(frozen=True, slots=True)
class Law:
    """How trajectories of one kind of agent are distributed.

    Args:
        mean_output_tokens: Mean of a trajectory's total output before the cap (log-normal tail).
        sigma: Standard deviation of log output (log-normal tail).
        pareto_alpha: Tail index (Pareto tail); the mean is `pareto_min_tokens * alpha / (alpha - 1)`.
        pareto_min_tokens: Shortest total output (Pareto tail).
        max_output_tokens: Cap of the total output.
        sibling_correlation: Correlation of the normal scores of siblings' lengths; for the log-normal tail it is the
            intraclass correlation of log output.
        output_tokens_per_turn: Output tokens for each turn, within the bounds on turns.
        mean_tool_s, tool_sigma: Log-normal tool times.
    """

    name: str
    min_turns: int
    max_turns: int
    output_tokens_per_turn: int
    mean_tool_s: float
    tail: Tail = "lognormal"
    mean_output_tokens: float = 5_000.0
    sigma: float = 0.973
    pareto_alpha: float = 1.5
    pareto_min_tokens: float = 1_700.0
    max_output_tokens: int = 40_000
    group_size: int = 16
    sibling_correlation: float = 0.65
    min_context_tokens: int = 500
    max_context_tokens: int = 1_500
    min_new_tokens: int = 200
    max_new_tokens: int = 800
    tool_sigma: float = 1.0


CODING = Law("coding", min_turns=5, max_turns=30, output_tokens_per_turn=400, mean_tool_s=0.41)
SEARCH = Law("search", min_turns=3, max_turns=30, output_tokens_per_turn=400, mean_tool_s=1.41)
MATH = Law("math", min_turns=1, max_turns=8, output_tokens_per_turn=2_500, mean_tool_s=0.046)
LAWS = {law.name: law for law in (CODING, SEARCH, MATH)}


def light(law: Law) -> Law:
    """The law with a lighter tail and the same nominal mean."""
    return replace(law, name=f"{law.name}-light", sigma=0.6)


def heavy(law: Law) -> Law:
    """The law with a heavier tail and the same nominal mean."""
    return replace(law, name=f"{law.name}-heavy", sigma=1.3)


def pareto(law: Law) -> Law:
    """The law with a Pareto tail: infinite variance before the cap."""
    return replace(law, name=f"{law.name}-pareto", tail="pareto")


def even(law: Law) -> Law:
    """The law without a bound on turns: long trajectories have more turns, not longer ones, so pace tells nothing."""
    return replace(law, name=f"{law.name}-even", max_turns=law.max_output_tokens)


TAILS = {"light": light, "heavy": heavy, "pareto": pareto, "even": even}


def law_named(name: str) -> Law:
    """The law called `coding`, `search` or `math`, or with a tail: `coding-heavy`.

    Raises:
        ValueError: If there is no law of that name; the message lists them.
    """
    agent, _, tail = name.partition("-")
    if agent not in LAWS or (tail and tail not in TAILS):
        raise ValueError(f"no law {name!r}: choose {', '.join(LAWS)}, alone or with -{', -'.join(TAILS)}")
    return TAILS[tail](LAWS[agent]) if tail else LAWS[agent]


def draw(
    law: Law, num_trajectories: int, seed: int, *, scale: float = 1.0, tool_scale: float | None = None, epoch: int = 0
) -> Workload:
    """Trajectories of the law, group after group; the last group is cut short if the number is no multiple of its size.

    Args:
        epoch: Later epochs have the same prompts, equally hard, and other trajectories. Their ids end in `@EPOCH`.
        scale: Multiplies lengths after the draw, for small real engines; the number of turns stays.
        tool_scale: Multiplies tool times. None: `scale`.
    """
    dice = random.Random(seed)
    trajectories: list[Trajectory] = []
    for group in range(math.ceil(num_trajectories / law.group_size)):
        prompt_id = f"{law.name}-{seed}-{group}"
        context_tokens = dice.randint(law.min_context_tokens, law.max_context_tokens)
        shared_score = dice.gauss(0.0, 1.0)
        members = _draw_members(law, shared_score, dice)
        if epoch:  # the draw above is still needed, so that the next group's prompt stays the same
            members = _draw_members(law, shared_score, random.Random(f"{prompt_id}@{epoch}"))
        suffix = f"@{epoch}" if epoch else ""
        trajectories += [
            Trajectory(
                f"{prompt_id}-{member}{suffix}", f"{prompt_id}{suffix}", context_tokens, turns, prompt_id=prompt_id
            )
            for member, turns in enumerate(members)
        ]
    workload = Workload(law.name, tuple(trajectories[:num_trajectories]))
    return workload.scaled(prompts=scale, outputs=scale, tools=scale if tool_scale is None else tool_scale)


def _draw_members(law: Law, shared_score: float, dice: random.Random) -> list[tuple[Turn, ...]]:
    return [_draw_turns(law, _draw_output_tokens(law, shared_score, dice), dice) for _ in range(law.group_size)]


def _draw_output_tokens(law: Law, shared_score: float, dice: random.Random) -> int:
    correlation = law.sibling_correlation
    score = math.sqrt(correlation) * shared_score + math.sqrt(1.0 - correlation) * dice.gauss(0.0, 1.0)
    match law.tail:
        case "lognormal":
            length = law.mean_output_tokens * math.exp(law.sigma * score - law.sigma**2 / 2)
        case "pareto":
            # cdf(-score), not 1 - cdf(score): that difference loses its digits in the tail.
            length = law.pareto_min_tokens * NormalDist().cdf(-score) ** (-1.0 / law.pareto_alpha)
        case _:
            assert_never(law.tail)
    return min(law.max_output_tokens, max(law.min_turns, round(length)))


def _draw_turns(law: Law, output_tokens: int, dice: random.Random) -> tuple[Turn, ...]:
    num_turns = min(law.max_turns, max(law.min_turns, round(output_tokens / law.output_tokens_per_turn)))
    outputs = _shared_out(output_tokens, [dice.uniform(0.5, 1.5) for _ in range(num_turns)])
    turns = []
    for index, turn_tokens in enumerate(outputs):
        is_last = index == num_turns - 1
        tool_s = law.mean_tool_s * math.exp(law.tool_sigma * dice.gauss(0.0, 1.0) - law.tool_sigma**2 / 2)
        new_tokens = dice.randint(law.min_new_tokens, law.max_new_tokens)
        turns.append(Turn(new_tokens if index else 0, turn_tokens, 0.0 if is_last else tool_s))
    return tuple(turns)


def _shared_out(total: int, weights: list[float]) -> list[int]:
    """`total` divided into integers of at least 1 in proportion to the weights; they sum to `total` exactly."""
    spare = total - len(weights)
    assert spare >= 0, "fewer tokens than turns"
    ends = [0]
    reached = 0.0
    for weight in weights:
        reached += weight
        ends.append(round(spare * reached / sum(weights)))
    return [1 + end - start for start, end in pairwise(ends)]
