"""Every bound of the scheduler, each with the reason of its default."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler.

    Args:
        kv_watermark: share of an engine's KV up to which trajectories may enter. Between 0.8 and 0.97 it changes the
            makespan by under 2 % (policy study); the rest is room for running contexts to grow.
        answer_tokens: the expected answer of a turn while nothing is known of its trajectory, then a prior for the mean
            of its answers. A turn claims its expected answer in advance. If answers count only when they end, engines
            are full before their claims are, and evict. The default is what coding and search agents write per turn; 0
            claims nothing in advance.
        in_tool_lease_s: how long a trajectory in a tool call keeps its KV claim against entrants. None: as learned from
            the fleet's tool calls (tool_calls.py). While too few are known, as long as prefilling what runs on its
            engine would take. A kept context costs the engine the tokens of one more turn that could run in its place;
            prefilling it again costs the tokens of all running turns meanwhile. If nobody knows when a tool call ends,
            it is best to keep the context until both costs are equal: at most twice the cost of knowing (the ski-rental
            problem).
        entry_patience_s: a turn that has waited this long may take the claim of any trajectory in a tool call, so that
            nothing starves behind residents that never end. None: half of `queue_timeout_s`, so that it has time left
            to run. Shorter patience makes a rollout longer if its contexts do not fit: the contexts that it takes are
            the long ones, which must be prefilled again.
        ageing_tokens_per_s: a second of waiting counts as this many tokens of the order. At 100 and longest first, the
            shortest trajectory passes a 40,000-token one that arrives 400 s after it.
        max_waiting_turns: turns in the queues; more are refused with 429. Above any rollout known to us (6,400).
        queue_timeout_s: longest wait in the queue. Half an hour is for a rollout's step, not for a client's patience.
        max_attempts: legs that a turn may lose to engines before its client gets an error. A busy engine costs no
            attempt: the turn waits for it, or for another engine, as long as turns may wait.
        max_killed_engines: engines that may be lost after they broke off one turn, before they made anything of it. One
            may die by chance; a second one probably died of the request, which must not kill the rest of the fleet.
        retry_pause_s: how long a turn avoids an engine that failed it, so that the only engine, busy or dying, does not
            use up all attempts within a millisecond.
        preempt_margin_tokens: a waiting turn takes the slot of a running one if it is more urgent by this many
            predicted tokens: some ten turns of a coding agent, because a swap costs a step or two of the whole engine.
        preempt_after_s: a leg runs for at least this long before it is preempted; else turns would take slots from each
            other all the time.
        gather_max_s: a turn that may run waits at most this long for others, to be prefilled in one step with them
            (gathering.py). On an H200 the rule itself asks for 0.05 to 0.2 s, and longer bounds change nothing
            (docs/studies.md); this one is for profiles that are wrong. 0: never.
        sends_ahead: legs are sent before a slot is free for them, where a request takes time to arrive (transit.py).
        trajectory_ttl_s: an idle trajectory is over after this long, for agents that never call finish.
        retention_s: how long ended trajectories can still be read after the last one of their rollout has ended: a
            trainer reads a rollout when it is over, and needs all of it. Without a rollout, after its own end.
        max_token_age_s: how long an ended trajectory is kept at most, unless `retention_s` is longer. A rollout goes on
            for ever if a client names the same one all the time. The gateway drops tokens at the same age, and no
            trainer has a use for a trajectory without its tokens.
        max_trajectories: trajectories kept in memory; the longest ended go first, then the longest idle. Thirty
            rollouts of 6,400.
    """

    kv_watermark: float = 0.9
    answer_tokens: int = 500
    in_tool_lease_s: float | None = None
    entry_patience_s: float | None = None
    ageing_tokens_per_s: float = 100.0
    max_waiting_turns: int = 20_000
    queue_timeout_s: float = 1_800.0
    max_attempts: int = 3
    max_killed_engines: int = 2
    retry_pause_s: float = 2.0
    preempt_margin_tokens: float = 4_000.0
    preempt_after_s: float = 5.0
    gather_max_s: float = 0.25
    sends_ahead: bool = True
    trajectory_ttl_s: float = 3_600.0
    retention_s: float = 3_600.0
    max_token_age_s: float = 14_400.0
    max_trajectories: int = 200_000

    @property
    def patience_s(self) -> float:
        """Seconds after which a waiting turn may take the claim of any trajectory in a tool call."""
        return self.queue_timeout_s / 2 if self.entry_patience_s is None else self.entry_patience_s
