"""The scheduler under any order of events, on a tiny fleet with tiny limits.

The machine plays the driver: it tracks which turn runs where, answers aborts, and checks the guarantees that a driver
relies on. Properties that need a whole run are checked at its end.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engines.profiles import load_profile
from scheduling.admission import Admission
from scheduling.cost import EngineProfile
from scheduling.engine import Engine
from scheduling.limits import Limits
from scheduling.policy import HEDDLE, POLICIES, Policy
from scheduling.residency import HELD, claims_giving_way
from scheduling.scheduler import Scheduler
from scheduling.state import Trajectory, Turn
from scheduling.types import (
    Abort,
    Action,
    Dispatch,
    EngineLeaving,
    EngineLoad,
    EngineLost,
    EngineReported,
    EngineSpec,
    Event,
    Fault,
    Forget,
    ModelGone,
    Move,
    Prediction,
    Preempt,
    Refusal,
    Reject,
    Save,
    Tick,
    TrajectoryClosed,
    TrajectoryDeclared,
    TrajectoryRecord,
    TrajectoryState,
    TurnArrived,
    TurnFailed,
    TurnFinished,
    TurnPaused,
    TurnProgressed,
)

KV = 100
LIMITS = Limits(
    answer_tokens=20,
    in_tool_lease_s=5.0,
    entry_patience_s=8.0,
    max_waiting_turns=6,
    queue_timeout_s=30.0,
    max_attempts=3,
    retry_pause_s=2.0,
    preempt_after_s=1.0,
    trajectory_ttl_s=20.0,
    retention_s=10.0,
    max_token_age_s=30.0,
    max_trajectories=5,
)
EAGER = replace(load_profile("toy-cpu-tp1"), prefill_step_ms=900.0)
FAR = replace(load_profile("toy-cpu-tp1"), request_ms=2_000.0)
"""Legs are sent there ahead, once enough have begun."""
ENGINES = ["A", "B", "C"]
SERVERS = {"B": "S", "C": "S"}
"""Those that are ranks of one."""
TRAJECTORIES = ["t0", "t1", "t2", "t3", "t4", "t5", "t6"]
MODELS = ["x", "y"]

trajectory_ids = st.sampled_from(TRAJECTORIES)
rollout_ids = st.sampled_from([None, "r", "s"])
predictions = st.sampled_from([1.0, 300.0, 5_000.0, 90_000.0]).map(lambda total: Prediction(total, total))


class AnyOrder(RuleBasedStateMachine):
    """A driver that performs every action; its events come at any time and in any order."""

    policy: Policy

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0
        self.num_turns = 0
        self.num_rejects = 0
        self.engines: dict[str, EngineSpec] = {}
        self.cordoned: set[str] = set()
        self.waiting: dict[str, tuple[int, str]] = {}  # turn: last leg and trajectory
        self.running: dict[str, Dispatch] = {}
        self.aborted: dict[str, Abort] = {}
        self.preempted: dict[str, Preempt] = {}
        self.num_faults: Counter[str] = Counter()
        self.trajectory_of: dict[str, str] = {}
        self.model_of: dict[str, str] = {}
        self.saved_homes: dict[str, str | None] = {}
        self.num_early = 0
        self.scheduler = Scheduler(self.policy, LIMITS, can_preempt=True)

    @initialize(
        homes=st.lists(st.sampled_from([*ENGINES, None]), max_size=3),
        rollouts=st.lists(rollout_ids, min_size=3, max_size=3),
        states=st.lists(st.sampled_from(TrajectoryState), min_size=3, max_size=3),
    )
    def restart(self, homes: list[str | None], rollouts: list[str | None], states: list[TrajectoryState]) -> None:
        """An earlier process may have left records, in any order."""
        records = [
            TrajectoryRecord(f"t{i}", "", rollouts[i], states[i], home, 30, 10, 1, 500.0, 0.0, float(-i))
            for i, home in enumerate(homes)
        ]
        self.saved_homes = {record.trajectory_id: record.home for record in records}
        self.scheduler = Scheduler(self.policy, LIMITS, records, can_preempt=True)

    # --- events -------------------------------------------------------------------------------------------

    @rule(
        trajectory_id=trajectory_ids,
        model=st.sampled_from(MODELS),
        prompt=st.integers(1, 120),
        prediction=predictions,
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        group_id=st.sampled_from(["", "", "g", "h"]),
        rollout_id=rollout_ids,
        parts=st.sampled_from(
            [(), (("p", 5),), (("p", 20), ("pg", 10)), (("q", 100),), (("p", 10), ("pg", 5), ("pgh", 90))]
        ),
    )
    def arrive(
        self,
        trajectory_id: str,
        model: str,
        prompt: int,
        prediction: Prediction,
        priority: int,
        group_id: str,
        rollout_id: str | None,
        parts: tuple[tuple[str, int], ...],
    ) -> None:
        turn_id = f"turn{self.num_turns}"
        self.num_turns += 1
        self.waiting[turn_id] = (0, trajectory_id)
        self.trajectory_of[turn_id] = trajectory_id
        self.model_of[turn_id] = model
        self.handle(
            TurnArrived(
                self.at, turn_id, trajectory_id, model, prompt, prediction, group_id, rollout_id, priority, parts
            )
        )

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def arrive_again(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(sorted({**self.waiting, **self.running})))
        event = TurnArrived(self.at, turn_id, "t0", "x", 1, Prediction(1.0, 1.0))
        assert self.scheduler.handle(event) == [Reject(turn_id, Refusal.DUPLICATE_TURN, None)]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), output=st.integers(0, 60), prompt=st.integers(1, 120))
    def finish(self, data: st.DataObject, output: int, prompt: int) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.running)))
        leg = self.end_leg(turn_id).leg
        self.handle(TurnFinished(self.at, turn_id, leg, prompt, output))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), output=st.integers(0, 60))
    def progress(self, data: st.DataObject, output: int) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.running)))
        self.handle(TurnProgressed(self.at, turn_id, self.running[turn_id].leg, output))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fault=st.sampled_from(Fault), can_retry=st.booleans())
    def fail(self, data: st.DataObject, fault: Fault, can_retry: bool) -> None:
        self.fail_leg(data.draw(st.sampled_from(sorted(self.running))), fault, can_retry)

    @precondition(lambda self: self.aborted)
    @rule(data=st.data(), can_retry=st.booleans())
    def answer_abort(self, data: st.DataObject, can_retry: bool) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.aborted)))
        self.fail_leg(turn_id, self.aborted[turn_id].fault, can_retry)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data(), output=st.integers(0, 60))
    def pause(self, data: st.DataObject, output: int) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.preempted)))
        leg = self.end_leg(turn_id).leg
        self.waiting[turn_id] = (leg, self.trajectory_of[turn_id])
        self.handle(TurnPaused(self.at, turn_id, leg, output))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.waiting)))
        leg, _ = self.waiting.pop(turn_id)
        self.handle(TurnFailed(self.at, turn_id, leg, Fault.CLIENT_LEFT, True))

    @precondition(lambda self: self.num_turns)
    @rule(data=st.data(), leg=st.integers(0, 2), fault=st.sampled_from([Fault.ENGINE, Fault.BUSY]))
    def report_late(self, data: st.DataObject, leg: int, fault: Fault) -> None:
        """Reports on a leg that is over, a turn that waits for its next leg, or a turn that ended long ago."""
        turn_id = f"turn{data.draw(st.integers(0, self.num_turns - 1))}"
        if turn_id in self.running and leg >= self.running[turn_id].leg:
            return
        if turn_id in self.waiting and self.waiting[turn_id][0] == 0:
            return  # it was never dispatched, so nothing can report on it
        for event in (
            TurnFailed(self.at, turn_id, leg, fault, True),
            TurnFinished(self.at, turn_id, leg, 5, 5),
            TurnPaused(self.at, turn_id, leg, 5),
            TurnProgressed(self.at, turn_id, leg, 5),
        ):
            assert self.scheduler.handle(event) == []

    @rule(trajectory_id=trajectory_ids, prediction=predictions, rollout_id=rollout_ids)
    def declare(self, trajectory_id: str, prediction: Prediction, rollout_id: str | None) -> None:
        self.handle(TrajectoryDeclared(self.at, trajectory_id, prediction, rollout_id=rollout_id))

    @rule(trajectory_id=trajectory_ids, abort=st.booleans())
    def close(self, trajectory_id: str, abort: bool) -> None:
        self.handle(TrajectoryClosed(self.at, trajectory_id, abort))

    @rule(
        engine_id=st.sampled_from(ENGINES),
        models=st.sampled_from([("x",), ("y",), ("x", "y"), ("x", "y")]),
        slots=st.integers(1, 3),
        kv=st.sampled_from([0, KV, KV, KV // 2]),
        accepting=st.sampled_from([True, True, False]),
        profile=st.sampled_from([None, None, EAGER, FAR]),
        is_assumed=st.sampled_from([False, False, True]),
        load=st.none() | st.builds(EngineLoad, st.integers(0, 8), st.integers(0, 8)),
    )
    def report(
        self,
        engine_id: str,
        models: tuple[str, ...],
        slots: int,
        kv: int,
        accepting: bool,
        profile: EngineProfile | None,
        is_assumed: bool,
        load: EngineLoad | None,
    ) -> None:
        self.engines[engine_id] = EngineSpec(
            engine_id,
            frozenset(models),
            slots,
            kv,
            profile=profile,
            slots_are_assumed=is_assumed,
            server_id=SERVERS.get(engine_id, ""),
        )
        (self.cordoned.discard if accepting else self.cordoned.add)(engine_id)
        if not accepting:
            self.close_others(self.engines[engine_id])
        self.handle(EngineReported(self.at, self.engines[engine_id], load, accepting))

    def close_others(self, spec: EngineSpec) -> None:
        """The engines of one server stop taking turns together."""
        if spec.server_id:
            self.cordoned |= {name for name, other in self.engines.items() if other.server_id == spec.server_id}

    @rule(engine_id=st.sampled_from(ENGINES))
    def evacuate(self, engine_id: str) -> None:
        for action in self.handle(EngineLeaving(self.at, engine_id)):
            if isinstance(action, Move):
                assert action.source == engine_id and action.source in self.cordoned
                assert action.target in self.engines and action.target not in self.cordoned
                assert self.saved_homes[action.trajectory_id] == action.target
                assert not self.scheduler.trajectories[action.trajectory_id].turns
                self.check_watermark(action.target)

    @rule(engine_id=st.sampled_from(ENGINES))
    def lose(self, engine_id: str) -> None:
        legs = {(d.turn_id, d.leg) for d in self.running.values() if d.engine_id == engine_id}
        known = self.engines.pop(engine_id, None)
        if known is not None:
            self.close_others(known)
        actions = self.handle(EngineLost(self.at, engine_id))
        aborts = {(a.turn_id, a.leg) for a in actions if isinstance(a, Abort)}
        assert aborts <= legs and (known is None or {turn for turn, _ in legs} >= {turn for turn, _ in aborts})

    @rule(model=st.sampled_from(MODELS))
    def lose_model(self, model: str) -> None:
        known = {turn_id: turn for one in self.scheduler.trajectories.values() for turn_id, turn in one.turns.items()}
        of_model = {turn_id for turn_id in self.waiting if known[turn_id].model == model}
        actions = self.handle(ModelGone(self.at, model))
        assert {one.turn_id for one in actions if isinstance(one, Reject)} == of_model
        assert not self.waiting.keys() & of_model

    @rule(later_s=st.sampled_from([0.0, 0.5, 1.0, 3.0, 12.0, 40.0]))
    def wait(self, later_s: float) -> None:
        self.at += later_s
        self.handle(Tick(self.at))

    # --- the driver ---------------------------------------------------------------------------------------

    def fail_leg(self, turn_id: str, fault: Fault, can_retry: bool) -> None:
        """End a running leg. The scheduler then dispatches the turn again, queues it, or rejects it."""
        dispatch = self.end_leg(turn_id)
        self.num_faults[turn_id] += fault is not Fault.BUSY
        wants_retry = can_retry and fault in (Fault.ENGINE, Fault.BUSY)
        if wants_retry:
            self.waiting[turn_id] = (dispatch.leg, self.trajectory_of[turn_id])
        self.handle(TurnFailed(self.at, turn_id, dispatch.leg, fault, can_retry))
        if wants_retry and self.num_faults[turn_id] >= LIMITS.max_attempts:
            assert turn_id not in self.waiting, "attempts are used up"

    def end_leg(self, turn_id: str) -> Dispatch:
        """Drop the turn's running leg from the driver."""
        self.aborted.pop(turn_id, None)
        self.preempted.pop(turn_id, None)
        return self.running.pop(turn_id)

    def handle(self, event: Event) -> list[Action]:
        residents = {name: set(engine.claims) for name, engine in self.scheduler.engines.items()}
        over, due = self.to_be_forgotten()
        actions = self.scheduler.handle(event)
        self.check_forgotten(
            event, over, due, {action.trajectory_id for action in actions if isinstance(action, Forget)}
        )
        entered: set[str] = set()
        for action in actions:
            match action:
                case Save(record):
                    self.saved_homes[record.trajectory_id] = record.home
                case Dispatch():
                    self.take(action)
                    trajectory_id = self.trajectory_of[action.turn_id]
                    # If this event added the engine, an earlier process left its residents there: take this for one.
                    is_resident = trajectory_id in residents.get(action.engine_id, {trajectory_id})
                    if not is_resident:
                        entered.add(action.engine_id)
                case Abort(turn_id, leg, _):
                    assert self.running[turn_id].leg == leg
                    self.aborted[turn_id] = action
                case Preempt(turn_id, leg):
                    assert self.running[turn_id].leg == leg and turn_id not in self.preempted
                    self.preempted[turn_id] = action
                case Reject(turn_id):
                    del self.waiting[turn_id]
                    self.num_rejects += 1
                case Forget(trajectory_id):
                    live = {self.trajectory_of[turn_id] for turn_id in {**self.waiting, **self.running}}
                    assert trajectory_id not in live
                    del self.saved_homes[trajectory_id]
        for engine_id in entered:
            self.check_watermark(engine_id)
        return actions

    def to_be_forgotten(self) -> tuple[set[str], set[str]]:
        """Trajectories whose rollout has been over for its retention; those, and others that are too old."""
        rollouts: dict[tuple[str | None, str], list[Trajectory]] = {}
        for one in self.scheduler.trajectories.values():
            rollouts.setdefault((one.rollout_id, one.trajectory_id if one.rollout_id is None else ""), []).append(one)
        over, old = set(), set()
        for members in rollouts.values():
            ended = [one for one in members if one.state is not TrajectoryState.ACTIVE and not one.turns]
            if len(ended) == len(members) and max(one.last_at for one in ended) <= self.at - LIMITS.retention_s:
                over |= {one.trajectory_id for one in ended}
            old |= {one.trajectory_id for one in ended if one.last_at <= self.at - LIMITS.max_token_age_s}
        return over, over | old

    def check_forgotten(self, event: Event, over: set[str], due: set[str], forgotten: set[str]) -> None:
        """At a tick, what is due is forgotten. Everything else goes only for room, while there are too many: until
        there are not, or all that are left have live turns."""
        if isinstance(event, Tick):
            assert due <= forgotten
        if not forgotten <= due:
            new = getattr(event, "trajectory_id", None)
            left = self.scheduler.trajectories
            has_only_live = all(one.turns for name, one in left.items() if name != new)
            assert len(left) == LIMITS.max_trajectories or (len(left) > LIMITS.max_trajectories and has_only_live)
        self.num_early += len(forgotten - over)
        assert self.scheduler.num_forgotten_early == self.num_early

    def take(self, dispatch: Dispatch) -> None:
        """Check that the turn was waiting, has its next leg, goes to an engine that accepts, and has its home saved."""
        leg, trajectory_id = self.waiting.pop(dispatch.turn_id)
        assert dispatch.leg == leg + 1 and self.num_faults[dispatch.turn_id] < LIMITS.max_attempts
        assert dispatch.engine_id in self.engines and dispatch.engine_id not in self.cordoned
        assert self.saved_homes[trajectory_id] == dispatch.engine_id
        assert not dispatch.send_at or self.at < dispatch.send_at <= self.at + LIMITS.gather_max_s
        assert not self.is_too_small(
            dispatch.engine_id, self.scheduler.trajectories[trajectory_id].turns[dispatch.turn_id]
        )
        self.running[dispatch.turn_id] = dispatch
        if self.policy.holds_turns:
            engine = self.scheduler.engines[dispatch.engine_id]
            num_ahead = engine.slots if engine.transit.leg_s and not engine.is_roomy else 0
            assert len(engine.running) <= engine.slots + num_ahead
            assert engine.slots == engine.spec.slots or engine.spec.slots_are_assumed

    def is_too_small(self, engine_id: str, turn: Turn) -> bool:
        """Whether an engine can never hold a turn's context, and another one that accepts turns can."""

        def holds(spec: EngineSpec) -> bool:
            return not spec.kv_capacity_tokens or turn.claim_tokens <= spec.kv_capacity_tokens

        others = [
            spec for name, spec in self.engines.items() if turn.model in spec.models and name not in self.cordoned
        ]
        return not holds(self.engines[engine_id]) and any(map(holds, others))

    def check_watermark(self, engine_id: str) -> None:
        engine = self.scheduler.engines[engine_id]
        # A second turn of a resident may have a longer prompt, and claim more in the same event.
        may_grow = any(len(self.scheduler.trajectories[resident].turns) > 1 for resident in engine.claims)
        if self.policy.residency is HELD and not may_grow and engine.spec.kv_capacity_tokens and len(engine.claims) > 1:
            assert engine.kv_held <= engine.spec.kv_capacity_tokens * LIMITS.kv_watermark

    @invariant()
    def scheduler_and_driver_agree(self) -> None:
        self.scheduler.check()
        assert self.scheduler.num_waiting == len(self.waiting) <= LIMITS.max_waiting_turns + len(ENGINES) * 3
        live = {turn for known in self.scheduler.trajectories.values() for turn in known.turns}
        assert live == set(self.waiting) | set(self.running)
        assert not self.waiting or self.scheduler.next_wakeup() is not None

    @invariant()
    def no_turn_waits_beside_room_for_it(self) -> None:
        """A turn that fits on an engine waits only if that engine is reserved for a more urgent turn."""
        if self.policy.residency is not HELD:
            return
        for engine in self.scheduler.engines.values():
            reserved_key = engine.reserved_for.key if engine.reserved_for else None
            for turn in self.homeless_turns_for(engine):
                fits = claims_giving_way(engine, turn, self.at, LIMITS) is not None
                assert not fits or (reserved_key is not None and reserved_key < turn.key)

    @invariant()
    def the_cheap_test_rejects_no_turn_that_may_enter(self) -> None:
        """The cheap test that is made for many turns is never stricter than the test of each turn."""
        admission = Admission(self.policy, LIMITS, self.at)
        known = self.scheduler.trajectories.values()
        turns = [turn for trajectory in known for turn in trajectory.turns.values() if turn.turn_id in self.waiting]
        for engine in self.scheduler.engines.values():
            most_tokens = admission.most_tokens(engine)
            for turn in turns:
                if admission.claims_too_much(engine, turn, most_tokens):
                    assert admission.claims_giving_way(engine, turn) is None

    def homeless_turns_for(self, engine: Engine) -> list[Turn]:
        """Waiting turns that this engine could take now, of trajectories that are resident nowhere."""
        if not engine.accepting or not engine.has_slot:
            return []
        engines = self.scheduler.engines
        known = [self.scheduler.trajectories[trajectory_id] for _, trajectory_id in self.waiting.values()]
        turns = [turn for trajectory in known for turn in trajectory.turns.values() if turn.turn_id in self.waiting]
        return [
            turn
            for turn in turns
            if turn.model in engine.spec.models and engine.spec.engine_id not in turn.avoided
            if not self.is_too_small(engine.spec.engine_id, turn)
            if not any(turn.trajectory.trajectory_id in other.claims for other in engines.values())
        ]

    def teardown(self) -> None:
        """Once turns end and time passes, every turn is served whose model some engine serves. Once the whole fleet
        serves, every turn is, and every trajectory is forgotten."""
        self.scheduler.limits = replace(LIMITS, queue_timeout_s=float("inf"))
        num_rejects = self.num_rejects
        self.turns_end()
        served = {model for one in self.scheduler.engines.values() if one.accepting for model in one.spec.models}
        assert not self.running and not served & {self.model_of[turn_id] for turn_id in self.waiting}
        self.engines = {name: EngineSpec(name, frozenset(MODELS), 1, KV) for name in ENGINES}
        self.cordoned.clear()
        for engine in self.engines.values():
            self.handle(EngineReported(self.at, engine))
        self.turns_end()
        assert not self.waiting and not self.running and self.num_rejects == num_rejects
        while (due_at := self.scheduler.next_wakeup()) is not None:
            self.at = max(self.at, due_at)
            self.handle(Tick(self.at))
        assert not self.scheduler.trajectories and not self.saved_homes
        assert all(not engine.claims and not engine.running for engine in self.scheduler.engines.values())

    def turns_end(self) -> None:
        """Running turns end and time passes, three minutes if turns go on waiting."""
        for _ in range(200):
            for turn_id, dispatch in sorted(self.running.items()):
                self.end_leg(turn_id)
                self.handle(TurnFinished(self.at, turn_id, dispatch.leg, 10, 10))
            if not self.running and not self.waiting:
                break
            self.at = max(self.at, self.scheduler.next_wakeup() or self.at)
            self.handle(Tick(self.at))
            self.scheduler_and_driver_agree()


# When Hypothesis has found a failure, it looks for a shorter one for up to five minutes. A test that ends before tells
# nothing.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_events_in_any_order_break_no_rule(policy: Policy) -> None:
    """Whatever happens when, no turn is lost, run twice or starved, and no limit is exceeded."""
    machine = type("AnyOrder", (AnyOrder,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60 if policy is HEDDLE else 20,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
