"""The state machine that decides when each turn runs and where each trajectory lives.

`handle(event)` is the only entry point. It is synchronous: it updates the state and returns the actions to perform, in
order. Rules:

1. A turn is waiting, running or ended (state.TRANSITIONS).
2. An event about an unknown turn or an earlier leg is late, and is dropped.
3. A turn that an engine failed goes to another engine. It may return to the same one after `retry_pause_s`, or after
   the delay that a busy engine asked for. It goes to no further one once it seems to kill them.
4. A trajectory is saved when one of its turns finishes.
5. An aborted trajectory stays aborted.

dispatcher.py decides where a waiting turn queues or runs (rules 6 to 10), admission.py whether it may enter an engine
(rules 11 to 15), gathering.py whether its leg is sent at once or together with the next ones.
"""

from collections.abc import Iterable
from typing import assert_never

from scheduling import invariants
from scheduling.admission import Admission
from scheduling.arrival import trajectory_of, turn_of
from scheduling.dispatcher import Dispatcher
from scheduling.engine import Engine
from scheduling.idle import IdleTrajectories
from scheduling.limits import Limits
from scheduling.policy import Policy
from scheduling.queues import Queues
from scheduling.state import ENDED, RUNNING, WAITING, Trajectory, Turn
from scheduling.tool_calls import ToolCalls
from scheduling.types import (
    ABORTED,
    ACTIVE,
    FINISHED,
    Abort,
    Action,
    EngineLeaving,
    EngineLost,
    EngineReported,
    Event,
    Fault,
    Forget,
    ModelGone,
    Refusal,
    Reject,
    Save,
    Tick,
    TrajectoryClosed,
    TrajectoryDeclared,
    TrajectoryRecord,
    TurnArrived,
    TurnFailed,
    TurnFinished,
    TurnPaused,
    TurnProgressed,
)

# Interval between Ticks while turns wait. Leases, pauses and patience may end this much late.
TICK_S = 1.0
# How soon a refused client may try again: by then turns have ended, or another engine is up.
REFUSED_RETRY_S = 5.0


