"""Makes a turn at its arrival, with its facts, key and claim, and a trajectory when it is first heard of."""

from scheduling.limits import Limits
from scheduling.order import Order, TurnFacts
from scheduling.state import Trajectory, Turn
from scheduling.types import TrajectoryDeclared, TurnArrived


def trajectory_of(event: TurnArrived | TrajectoryDeclared, ordinal: int, at: float) -> Trajectory:
    """A trajectory that was not known; `ordinal` counts trajectories."""
    return Trajectory(
        trajectory_id=event.trajectory_id,
        ordinal=ordinal,
        group_id=event.group_id,
        rollout_id=event.rollout_id,
        created_at=at,
        last_at=at,
        prediction=event.prediction,
    )


def turn_of(event: TurnArrived, trajectory: Trajectory, ordinal: int, at: float, order: Order, limits: Limits) -> Turn:
    """The turn that a client asks for, not queued yet; `ordinal` counts turns and makes keys unique.

    It claims its prompt and the usual answer of its trajectory.
    """
    facts = TurnFacts(
        ordinal,
        trajectory.ordinal,
        at,
        event.prompt_tokens,
        trajectory.output_tokens,
        event.prediction,
        trajectory.group_id or event.group_id,
        trajectory.num_turns,
        trajectory.context_tokens,
        trajectory.home,
    )
    key = (event.priority, order(facts, limits), ordinal)
    turn = Turn(event.turn_id, trajectory, event.model, facts, key, at)
    turn.claim_tokens = event.prompt_tokens
    if limits.answer_tokens:
        made_tokens = trajectory.output_tokens + limits.answer_tokens
        turn.claim_tokens += made_tokens // (trajectory.num_turns + 1)
    return turn
