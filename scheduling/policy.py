"""A policy is a few functions and switches; the baselines have the same signature as the default policy."""

from dataclasses import dataclass, replace

from scheduling import baselines, buckets, order, placement, ranks
from scheduling.heddle_groups import heddle_groups
from scheduling.residency import HELD, PAUSED, Residency


@dataclass(frozen=True, slots=True)
class Policy:
    """How turns are scheduled.

    Args:
        order: gives the key of a waiting turn, which is also its priority at its engine.
        place: chooses the engine for a trajectory without a home, or for every turn if not sticky.
        is_sticky: a trajectory stays on the engine that holds its KV.
        holds_turns: turns wait in Heddle until their engine has a free slot; else the engine queues them.
        assigns: a trajectory has a home from its arrival on, and waits for it; else the first engine with room takes
            it.
        residency: which trajectories may have KV on an engine; None: engines evict as they like.
        move: where a trajectory moves from its home at a tool return, though it could run there at once; None: nowhere.
        preempts: a waiting turn that is much more urgent than a running one takes its slot, if the driver can preempt.
        gathers: legs are sent to an engine together, where that saves it more time than they lose (gathering.py).
        partition: gives ranks to engines; None if `place` and `move` do not use ranks.
    """

    name: str
    order: order.Order
    place: placement.Placement
    is_sticky: bool = True
    holds_turns: bool = True
    assigns: bool = False
    residency: Residency | None = None
    move: placement.Move | None = None
    preempts: bool = False
    gathers: bool = False
    partition: ranks.Partitioner | None = None


# --- Heddle -------------------------------------------------------------------------------------------------

HEDDLE = Policy(
    name="heddle",
    order=order.weightiest_first,
    place=placement.least_estimated_finish,
    residency=HELD,
    move=placement.lower_the_latest,
    gathers=True,
)

# The Heddle paper to the letter (arXiv 2603.28101): longest remaining first, trajectories placed on engines by rank and
# moved when their rank changes, no room kept for KV.
HEDDLE_PAPER = Policy(
    name="heddle-paper",
    order=order.longest_remaining_first,
    place=ranks.in_rank_group,
    assigns=True,
    move=ranks.follow_rank,
    preempts=True,
    partition=heddle_groups,
)

# Prediction-led placement that never puts a trajectory below the bucket that its prediction is sure of.
HEDDLE_BUCKETS = replace(
    HEDDLE, name="heddle-buckets", place=buckets.least_finish_above_floor, move=buckets.lower_the_latest_above_floor
)

# --- Heddle with one thing changed: what an order or a migration is worth ---------------------------------------

FCFS = replace(HEDDLE, name="fcfs", order=order.first_come_first_served)
LONGEST_FIRST = replace(HEDDLE, name="longest-first", order=order.longest_total_first)
OLDEST_FIRST = replace(HEDDLE, name="oldest-first", order=order.oldest_trajectory_first)
SHORTEST_FIRST = replace(HEDDLE, name="shortest-first", order=order.shortest_first)
REMAINING_FIRST = replace(HEDDLE, name="remaining-first", order=order.longest_remaining_first, preempts=True)
ATTAINED_SERVICE = replace(HEDDLE, name="attained-service", order=order.least_attained_first, preempts=True)
RANK_FOLLOWING = replace(
    HEDDLE,
    name="rank-following",
    place=ranks.in_rank_group,
    move=ranks.follow_rank,
    partition=heddle_groups,
)
LOAD_STEALING = replace(HEDDLE, name="load-stealing", move=baselines.steal_kv_load)

# --- other systems; their engines queue turns themselves --------------------------------------------------------

ROUND_ROBIN = Policy(
    name="round-robin",
    order=order.first_come_first_served,
    place=baselines.round_robin_turns,
    is_sticky=False,
    holds_turns=False,
)
SLIME = replace(ROUND_ROBIN, name="slime", place=baselines.least_loaded)
POWER_OF_TWO = replace(ROUND_ROBIN, name="power-of-two", place=baselines.power_of_two)
CACHE_AWARE = replace(ROUND_ROBIN, name="cache-aware", place=baselines.cache_aware)
VERL = replace(ROUND_ROBIN, name="verl", place=baselines.round_robin_trajectories, is_sticky=True)
VERL_HYBRID = replace(
    VERL,
    name="verl-hybrid",
    place=baselines.round_robin_or_least_loaded,
    move=baselines.to_least_loaded_if_unbalanced,
)
VLLM_ROUTER = replace(VERL, name="vllm-router", place=baselines.fewest_trajectories)
THUNDERAGENT = replace(
    VERL,
    name="thunderagent",
    order=order.shortest_context_first,
    place=baselines.most_free_kv,
    residency=PAUSED,
)
CMLFQ = replace(VERL, name="cmlfq", place=buckets.start_short, move=buckets.move_up)

POLICIES = {
    policy.name: policy
    for policy in (
        HEDDLE,
        HEDDLE_PAPER,
        HEDDLE_BUCKETS,
        FCFS,
        LONGEST_FIRST,
        OLDEST_FIRST,
        SHORTEST_FIRST,
        REMAINING_FIRST,
        ATTAINED_SERVICE,
        RANK_FOLLOWING,
        LOAD_STEALING,
        ROUND_ROBIN,
        SLIME,
        POWER_OF_TWO,
        CACHE_AWARE,
        VERL,
        VERL_HYBRID,
        VLLM_ROUTER,
        THUNDERAGENT,
        CMLFQ,
    )
}