class Scheduler:
    """Schedules one fleet.

    Args:
        policy: how turns are ordered and placed.
        limits: the bounds.
        records: trajectories of an earlier process. A trajectory's home is valid again as soon as that engine reports.
        at: now.
        can_preempt: whether the driver performs Preempt. If it does not, no policy preempts.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        records: Iterable[TrajectoryRecord] = (),
        at: float = 0.0,
        *,
        can_preempt: bool = False,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.engines: dict[str, Engine] = {}
        self.trajectories: dict[str, Trajectory] = {}
        self._queues = Queues()
        self._admission = Admission(policy, limits, at)
        self._dispatcher = Dispatcher(
            policy, limits, self.engines, self.trajectories, self._queues, self._admission, at, can_preempt
        )
        self._at = at
        self._turns: dict[str, Turn] = {}
        self._gone_models: set[str] = set()  # of running turns; no engine has them any more
        self._idle = IdleTrajectories()
        self._tool_calls = ToolCalls()
        self._num_turns = 0
        self._num_trajectories = 0
        self._next_tick_at = at + TICK_S
        for record in sorted(records, key=lambda record: record.last_at):
            self._add_trajectory(Trajectory.restored(record, self._num_trajectories))

    # --- entry points ---------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action]:
        """Apply an event. Returns the actions to perform, in order."""
        if event.at > self._at:
            self._at = self._dispatcher.at = self._admission.at = event.at
        actions: list[Action] = []
        match event:
            case TurnArrived():
                self._turn_arrived(event, actions)
            case TurnFinished():
                self._turn_finished(event, actions)
            case TurnProgressed():
                self._turn_progressed(event, actions)
            case TurnFailed():
                self._turn_failed(event, actions)
            case TurnPaused():
                self._turn_paused(event, actions)
            case EngineReported():
                self._engine_reported(event, actions)
            case EngineLeaving():
                self._engine_leaving(event.engine_id, actions)
            case EngineLost():
                self._engine_lost(event.engine_id, actions)
            case ModelGone():
                self._model_gone(event.model, actions)
            case TrajectoryDeclared():
                self._trajectory_declared(event, actions)
            case TrajectoryClosed():
                self._trajectory_closed(event, actions)
            case Tick():
                self._ticked(actions)
            case _:
                assert_never(event)
        self._dispatcher.settle(actions)
        return actions

    @property
    def num_waiting(self) -> int:
        """Number of turns in the queues."""
        return self._queues.num_waiting

    @property
    def num_forgotten_early(self) -> int:
        """Number of trajectories that were forgotten before their rollout was over for `retention_s`."""
        return self._idle.num_forgotten_early

    def num_forgotten(self, rollout_id: str) -> int:
        """Number of a rollout's trajectories that were forgotten; 0 again when it has no other ones."""
        return self._idle.num_forgotten(rollout_id)

    def next_wakeup(self) -> float | None:
        """When the next Tick is due; None while there is nothing to wait for."""
        if self._queues.num_waiting or self._dispatcher.checks_on_a_timer:
            return self._next_tick_at
        due_at = self._idle.next_due_at(self.limits)
        return None if due_at is None else max(due_at, self._next_tick_at)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        waiting = [turn for turn in self._turns.values() if turn.state is WAITING]
        assert len(waiting) == self.num_waiting
        invariants.check(self.policy, self.engines, self.trajectories, self._turns, self._queues)

    # --- turns ----------------------------------------------------------------------------------------------

    def _turn_arrived(self, event: TurnArrived, actions: list[Action]) -> None:
        if event.turn_id in self._turns:
            actions.append(Reject(event.turn_id, Refusal.DUPLICATE_TURN, None))
            return
        trajectory = self.trajectories.get(event.trajectory_id)
        if trajectory is not None and trajectory.state is ABORTED:
            actions.append(Reject(event.turn_id, Refusal.TRAJECTORY_ABORTED, None))
            return
        is_new = trajectory is None
        if trajectory is None:
            trajectory = trajectory_of(event, self._num_trajectories, self._at)
        if not trajectory.num_turns and not trajectory.turns:
            trajectory.note_first_prompt(event)
        turn = turn_of(event, trajectory, self._num_turns, self._at, self.policy.order, self.limits)
        if self._queues.num_waiting >= self.limits.max_waiting_turns and not self._dispatcher.has_room_for(turn):
            actions.append(Reject(event.turn_id, Refusal.QUEUE_FULL, REFUSED_RETRY_S))
            return
        if is_new:
            self._begin(trajectory, actions)
        self._idle.remove(trajectory)
        if trajectory.num_turns and not trajectory.turns and trajectory.state is ACTIVE:
            self._tool_calls.note(self._at - trajectory.last_at)
        trajectory.group_id = trajectory.group_id or event.group_id
        is_saved = trajectory.state is FINISHED
        if trajectory.rollout_id is None and event.rollout_id is not None:
            self._idle.join(trajectory, event.rollout_id)
            is_saved = True
        if is_saved:
            trajectory.state = ACTIVE
            actions.append(Save(trajectory.record()))
        trajectory.prediction = event.prediction
        trajectory.last_at = self._at
        trajectory.key = turn.key
        self._num_turns += 1
        self._turns[turn.turn_id] = trajectory.turns[turn.turn_id] = turn
        self._dispatcher.admit(turn, actions)

    def _turn_progressed(self, event: TurnProgressed, actions: list[Action]) -> None:
        turn = self._running_turn(event.turn_id, event.leg)
        if turn is None:
            return
        engine = self._queues.engine_of[turn]
        context = turn.facts.prompt_tokens + event.output_tokens
        claimed = engine.claims.get(turn.trajectory.trajectory_id)
        if claimed is not None and context > claimed:
            engine.claim(turn.trajectory, context)
            num_residents = len(engine.claims)
            self._dispatcher.relieve(engine)
            if len(engine.claims) < num_residents:  # they may leave more room than was lacking
                self._dispatcher.fill(engine, actions)

    def _turn_finished(self, event: TurnFinished, actions: list[Action]) -> None:
        turn = self._running_turn(event.turn_id, event.leg)
        if turn is None:
            return
        engine, trajectory = self._queues.engine_of[turn], turn.trajectory
        if self._at >= engine.learns_at:
            engine.learn(turn, event.prompt_tokens, event.output_tokens, self._at)
        self._tool_calls.note_turn(self._at - turn.began_at)
        trajectory.context_tokens = event.prompt_tokens + event.output_tokens
        trajectory.output_tokens += event.output_tokens
        trajectory.num_turns += 1
        if trajectory.trajectory_id in engine.claims:
            engine.claim(trajectory, trajectory.context_tokens)
        self._end(turn)
        self._dispatcher.note(trajectory)
        actions.append(Save(trajectory.record()))
        self._dispatcher.relieve(engine)
        self._dispatcher.fill(engine, actions)

    def _turn_failed(self, event: TurnFailed, actions: list[Action]) -> None:
        turn = self._turns.get(event.turn_id)
        if turn is None or turn.leg != event.leg:
            return
        if turn.state is WAITING and event.fault is not Fault.CLIENT_LEFT:
            return  # late: that leg's end is known, and the turn waits again
        engine = self._queues.engine_of.get(turn)
        wants_retry = event.can_retry and event.fault in (Fault.ENGINE, Fault.BUSY)
        is_aborted = turn.trajectory.state is ABORTED
        is_busy = event.fault is Fault.BUSY
        turn.num_faults += not is_busy
        kills = False
        if event.broke_off and engine is not None:
            # This one may still be alive, but those before it are known to be lost.
            killed = turn.broken - self.engines.keys()
            killed.add(engine.spec.engine_id)
            kills = len(killed) >= self.limits.max_killed_engines
            turn.broken.add(engine.spec.engine_id)
        if wants_retry and not (is_aborted or kills) and turn.num_faults < self.limits.max_attempts:
            pause_s = max(event.retry_after_s or self.limits.retry_pause_s, TICK_S if is_busy else 0.0)
            failed = self._queues.engine_of[turn]
            for one in (failed,) if is_busy else (failed, *self._beside(failed)):
                turn.avoided[one.spec.engine_id] = self._at + pause_s
            # A busy engine that made nothing did no work for the turn, so its wait counts from the start: the queue
            # timeout still ends it.
            since = turn.queued_at if is_busy and not event.has_made else self._at
            self._wait_again(turn, since, actions)
        else:
            self._end(turn)
            if wants_retry and is_aborted:
                actions.append(Reject(turn.turn_id, Refusal.TRAJECTORY_ABORTED, None))
            elif wants_retry and kills:
                actions.append(Reject(turn.turn_id, Refusal.ENGINES_KILLED, None))  # whoever repeats it kills more
            elif wants_retry:
                actions.append(Reject(turn.turn_id, Refusal.ENGINE_FAILED, REFUSED_RETRY_S))
        if engine is not None:
            self._dispatcher.fill(engine, actions)

    def _turn_paused(self, event: TurnPaused, actions: list[Action]) -> None:
        turn = self._running_turn(event.turn_id, event.leg)
        if turn is None:
            return
        engine, trajectory = self._queues.engine_of[turn], turn.trajectory
        turn.claim_tokens += event.output_tokens - turn.kept_tokens
        turn.kept_tokens = event.output_tokens
        if trajectory.state is ABORTED:
            self._end(turn)
            actions.append(Reject(turn.turn_id, Refusal.TRAJECTORY_ABORTED, None))
        else:
            self._wait_again(turn, self._at, actions)
        self._dispatcher.fill(engine, actions)

    def _wait_again(self, turn: Turn, since: float, actions: list[Action]) -> None:
        if turn.model in self._gone_models:
            self._refuse_as_gone(turn, actions)
            return
        self._dispatcher.withdraw(turn)
        turn.become(WAITING)
        turn.queued_at = since
        self._dispatcher.admit(turn, actions)

    # --- trajectories ---------------------------------------------------------------------------------------

    def _trajectory_declared(self, event: TrajectoryDeclared, actions: list[Action]) -> None:
        if event.trajectory_id not in self.trajectories:
            self._begin(trajectory_of(event, self._num_trajectories, self._at), actions)

    def _trajectory_closed(self, event: TrajectoryClosed, actions: list[Action]) -> None:
        trajectory = self.trajectories.get(event.trajectory_id)
        if trajectory is None or trajectory.state is ABORTED:
            return
        if trajectory.state is FINISHED and not event.abort:
            return
        self._idle.remove(trajectory)
        trajectory.state = ABORTED if event.abort else FINISHED
        trajectory.last_at = self._at
        self._dispatcher.note(trajectory)
        if event.abort:
            for turn in list(trajectory.turns.values()):
                if turn.state is RUNNING:
                    actions.append(Abort(turn.turn_id, turn.leg, Fault.CLOSED))
                else:
                    self._end(turn)
                    actions.append(Reject(turn.turn_id, Refusal.TRAJECTORY_ABORTED, None))
        actions.append(Save(trajectory.record()))
        if not trajectory.turns:
            self._idle.add(trajectory)
            self._dispatcher.leave_home(trajectory, actions)

    def _ticked(self, actions: list[Action]) -> None:
        self._next_tick_at = self._at + TICK_S
        deadline = self._at - self.limits.queue_timeout_s
        for turn in list(self._turns.values()):
            if turn.state is WAITING and turn.queued_at <= deadline:
                self._end(turn)
                actions.append(Reject(turn.turn_id, Refusal.QUEUE_TIMEOUT, REFUSED_RETRY_S))
        self._expire(actions)
        self._dispatcher.revisit(actions)

    # --- engines --------------------------------------------------------------------------------------------

    def _engine_reported(self, event: EngineReported, actions: list[Action]) -> None:
        engine = self.engines.get(event.spec.engine_id)
        if engine is None:
            engine = self.engines[event.spec.engine_id] = Engine(
                event.spec, accepting=False, tool_calls=self._tool_calls
            )
            self._settle_residents(engine)
        before = engine.accepting, engine.spec.models, engine.room
        engine.report(event.spec, event.accepting)
        self._gone_models -= event.spec.models
        closed = [] if event.accepting else self._close_others(engine)
        if event.load is not None:
            engine.look(event.load, self._at, self.limits.sends_ahead)
        if before != (engine.accepting, engine.spec.models, engine.room):
            self._dispatcher.route_anew(engine, actions)
        for other in closed:
            self._dispatcher.route_anew(other, actions)
        self._dispatcher.fill(engine, actions)

    def _engine_leaving(self, engine_id: str, actions: list[Action]) -> None:
        engine = self.engines.get(engine_id)
        if engine is not None and not engine.accepting:
            self._dispatcher.evacuate(engine, actions)

    def _engine_lost(self, engine_id: str, actions: list[Action]) -> None:
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return
        engine.accepting = False
        closed = self._close_others(engine)
        for trajectory_id in list(engine.claims):
            engine.release(trajectory_id)
        for trajectory in self.trajectories.values():
            if trajectory.home == engine_id:
                trajectory.home = None
                actions.append(Save(trajectory.record()))
        actions.extend(Abort(turn.turn_id, turn.leg, Fault.ENGINE) for turn in engine.running.values())
        for one in (engine, *closed):  # the lost one first: nothing may be reserved there any more
            self._dispatcher.route_anew(one, actions)

    def _close_others(self, engine: Engine) -> list[Engine]:
        """The other engines of its server take no more turns either, until they are reported again. They are told of
        one by one, and turns would follow them from one to the next.

        Returns: those that took turns until now, whose turns are to be routed anew.
        """
        closed = [other for other in self._beside(engine) if other.accepting]
        for other in closed:
            other.accepting = False
        return closed

    def _beside(self, engine: Engine) -> list[Engine]:
        """The other engines of its server, if it has several."""
        server_id = engine.spec.server_id
        return [
            other
            for other in (self.engines.values() if server_id else ())
            if other.spec.server_id == server_id and other is not engine
        ]

    def _model_gone(self, model: str, actions: list[Action]) -> None:
        for turn in list(self._turns.values()):
            if turn.state is WAITING and turn.model == model:
                self._refuse_as_gone(turn, actions)
        models_at_work = {turn.model for turn in self._turns.values()}  # which may have to wait again
        self._gone_models = models_at_work & (self._gone_models | {model})

    def _refuse_as_gone(self, turn: Turn, actions: list[Action]) -> None:
        self._end(turn)
        actions.append(Reject(turn.turn_id, Refusal.MODEL_GONE, None))

    def _settle_residents(self, engine: Engine) -> None:
        """Restore an engine's residents: the active trajectories of an earlier process whose home it is. Those without
        a finished turn have no context there, and enter again."""
        residents = [
            trajectory
            for trajectory in self.trajectories.values()
            if trajectory.home == engine.spec.engine_id and trajectory.state is ACTIVE and trajectory.num_turns
        ]
        for trajectory in sorted(residents, key=lambda trajectory: trajectory.last_at):
            engine.restore(trajectory)
            if not trajectory.turns:
                engine.in_tool[trajectory.trajectory_id] = trajectory.last_at

    # --- changes of state -----------------------------------------------------------------------------------

    def _end(self, turn: Turn) -> None:
        trajectory = turn.trajectory
        self._dispatcher.withdraw(turn)
        turn.become(ENDED)
        del self._turns[turn.turn_id]
        del trajectory.turns[turn.turn_id]
        trajectory.last_at = self._at
        if not trajectory.turns:
            self._idle.add(trajectory)
            self._dispatcher.rest(trajectory)

    def _running_turn(self, turn_id: str, leg: int) -> Turn | None:
        turn = self._turns.get(turn_id)
        return turn if turn is not None and turn.leg == leg and turn.state is RUNNING else None

    def _begin(self, trajectory: Trajectory, actions: list[Action]) -> None:
        self._make_room(1, actions)
        self._add_trajectory(trajectory)
        actions.append(Save(trajectory.record()))

    def _add_trajectory(self, trajectory: Trajectory) -> None:
        self._num_trajectories += 1
        self.trajectories[trajectory.trajectory_id] = trajectory
        self._idle.begin(trajectory)
        self._dispatcher.note(trajectory)

    # --- expiry ---------------------------------------------------------------------------------------------

    def _expire(self, actions: list[Action]) -> None:
        """Finish active trajectories that were idle for too long; forget ended ones after their rollout's retention."""
        for trajectory in self._idle.to_finish(self._at, self.limits):
            self._trajectory_closed(TrajectoryClosed(self._at, trajectory.trajectory_id), actions)
        for trajectory in self._idle.to_forget(self._at, self.limits):
            self._forget(trajectory, actions)
        self._make_room(0, actions)

    def _make_room(self, num_more: int, actions: list[Action]) -> None:
        """Forget idle trajectories, the longest ended first, until `num_more` others fit."""
        while len(self.trajectories) + num_more > self.limits.max_trajectories:
            trajectory = self._idle.first_to_go()
            if trajectory is None:
                return
            self._forget(trajectory, actions)

    def _forget(self, trajectory: Trajectory, actions: list[Action]) -> None:
        self._idle.forget(trajectory, self._at, self.limits)
        self._dispatcher.leave_home(trajectory, actions)
        del self.trajectories[trajectory.trajectory_id]
        actions.append(Forget(trajectory.trajectory_id))
