"""The same events give the same actions, byte for byte, in any process, so a log can be replayed."""

import os
import subprocess
import sys

import pytest

from scheduling.limits import Limits
from scheduling.policy import POLICIES
from scheduling.scheduler import Scheduler
from scheduling.types import Action, Dispatch, Event
from tests.scheduling.streams import Stream

LIMITS = Limits(max_waiting_turns=20, queue_timeout_s=60, trajectory_ttl_s=50, retention_s=20, in_tool_lease_s=3)


def play(policy_name: str) -> list[tuple[Event, list[Action]]]:
    """A busy fleet drawn from a fixed seed: engines with several models, and everything that may happen to turns."""
    stream = Stream(7, engines="ABCDE", num_trajectories=40)
    return list(stream.play(Scheduler(POLICIES[policy_name], LIMITS), 1_500))


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
