"""How many events per second the scheduler handles: 64 engines, 10,000 live trajectories, one core.

Run as a script it prints the figure for each policy named, or for all, with a profile under `--profile`:

    python -m tests.bench.test_scheduler_speed [--profile] [--idle] [--vague] [--save LABEL] [POLICY ...]

A rollout is played first, and its events are then replayed on a new scheduler without a look at the clock between
them: reading the thread's clock is a system call, and on a virtual machine two of them took up to 23 us an event, a
third of what was measured. Rows of scheduler_speed.csv before ff944c7 have that in them.

With `--idle`, engines have twice the slots, so that most turns find room at once and placement compares all engines.
With `--vague`, 90th percentiles are as far above the means as those of a first rollout, of which nothing is known; a
tool return then compares all engines, too.
With `--save`, the figures are added to scheduler_speed.csv beside this file, under a label such as the commit. They are
processor time, and the machines were shared and noisy: compare rows of one label, or the last of two labels of one day.
"""

import cProfile
import gc
import pstats
import random
import sys
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from time import perf_counter, thread_time

import pytest

from scheduling.limits import Limits
from scheduling.policy import HEDDLE, HEDDLE_PAPER, POLICIES, ROUND_ROBIN, THUNDERAGENT, Policy
from scheduling.scheduler import Scheduler
from scheduling.types import (
    Dispatch,
    EngineReported,
    EngineSpec,
    Event,
    Prediction,
    Tick,
    TrajectoryClosed,
    TurnArrived,
    TurnFinished,
    TurnProgressed,
)

NUM_ENGINES = 64
NUM_TRAJECTORIES = 10_000
SLOTS = 100
KV_TOKENS = 2_000_000
PROGRESS_EVERY_S = 10.0
SERIES = Path(__file__).with_name("scheduler_speed.csv")

# The 90th percentile of a first rollout's predictions over the mean.
VAGUE_P90 = 2.3

# Generous bounds for a shared, slow machine: the gateway needs some 5 events a turn, and serves under 1,000 turns/s.
FLOOR_EVENTS_PER_S = 7_500
VAGUE_FLOOR_EVENTS_PER_S = 4_000


class Rollout:
    """Agents and engines in virtual time: turns of some seconds, tool calls between them, then a new trajectory."""

    def __init__(self, policy: Policy, slots: int = SLOTS, seed: int = 1, p90: float = 1.0) -> None:
        self.p90 = p90
        self.scheduler = Scheduler(policy, Limits())
        self.dice = random.Random(seed)
        self.num_events = 0
        self.played: list[Event] = []
        self.later: list[tuple[float, int, Event]] = []
        self.turn_of: dict[str, TurnArrived] = {}
        self.turns_left: dict[str, int] = {}
        self.num_begun = 0
        for index in range(NUM_ENGINES):
            self.at(EngineReported(0.0, EngineSpec(f"engine{index}", {"model"}, slots, KV_TOKENS)))
        self.run(NUM_ENGINES)
        for _ in range(NUM_TRAJECTORIES):
            self.begin(self.dice.uniform(0, 30))

    def begin(self, at: float) -> None:
        trajectory_id = f"trajectory{self.num_begun}"
        self.num_begun += 1
        self.turns_left[trajectory_id] = self.dice.randint(2, 40)
        self.next_turn(at, trajectory_id, self.dice.randint(2_000, 12_000))

    def next_turn(self, at: float, trajectory_id: str, prompt_tokens: int) -> None:
        turn_id = f"{trajectory_id}/{self.turns_left[trajectory_id]}"
        total = self.dice.lognormvariate(8.5, 1.0)
        event = TurnArrived(at, turn_id, trajectory_id, "model", prompt_tokens, Prediction(total, self.p90 * total))
        self.turn_of[turn_id] = event
        self.at(event)

    def at(self, event: Event) -> None:
        self.num_events += 1
        heappush(self.later, (event.at, self.num_events, event))

    def run(self, num_events: int) -> None:
        """Play this many events."""
        for _ in range(num_events):
            event = heappop(self.later)[2]
            self.played.append(event)
            actions = self.scheduler.handle(event)
            if isinstance(event, TurnFinished):
                self.go_on(event)
            for action in actions:
                if isinstance(action, Dispatch):
                    self.serve(event.at, action)

    def serve(self, at: float, dispatch: Dispatch) -> None:
        arrived = self.turn_of[dispatch.turn_id]
        output = self.dice.randint(20, 1_500)
        lasts_s = output / 50
        for beat in range(1, int(lasts_s / PROGRESS_EVERY_S) + 1):
            after_s = beat * PROGRESS_EVERY_S
            self.at(TurnProgressed(at + after_s, dispatch.turn_id, dispatch.leg, int(after_s * 50)))
        self.at(TurnFinished(at + lasts_s, dispatch.turn_id, dispatch.leg, arrived.prompt_tokens, output))

    def go_on(self, event: TurnFinished) -> None:
        trajectory_id = self.turn_of.pop(event.turn_id).trajectory_id
        self.turns_left[trajectory_id] -= 1
        if self.turns_left[trajectory_id]:
            context = event.prompt_tokens + event.output_tokens + self.dice.randint(50, 2_000)
            self.next_turn(event.at + self.dice.expovariate(1 / 5), trajectory_id, context)
        else:
            self.at(TrajectoryClosed(event.at, trajectory_id))
            self.begin(event.at)


