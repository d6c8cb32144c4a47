"""Random draws for what goes wrong. Every trajectory has its own generator, so the same ones leave under
every policy."""

import random
from dataclasses import replace

from simulator.conditions import Faults
from workloads.trajectories import Trajectory

PATIENCE_S = 30.0
"""A client that will leave does so within this time after it asked for its last turn."""


class FaultDraws:
    """What goes wrong in one rollout."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self._seed = seed
        self._random = random.Random(f"engines/{seed}")

    def leaving(self, trajectory: Trajectory) -> tuple[int, float] | None:
        """The turn that its client does not wait for, and how long after asking it leaves; None if it stays."""
        if not self.faults.leaving_share:
            return None
        dice = random.Random(f"leaving/{self._seed}/{trajectory.trajectory_id}")
        if dice.random() >= self.faults.leaving_share:
            return None
        return dice.randrange(len(trajectory.turns)), dice.uniform(0.0, PATIENCE_S)

    def waited_for(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the turns that certainly end before its client leaves."""
        leaving = self.leaving(trajectory)
        return trajectory if leaving is None else replace(trajectory, turns=trajectory.turns[: leaving[0]])

    def tool_hangs(self, trajectory: Trajectory, turn: int) -> bool:
        """Whether the tool call after this turn hangs until its time-out."""
        if not self.faults.tool_timeout_share:
            return False
        dice = random.Random(f"tools/{self._seed}/{trajectory.trajectory_id}/{turn}")
        return dice.random() < self.faults.tool_timeout_share

    def next_death_s(self) -> float | None:
        """Time until the next engine dies; None: never."""
        return self._random.expovariate(self.faults.deaths_per_hour / 3600) if self.faults.deaths_per_hour else None

    def one_of(self, engine_ids: list[str]) -> str:
        """The engine that dies."""
        return self._random.choice(engine_ids)

    def start_s(self) -> float:
        """Time from the rollout's start until an engine is there."""
        return self._random.uniform(0.0, self.faults.slow_start_s) if self.faults.slow_start_s else 0.0
