"""Whether a turn may go to an engine now. Rules:

11. An engine gets at most `slots` turns, if the policy holds turns.
12. A trajectory that is not resident on an engine enters only while the KV claims there, those of trajectories in a
    tool call included, stay under the watermark with it; or when nothing is claimed at all: nothing waits for ever.
13. The longest idle claims in a tool call give way to an entrant: after their lease, or at once when it has waited for
    `entry_patience_s`.
14. A turn that fits nowhere has one engine reserved, so that it is not passed for ever: there only residents and more
    urgent turns pass it. Those behind it may enter the others; it takes the first engine on which it fits.
"""

from math import inf

from scheduling.engine import Engine
from scheduling.limits import Limits
from scheduling.policy import Policy
from scheduling.state import Turn


class Admission:
    """Says who may enter, as the policy has it; nothing is changed by asking.

    Args:
        at: now; the scheduler sets it at every event.
    """

    def __init__(self, policy: Policy, limits: Limits, at: float) -> None:
        self.at = at
        self._holds_turns = policy.holds_turns
        self._residency = policy.residency
        self._limits = limits

    def has_room(self, engine: Engine) -> bool:
        """Whether an engine takes one more turn, whoever it is."""
        return not self._holds_turns or len(engine.running) < engine.spec.slots

    def is_open(self, engine: Engine) -> bool:
        """Whether an engine has room for a turn and gathers none for another one."""
        return engine.reserved_for is None and engine.accepting and self.has_room(engine)

    def may_serve(self, engine: Engine, turn: Turn) -> bool:
        """Whether an engine has a turn's model, and has not just failed it."""
        if turn.avoided and turn.avoided.get(engine.spec.engine_id, self.at) > self.at:
            return False
        return engine.accepting and turn.model in engine.spec.models

    def may_enter(self, engine: Engine, turn: Turn) -> bool:
        """Whether a turn may go to an engine now, without passing one that this engine gathers room for."""
        # Nothing else is asked of so many engines: mostly they have no slot, or gather room, and their claims are many.
        if not self.has_room(engine):
            return False
        first = engine.reserved_for
        if first is not None and first.key < turn.key and self.may_serve(engine, first):
            return False
        return self.may_serve(engine, turn) and self.claims_giving_way(engine, turn) is not None

    def claims_giving_way(self, engine: Engine, turn: Turn) -> list[str] | None:
        """Who must lose their claims at an engine so that a turn may run there; None when it may not."""
        return [] if self._residency is None else self._residency.enter(engine, turn, self.at, self._limits)

    def most_tokens(self, engine: Engine) -> float:
        """What a turn that waits may claim at an engine, for `claims_too_much`."""
        return inf if self._residency is None else self._residency.most(engine, self.at, self._limits)

    def claims_too_much(self, engine: Engine, turn: Turn, most_tokens: float) -> bool:
        """Whether a turn may not run on an engine, as far as a glance tells: nothing more is asked of so many turns."""
        trajectory = turn.trajectory
        return (
            turn.claim_tokens - trajectory.first_prompt_tokens > most_tokens
            and self.at - turn.queued_at < self._limits.entry_patience_s
            and trajectory.trajectory_id not in engine.claims
        )
