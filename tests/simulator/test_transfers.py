"""KV on its way between engines: what is sent, how long it takes, and when it is not worth sending."""

from dataclasses import replace

import pytest

from engines.profiles import load_profile
from engines.simulated.features import Features
from scheduling.limits import Limits
from scheduling.policy import POLICIES
from scheduling.types import Dispatch
from simulator.agent import Agent
from simulator.conditions import Conditions, Transfer
from simulator.host import Host
from simulator.predictors import Oracle
from simulator.rollout import Rollout
from simulator.transfers import Transfers
from workloads.trajectories import Trajectory, Turn, Workload

# 1,000 bytes a token and a megabyte a second: a thousand tokens take a second.
TP1 = replace(load_profile("qwen3-14b-h100-tp1"), kv_bytes_per_token=1_000, prefill_per_ktoken_ms=10_000.0)
SETTINGS = Transfer(start_s=0.5, bytes_per_s=1e6)
PIECES = [("prompt", 3_000), ("own", 2_000)]


def hosts(*names: str) -> list[Host]:
    return [Host(name, TP1, Features(), 0.0, by_priority=False) for name in names]


def holding(host: Host, num_pieces: int = 2) -> Host:
    host.engine.adopt(0.0, PIECES[:num_pieces])
    return host


def test_kv_is_sent_from_the_beginning_of_the_tool_call() -> None:
    """It takes half a second, and one second for each thousand tokens. The part that the tool call hides costs
    nothing."""
    for tool_began_at, at, there_at in ((100.0, 100.0, 105.5), (97.0, 100.0, 102.5), (90.0, 100.0, 100.0)):
        old, new = hosts("old", "new")
        assert Transfers(SETTINGS).arrival(at, tool_began_at, holding(old), new, PIECES) == pytest.approx(there_at)


def test_only_kv_that_the_new_engine_lacks_is_sent() -> None:
    """It may hold the group's prompt already. If the old engine holds no more than that, nothing is sent."""
    old, new = hosts("old", "new")
    assert Transfers(SETTINGS).arrival(100.0, 100.0, holding(old), holding(new, 1), PIECES) == pytest.approx(102.5)
    for held, there in ((0, 0), (1, 1), (1, 2)):
        old, new = hosts("old", "new")
        transfers = Transfers(Transfer(start_s=0.0, bytes_per_s=1e6))
        assert transfers.arrival(100.0, 0.0, holding(old, held), holding(new, there), PIECES) is None


def test_kv_that_is_faster_to_compute_is_not_sent() -> None:
    """Neither is any KV if engines have no transfers."""
    old, new = hosts("old", "new")
    assert Transfers(None).arrival(100.0, 0.0, holding(old), new, PIECES) is None
    prefill_s = TP1.prefill_s(2_000, 3_000)
    for start_s, is_sent in ((prefill_s - 2.1, True), (prefill_s - 1.9, False)):
        old, new = hosts("old", "new")
        arrival = Transfers(Transfer(start_s, 1e6)).arrival(100.0, 100.0, holding(old), holding(new, 1), PIECES)
        assert (arrival is not None) == is_sent


def test_an_engine_has_one_transfer_at_a_time() -> None:
    """Whether it sends or receives. Other engines are not delayed, and a transfer that was not made delays none."""
    first, second, third, fourth = hosts("first", "second", "third", "fourth")
    for host in (first, third):
        holding(host)
    transfers = Transfers(SETTINGS)
    assert Transfers(None).arrival(100.0, 100.0, first, second, PIECES) is None
    assert transfers.arrival(100.0, 100.0, first, second, PIECES) == pytest.approx(105.5)
    assert transfers.arrival(100.0, 100.0, third, fourth, PIECES) == pytest.approx(105.5)
    assert transfers.arrival(101.0, 100.0, first, fourth, PIECES) == pytest.approx(111.0), "both engines are busy"
    assert transfers.arrival(101.0, 100.0, third, second, PIECES) == pytest.approx(111.0), (
        "both engines were busy before"
    )
    (fifth,) = hosts("fifth")
    assert transfers.arrival(102.0, 100.0, first, fifth, PIECES) == pytest.approx(116.5), "the old engine is busy"
    assert transfers.arrival(103.0, 100.0, third, fourth, PIECES) == pytest.approx(116.5), "the new engine is busy"


def test_a_paused_turns_kv_can_be_sent_only_after_its_pause() -> None:
    """It did not exist before, however long ago the tool call began."""
    agent = Agent(Trajectory("t", "g", 16, (Turn(0, 400, 3.0), Turn(300, 700, 0.0))), ())
    agent.take_prompt(0.0)
    agent.finish_turn(10.0, None)
    agent.take_prompt(13.0)
    agent.begin_leg(Dispatch("t/1", 1, "e", 0, ""))
    assert agent.rested_at == 10.0
    assert agent.pause(20.0, 100) == 100 and agent.rested_at == 20.0
    assert agent.pause(25.0, 50) == 150 and agent.rested_at == 25.0


@pytest.mark.parametrize("hidden_share", [0.0, 0.25, 1.0, 3.0])
def test_a_rollout_waits_for_the_part_of_a_transfer_no_tool_hides(hidden_share: float) -> None:
    """Each turn runs on the next engine with the KV of the one before. It takes as long as on one engine, plus what is
    left of each transfer when its tool has ended."""
    tp1 = load_profile("qwen3-14b-h100-tp1")
    sent_s = 0.5 * tp1.prefill_s(8_000)
    rate = 8_100 * tp1.kv_bytes_per_token / sent_s
    turns = (Turn(0, 101, hidden_share * sent_s), Turn(16, 1, 0.0))
    workload = Workload("one", (Trajectory("t", "g", 7_999, turns),))

    def taken_s(num_engines: int, transfer: Transfer | None) -> float:
        limits, oracle = Limits(queue_timeout_s=1e6), Oracle(workload.trajectories)
        conditions = Conditions(transfer=transfer)
        policy = POLICIES["round-robin"]
        return Rollout(workload, [tp1] * num_engines, policy, limits, oracle, conditions=conditions).run().makespan_s

    at_home_s = taken_s(1, None)
    waits_s = max(1.0 - hidden_share, 0.0) * sent_s
    assert taken_s(2, Transfer(start_s=0.0, bytes_per_s=rate)) == pytest.approx(at_home_s + waits_s, abs=1e-3)
    assert taken_s(2, None) > at_home_s + 0.9 * tp1.prefill_s(8_000)


@pytest.mark.parametrize("policy", ["round-robin", "slime", "power-of-two"])
def test_what_no_engine_computed_is_not_sent(policy: str) -> None:
    """Links are so fast that every move brings the KV that there is. So all engines together compute each token of a
    prompt and of a tool's output at least once."""
    tp1 = replace(load_profile("qwen3-14b-h100-tp1"), kv_capacity_tokens=30_000)
    turns = tuple(Turn(2_000 if turn else 0, 20, 0.5) for turn in range(8))
    workload = Workload("some", tuple(Trajectory(f"t{n}", f"g{n}", 1_000, turns) for n in range(6)))
    limits, oracle = Limits(queue_timeout_s=1e6), Oracle(workload.trajectories)
    conditions = Conditions(transfer=Transfer(start_s=0.0, bytes_per_s=1e15))
    rollout = Rollout(workload, [tp1] * 3, POLICIES[policy], limits, oracle, conditions=conditions).run()
    assert rollout.num_moves
    computed = sum(engine.num_prompt_tokens - engine.num_cached_tokens for engine in rollout.engines)
    assert computed >= 6 * (1_000 + 7 * 2_000)
