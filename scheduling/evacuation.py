"""New homes for trajectories whose engine will soon be gone, chosen in tool calls, while their KV can still be moved.

A trajectory that fits nowhere stays, and enters an engine with its next turn.
"""

from collections.abc import Iterator, Mapping

from scheduling.chooser import Chooser
from scheduling.engine import Engine
from scheduling.limits import Limits
from scheduling.state import Trajectory


def new_homes(
    source: Engine,
    engines: Mapping[str, Engine],
    trajectories: Mapping[str, Trajectory],
    chooser: Chooser,
    limits: Limits,
    at: float,
) -> Iterator[tuple[Trajectory, Engine, int]]:
    """Trajectories that leave an engine, each with its new home and the KV tokens that it claims there.

    Those with the most work left go first, because the end of the rollout waits for them. The caller must settle each
    one in its new home before it asks for the next one, so that its claim is counted.
    """
    leaving = [trajectories[trajectory_id] for trajectory_id in source.in_tool]
    leaving.sort(key=lambda trajectory: (-trajectory.remaining_tokens(), trajectory.ordinal))
    for trajectory in leaving:
        claim_tokens = source.claims[trajectory.trajectory_id]
        targets = [engine for engine in engines.values() if _takes(engine, source, trajectory, claim_tokens, limits)]
        if targets:
            yield trajectory, chooser.new_home(trajectory, targets, at), claim_tokens


def _takes(engine: Engine, source: Engine, trajectory: Trajectory, claim_tokens: int, limits: Limits) -> bool:
    """Whether an engine has the source's models and the room, and is reserved for no waiting turn."""
    if (
        claim_tokens > engine.room
        or not engine.accepting
        or not source.spec.models <= engine.spec.models
        or engine.reserved_for is not None
    ):
        return False
    capacity_tokens = engine.spec.kv_capacity_tokens * limits.kv_watermark
    found_tokens = engine.held_prompts.found_by(trajectory.prompt_within(claim_tokens))
    held_tokens = engine.kv_held + claim_tokens - found_tokens
    return not capacity_tokens or not engine.claims or held_tokens <= capacity_tokens
