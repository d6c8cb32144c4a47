"""Streams of events drawn by seed, with every fault at once."""

import random
from collections.abc import Iterator

from scheduling.scheduler import Scheduler
from scheduling.types import (
    Action,
    Dispatch,
    EngineLoad,
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


class Stream:
    """Draws the next event from the turns that run and wait."""

    def __init__(self, seed: int, engines: str = "ABC", num_trajectories: int = 16) -> None:
        self.dice = random.Random(seed)
        self.engines = engines
        self.num_trajectories = num_trajectories
        self.prompt_parts = random.Random(seed)
        self.rollouts = random.Random(seed)
        self.at = 0.0
        self.running: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.preempted: list[Preempt] = []
        self.num_turns = 0

    def records(self) -> list[TrajectoryRecord]:
        """Three trajectories of an earlier process."""
        active, homes = TrajectoryState.ACTIVE, [self.dice.choice(self.engines) for _ in range(3)]
        return [
            TrajectoryRecord(f"t{n}", "", None, active, home, 30, 10, 1, 500.0, 0.0, float(-n))
            for n, home in enumerate(homes)
        ]

    def play(self, scheduler: Scheduler, num_events: int) -> Iterator[tuple[Event, list[Action]]]:
        """So many events, each with what the scheduler decided. A turn is dispatched only while it waits, with its
        next leg."""
        for _ in range(num_events):
            event = self.event()
            actions = scheduler.handle(event)
            for action in actions:
                if isinstance(action, Dispatch):
                    assert action.leg == self.waiting.pop(action.turn_id) + 1, event
                    self.running[action.turn_id] = action.leg
                elif isinstance(action, Preempt):
                    self.preempted.append(action)
                elif isinstance(action, Reject):
                    self.waiting.pop(action.turn_id, None)
            yield event, actions

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
        trajectory_id, model, prompt = self._trajectory_id(), dice.choice("mmn"), dice.randint(1, 60)
        priority = dice.choice([0, 0, 0, -1, 1])
        return TurnArrived(
            self.at,
            turn_id,
            trajectory_id,
            model,
            prompt,
            Prediction(total, total),
            rollout_id=self._rollout_id(),
            priority=priority,
            prompt_parts=self.prompt_parts.choice([(), (("p", 30),), (("p", 30), ("pa", 10)), (("q", 0), ("qa", 50))]),
        )

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
        return TrajectoryClosed(self.at, self._trajectory_id(), self.dice.random() < 0.4)

    def _declared(self) -> Event:
        prediction = Prediction(9.0, 9.0)
        return TrajectoryDeclared(self.at, self._trajectory_id(), prediction, rollout_id=self._rollout_id())

    def _reported(self) -> Event:
        dice = self.dice
        models = frozenset(dice.choice(["m", "n", "mn", "mn"]))
        spec = EngineSpec(dice.choice(self.engines), models, dice.randint(1, 4), dice.choice([0, 100, 100]))
        load = EngineLoad(dice.randint(0, 6), dice.randint(0, 3)) if dice.random() < 0.5 else None
        return EngineReported(self.at, spec, load, accepting=dice.random() < 0.8)

    def _lost(self) -> Event:
        return EngineLost(self.at, self.dice.choice(self.engines))

    def _ticked(self) -> Event:
        return Tick(self.at)

    def _rollout_id(self) -> str | None:
        return self.rollouts.choice([None, "r", "s"])

    def _trajectory_id(self) -> str:
        return f"t{self.dice.randrange(self.num_trajectories)}"
