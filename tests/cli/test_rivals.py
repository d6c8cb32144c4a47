"""`make rivals` before anything starts: the workload matches its page, and a router gets what was measured."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import orjson

from heddle.rivals import BLOCK_TOKENS, CASES, MAX_CONTEXT_TOKENS, NUM_ENGINES, program_scheduling, workload
from scheduling.cost import EngineProfile

SEEDS = range(1, 6)


def test_kv_is_scarce_in_one_case_and_plentiful_in_the_other() -> None:
    """All contexts, each half done, take 1.8 to 3 times the scarce KV. The plentiful KV holds all of them, and either
    holds any one."""
    scarce, plentiful = (NUM_ENGINES * BLOCK_TOKENS * blocks for blocks in CASES.values())
    for seed in SEEDS:
        played = workload(seed)
        half_done = sum((t.context_tokens + t.total_tokens) / 2 for t in played.trajectories)
        assert 1.8 < half_done / scarce < 3.0
        assert played.total_tokens < plentiful
        assert played.max_context_tokens < MAX_CONTEXT_TOKENS < scarce / NUM_ENGINES


def test_the_workload_has_groups_and_a_long_tail() -> None:
    """Three groups of 16; the longest is more than twice the median; tools take little time."""
    for seed in SEEDS:
        played = workload(seed)
        totals = [trajectory.total_tokens for trajectory in played.trajectories]
        assert [len(siblings) for siblings in played.groups.values()] == [16, 16, 16]
        assert 2_000 < statistics.median(totals) < max(totals) / 2
        assert statistics.mean(trajectory.tool_s for trajectory in played.trajectories) < 2.5


def test_a_router_gets_the_measured_costs() -> None:
    """Milliseconds become seconds. A fit's negative coefficient becomes zero, because the router would refuse it."""
    profile = EngineProfile("n", "m", "g", 1, 16, 24_576, 0, 4.0, 0.5, 0.25, 60.0, -1.0, "here", 10.0)
    arguments = orjson.loads(program_scheduling(profile))
    assert arguments["token_capacity_per_target"] == 24_576
    assert list(arguments["prefill_cost_model"].values()) == [0.01, 0.06, 0.0]
    assert list(arguments["decode_throughput_model"].values()) == [0.004, 0.0005, 0.25e-6]


def test_without_vllm_router_nothing_is_started(tmp_path: Path) -> None:
    """Otherwise the first rollouts would have been played for nothing, minutes later."""
    command = [sys.executable, "-m", "heddle.rivals", "--work-dir", tmp_path / "work", "--venv", tmp_path / "vllm"]
    environment = os.environ | {"HEDDLE_WORK": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 2 and ended.stderr.endswith("get it with: deploy/get-bench-peers.sh\n")
    assert not (tmp_path / "work").exists()
