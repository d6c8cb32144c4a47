"""A scheduler driven by short methods, one for each event; the invariants are checked after every event."""

from collections.abc import Iterable
from dataclasses import replace

from scheduling.cost import EngineProfile
from scheduling.limits import Limits
from scheduling.policy import LONGEST_FIRST, Policy
from scheduling.scheduler import Scheduler
from scheduling.types import (
    Action,
    Dispatch,
    EngineLost,
    EngineReported,
    EngineSpec,
    Event,
    Fault,
    Prediction,
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

MODEL = "model"


def without_saves(actions: Iterable[Action]) -> list[Action]:
    """The actions that a client or an engine notices."""
    return [action for action in actions if not isinstance(action, Save)]


def record(trajectory_id: str, home: str | None, last_at: float = 0.0, **changes: object) -> TrajectoryRecord:
    """A trajectory's record, as an earlier process saved it."""
    values: dict[str, object] = {
        "trajectory_id": trajectory_id,
        "group_id": "",
        "rollout_id": None,
        "state": TrajectoryState.ACTIVE,
        "home": home,
        "context_tokens": 100,
        "output_tokens": 50,
        "num_turns": 1,
        "predicted_tokens": 1000.0,
        "created_at": 0.0,
        "last_at": last_at,
    }
    return TrajectoryRecord(**(values | changes))  # type: ignore[arg-type]


class Fleet:
    """One scheduler under test. `at` is its clock; turn `x` belongs to trajectory `x` unless the call names another.

    Args:
        policy: Heddle's by default, with an order whose keys are easy to read: predicted tokens, longest first.
        answer_tokens: the limit of that name; with 0, a claim is exactly the known context.
    """

    def __init__(
        self,
        policy: Policy = LONGEST_FIRST,
        limits: Limits | None = None,
        records: Iterable[TrajectoryRecord] = (),
        can_preempt: bool = False,
        answer_tokens: int = 0,
    ) -> None:
        limits = replace(limits or Limits(), answer_tokens=answer_tokens)
        self.scheduler = Scheduler(policy, limits, records, can_preempt=can_preempt)
        self.at = 0.0
        self.actions: list[Action] = []

    def handle(self, event: Event) -> list[Action]:
        """The actions except saves; `actions` holds all of them."""
        self.actions = self.scheduler.handle(event)
        self.scheduler.check()
        return without_saves(self.actions)

    def engine(
        self,
        engine_id: str,
        slots: int = 1,
        kv: int = 0,
        accepting: bool = True,
        models: tuple[str, ...] = (MODEL,),
        profile: EngineProfile | None = None,
        server: str = "",
    ) -> list[Action]:
        spec = EngineSpec(engine_id, frozenset(models), slots, kv, profile=profile, server_id=server)
        return self.handle(EngineReported(self.at, spec, accepting=accepting))

    def lose(self, engine_id: str) -> list[Action]:
        return self.handle(EngineLost(self.at, engine_id))

    def arrive(
        self,
        turn_id: str,
        trajectory_id: str | None = None,
        prompt: int = 10,
        predicted: float = 1000.0,
        priority: int = 0,
        model: str = MODEL,
        group: str = "",
        rollout: str | None = None,
        parts: tuple[tuple[str, int], ...] | None = None,
    ) -> list[Action]:
        """A turn arrives. Unless its parts are given, its whole prompt is the group's."""
        prediction = Prediction(predicted, predicted)
        trajectory_id = trajectory_id or turn_id
        if parts is None:
            parts = ((group, prompt),) if group else ()
        return self.handle(
            TurnArrived(self.at, turn_id, trajectory_id, model, prompt, prediction, group, rollout, priority, parts)
        )

    def finish(self, turn_id: str, leg: int = 1, prompt: int = 10, output: int = 10) -> list[Action]:
        return self.handle(TurnFinished(self.at, turn_id, leg, prompt, output))

    def progress(self, turn_id: str, leg: int, output: int) -> list[Action]:
        return self.handle(TurnProgressed(self.at, turn_id, leg, output))

    def fail(
        self,
        turn_id: str,
        leg: int = 1,
        fault: Fault = Fault.ENGINE,
        can_retry: bool = True,
        broke_off: bool = False,
    ) -> list[Action]:
        return self.handle(TurnFailed(self.at, turn_id, leg, fault, can_retry, broke_off=broke_off))

    def pause(self, turn_id: str, leg: int = 1, output: int = 10) -> list[Action]:
        return self.handle(TurnPaused(self.at, turn_id, leg, output))

    def declare(self, trajectory_id: str, predicted: float = 1000.0, rollout: str | None = "r") -> list[Action]:
        return self.handle(TrajectoryDeclared(self.at, trajectory_id, Prediction(predicted, predicted), "g", rollout))

    def close(self, trajectory_id: str, abort: bool = False) -> list[Action]:
        return self.handle(TrajectoryClosed(self.at, trajectory_id, abort))

    def tick(self, later_s: float = 0.0) -> list[Action]:
        self.at += later_s
        return self.handle(Tick(self.at))

    def sent(self, actions: Iterable[Action]) -> list[tuple[str, str]]:
        """Which turns the actions dispatch, and to which engine."""
        return [(action.turn_id, action.engine_id) for action in actions if isinstance(action, Dispatch)]

    def home(self, trajectory_id: str) -> str | None:
        return self.scheduler.trajectories[trajectory_id].home

    def claims(self, engine_id: str) -> dict[str, int]:
        return self.scheduler.engines[engine_id].claims


def fleet_with_one_in_tool(limits: Limits | None = None, kv: int = 100) -> Fleet:
    """Engine A with 4 slots, where `a` has been in a tool call with 50 tokens of KV since time 0."""
    fleet = Fleet(limits=limits or Limits(in_tool_lease_s=60, entry_patience_s=300))
    fleet.engine("A", slots=4, kv=kv)
    fleet.arrive("a")
    fleet.finish("a", prompt=40, output=10)
    return fleet