def replay(policy: Policy, played: Sequence[Event], num_counted: int, profile: cProfile.Profile | None = None) -> float:
    """Replay events. Returns how many of the last ones a new scheduler handles per second of its own time."""
    gc.freeze()  # a gateway does not keep its events
    scheduler = Scheduler(policy, Limits())
    for event in played[:-num_counted]:
        scheduler.handle(event)
    if profile:
        profile.enable()
    started_at = thread_time()
    for event in played[-num_counted:]:
        scheduler.handle(event)
    took_s = thread_time() - started_at
    if profile:
        profile.disable()
    return num_counted / took_s


def test_the_scheduler_handles_thousands_of_events_a_second() -> None:
    """Under full load, on any machine."""
    rollout = Rollout(HEDDLE)
    rollout.run(40_000)
    assert replay(HEDDLE, rollout.played, 20_000) > FLOOR_EVENTS_PER_S
    assert len(rollout.scheduler.trajectories) >= NUM_TRAJECTORIES


def test_predictions_that_tell_nothing_do_not_slow_the_scheduler_down() -> None:
    """In a first rollout, on engines that have room, each tool return may move its trajectory to any of them."""
    rollout = Rollout(HEDDLE, 2 * SLOTS, p90=VAGUE_P90)
    rollout.run(30_000)
    assert replay(HEDDLE, rollout.played, 10_000) > VAGUE_FLOOR_EVENTS_PER_S


@pytest.mark.parametrize("policy", [HEDDLE, HEDDLE_PAPER, THUNDERAGENT, ROUND_ROBIN], ids=lambda policy: policy.name)
def test_a_tick_takes_less_than_a_quarter_of_a_second(policy: Policy) -> None:
    """It checks all engines and all waiting turns once a second, and must not stall streams for long."""
    rollout = Rollout(policy)
    rollout.run(20_000)
    started_at = perf_counter()
    rollout.scheduler.handle(Tick(rollout.later[0][0]))
    assert perf_counter() - started_at < 0.25


def main() -> None:
    is_idle, is_vague = "--idle" in sys.argv, "--vague" in sys.argv
    slots = 2 * SLOTS if is_idle else SLOTS
    label = sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else None
    for policy in [POLICIES[name] for name in sys.argv[1:] if name in POLICIES] or POLICIES.values():
        rollout = Rollout(policy, slots, p90=VAGUE_P90 if is_vague else 1.0)
        rollout.run(150_000)
        profile = cProfile.Profile() if "--profile" in sys.argv else None
        events_per_s = replay(policy, rollout.played, 100_000, profile)
        waiting = rollout.scheduler.num_waiting
        running = sum(len(engine.running) for engine in rollout.scheduler.engines.values())
        print(f"{policy.name:16} {events_per_s:9,.0f} events/s  ({running} running, {waiting} waiting)")
        if label:
            with SERIES.open("a") as series:
                load = ("idle" if is_idle else "full") + (" vague" if is_vague else "")
                series.write(f"{label},{policy.name},{load},{events_per_s:.0f}\n")
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
