"""Where a waiting turn queues or runs, and which turn an engine runs next.

The scheduler handles what happened; the dispatcher uses the room that this left. admission.py decides which turns may
enter an engine (rules 11 to 15). Rules:

6. A waiting turn is in one queue: its home's own while its trajectory is resident there and the home may serve the
   turn, else its model's. When its trajectory gets a new home, the turn is routed again. A home that does not serve
   the turn's model any more loses the claim, which nothing else would end while the turn waits.
7. When contexts have outgrown an engine's KV, the least urgent residents that do not run give up their claims and enter
   again, there or elsewhere. An engine that is left to evict by itself evicts every context in turn (thrashing).
8. A trajectory is saved before one of its turns is dispatched to a new home.
9. A trajectory in a tool call on an engine that will soon be gone moves to an engine where it fits. Those with the most
   work left go first.
10. If policy and driver allow it, a waiting turn that lacks only a slot takes the slot of the least urgent running
    turn. It must be more urgent by the client's priority, or else by the margin. An engine gives up one turn at a time.
"""

from collections.abc import Mapping
from itertools import takewhile

from scheduling.admission import Admission
from scheduling.chooser import Chooser
from scheduling.engine import Engine
from scheduling.evacuation import new_homes
from scheduling.limits import Limits
from scheduling.policy import Policy
from scheduling.preemption import victim_for
from scheduling.queues import Queues
from scheduling.residency import Residency
from scheduling.state import RUNNING, WAITING, Trajectory, Turn
from scheduling.types import ACTIVE, Action, Dispatch, Move, Preempt, Save

# A client's priority outranks every prediction at the engine, too: one step of it exceeds any trajectory's output.
HINT_TOKENS = 10_000_000


