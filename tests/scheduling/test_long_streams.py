"""Long streams of events drawn by seed, with every fault at once: what the state machine's short runs hardly reach."""

import random

import pytest

from scheduling.limits import Limits
from scheduling.policy import HEDDLE, POLICIES, Policy
from scheduling.scheduler import Scheduler
from scheduling.types import (
    Dispatch,
    EngineLost,
    EngineReported,
    EngineSpec,
    Event,
    Fault,
    Prediction,
    Preempt,
    Reject,
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

LIMITS = Limits(
    answer_tokens=20,
    in_tool_lease_s=5,
    entry_patience_s=8,
    max_waiting_turns=12,
    queue_timeout_s=30,
    retry_pause_s=2,
    preempt_after_s=1,
    trajectory_ttl_s=20,
    retention_s=10,
    max_trajectories=12,
)
NUM_EVENTS = 400
NUM_SEEDS = 60
NUM_SEEDS_OF_A_BASELINE = 15


class Stream:
    """Draws the next event from the turns that run and wait."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.at = 0.0
        self.running: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.preempted: list[Preempt] = []
        self.num_turns = 0

    def records(self) -> list[TrajectoryRecord]:
        """Three trajectories of an earlier process."""
        return [
            TrajectoryRecord(
                f"t{n}", "", None, TrajectoryState.ACTIVE, self.dice.choice("ABC"), 30, 10, 1, 500.0, 0.0, float(-n)
            )
            for n in range(3)
        ]

    def event(self) -> Event:
        """The next event, at once or a while later."""
        dice = self.dice
        self.at += dice.choice([0, 0, 0.1, 0.5, 1, 3]) if dice.random() < 0.98 else 15
        kinds = [self._arrived, self._ended, self._closed, self._declared, self._reported, self._lost, self._ticked]
        [kind] = dice.choices(kinds, weights=[35, 46, 4, 2, 7, 1, 5])
        return kind()

    def _arrived(self) -> Event:
        dice = self.dice
        self.num_turns += 1
        turn_id = f"x{self.num_turns}"
        self.waiting[turn_id] = 0
        total = dice.choice([1.0, 300.0, 5_000.0, 90_000.0])
        trajectory_id, model, prompt = f"t{dice.randrange(16)}", dice.choice("mmn"), dice.randint(1, 60)
        priority = dice.choice([0, 0, 0, -1, 1])
        return TurnArrived(self.at, turn_id, trajectory_id, model, prompt, Prediction(total, total), priority=priority)

    def _ended(self) -> Event:
        dice = self.dice
        if self.waiting and dice.random() < 0.07:
            turn_id = dice.choice(sorted(self.waiting))
            return TurnFailed(self.at, turn_id, self.waiting.pop(turn_id), Fault.CLIENT_LEFT, True)
        if not self.running:
            return Tick(self.at)
        if self.preempted and dice.random() < 0.8:
            asked = self.preempted.pop()
            if self.running.get(asked.turn_id) == asked.leg:
                self.waiting[asked.turn_id] = self.running.pop(asked.turn_id)
            return TurnPaused(self.at, asked.turn_id, asked.leg, dice.randint(0, 30))
        turn_id = dice.choice(sorted(self.running))
        match dice.choices(["finished", "progressed", "failed"], weights=[27, 8, 8])[0]:
            case "finished":
                leg = self.running.pop(turn_id)
                return TurnFinished(self.at, turn_id, leg, dice.randint(1, 60), dice.randint(0, 40))
            case "progressed":
                return TurnProgressed(self.at, turn_id, self.running[turn_id], dice.randint(0, 60))
            case _:
                leg = self.waiting[turn_id] = self.running.pop(turn_id)
                return TurnFailed(self.at, turn_id, leg, dice.choice(list(Fault)), dice.random() < 0.8)

    def _closed(self) -> Event:
        return TrajectoryClosed(self.at, f"t{self.dice.randrange(16)}", self.dice.random() < 0.4)

    def _declared(self) -> Event:
        return TrajectoryDeclared(self.at, f"t{self.dice.randrange(16)}", Prediction(9.0, 9.0))

    def _reported(self) -> Event:
        dice = self.dice
        models = frozenset(dice.choice(["m", "n", "mn", "mn"]))
        spec = EngineSpec(dice.choice("ABC"), models, dice.randint(1, 4), dice.choice([0, 100, 100]))
        return EngineReported(self.at, spec, accepting=dice.random() < 0.8)

    def _lost(self) -> Event:
        return EngineLost(self.at, self.dice.choice("ABC"))

    def _ticked(self) -> Event:
        return Tick(self.at)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_long_streams_with_every_fault_break_no_invariant(policy: Policy) -> None:
    """No exception is raised either, and a turn is dispatched only while it waits, with its next leg."""
    for seed in range(NUM_SEEDS if policy is HEDDLE else NUM_SEEDS_OF_A_BASELINE):
        stream = Stream(seed)
        scheduler = Scheduler(policy, LIMITS, stream.records(), can_preempt=True)
        for number in range(NUM_EVENTS):
            for action in scheduler.handle(stream.event()):
                if isinstance(action, Dispatch):
                    assert action.leg == stream.waiting.pop(action.turn_id) + 1, (seed, number)
                    stream.running[action.turn_id] = action.leg
                elif isinstance(action, Preempt):
                    stream.preempted.append(action)
                elif isinstance(action, Reject):
                    stream.waiting.pop(action.turn_id, None)
            scheduler.check()
