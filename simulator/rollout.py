"""One rollout in virtual time: agents, the scheduler that ships, and simulated engines.

All events are in one agenda, ordered by time. An engine's model reports when something in it changes next. The agenda
may hold an outdated time for it, which is skipped. There is no input but the arguments: the same workload, fleet,
policy and seed give the same result.

Agents behave like clients of the gateway, and this module like the gateway. A leg that an engine lost is reported as
failed and may be retried. A rejected turn is asked for again, a few times. A client that leaves sends nothing more.
"""

from collections.abc import Callable, Sequence

from engines.simulated.prefix_cache import front
from engines.simulated.sequence import SimulatedSequence
from predictor.progress import Predictor
from scheduling.cost import EngineProfile
from scheduling.estimate import Remaining
from scheduling.limits import Limits
from scheduling.policy import Policy
from scheduling.reshaping import still_needed
from scheduling.scheduler import Scheduler
from scheduling.types import (
    Abort,
    Action,
    Dispatch,
    Event,
    Fault,
    Preempt,
    Reject,
    Tick,
    TrajectoryClosed,
    TurnArrived,
    TurnFailed,
    TurnFinished,
    TurnPaused,
)
from simulator.agenda import Agenda
from simulator.agent import Agent, shared_prompts
from simulator.conditions import PLAIN, Conditions
from simulator.fault_draws import FaultDraws
from simulator.host import Host
from simulator.hosts import MODEL, Hosts
from simulator.outcome import Ending, Outcome
from simulator.transfers import Transfers
from workloads.trajectories import Workload

Log = Callable[[Event, list[Action]], None]


def too_long_for(workload: Workload, fleet: Sequence[EngineProfile]) -> str | None:
    """A sentence about the trajectories that some engine's KV cannot hold; None if every engine can hold each one."""
    smallest = min(fleet, key=lambda profile: profile.kv_capacity_tokens)
    room = smallest.kv_capacity_tokens
    if workload.max_context_tokens <= room:
        return None
    num_too_long = sum(trajectory.total_tokens > room for trajectory in workload.trajectories)
    return (
        f"{num_too_long:,} of {len(workload.trajectories):,} trajectories come to up to "
        f"{workload.max_context_tokens:,} tokens, and the KV of {smallest.name} holds {room:,}: larger engines are "
        "wanted, or --max-context-tokens, which scales a trace"
    )


