"""Residency: which trajectories may have their KV on an engine. It matters more than any order (policy study).

A trajectory in a tool call keeps its KV claim, so its context is still there when it returns. Otherwise engines evict
and prefill every context again and again.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from math import exp2, inf

from scheduling.engine import Engine
from scheduling.limits import Limits
from scheduling.state import RUNNING, Trajectory, Turn

# How often ThunderAgent checks whether programs must pause (arXiv 2602.13692).
PAUSE_EVERY_S = 5.0
# How long one of its paused programs waits at most.
FORCED_RESUME_S = 1_800.0

Enter = Callable[[Engine, Turn, float, Limits], list[str] | None]
"""Trajectories that must lose their KV claim so that a turn's trajectory may be resident; None if it may not
be, now."""

Leave = Callable[[Engine, Mapping[str, Trajectory], float], list[str]]
"""Residents that must give up their claims; running ones never do."""

Most = Callable[[Engine, float, Limits], float]
"""A bound for a cheap test of many turns. A turn whose claim exceeds it by more than the prompt it may find there does
not enter, unless it is impatient or its trajectory is resident already."""


def any_claim(engine: Engine, at: float, limits: Limits) -> float:
    """No bound."""
    return inf


@dataclass(frozen=True, slots=True)
class Residency:
    """Which trajectories may have their KV on an engine.

    Args:
        most: the most that an entrant may claim, as far as that is known without the turn.
        every_s: how often `leave` is called; 0: whenever a context has grown.
        is_one_queue: a turn that fits nowhere holds back all turns behind it; else one engine is reserved for it.
    """

    enter: Enter
    leave: Leave
    most: Most = any_claim
    every_s: float = 0.0
    is_one_queue: bool = False


def claims_giving_way(engine: Engine, turn: Turn, at: float, limits: Limits) -> list[str] | None:
    """Trajectories in a tool call that must lose their KV claim so that a turn's trajectory may be resident.

    The longest idle go first: after their lease, or at once if the turn has waited for its patience.

    Returns:
        None if the trajectory may not enter now. An empty list if no claim has to give way: it is resident already, or
        stays under the watermark, or is the only one (so that a context above the watermark does not wait forever), or
        the KV capacity is unknown.
    """
    capacity_tokens = engine.spec.kv_capacity_tokens * limits.kv_watermark
    if not capacity_tokens or not engine.claims or turn.trajectory.trajectory_id in engine.claims:
        return []
    excess_tokens = engine.kv_held + turn.claim_tokens - capacity_tokens
    if excess_tokens <= 0:
        return []
    prompt = turn.trajectory.prompt_within(turn.claim_tokens)
    excess_tokens -= engine.held_prompts.found_by(prompt)
    if excess_tokens <= 0:
        return []
    if not engine.in_tool:
        return None
    is_impatient = at - turn.queued_at >= limits.patience_s
    lease_s = _lease_s(engine, limits)
    giving_way: list[str] = []
    left_by_each = engine.held_prompts.left_by(engine.in_tool, prompt)
    for trajectory_id, since in engine.in_tool.items():
        if not is_impatient and at - since < lease_s:
            break
        giving_way.append(trajectory_id)
        excess_tokens -= engine.claims[trajectory_id] - next(left_by_each)
        if excess_tokens <= 0 or len(giving_way) == len(engine.claims):
            return giving_way
    return None


def free_and_idle_tokens(engine: Engine, at: float, limits: Limits) -> float:
    """Tokens left under the watermark plus those of idle claims past their lease; no bound if all claims are.

    `claims_giving_way` checks each turn by itself, which takes most of the scheduler's time when many turns wait.
    """
    capacity_tokens = engine.spec.kv_capacity_tokens * limits.kv_watermark
    if not capacity_tokens or not engine.claims:
        return inf
    tokens = capacity_tokens - engine.kv_held
    lease_s = _lease_s(engine, limits)
    num_idle = 0
    for trajectory_id, since in engine.in_tool.items():
        if at - since < lease_s:
            return tokens
        tokens += engine.claims[trajectory_id]
        num_idle += 1
    return tokens if num_idle < len(engine.claims) else inf


def claims_beyond_capacity(engine: Engine, trajectories: Mapping[str, Trajectory], at: float) -> list[str]:
    """Residents that must give up their claims because contexts have outgrown the engine's KV.

    Only those that do not run can; the least urgent go first. Cost: linear in the residents if there is an excess.
    """
    capacity_tokens = engine.spec.kv_capacity_tokens
    excess_tokens = engine.kv_held - capacity_tokens
    if not capacity_tokens or excess_tokens <= 0:
        return []
    idle = [trajectory for trajectory in map(trajectories.__getitem__, engine.claims) if not _runs(trajectory)]
    idle.sort(key=lambda trajectory: trajectory.key, reverse=True)
    trajectory_ids = [trajectory.trajectory_id for trajectory in idle]
    return _until_freed(engine, trajectory_ids, excess_tokens, engine.held_prompts.left_by(trajectory_ids))


def room_for_a_program(engine: Engine, turn: Turn, at: float, limits: Limits) -> list[str] | None:
    """ThunderAgent's entry: while active contexts, with those in a tool call fading, stay within the engine's KV.

    No claim gives way. A turn that has waited for half an hour resumes by force.
    """
    capacity_tokens = engine.spec.kv_capacity_tokens
    if not capacity_tokens or not engine.claims or turn.trajectory.trajectory_id in engine.claims:
        return []
    fits = _fading_tokens(engine, at) + turn.context_tokens <= capacity_tokens
    return [] if fits or at - turn.queued_at >= FORCED_RESUME_S else None


def programs_to_pause(engine: Engine, trajectories: Mapping[str, Trajectory], at: float) -> list[str]:
    """ThunderAgent's pausing: trajectories in a tool call first, then those that wait; within each kind the shortest
    context first, because it is the cheapest to prefill again. Those that run go on, and can be paused at a later
    check."""
    capacity_tokens = engine.spec.kv_capacity_tokens
    excess_tokens = _fading_tokens(engine, at) - capacity_tokens
    if not capacity_tokens or excess_tokens <= 0:
        return []
    idle = [trajectory_id for trajectory_id in engine.claims if not _runs(trajectories[trajectory_id])]
    idle.sort(key=lambda trajectory_id: (trajectory_id not in engine.in_tool, engine.claims[trajectory_id]))
    return _until_freed(engine, idle, excess_tokens, repeat(0))


HELD = Residency(claims_giving_way, claims_beyond_capacity, free_and_idle_tokens)
PAUSED = Residency(room_for_a_program, programs_to_pause, every_s=PAUSE_EVERY_S, is_one_queue=True)


def _lease_s(engine: Engine, limits: Limits) -> float:
    """How long a claim in a tool call is safe from patient entrants."""
    if limits.in_tool_lease_s is not None:
        return limits.in_tool_lease_s
    learned_s = engine.tool_calls.lease_s(engine.refill_all_s)
    return engine.refill_s if learned_s is None else learned_s


def _fading_tokens(engine: Engine, at: float) -> float:
    """Claimed KV, with each context in a tool call halving every second."""
    faded = [engine.claims[name] * (1.0 - exp2(since - at)) for name, since in engine.in_tool.items()]
    return engine.kv_claimed - sum(faded, 0.0)


def _until_freed(
    engine: Engine, trajectory_ids: Iterable[str], excess_tokens: float, left_by_each: Iterable[int]
) -> list[str]:
    """As many of these trajectories, the first ones first, as free so many tokens. Of its claim, each leaves some."""
    leaving: list[str] = []
    for trajectory_id, left_tokens in zip(trajectory_ids, left_by_each, strict=False):
        if excess_tokens <= 0:
            break
        leaving.append(trajectory_id)
        excess_tokens -= engine.claims[trajectory_id] - left_tokens
    return leaving


def _runs(trajectory: Trajectory) -> bool:
    turns = trajectory.turns
    return bool(turns) and any(turn.state is RUNNING for turn in turns.values())
