"""What must hold of a scheduler between two events; for tests and for the simulator."""

from collections.abc import Mapping
from dataclasses import replace
from math import isclose

from scheduling.engine import Engine
from scheduling.estimate import estimate_finish_s
from scheduling.placement import UNMEASURED
from scheduling.policy import Policy
from scheduling.queues import Queues
from scheduling.state import Trajectory, Turn, TurnState


def check(
    policy: Policy,
    engines: Mapping[str, Engine],
    trajectories: Mapping[str, Trajectory],
    turns: Mapping[str, Turn],
    queues: Queues,
) -> None:
    """Assert that the state is consistent."""
    for turn in turns.values():
        assert turn.trajectory.turns[turn.turn_id] is turn
        assert trajectories[turn.trajectory.trajectory_id] is turn.trajectory
        assert (turn.state is TurnState.WAITING) == (turn.queue is not None)
    assert {turn for trajectory in trajectories.values() for turn in trajectory.turns} == set(turns)
    for turn in turns.values():
        awaited = queues.awaited_by.get(turn)
        assert awaited is None or (awaited.reserved_for is turn and turn not in queues.engine_of)
    lists = list(queues.homeless.values())
    for engine in engines.values():
        assert engine.reserved_for is None or queues.awaited_by[engine.reserved_for] is engine
        assert engine.reserved_for is None or engine.reserved_for.turn_id in turns
        lists.append(engine.returning)
        _check_engine(policy, engine, trajectories, queues)
    for queue in lists:
        assert [turn.key for turn in queue] == sorted(turn.key for turn in queue)
        assert all(turn.queue is queue for turn in queue)
    queued = sorted(turn.turn_id for queue in lists for turn in queue)
    assert queued == sorted(turn.turn_id for turn in turns.values() if turn.state is TurnState.WAITING)
    for turn in (turn for queue in queues.homeless.values() for turn in queue):
        home = engines.get(turn.trajectory.home or "")
        is_resident = home is not None and turn.trajectory.trajectory_id in home.claims
        largest = max((engine.room for engine in engines.values() if engine.serves(turn.model)), default=0.0)
        serving = [
            engine
            for engine in engines.values()
            if engine.serves(turn.model) and (turn.claim_tokens <= engine.room or turn.claim_tokens > largest)
        ]
        assert home not in serving or not is_resident or not policy.is_sticky or turn.avoided
        for engine in serving:
            is_empty = not engine.claims and not engine.running
            assert not is_empty or turn.avoided, "a turn waits beside an empty engine"


def _check_engine(policy: Policy, engine: Engine, trajectories: Mapping[str, Trajectory], queues: Queues) -> None:
    assert not engine.returning or not engine.accepting or not engine.has_slot, "a resident waits beside a free slot"
    profile = engine.spec.profile or UNMEASURED.slower(engine.slowness.ratio)
    assert engine.kv_claimed == sum(engine.claims.values())
    longest = max(engine.claims.values(), default=0)
    assert engine.kv_held == engine.kv_claimed - engine.held_prompts.shared_tokens
    assert longest <= engine.kv_held <= engine.kv_claimed, "of what residents claim, only what is shared counts less"
    assert isclose(
        engine.work.total_tokens, sum(share[0] for share in engine.shares.values()), rel_tol=1e-6, abs_tol=1e-3
    )
    assert engine.work.longest_tokens >= max((share[2] for share in engine.shares.values()), default=0.0)
    timing = replace(profile, slots=engine.slots, kv_capacity_tokens=engine.spec.kv_capacity_tokens)
    assert engine.finish_s == estimate_finish_s(timing, engine.work)
    assert set(engine.shares) == set(engine.claims)
    assert set(engine.prefills) <= set(engine.claims)
    assert engine.uncached_tokens == sum(engine.prefills.values())
    if engine.claims:
        context_tokens = engine.kv_claimed / len(engine.claims)
        assert engine.refill_s == max(len(engine.running), 1) * profile.prefill_s(context_tokens)
    assert list(engine.in_tool.values()) == sorted(engine.in_tool.values())
    for trajectory_id in engine.claims:
        trajectory = trajectories[trajectory_id]
        assert trajectory.home == engine.spec.engine_id
        assert bool(trajectory.turns) != (trajectory_id in engine.in_tool)
    assert set(engine.in_tool) <= set(engine.claims)
    for turn in engine.running.values():
        assert turn.state is TurnState.RUNNING and queues.engine_of[turn] is engine
        is_home = turn.trajectory.home == engine.spec.engine_id
        assert (turn.trajectory.trajectory_id in engine.claims) == is_home
    for turn in engine.returning:
        assert policy.holds_turns and engine.serves(turn.model)
        assert queues.engine_of[turn] is engine and turn.trajectory.home == engine.spec.engine_id
