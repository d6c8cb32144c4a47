"""Long streams of events drawn by seed, with every fault at once: what the state machine's short runs hardly reach."""

import pytest

from scheduling.limits import Limits
from scheduling.policy import HEDDLE, POLICIES, Policy
from scheduling.scheduler import Scheduler
from tests.scheduling.streams import Stream

LIMITS = Limits(
    answer_tokens=20,
    in_tool_lease_s=5,
    entry_patience_s=8,
    max_waiting_turns=12,
    queue_timeout_s=30,
    retry_pause_s=2,
    preempt_after_s=1,
    trajectory_ttl_s=20,
    retention_s=10,
    max_token_age_s=30,
    max_trajectories=12,
)
NUM_EVENTS = 400
NUM_SEEDS = 60
NUM_SEEDS_OF_A_BASELINE = 15


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_long_streams_with_every_fault_break_no_invariant(policy: Policy) -> None:
    """No exception is raised either, and a turn is dispatched only while it waits, with its next leg."""
    for seed in range(NUM_SEEDS if policy is HEDDLE else NUM_SEEDS_OF_A_BASELINE):
        stream = Stream(seed)
        scheduler = Scheduler(policy, LIMITS, stream.records(), can_preempt=True)
        for _ in stream.play(scheduler, NUM_EVENTS):
            scheduler.check()
