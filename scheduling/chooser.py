"""Asks the policy where a turn goes, and gives it its view of the fleet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from scheduling.engine import LONGEST_MAX_AGE_S, Engine
from scheduling.order import TurnFacts
from scheduling.placement import EngineFacts
from scheduling.policy import Policy
from scheduling.ranks import Ranks
from scheduling.state import Trajectory, Turn

MayGo = Callable[[Engine, Turn], bool]
"""Whether an engine could run a turn now."""


class Chooser:
    """Asks a policy; caches what is costly to look up at every turn.

    Args:
        engines: the scheduler's.
    """

    def __init__(self, policy: Policy, engines: Mapping[str, Engine]) -> None:
        self._policy = policy
        self._engines = engines
        self._ranks = Ranks(policy.partition) if policy.partition else None
        self._serving: dict[str, list[Engine]] = {}
        self._seen: dict[str, tuple[float, list[EngineFacts]]] = {}

    def note(self, trajectory: Trajectory) -> None:
        """Note that a trajectory's remaining work has changed, or that it has ended; for policies with ranks."""
        assert self._ranks is not None
        self._ranks.note(trajectory)

    def drop(self, trajectory: Trajectory) -> None:
        """Drop a trajectory that is over."""
        if self._ranks is not None:
            self._ranks.drop(trajectory)

    def clear_caches(self) -> None:
        """Clear the caches: an engine came, went or changed."""
        self._serving.clear()
        self._seen.clear()

    def engines_for(self, model: str) -> list[Engine]:
        """Engines that serve a model."""
        engines = self._serving.get(model)
        if engines is None:
            engines = self._serving[model] = [engine for engine in self._engines.values() if engine.serves(model)]
        return engines

    def engine_to_enter(self, turn: Turn, candidates: Sequence[Engine], at: float) -> Engine:
        """The engine that a trajectory enters: its home if that is a candidate, because some of its KV may be left
        there. Else one with a free slot, if there is any: sent ahead to another one, the turn would wait beside it.
        """
        fleet = self.engines_for(turn.model)
        if not any(engine.claims for engine in fleet):
            _give_chances(fleet)
        home = self._engines.get(turn.trajectory.home or "")
        if self._policy.is_sticky and home is not None and home in candidates:
            return home
        if self._policy.holds_turns and not self._policy.assigns:
            candidates = [engine for engine in candidates if engine.has_free_slot] or candidates
        chosen = self._policy.place(self._facts(turn, at), [engine.facts(at) for engine in candidates])
        return self._engines[chosen.engine_id]

    def new_home(self, trajectory: Trajectory, candidates: Sequence[Engine], at: float) -> Engine:
        """The engine that a trajectory in a tool call moves to; there is no turn to place."""
        facts = TurnFacts(
            ordinal=trajectory.key[2],
            trajectory_ordinal=trajectory.ordinal,
            arrived_at=at,
            prompt_tokens=trajectory.context_tokens,
            attained_tokens=trajectory.output_tokens,
            prediction=trajectory.prediction,
            group_id=trajectory.group_id,
            num_turns=trajectory.num_turns,
            context_tokens=trajectory.context_tokens,
        )
        if self._ranks is not None:
            facts.rank = self._ranks.rank(trajectory)
        return self._engines[self._policy.place(facts, [engine.facts(at) for engine in candidates]).engine_id]

    def better_home(self, turn: Turn, home: Engine, may_go: MayGo, at: float) -> Engine | None:
        """Where a turn's trajectory moves at a tool return; None if it stays.

        Args:
            may_go: whether another engine could run it now.
        """
        policy = self._policy
        assert policy.move is not None
        elsewhere = _Elsewhere(self._engines, turn, home, may_go, at)
        facts = home.facts(at)
        facts.without = partial(home.work_without, turn.trajectory.trajectory_id)
        target = policy.move(self._facts(turn, at), facts, elsewhere, self._fleet(turn.model, at))
        return None if target is None else self._engines[target.engine_id]

    def _facts(self, turn: Turn, at: float) -> TurnFacts:
        """What is known of a turn, including its trajectory's rank."""
        if self._ranks is not None:
            self._ranks.cut(self.engines_for(turn.model), at)
            turn.facts.rank = self._ranks.rank(turn.trajectory)
        return turn.facts

    def _fleet(self, model: str, at: float) -> list[EngineFacts]:
        """Live views of the engines that serve a model; the list is cached, the views are refreshed once a second."""
        seen = self._seen.get(model)
        if seen is None or at - seen[0] >= LONGEST_MAX_AGE_S:
            seen = self._seen[model] = at, [engine.facts(at) for engine in self.engines_for(model)]
        return seen[1]


def _give_chances(fleet: Sequence[Engine]) -> None:
    """Work comes to these idle engines: those that seemed slow and were not used may get another chance."""
    unmeasured = [engine for engine in fleet if engine.spec.profile is None]
    ratios = [engine.slowness.ratio for engine in unmeasured if engine.was_used]
    for engine in unmeasured if ratios else ():
        engine.give_chance(min(ratios))


class _Elsewhere:
    """The engines that a turn may move to, each checked, and its view refreshed, only when the policy reaches it."""

    def __init__(self, engines: Mapping[str, Engine], turn: Turn, home: Engine, may_go: MayGo, at: float) -> None:
        self._engines = engines
        self._turn = turn
        self._home = home
        self._may_go = may_go
        self._at = at

    def __iter__(self) -> Iterator[EngineFacts]:
        for engine in self._engines.values():
            if engine is not self._home and self._may_go(engine, self._turn):
                yield engine.facts(self._at)

    def __contains__(self, other: object, /) -> bool:
        engine = self._engines[other.engine_id] if isinstance(other, EngineFacts) else self._home
        if engine is self._home or not self._may_go(engine, self._turn):
            return False
        engine.facts(self._at)
        return True
