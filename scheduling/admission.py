"""Whether a turn may go to an engine now. Rules:

11. If the policy holds turns, an engine gets at most `slots` of them, and those that are sent ahead (transit.py).
12. A trajectory that is not resident on an engine enters only if the KV claims there, its own included, stay under the
    watermark. Claims of trajectories in a tool call count. If nothing is claimed there, any trajectory enters, so that
    nothing waits forever.
13. Claims of trajectories in a tool call give way to an entrant, the longest idle first: after their lease, or at once
    if the entrant has waited for its patience (limits.py).
14. A turn that fits nowhere has one engine reserved, so that it is not passed forever. There only residents and more
    urgent turns pass it; turns behind it may enter other engines. It takes the first engine on which it fits.
15. An engine that can never hold a turn's context gets it only if no other engine that accepts turns can.
"""

from collections.abc import Iterable
from math import inf

from scheduling.engine import Engine
from scheduling.limits import Limits
from scheduling.policy import Policy
from scheduling.state import Turn


class Admission:
    """Decides which turns may enter an engine under a policy. Asking changes nothing.

    Args:
        at: now; the scheduler sets it at every event.
        least_room: tokens of the longest context that every engine holds.
    """

    def __init__(self, policy: Policy, limits: Limits, at: float) -> None:
        self.at = at
        self.least_room = inf
        self._holds_turns = policy.holds_turns
        self._residency = policy.residency
        self._limits = limits
        self._patience_s = limits.patience_s
        self._rooms: dict[str, float] = {}

    def note_rooms(self, engines: Iterable[Engine]) -> bool:
        """Note the largest context that each model's engines hold, and the one that all hold. Returns whether the
        former is a change."""
        before, self._rooms, self.least_room = self._rooms, {}, inf
        for engine in engines:
            self.least_room = min(self.least_room, engine.room)
            for model in engine.spec.models if engine.accepting else ():
                self._rooms[model] = max(engine.room, self._rooms.get(model, 0.0))
        return self._rooms != before

    def has_room(self, engine: Engine) -> bool:
        """Whether an engine takes one more turn, whichever it is."""
        return not self._holds_turns or len(engine.running) < engine.num_slots

    def is_open(self, engine: Engine) -> bool:
        """Whether an engine has room for a turn and is reserved for none."""
        return engine.reserved_for is None and engine.accepting and self.has_room(engine)

    def may_serve(self, engine: Engine, turn: Turn) -> bool:
        """Whether an engine accepts turns, has this one's model and is large enough, and has not just failed it."""
        if turn.avoided and turn.avoided.get(engine.spec.engine_id, self.at) > self.at:
            return False
        if not engine.accepting or turn.model not in engine.spec.models:
            return False
        tokens = turn.claim_tokens
        return tokens <= engine.room or tokens > self._rooms[turn.model]

    def may_enter(self, engine: Engine, turn: Turn) -> bool:
        """Whether a turn may go to an engine now, without passing a more urgent one that the engine is reserved for."""
        # The check made for the most engines, so cheap tests come first, and has_room is not called: most engines have
        # no slot or are reserved, and their claims are many.
        if self._holds_turns and len(engine.running) >= engine.num_slots:
            return False
        first = engine.reserved_for
        if first is not None and first.key < turn.key and self.may_serve(engine, first):
            return False
        return self.may_serve(engine, turn) and self.claims_giving_way(engine, turn) is not None

    def claims_giving_way(self, engine: Engine, turn: Turn) -> list[str] | None:
        """Trajectories that must lose their claims at an engine so that a turn may run there; None if it may not."""
        return [] if self._residency is None else self._residency.enter(engine, turn, self.at, self._limits)

    def most_tokens(self, engine: Engine) -> float:
        """The most that a waiting turn may claim at an engine, for `claims_too_much`."""
        return inf if self._residency is None else self._residency.most(engine, self.at, self._limits)

    def claims_too_much(self, engine: Engine, turn: Turn, most_tokens: float) -> bool:
        """Whether a cheap test already rules out that a turn enters an engine: it is made for every waiting turn."""
        trajectory = turn.trajectory
        return (
            turn.claim_tokens - trajectory.first_prompt_tokens > most_tokens
            and self.at - turn.queued_at < self._patience_s
            and trajectory.trajectory_id not in engine.claims
        )