class Rollout:
    """Plays a workload.

    Args:
        fleet: the profile of each engine.
        conditions: what engines can do, and what goes wrong.
        family: profiles of which a reshaped fleet may be made.
        seed: for the draws of what goes wrong.
        on_ended: called with the virtual time whenever a trajectory has ended, for progress bars.
        log: called with every event and the actions that followed from it.

    Raises:
        ValueError: a trajectory is too long for an engine (`too_long_for`).
    """

    def __init__(
        self,
        workload: Workload,
        fleet: Sequence[EngineProfile],
        policy: Policy,
        limits: Limits,
        predictor: Predictor,
        *,
        conditions: Conditions = PLAIN,
        family: Sequence[EngineProfile] = (),
        seed: int = 0,
        on_ended: Callable[[float], None] | None = None,
        log: Log | None = None,
    ) -> None:
        too_long = too_long_for(workload, fleet)
        if too_long is not None:
            raise ValueError(too_long)
        self._policy = policy
        self._predictor = predictor
        self._conditions = conditions
        self._fault_draws = FaultDraws(conditions.faults, seed)
        self._transfers = Transfers(conditions.transfer)
        self._on_ended = on_ended
        self._log = log
        self._scheduler = Scheduler(policy, limits, can_preempt=True)
        prompts = shared_prompts(workload.trajectories)
        self._agents = {t.trajectory_id: Agent(t, prompts[t.group_id]) for t in workload.trajectories}
        self._agenda = Agenda()
        self._left = len(self._agents)
        self._wakeup = float("inf")
        self._engines = Hosts(
            conditions,
            self._fault_draws,
            [profile for profile in family if too_long_for(workload, [profile]) is None],
            self._agenda,
            by_priority=policy.holds_turns,
            handle=self._handle,
            pause_legs=self._pause_legs,
            remaining=self._remaining,
        )
        # A policy that pins trajectories where they enter would pin all of them to the first engine that starts. So its
        # rollout begins when all engines are there. Engines that come later would get no trajectory, so its fleet is
        # not reshaped. A policy that pauses trajectories sends them anywhere.
        is_pinning = policy.is_sticky and not policy.holds_turns
        all_are_there_at = self._engines.open(fleet, may_change=not is_pinning or policy.residency is not None)
        self._begin_at = all_are_there_at if is_pinning else 0.0

    def run(self) -> Outcome:
        """Play it to its end."""
        for trajectory_id in self._agents:
            self._agenda.note(self._begin_at, self._turn_due, trajectory_id)
        while self._left:
            self._agenda.go_on()
        return Outcome(
            self._policy.name,
            tuple(agent.outcome() for agent in self._agents.values()),
            tuple(host.outcome() for host in self._engines.hosts.values()),
            self._engines.num_relaunches,
        )

    # --- agents ---------------------------------------------------------------------------------------------

    def _turn_due(self, trajectory_id: str) -> None:
        agent = self._agents[trajectory_id]
        if agent.ending is not None:
            return
        agent.take_prompt(self._agenda.now)
        leaving = self._fault_draws.leaving(agent.trajectory)
        if leaving is not None and leaving[0] == agent.turn:
            self._agenda.note(self._agenda.now + leaving[1], self._client_leaves, trajectory_id)
        self._ask(agent)

    def _ask(self, agent: Agent) -> None:
        agent.ask()
        prediction = self._predictor.predict(agent.progress(self._predictor.reads_outcomes))
        agent.note_prediction(prediction)
        them = agent.trajectory
        self._handle(
            TurnArrived(
                self._agenda.now,
                agent.turn_id,
                them.trajectory_id,
                MODEL,
                agent.context_tokens,
                prediction,
                them.group_id,
                prompt_parts=() if agent.turn else tuple(agent.prompt_parts(agent.context_tokens)),
            )
        )

    def _ask_again(self, trajectory_id: str) -> None:
        agent = self._agents[trajectory_id]
        if agent.ending is None:
            self._ask(agent)

    def _rejected(self, action: Reject) -> None:
        agent = self._agents[_trajectory_of(action.turn_id)]
        agent.interrupt(self._agenda.now)
        if action.retry_after_s is not None and agent.num_retries < self._conditions.faults.turn_retries:
            agent.num_retries += 1
            self._agenda.note(self._agenda.now + action.retry_after_s, self._ask_again, agent.trajectory.trajectory_id)
            return
        self._end(agent, Ending.FAILED)
        self._predictor.dropped(agent.trajectory.trajectory_id)
        self._agenda.note(self._agenda.now, self._close, agent.trajectory.trajectory_id)

    def _client_leaves(self, trajectory_id: str) -> None:
        agent = self._agents[trajectory_id]
        if agent.ending is not None:
            return
        if agent.is_asking:
            if agent.is_on_engine and agent.engine_id is not None:
                host = self._engines.hosts[agent.engine_id]
                host.engine.abort(self._agenda.now, trajectory_id)
                self._note_due(host)
            agent.interrupt(self._agenda.now)
            self._handle(TurnFailed(self._agenda.now, agent.turn_id, agent.leg, Fault.CLIENT_LEFT, can_retry=False))
        self._predictor.dropped(trajectory_id)
        self._end(agent, Ending.LEFT)
        self._left -= 1

    def _end(self, agent: Agent, ending: Ending) -> None:
        assert agent.ending is None
        agent.ending = ending
        agent.ended_at = self._agenda.now
        agent.is_pausing = False
        agent.arrives_at = None
        if self._on_ended is not None:
            self._on_ended(self._agenda.now)

    def _close(self, trajectory_id: str) -> None:
        self._handle(TrajectoryClosed(self._agenda.now, trajectory_id))
        self._left -= 1

    # --- turns on engines -----------------------------------------------------------------------------------

    def _dispatch(self, action: Dispatch) -> None:
        agent = self._agents[_trajectory_of(action.turn_id)]
        old = self._engines.hosts.get(agent.engine_id or "")
        new = self._engines.hosts[action.engine_id]
        agent.begin_leg(action)
        kv_arrives_at, agent.brings = None, ()
        if old is not None and old is not new and old.ended_at is None:
            pieces = agent.pieces(agent.context_tokens + agent.kept_tokens)
            kv_arrives_at = self._transfers.arrival(self._agenda.now, agent.rested_at, old, new, pieces)
            if kv_arrives_at is not None:
                agent.brings = front(pieces, old.engine.num_cached(self._agenda.now, pieces))
        agent.kv_arrives_at = kv_arrives_at or 0.0
        agent.arrives_at = max(self._agenda.now, action.send_at)
        self._when(agent, self._sent)

    def _sent(self, trajectory_id: str) -> None:
        agent = self._agents[trajectory_id]
        if (host := self._expecting(agent)) is None:
            return
        agent.arrives_at = max(agent.kv_arrives_at, host.take(self._agenda.now))
        self._when(agent, self._arrives)

    def _when(self, agent: Agent, happens: Callable[[str], None]) -> None:
        """Call it with the trajectory's id when the leg arrives."""
        assert agent.arrives_at is not None
        if agent.arrives_at > self._agenda.now:
            self._agenda.note(agent.arrives_at, happens, agent.trajectory.trajectory_id)
        else:
            happens(agent.trajectory.trajectory_id)

    def _expecting(self, agent: Agent) -> Host | None:
        """The engine that its leg arrives at now. None: the engine died, the client left, or the leg is preempted."""
        if agent.arrives_at != self._agenda.now or agent.is_pausing or agent.engine_id is None:
            return None
        return self._engines.hosts[agent.engine_id]

    def _arrives(self, trajectory_id: str) -> None:
        agent = self._agents[trajectory_id]
        if (host := self._expecting(agent)) is None:
            return
        if agent.brings:
            host.engine.adopt(self._agenda.now, agent.brings)
        self._submit(agent, host)

    def _submit(self, agent: Agent, host: Host) -> None:
        agent.arrives_at = None
        agent.is_on_engine = True
        kept = agent.kept_tokens
        sequence = SimulatedSequence(
            agent.trajectory.trajectory_id,
            agent.context_tokens + kept,
            agent.now_asks.output_tokens - kept,
            agent.pieces,
            agent.priority,
        )
        host.engine.submit(self._agenda.now, sequence)
        self._note_due(host)

    def _engine_due(self, engine_id: str) -> None:
        host = self._engines.hosts[engine_id]
        if host.due_at == self._agenda.now:
            self._advance(host)

    def _advance(self, host: Host) -> None:
        for event in host.engine.advance(self._agenda.now):
            agent = self._agents[event.id]
            if agent.ending is not None:
                continue  # its client left, and the engine finishes its step
            match event.kind:
                case "admitted":
                    agent.admit(event.at)
                case "preempted":
                    agent.interrupt(event.at)
                case "finished":
                    agent.interrupt(event.at)
                    self._finished(agent, event.at)
                case "aborted" if agent.is_pausing:
                    self._paused(agent, event.at, event.num_generated)
        host.sample(self._agenda.now, self._scheduler.engines[host.engine_id].kv_held)
        self._note_due(host)

    def _finished(self, agent: Agent, at: float) -> None:
        turn_id, trajectory = agent.turn_id, agent.trajectory
        prompt_tokens, output_tokens = agent.context_tokens, agent.now_asks.output_tokens
        hangs = self._fault_draws.tool_hangs(trajectory, agent.turn)
        tool_s = agent.finish_turn(at, self._conditions.faults.tool_timeout_s if hangs else None)
        self._handle(TurnFinished(at, turn_id, agent.leg, prompt_tokens, output_tokens))
        if agent.turn < len(trajectory.turns):
            self._agenda.note(at + tool_s, self._turn_due, trajectory.trajectory_id)
        else:
            self._end(agent, Ending.FINISHED)
            self._predictor.ended(agent.progress(self._predictor.reads_outcomes))
            self._close(trajectory.trajectory_id)

    def _preempt(self, turn_id: str, leg: int) -> None:
        agent = self._agents[_trajectory_of(turn_id)]
        assert agent.turn_id == turn_id and agent.leg == leg and agent.engine_id is not None
        agent.is_pausing = True
        if agent.is_on_engine:  # reported when the step ends, unless it finishes the turn
            host = self._engines.hosts[agent.engine_id]
            host.engine.abort(self._agenda.now, agent.trajectory.trajectory_id)
            self._note_due(host)
        else:
            self._agenda.note(self._agenda.now, self._paused_early, turn_id)

    def _paused_early(self, turn_id: str) -> None:
        """The leg was still on its way to the engine."""
        agent = self._agents[_trajectory_of(turn_id)]
        if agent.is_pausing and agent.turn_id == turn_id:
            self._paused(agent, self._agenda.now, 0)

    def _paused(self, agent: Agent, at: float, num_generated: int) -> None:
        agent.interrupt(at)
        self._handle(TurnPaused(at, agent.turn_id, agent.leg, agent.pause(at, num_generated)))

    def _leg_lost(self, name: str) -> None:
        turn_id, _, leg = name.rpartition("#")
        agent = self._agents[_trajectory_of(turn_id)]
        if agent.is_asking and agent.turn_id == turn_id and agent.leg == int(leg):
            agent.interrupt(self._agenda.now)
            agent.is_on_engine = agent.is_pausing = False
            agent.arrives_at = None
            self._handle(TurnFailed(self._agenda.now, turn_id, agent.leg, Fault.ENGINE, can_retry=True))

    def _pause_legs(self, host: Host) -> None:
        self._advance(host)
        for agent in self._agents.values():
            if agent.ending is None and agent.has_leg and agent.engine_id == host.engine_id:
                made = host.engine.num_generated(agent.trajectory.trajectory_id) if agent.is_on_engine else 0
                self._paused(agent, self._agenda.now, made)

    # --- the scheduler ----------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        actions = self._scheduler.handle(event)
        if self._log is not None:
            self._log(event, actions)
        for action in actions:
            match action:
                case Dispatch():
                    self._dispatch(action)
                case Reject():
                    self._rejected(action)
                case Preempt(turn_id, leg):
                    self._preempt(turn_id, leg)
                case Abort(turn_id, leg, _):
                    self._agenda.note(self._agenda.now, self._leg_lost, f"{turn_id}#{leg}")
        wakeup = self._scheduler.next_wakeup()
        if wakeup is not None and wakeup < self._wakeup:
            self._wakeup = wakeup
            self._agenda.note(max(wakeup, self._agenda.now), self._tick, "")

    def _remaining(self) -> list[Remaining]:
        known = self._scheduler.trajectories
        going = [known[id] for id, agent in self._agents.items() if agent.ending is None and id in known]
        return [still_needed(trajectory.record()) for trajectory in going]

    def _tick(self, _: str) -> None:
        if self._agenda.now >= self._wakeup:
            self._wakeup = float("inf")
            self._handle(Tick(self._agenda.now))

    def _note_due(self, host: Host) -> None:
        due_at = self._agenda.now if host.engine.has_ended_some else host.engine.next_event_at()
        if due_at is not None and host.ended_at is None:
            host.due_at = max(due_at, self._agenda.now)
            self._agenda.note(host.due_at, self._engine_due, host.engine_id)


def _trajectory_of(turn_id: str) -> str:
    return turn_id.rpartition("/")[0]
