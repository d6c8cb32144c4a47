"""`make rivals` before anything starts: the workload is what its page says, and a router is told what was measured."""

import statistics

import orjson

from heddle.rivals import BLOCK_TOKENS, CASES, MAX_CONTEXT_TOKENS, NUM_ENGINES, program_scheduling, workload
from scheduling.cost import EngineProfile

SEEDS = range(1, 6)


def test_kv_binds_in_one_case_and_not_in_the_other() -> None:
    """All contexts, each half done, take 1.8 to 3 times the KV; where there is plenty all fit; one always does."""
    binds, plenty = (NUM_ENGINES * BLOCK_TOKENS * blocks for blocks in CASES.values())
    for seed in SEEDS:
        played = workload(seed)
        half_done = sum((t.context_tokens + t.total_tokens) / 2 for t in played.trajectories)
        assert 1.8 < half_done / binds < 3.0
        assert played.total_tokens < plenty
        assert played.max_context_tokens < MAX_CONTEXT_TOKENS < binds / NUM_ENGINES


def test_trajectories_are_of_groups_and_long_tailed() -> None:
    """Three groups of 16; the longest is more than twice the median; tools take little."""
    for seed in SEEDS:
        played = workload(seed)
        totals = [trajectory.total_tokens for trajectory in played.trajectories]
        assert [len(siblings) for siblings in played.groups.values()] == [16, 16, 16]
        assert 2_000 < statistics.median(totals) < max(totals) / 2
        assert statistics.mean(trajectory.tool_s for trajectory in played.trajectories) < 2.5


def test_a_router_is_told_what_the_engines_take() -> None:
    """Milliseconds become seconds; a fit's negative coefficient becomes none, which the router would refuse."""
    profile = EngineProfile("n", "m", "g", 1, 16, 24_576, 0, 4.0, 0.5, 0.25, 60.0, -1.0, "here", 10.0)
    said = orjson.loads(program_scheduling(profile))
    assert said["token_capacity_per_target"] == 24_576
    assert list(said["prefill_cost_model"].values()) == [0.01, 0.06, 0.0]
    assert list(said["decode_throughput_model"].values()) == [0.004, 0.0005, 0.25e-6]
