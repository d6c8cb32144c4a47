"""When: the key by which waiting turns are ordered. Lower is earlier.

A key is made once, when its turn arrives, and does not change while the turn waits, so queues are plain sorted lists.
Ageing still works: if urgency grows linearly with waiting, two turns keep the difference they arrived with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log

from scheduling.limits import Limits
from scheduling.types import Prediction

# How much the longest trajectories matter: the soft maximum with weights total ** 4. At 10 only they count, at 2 too
# little; between 3 and 5 makespans differ by 1 % (scenarios and recorded agents, three seeds).
WEIGHT_EXPONENT = 4
# A turn that is e times as urgent may arrive later by the time in which ageing adds this many tokens: 40 s by default.
URGENCY_TOKENS = 4_000.0
# The first level of attained service, in output tokens: some two turns of a coding agent.
ATTAINED_LEVEL_TOKENS = 512
# A level is later than every instant of an earlier level: no process lives for 30 years.
LEVEL_S = 1e9
# A new trajectory is later than every context that exists.
NEW_TOKENS = 1e9


@dataclass(slots=True)
class TurnFacts:
    """What an order or a placement may read. Never changed there, though not frozen, because one is made at every turn.

    Args:
        ordinal: counts all turns of this fleet from 0.
        trajectory_ordinal: counts all trajectories of this fleet from 0.
        attained_tokens: output that the trajectory already has.
        num_turns: finished turns of the trajectory.
        context_tokens: prompt and output of its last finished turn, which its home may still have in its cache.
        home: the engine that its last turn went to.
        rank: share of all live trajectories that have more output ahead of them, as last looked up; 0 unless a policy
            has a partition.
    """

    ordinal: int
    trajectory_ordinal: int
    arrived_at: float
    prompt_tokens: int
    attained_tokens: int
    prediction: Prediction
    group_id: str = ""
    num_turns: int = 0
    context_tokens: int = 0
    home: str | None = None
    rank: float = 0.0

    def share(self) -> tuple[float, float, float]:
        """What its trajectory adds to an engine's work: remaining output, mean context, 90th percentile of remaining
        output."""
        remaining = self.prediction.total_tokens - self.attained_tokens
        if remaining < 1.0:
            remaining = 1.0
        return remaining, self.prompt_tokens + remaining / 2, self.prediction.p90_tokens - self.attained_tokens

    def remaining_tokens(self) -> float:
        """Predicted output still to come, including this turn's; never less than one token."""
        remaining = self.prediction.total_tokens - self.attained_tokens
        return remaining if remaining > 1.0 else 1.0


Order = Callable[[TurnFacts, Limits], float]


def weightiest_first(turn: TurnFacts, limits: Limits) -> float:
    """Most weight for its room first: predicted total ** 4 / (context * remaining output), with ageing.

    If lengths are known well, this is longest first, which ends a rollout soonest. If they are not, totals are alike,
    and the trajectory that needs the least room for the least time goes first (Smith's rule): all are under way sooner,
    and the longest one with them, whichever it is. The exponent turns the sum of weights into a soft maximum.
    """
    total = turn.prediction.total_tokens
    area = (turn.prompt_tokens if turn.prompt_tokens > 1 else 1) * turn.remaining_tokens()
    urgency = (WEIGHT_EXPONENT * log(total) if total > 1.0 else 0.0) - log(area)
    return turn.arrived_at * limits.ageing_tokens_per_s - URGENCY_TOKENS * urgency


def longest_total_first(turn: TurnFacts, limits: Limits) -> float:
    """Predicted total work, longest first, with ageing.

    Total, not remaining: while contexts must be kept alive, longest-remaining-first makes equal trajectories take
    turns, and each swap is a prefill (policy study: up to 2x slower).
    """
    return turn.arrived_at * limits.ageing_tokens_per_s - turn.prediction.total_tokens


def first_come_first_served(turn: TurnFacts, limits: Limits) -> float:
    """Order of arrival, at every turn: what step-centric serving does."""
    return turn.arrived_at


def oldest_trajectory_first(turn: TurnFacts, limits: Limits) -> float:
    """Trajectories in order of arrival: program-level FCFS (Continuum, arXiv 2511.02230)."""
    return float(turn.trajectory_ordinal)


def shortest_first(turn: TurnFacts, limits: Limits) -> float:
    """Least predicted total work first: shortest job first, good for the mean, bad for the makespan."""
    return turn.prediction.total_tokens


def longest_remaining_first(turn: TurnFacts, limits: Limits) -> float:
    """Longest predicted remaining work first, no ageing: the Heddle paper's progressive priority (arXiv 2603.28101)."""
    return -turn.remaining_tokens()


def least_attained_first(turn: TurnFacts, limits: Limits) -> float:
    """Autellix's PLAS (arXiv 2502.13965): least service attained by the trajectory's finished turns first, in levels
    that double; first come first served within a level."""
    level = (turn.attained_tokens // ATTAINED_LEVEL_TOKENS).bit_length()
    return level * LEVEL_S + turn.arrived_at


def shortest_context_first(turn: TurnFacts, limits: Limits) -> float:
    """Trajectories that have finished a turn before new ones, each kind by shortest context first: the order in which
    ThunderAgent lets paused ones resume (arXiv 2602.13692)."""
    return turn.prompt_tokens + (0 if turn.num_turns else NEW_TOKENS)
