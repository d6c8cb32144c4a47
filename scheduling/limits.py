"""Every bound of the scheduler, each with the reason of its default."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler.

    Args:
        kv_watermark: share of an engine's KV up to which trajectories may enter. Entry between 0.8 and 0.97 changes the
            makespan by under 2 % (policy study); the rest is room for running contexts to grow.
        answer_tokens: what a turn makes while nobody knows its trajectory, then a prior for the mean of its answers. So
            much is claimed when it is dispatched: where answers are not counted until they end, engines are full before
            their claims are, and evict. What coding and search agents write a turn; 0: claim nothing in advance.
        in_tool_lease_s: how long a trajectory in a tool call keeps its KV claim against others. None: as long as
            prefilling what runs on its engine would take. A context that is kept costs the engine the tokens of one
            more that could run in its place; prefilling it again costs it those of all that run, meanwhile. Who does
            not know when a tool ends does best to keep it until both are equal (the ski-rental problem: at most twice
            the cost of knowing).
        entry_patience_s: a turn that waited this long may take the claim of any trajectory in a tool call, so that
            nothing starves.
        ageing_tokens_per_s: a second of waiting counts as this many predicted tokens. At 100, the shortest trajectory
            passes a 40,000-token one that arrives 400 s after it.
        max_waiting_turns: turns in the queue; more are refused with 429. Above any rollout known to us (6,400).
        queue_timeout_s: longest wait in the queue. Half an hour: a rollout's step, not a client's patience.
        max_attempts: legs that one turn may lose to engines before its client is told. An engine that is only busy
            costs none: the turn waits for it, or for another, as long as turns may wait.
        retry_pause_s: a turn does not go back sooner to an engine that failed it, so that the only engine, busy or
            dying, does not use up all attempts within a millisecond.
        preempt_margin_tokens: a waiting turn takes the slot of a running one if it is more urgent by so many predicted
            tokens; some ten turns of a coding agent, for a swap costs a step or two of the whole engine.
        preempt_after_s: a leg runs for at least so long, or turns would take slots from each other all the time.
        trajectory_ttl_s: an idle trajectory is over after this long, for agents that never say finish.
        retention_s: how long an ended trajectory can still be looked at: a trainer reads a rollout when it is over.
        max_trajectories: trajectories that are kept in memory; the longest idle go first. Thirty rollouts (of 6,400).
    """

    kv_watermark: float = 0.9
    answer_tokens: int = 500
    in_tool_lease_s: float | None = None
    entry_patience_s: float = 300.0
    ageing_tokens_per_s: float = 100.0
    max_waiting_turns: int = 20_000
    queue_timeout_s: float = 1_800.0
    max_attempts: int = 3
    retry_pause_s: float = 2.0
    preempt_margin_tokens: float = 4_000.0
    preempt_after_s: float = 5.0
    trajectory_ttl_s: float = 3_600.0
    retention_s: float = 3_600.0
    max_trajectories: int = 200_000
