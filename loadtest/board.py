"""What Locust's users play: the trajectories of a law or a trace, handed out one by one, and in rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from uuid import uuid4

from gevent.event import Event  # type: ignore[import-untyped]

from loadtest.agent import Writer
from workloads.laws import draw, law_named
from workloads.traces import load_trace
from workloads.trajectories import Trajectory, Workload

# Trajectories drawn from a law in advance; when all have been played they come again under new ids.
NUM_DRAWN = 1_024


class Board:
    """Hands out trajectories to users.

    Args:
        rollout_size: This many trajectories make a rollout, and the next one begins when the last trajectory has ended.
            None: no rollouts, a user never waits.
        num_rollouts: After this many, users wait to be stopped.
    """

    def __init__(self, options: Any, environment: Any, rollout_size: int | None = None, num_rollouts: int = 1) -> None:
        self.writer = Writer()
        self.num_rollouts_ended = 0
        # Agents that have fetched the list of models, or were refused; the latter play nothing.
        self.num_agents = 0
        self.num_refused = 0
        self._options = options
        self._environment = environment
        self._rollout_size = rollout_size
        self._num_rollouts = num_rollouts
        self._run_id = f"l{uuid4().hex[:8]}"
        self._feeds: dict[str, Iterator[Trajectory]] = {}
        self._num_taken = 0
        self._num_ended = 0
        self._began_at = time.perf_counter()
        self._next_rollout = Event()

    @property
    def rollout_id(self) -> str:
        return f"{self._run_id}-{self.num_rollouts_ended}"

    def take(self, law_name: str) -> tuple[Trajectory, str]:
        """The next trajectory of the kind, and its id on the wire. Waits if the rollout has none left to begin."""
        while self._rollout_size is not None and (
            self._num_taken >= self._rollout_size or self.num_rollouts_ended >= self._num_rollouts
        ):
            self._next_rollout.wait()
        self._num_taken += 1
        # All kinds share one trace or one law, else each of its trajectories would be played by each kind.
        source = self._options.trace or self._options.law or law_name
        if source not in self._feeds:
            self._feeds[source] = _endless(workload_of(self._options, law_name))
        trajectory = next(self._feeds[source])
        return trajectory, f"{self.rollout_id}-{self._num_taken}-{trajectory.trajectory_id}"

    def put_back(self) -> None:
        """A taken trajectory has ended, well or not."""
        self._num_ended += 1
        if self._num_ended == self._rollout_size:
            makespan_ms = (time.perf_counter() - self._began_at) * 1_000
            report(self._environment, "AGENT", "rollout", makespan_ms)
            self.num_rollouts_ended += 1
            self._num_taken = self._num_ended = 0
            self._began_at = time.perf_counter()
            waiting, self._next_rollout = self._next_rollout, Event()
            waiting.set()


def workload_of(options: Any, law_name: str) -> Workload:
    """What agents of this law play with these options. It is read or drawn once."""
    law_name = "" if options.trace else options.law or law_name
    return _loaded(options.trace, law_name, options.seed, options.scale, options.max_context_tokens or None)


def report(environment: Any, request_type: str, name: str, time_ms: float, error: str | None = None) -> None:
    """One entry of Locust's statistics that is not an HTTP request."""
    environment.events.request.fire(
        request_type=request_type,
        name=name,
        response_time=time_ms,
        response_length=0,
        exception=None if error is None else RuntimeError(error),
        context={},
    )


@lru_cache(maxsize=3)  # one for each kind
def _loaded(trace: str, law_name: str, seed: int, scale: float, fit: int | None) -> Workload:
    if trace:
        workload = load_trace(trace, scale=scale)
    else:
        workload = draw(law_named(law_name), NUM_DRAWN, seed, scale=scale)
    return workload.within(max_context_tokens=fit)


def _endless(workload: Workload) -> Iterator[Trajectory]:
    while True:
        yield from workload.trajectories