class Dispatcher:
    """Runs the turns of one fleet.

    Args:
        engines, trajectories: the scheduler's. The scheduler adds and removes them.
        queues: where turns are. Only the dispatcher moves them.
        admission: decides which turns may enter an engine; its `at` equals the dispatcher's.
        at: now; the scheduler sets it at every event.
        can_preempt: whether the driver performs Preempt.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        engines: Mapping[str, Engine],
        trajectories: Mapping[str, Trajectory],
        queues: Queues,
        admission: Admission,
        at: float,
        can_preempt: bool,
    ) -> None:
        self.at = at
        self._policy = policy
        self._residency = policy.residency
        self._check_every_s = policy.residency.every_s if policy.residency else 0.0
        self._is_one_queue = policy.residency is not None and policy.residency.is_one_queue
        self._limits = limits
        self._engines = engines
        self._trajectories = trajectories
        self._queues = queues
        self._admission = admission
        self._chooser = Chooser(policy, engines)
        self._to_place: set[str] = set()
        self._to_fill: set[str] = set()
        self._check_again_at = at
        self._preempts = policy.preempts and can_preempt
        self._gather_max_s = limits.gather_max_s if policy.gathers else 0.0
        self._has_ranks = policy.partition is not None

    # --- turns and trajectories that come and go ------------------------------------------------------------

    def admit(self, turn: Turn, actions: list[Action]) -> None:
        """Queue a turn, or dispatch it at once."""
        self._queues.num_waiting += 1
        self.note(turn.trajectory)
        home = self._home(turn.trajectory)
        if home is not None:
            home.in_tool.pop(turn.trajectory.trajectory_id, None)
        self._route(turn, actions)

    def has_room_for(self, turn: Turn) -> bool:
        """Whether a turn that is not admitted yet would be dispatched at once."""
        home = self._resident_home(turn)
        if home is not None and self._admission.may_serve(home, turn):
            return self._admission.has_room(home)
        if self._policy.assigns:
            return False
        return any(self._admission.may_enter(engine, turn) for engine in self._engines.values())

    def note(self, trajectory: Trajectory) -> None:
        """Note that a trajectory's remaining work has changed, or that it has ended; for policies with ranks."""
        if self._has_ranks:
            self._chooser.note(trajectory)

    def withdraw(self, turn: Turn) -> None:
        """Remove a turn from its queue or its engine."""
        awaited = self._queues.withdraw(turn)
        if awaited is not None:
            self._to_fill.add(awaited.spec.engine_id)

    def rest(self, trajectory: Trajectory) -> None:
        """Keep the claim of a trajectory without a live turn if it is in a tool call; release it otherwise."""
        home = self._home(trajectory)
        if home is None or trajectory.trajectory_id not in home.claims:
            return
        if trajectory.state is ACTIVE and trajectory.num_turns:
            home.in_tool[trajectory.trajectory_id] = self.at
            return
        home.release(trajectory.trajectory_id)
        self._to_fill.add(home.spec.engine_id)
        if not trajectory.num_turns:
            trajectory.home = None

    def leave_home(self, trajectory: Trajectory, actions: list[Action]) -> None:
        """Release the KV claim and the rank of a trajectory that ended or is forgotten."""
        self._chooser.drop(trajectory)
        home = self._home(trajectory)
        if home is not None:
            home.release(trajectory.trajectory_id)
            self.fill(home, actions)

    def evacuate(self, source: Engine, actions: list[Action]) -> None:
        """Move trajectories in a tool call off an engine, as far as other engines have room."""
        homes = new_homes(source, self._engines, self._trajectories, self._chooser, self._limits, self.at)
        for trajectory, target, claim_tokens in homes:
            self._settle_at(trajectory, target, actions)
            target.claim(trajectory, claim_tokens)
            target.in_tool[trajectory.trajectory_id] = self.at
            actions.append(Move(trajectory.trajectory_id, source.spec.engine_id, target.spec.engine_id))

    # --- room that an event left ----------------------------------------------------------------------------

    def settle(self, actions: list[Action]) -> None:
        """Place the turns and fill the engines that the event left to be handled."""
        while self._to_place or self._to_fill:
            if self._to_place:
                self.place_homeless(min(self._to_place), actions)
            else:
                engine_id = min(self._to_fill)
                self._to_fill.discard(engine_id)
                self.fill(self._engines[engine_id], actions)  # lost ones are removed before any are left to fill

    def revisit(self, actions: list[Action]) -> None:
        """Try every queue and engine again, because time has passed: leases and pauses end, patience runs out."""
        self._queues.drop_empty()
        if self._residency is not None and self._check_every_s and self.at >= self._check_again_at:
            self._check_again_at = self.at + self._check_every_s
            for engine in self._engines.values():
                self._thin_out(engine, self._residency)
        for model in list(self._queues.homeless):
            self.place_homeless(model, actions)
        self._settle_strays(actions)
        for engine in self._engines.values():
            self.fill(engine, actions)

    def _settle_strays(self, actions: list[Action]) -> None:
        """Route the homeless turns whose trajectories have claims at a home that may serve them again (it had failed
        them), and release the claims at one that serves them no more. Such a claim may be what keeps a turn that the
        home is reserved for from entering."""
        queues = self._queues.homeless.values()
        for turn in [turn for queue in queues for turn in queue if turn.trajectory.home is not None]:
            home = self._resident_home(turn)
            if home is None or turn.state is not WAITING:
                continue
            if self._admission.may_serve(home, turn):
                self._leave_queue(turn)
                self._route(turn, actions)
            elif home.accepting and turn.model not in home.spec.models and not self._has_turn_at(home, turn.trajectory):
                home.release(turn.trajectory.trajectory_id)

    def _has_turn_at(self, engine: Engine, trajectory: Trajectory) -> bool:
        return any(self._queues.engine_of.get(turn) is engine for turn in trajectory.turns.values())

    @property
    def checks_on_a_timer(self) -> bool:
        """Whether residents are checked on a timer, so that a Tick is due even though no turn waits."""
        return self._check_every_s > 0 and any(engine.claims for engine in self._engines.values())

    # --- routing: where a waiting turn waits, or goes at once -----------------------------------------------

    def route_anew(self, engine: Engine, actions: list[Action]) -> None:
        """Route turns again after an engine changed: those in its queue that it no longer serves and, under a sticky
        policy, homeless ones whose home it is. If the largest engines are others now, also those that need one."""
        self._chooser.clear_caches()
        self._queues.reserve(engine, None)
        is_other_room = self._admission.note_rooms(self._engines.values())
        least = self._admission.least_room if is_other_room else engine.room
        moving = {turn for turn in engine.returning if turn.claim_tokens > least or not engine.serves(turn.model)}
        if is_other_room:
            queues = [*self._queues.homeless.values(), *(other.returning for other in self._engines.values())]
            moving |= {turn for queue in queues for turn in queue if turn.claim_tokens > least}
        if self._policy.is_sticky:
            for queue in self._queues.homeless.values():
                moving |= {turn for turn in queue if turn.trajectory.home == engine.spec.engine_id}
        waiting = sorted(moving, key=lambda turn: turn.key)
        for turn in waiting:
            self._leave_queue(turn)
            self._queues.wait_homeless(turn)
        for turn in waiting:
            if turn.state is WAITING:
                self._leave_queue(turn)
                self._route(turn, actions)

    def _route(self, turn: Turn, actions: list[Action]) -> None:
        home = self._resident_home(turn)
        if home is not None and self._admission.may_serve(home, turn):
            self._route_home(turn, home, actions)
            return
        if home is None and self._policy.assigns:
            engines = [engine for engine in self._engines.values() if self._admission.may_serve(engine, turn)]
            if engines:
                self._wait_at(turn, self._chooser.engine_to_enter(turn, engines, self.at), actions)
                return
        self._queues.wait_homeless(turn)
        self._place(turn, self._chooser.engines_for(turn.model), actions)

    def _resident_home(self, turn: Turn) -> Engine | None:
        home = self._home(turn.trajectory) if self._policy.is_sticky else None
        return home if home is not None and turn.trajectory.trajectory_id in home.claims else None

    def _route_home(self, turn: Turn, home: Engine, actions: list[Action]) -> None:
        target = self._better_home(turn, home)
        if target is None:
            self._wait_at(turn, home, actions)
            return
        if self._policy.assigns:
            self._wait_at(turn, target, actions)
        else:
            self._dispatch(turn, target, f"moved from {home.spec.engine_id}", actions)
        self.fill(home, actions)

    def _wait_at(self, turn: Turn, engine: Engine, actions: list[Action]) -> None:
        trajectory = turn.trajectory
        is_new_home = self._settle_at(trajectory, engine, actions)
        claimed = engine.claims.get(trajectory.trajectory_id, 0)
        engine.claim(trajectory, claimed if claimed > turn.claim_tokens else turn.claim_tokens)
        if (
            self._queues.num_waiting == 1
            and engine.kv_claimed <= engine.spec.kv_capacity_tokens
            and self._admission.has_room(engine)
        ):
            self._dispatch(turn, engine, "home", actions)  # no other turn waits anywhere, and no claim has to give way
            return
        self._queues.wait_at(turn, engine)
        if is_new_home:
            self._call_home(trajectory, actions)
        self.relieve(engine)
        self.fill(engine, actions)

    def _better_home(self, turn: Turn, home: Engine) -> Engine | None:
        is_in_tool_gap = len(turn.trajectory.turns) == 1 and not turn.kept_tokens
        if self._policy.move is None or not is_in_tool_gap:
            return None
        may_go = self._admission.may_serve if self._policy.assigns else self._admission.may_enter
        return self._chooser.better_home(turn, home, may_go, self.at)

    def place_homeless(self, model: str, actions: list[Action]) -> None:
        """Dispatch homeless turns of a model, first key first, to engines that have room for them."""
        self._to_place.discard(model)
        engines = self._chooser.engines_for(model)
        queue = self._queues.homeless.get(model)
        for turn in list(queue or ()):
            if turn.queue is not queue:
                continue  # it left with another turn of its trajectory
            if not self._place(turn, engines, actions) and not any(map(self._admission.is_open, engines)):
                return

    def _place(self, turn: Turn, engines: list[Engine], actions: list[Action]) -> bool:
        """Dispatch a homeless turn to an engine that has room, or reserve one for it. Returns whether it was
        dispatched."""
        enterable = self._first_for(turn, engines) if self._is_one_queue else engines
        candidates = [engine for engine in enterable if self._admission.may_enter(engine, turn)]
        if candidates:
            why = f"retried, leg {turn.leg + 1}" if turn.leg else "entered"
            self._dispatch(turn, self._chooser.engine_to_enter(turn, candidates, self.at), why, actions)
            return True
        if not self._is_one_queue and self._queues.awaited_by.get(turn) is None:
            lacking = [
                engine
                for engine in engines
                if self._admission.is_open(engine) and self._admission.may_serve(engine, turn)
            ]
            if lacking:
                self._queues.reserve(max(lacking, key=_free_tokens), turn)
        self._make_slot(turn, engines, actions)
        return False

    def _first_for(self, turn: Turn, engines: list[Engine]) -> list[Engine]:
        """The engines for which this turn is the first of its queue: all turns before it avoid them, or are too large
        for them."""
        for first in takewhile(lambda other: other is not turn, self._queues.homeless[turn.model]):
            if not first.avoided and first.claim_tokens <= self._admission.least_room:
                return []
            engines = [engine for engine in engines if not self._admission.may_serve(engine, first)]
        return engines

    # --- filling: what an engine runs next ------------------------------------------------------------------

    def fill(self, engine: Engine, actions: list[Action]) -> None:
        """Dispatch waiting turns to an engine, first key first, while it has room."""
        while self._queues.num_waiting and engine.accepting and self._admission.has_room(engine):
            entrant, returning = self._next_entrant(engine), engine.returning.head()
            if entrant is not None and (returning is None or entrant.key < returning.key):
                self._dispatch(entrant, engine, "entered", actions)
            elif returning is not None:  # residents may pass an entrant that does not fit: their KV is claimed already
                self._dispatch(returning, engine, "home", actions)
            else:
                return
        if self._preempts and not engine.has_slot and engine.accepting and (returning := engine.returning.head()):
            self._make_slot(returning, [engine], actions)

    def _make_slot(self, turn: Turn, engines: list[Engine], actions: list[Action]) -> None:
        """Preempt the least urgent running turn, on engines where a much more urgent turn lacks only a slot."""
        if not self._preempts:
            return
        full = [engine for engine in engines if not engine.has_slot and self._admission.may_serve(engine, turn)]
        enterable = [engine for engine in full if self._admission.claims_giving_way(engine, turn) is not None]
        victim = victim_for(turn, enterable, self.at, self._limits)
        if victim is not None:
            victim.stop_asked_at = self.at
            actions.append(Preempt(victim.turn_id, victim.leg))

    def _next_entrant(self, engine: Engine) -> Turn | None:
        """The first homeless turn that may enter an engine and fits there.

        The first one that does not fit, and has no engine reserved, gets this one reserved. No turn behind it enters
        then. Turns with another engine reserved are skipped.
        """
        admission = self._admission
        most_tokens = admission.most_tokens(engine)
        for turn in self._queues.homeless_for(engine):
            if (turn.avoided or turn.claim_tokens > engine.room) and not admission.may_serve(engine, turn):
                continue
            is_too_much = admission.claims_too_much(engine, turn, most_tokens)
            if not is_too_much and admission.claims_giving_way(engine, turn) is not None:
                return turn
            if self._is_one_queue:
                return None
            awaited = self._queues.awaited_by.get(turn)
            if awaited is None:
                self._queues.reserve(engine, turn)
            if awaited is None or awaited is engine:
                return None
        return None

    def relieve(self, engine: Engine) -> None:
        """Release residents' claims while they exceed the engine's KV; policies that check on a timer do so in
        `revisit`.

        Their waiting turns are placed after the event has been handled, not in the middle of a change to the same
        engine.
        """
        is_in_excess = engine.kv_held > engine.spec.kv_capacity_tokens
        if is_in_excess and self._residency is not None and not self._check_every_s:
            self._thin_out(engine, self._residency)

    def _thin_out(self, engine: Engine, residency: Residency) -> None:
        for trajectory_id in residency.leave(engine, self._trajectories, self.at):
            engine.release(trajectory_id)
            for turn in self._trajectories[trajectory_id].turns.values():
                self._leave_queue(turn)
                self._queues.wait_homeless(turn)
                self._to_place.add(turn.model)

    # --- dispatching ----------------------------------------------------------------------------------------

    def _dispatch(self, turn: Turn, engine: Engine, why: str, actions: list[Action]) -> None:
        trajectory = turn.trajectory
        enters = trajectory.trajectory_id not in engine.claims
        giving_way = self._admission.claims_giving_way(engine, turn) if enters else ()
        assert giving_way is not None and self._admission.has_room(engine) and self._admission.may_serve(engine, turn)
        for trajectory_id in giving_way:
            engine.release(trajectory_id)
        self.withdraw(turn)
        turn.become(RUNNING)
        turn.leg += 1
        turn.began_at, turn.stop_asked_at = self.at, None
        send_at = 0.0
        if engine.may_gather and self._gather_max_s:
            send_at = engine.send_at(self._uncached(turn, engine), self.at, self._gather_max_s)
            if send_at:
                why = f"{why}, gathered for {send_at - self.at:.3f} s"
        self._queues.run(turn, engine)
        old_home = self._home(trajectory) if enters else None
        is_new_home = self._settle_at(trajectory, engine, actions)
        if engine.claims.get(trajectory.trajectory_id, -1) < turn.claim_tokens:
            engine.claim(trajectory, turn.claim_tokens)
        if trajectory.group_id and not trajectory.num_turns:
            engine.remember_prompt(trajectory.group_id, turn.facts.prompt_tokens)
        priority = turn.key[0] * HINT_TOKENS + int(turn.key[1])
        actions.append(Dispatch(turn.turn_id, turn.leg, engine.spec.engine_id, priority, why, send_at))
        if enters and self._policy.is_sticky:
            self._call_home(trajectory, actions)
            if is_new_home and old_home is not None:
                self.fill(old_home, actions)

    def _uncached(self, turn: Turn, engine: Engine) -> int:
        """The tokens that a turn which begins at an engine has prefilled there, if its context is still there."""
        num_tokens = turn.facts.prompt_tokens + turn.kept_tokens
        is_home = turn.trajectory.home == engine.spec.engine_id
        return max(num_tokens - turn.trajectory.context_tokens, 0) if is_home else num_tokens

    def _settle_at(self, trajectory: Trajectory, engine: Engine, actions: list[Action]) -> bool:
        """Make an engine a trajectory's home. Returns whether that is a change."""
        if trajectory.home == engine.spec.engine_id:
            return False
        old_home = self._home(trajectory)
        if old_home is not None:
            old_home.release(trajectory.trajectory_id)
        trajectory.home = engine.spec.engine_id
        actions.append(Save(trajectory.record()))
        return True

    def _call_home(self, trajectory: Trajectory, actions: list[Action]) -> None:
        """Route a trajectory's waiting turns again, to its new home."""
        for turn in list(trajectory.turns.values()):
            if turn.state is WAITING:
                self._leave_queue(turn)
                self._route(turn, actions)

    def _leave_queue(self, turn: Turn) -> None:
        awaited = self._queues.leave(turn)
        if awaited is not None:
            self._to_fill.add(awaited.spec.engine_id)

    def _home(self, trajectory: Trajectory) -> Engine | None:
        return self._engines.get(trajectory.home or "")


def _free_tokens(engine: Engine) -> int:
    return engine.spec.kv_capacity_tokens - engine.kv_held
