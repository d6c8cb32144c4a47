"""The same events give the same actions, byte for byte, in any process, so a log can be replayed."""

import os
import random
import subprocess
import sys

import pytest

from scheduling.limits import Limits
from scheduling.policy import POLICIES
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
    Tick,
    TrajectoryClosed,
    TurnArrived,
    TurnFailed,
    TurnFinished,
)

LIMITS = Limits(max_waiting_turns=20, queue_timeout_s=60, trajectory_ttl_s=50, retention_s=20, in_tool_lease_s=3)


def play(policy_name: str, num_events: int = 1_500) -> list[tuple[Event, list[Action]]]:
    """A busy fleet drawn from a fixed seed: engines with several models, arrivals, ends, faults, losses, ticks."""
    dice = random.Random(7)
    scheduler = Scheduler(POLICIES[policy_name], LIMITS)
    running: dict[str, Dispatch] = {}
    log: list[tuple[Event, list[Action]]] = []
    at = 0.0
    for number in range(num_events):
        at += dice.expovariate(2)
        engine_id = f"engine{dice.randrange(5)}"
        kind = dice.random()
        event: Event
        if number < 5 or kind < 0.03:
            models = frozenset(dice.sample(["x", "y", "z"], 2))
            event = EngineReported(at, EngineSpec(engine_id, models, 3, 3_000), accepting=dice.random() < 0.9)
        elif kind < 0.04:
            event = EngineLost(at, engine_id)
        elif kind < 0.06:
            event = TrajectoryClosed(at, f"t{dice.randrange(40)}", dice.random() < 0.3)
        elif kind < 0.12:
            event = Tick(at)
        elif running and kind < 0.5:
            leg = running.pop(dice.choice(sorted(running)))
            event = TurnFinished(at, leg.turn_id, leg.leg, dice.randint(10, 900), dice.randint(1, 300))
            if dice.random() < 0.2:
                event = TurnFailed(at, leg.turn_id, leg.leg, dice.choice(list(Fault)), dice.random() < 0.7)
        else:
            total = dice.lognormvariate(6, 2)
            model = dice.choice(["x", "y", "z"])
            trajectory_id = f"t{dice.randrange(40)}"
            event = TurnArrived(
                at,
                f"turn{number}",
                trajectory_id,
                model,
                dice.randint(10, 900),
                Prediction(total, total),
                preamble_id=dice.choice(["", "p", "q"]),
                preamble_tokens=dice.randint(0, 500),
            )
        actions = scheduler.handle(event)
        running.update((action.turn_id, action) for action in actions if isinstance(action, Dispatch))
        log.append((event, actions))
    return log


@pytest.mark.parametrize("policy_name", POLICIES)
def test_a_replayed_log_gives_the_same_actions(policy_name: str) -> None:
    """A second scheduler that gets the first one's events makes the same decisions, to the last byte."""
    log = play(policy_name)
    again = Scheduler(POLICIES[policy_name], LIMITS)
    replayed = [again.handle(event) for event, _ in log]
    decided = [actions for _, actions in log]
    assert repr(replayed).encode() == repr(decided).encode()
    assert sum(isinstance(action, Dispatch) for actions in decided for action in actions) > 300


def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    """Each process iterates sets of strings in its own order; no decision may depend on that order."""
    code = f"from {__name__} import play; print([actions for _, actions in play('heddle')])"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(printed) == 1
