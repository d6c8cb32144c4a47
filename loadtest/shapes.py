"""Shapes of load for the agents of `loadtest/locustfile.py`: rollouts, or a ramp.

    locust -f loadtest/shapes.py --headless --host http://127.0.0.1:8080 --shape rollout --agents 64 --rollouts 3
    locust -f loadtest/shapes.py --headless --host http://127.0.0.1:8080 --shape ramp --agents 64 --ramp-s 60

A rollout is a burst: all agents begin at once, each plays one trajectory, and the next rollout begins when the last
agent has ended; the makespan is reported as `AGENT rollout`. A ramp adds agents evenly, each plays one trajectory after
the other, and the run ends a little after all agents are running.

Both need to know all agents, so a shape runs in one process; `loadtest/locustfile.py` also runs with workers.
"""

from __future__ import annotations

import math
import time
from typing import Any

from locust import LoadTestShape
from locust.argument_parser import LocustArgumentParser
from locust.runners import MasterRunner, WorkerRunner

from loadtest.board import Board

# Locust takes the user classes that it finds in the file it is given.
from loadtest.locustfile import (
    CodingAgent,
    MathAgent,
    SearchAgent,
    events,
    on_each_run,
    refuse_unless_positive,
)

__all__ = ["AgentShape", "CodingAgent", "MathAgent", "SearchAgent"]

# How long a ramp stays at its top, with all agents running, as a share of the ramp.
TOP_SHARE = 0.25


def add_arguments(parser: LocustArgumentParser) -> None:
    """Add the shape's arguments to those of the agents."""
    parser.add_argument("--shape", choices=("rollout", "ramp"), default="rollout")
    parser.add_argument("--agents", type=int, default=16, help="concurrent agents")
    parser.add_argument("--rollouts", type=int, default=1, help="number of rollouts, one after the other")
    parser.add_argument("--ramp-s", type=float, default=60.0, help="seconds from the first agent to all")


def refuse_what_cannot_run(environment: Any, runner: Any, **_: Any) -> None:
    """A master sees no agent, so its run would never end; and without agents there is none."""
    if isinstance(runner, MasterRunner | WorkerRunner):
        raise SystemExit("loadtest/shapes.py runs in one process; use loadtest/locustfile.py with workers")
    refuse_unless_positive(environment.parsed_options, "agents", "rollouts", "ramp_s")


def set_up(environment: Any, **_: Any) -> None:
    """Install a board that hands out rollouts, if the shape is a rollout."""
    options = environment.parsed_options
    if options.shape == "rollout":
        environment.board = Board(options, environment, options.agents, options.rollouts)


events.init_command_line_parser.add_listener(add_arguments)
events.init.add_listener(refuse_what_cannot_run)
# After the agents' own listener, so this board is the one that remains.
on_each_run(set_up)


class AgentShape(LoadTestShape):
    """The shape that `--shape` names."""

    # Seconds into the run when all agents of a ramp were first seen running.
    _top_s: float | None = None

    def tick(self) -> tuple[int, float] | None:
        runner: Any = self.runner
        environment, options = runner.environment, runner.environment.parsed_options
        board: Board = environment.board
        if options.shape == "rollout":
            if board.num_refused >= options.agents:
                return None  # nobody is left to end a rollout
            return rollout(board.num_rollouts_ended, options.agents, options.rollouts)
        run_s = time.perf_counter() - self.start_time
        if board.num_agents < options.agents:
            self._top_s = None  # also in a run that follows another
        elif self._top_s is None:
            self._top_s = run_s
        return ramp(run_s, self._top_s, options.agents, options.ramp_s)


def rollout(num_ended: int, num_agents: int, num_rollouts: int) -> tuple[int, float] | None:
    """All agents at once, until this many rollouts have ended."""
    return None if num_ended >= num_rollouts else (num_agents, float(num_agents))


def ramp(run_s: float, top_s: float | None, num_agents: int, ramp_s: float) -> tuple[int, float] | None:
    """Agents in proportion to the time, all of them at `ramp_s`; the end comes a little after all were running
    (`top_s`).
    """
    if top_s is not None and run_s > max(top_s, ramp_s) + ramp_s * TOP_SHARE:
        return None
    wanted = min(num_agents, max(1, math.ceil(num_agents * run_s / ramp_s)))
    return wanted, float(num_agents)
