"""Locust users that act as agents: turn, tool, turn; a user plays one trajectory after the other.

    locust -f loadtest/locustfile.py --headless -u 20 -r 20 -t 20s --host http://127.0.0.1:8080 --scale 0.1

There are three kinds of agents, in proportion to their weights; with `--law` or `--trace` all play that. In addition to
each finish, the statistics have `POST turn` (to the last byte), `TTFT first token`, and `AGENT trajectory` (first
question to last answer, tools included). An answer that does not have exactly the requested length is a failure, and
Locust exits with 1 if there was one. Nothing is retried.

Locust runs on gevent and patches the standard library when imported, so the asyncio replayer is not imported here.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import gevent  # type: ignore[import-untyped]
from locust import FastHttpUser, constant, task
from locust import events as locust_events
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from locust.exception import StopUser

from loadtest.agent import Address, Answer, Conversation, Identity, address_of, chat_body
from loadtest.answers import NONSENSE, Assembly, StreamBroken, add_event
from loadtest.board import Board, report, workload_of
from workloads.trajectories import Trajectory


def add_arguments(parser: LocustArgumentParser) -> None:
    """Add these arguments to Locust's own."""
    parser.add_argument("--trace", default="", help="JSON lines of trajectories, .gz or not")
    parser.add_argument("--law", default="", help="all agents play this law")
    parser.add_argument("--seed", type=int, default=1, help="seed of the law's draw")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies lengths and tool times")
    parser.add_argument("--tool-speed-up", type=float, default=1.0, help="divides tool times")
    parser.add_argument("--max-context-tokens", type=int, default=0, help="scale lengths until all fit; 0: do not")
    parser.add_argument("--identity", choices=get_args(Identity), default="header")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="none", is_secret=True)


def set_up(environment: Any, **_: Any) -> None:
    """One board per run; `loadtest/shapes.py` replaces it by one with rollouts."""
    environment.board = Board(environment.parsed_options, environment)


def load_workloads(environment: Any, **_: Any) -> None:
    """Before a run begins: agents would count the time as their server's. What cannot be played ends the process: each
    agent would fail by itself, and a rollout of `loadtest/shapes.py` would never end.
    """
    refuse_unless_positive(environment.parsed_options, "scale", "tool_speed_up")
    try:
        _load(environment)
    except (OSError, ValueError) as error:
        raise SystemExit(f"loadtest: {error}") from None
    # By this clock Locust counts the seconds of `--run-time`; it has stood still since Locust was imported.
    gevent.get_hub().loop.update_now()


def load_chosen_workloads(environment: Any, **_: Any) -> None:
    """The web page may have chosen others. What is wrong with them, the agents say."""
    with suppress(OSError, ValueError):
        _load(environment)


def refuse_unless_positive(options: Any, *names: str) -> None:
    """End the process if one of these options is not a number above 0."""
    for name in names:
        if not 0 < getattr(options, name) < math.inf:
            raise SystemExit(f"loadtest: --{name.replace('_', '-')} must be a number above 0")


def on_each_run(prepare: Callable[..., None]) -> None:
    """Call this before each run. The web page starts one after the other, each with its own options.

    A shape looks at the board before `test_start`, so the board of an ended run must not be there any more.
    """
    for event in (events.init, events.test_start, events.test_stop):
        event.add_listener(prepare)


# Locust's events have no types.
events: Any = locust_events
events.init_command_line_parser.add_listener(add_arguments)
events.init.add_listener(load_workloads)
events.test_start.add_listener(load_chosen_workloads)
on_each_run(set_up)


class Agent(FastHttpUser):
    """One agent after the other. The kinds differ by the law of their trajectories."""

    abstract = True
    wait_time = constant(0)
    # A turn may queue for a long time in a rollout.
    network_timeout = 3_600.0
    law_name = ""

    def on_start(self) -> None:
        self.board: Board = self.environment.board
        self.options: Any = self.environment.parsed_options
        self.client.base_url = (self.host or "").rstrip("/")  # paths begin with one
        self.model: str | None = self.options.model or self._first_model()
        self.board.num_agents += 1
        self.board.num_refused += self.model is None

    @task
    def play_trajectory(self) -> None:
        """One trajectory from its first question to its last answer."""
        if self.model is None:
            # Not in `on_start`, where Locust logs it with a traceback.
            raise StopUser
        trajectory, trajectory_id = self.board.take(self.law_name)
        began_at = time.perf_counter()
        try:
            address = address_of(self.options.identity, trajectory_id, trajectory.group_id, self.board.rollout_id)
            error = self._play(trajectory, self.model, address)
            report(self.environment, "AGENT", "trajectory", (time.perf_counter() - began_at) * 1_000, error)
            if self.options.identity != "none":
                self._finish(trajectory_id)
        except Exception:
            self.board.put_back()
            raise
        # Not in a `finally`: agents that are killed because the run is stopped have not ended their rollout.
        self.board.put_back()

    def _play(self, trajectory: Trajectory, model: str, address: Address) -> str | None:
        """Why the trajectory failed, or None."""
        conversation = Conversation(trajectory, self.board.writer)
        for index, turn in enumerate(trajectory.turns):
            body = chat_body(model, conversation.ask(), turn.output_tokens, True)
            error = self._take_turn(body | dict(address.body), address, conversation)
            if error is not None:
                return f"turn {index}: {error}"
            if index + 1 < len(trajectory.turns):
                gevent.sleep(turn.tool_s / self.options.tool_speed_up)
        return None

    def _take_turn(self, body: dict[str, Any], address: Address, conversation: Conversation) -> str | None:
        headers = {**self._key(), **address.headers}
        path = f"{address.path_prefix}/v1/chat/completions"
        began_at = time.perf_counter()
        with self.client.post(
            path, json=body, headers=headers, name="turn", stream=True, catch_response=True
        ) as response:
            error: str | None
            if response.status_code != 200:
                error = _refusal(response)
            else:
                try:
                    answer, first_token_at = _read_stream(response)
                    error = conversation.hear(answer)
                    if first_token_at is not None:
                        report(self.environment, "TTFT", "first token", (first_token_at - began_at) * 1_000)
                except (StreamBroken, *NONSENSE, *FAILURE_EXCEPTIONS) as broken:
                    error = f"{type(broken).__name__}: {broken}"
            # Locust's own figure ends with the headers of a stream.
            response.request_meta["response_time"] = (time.perf_counter() - began_at) * 1_000
            if error is not None:
                response.failure(error)
        return error

    def _finish(self, trajectory_id: str) -> None:
        with self.client.post(
            f"/v1/trajectories/{trajectory_id}/finish", json={}, headers=self._key(), name="finish", catch_response=True
        ) as response:
            # An engine without a gateway knows no trajectories.
            if response.status_code in (404, 405):
                response.success()

    def _first_model(self) -> str | None:
        """None if the server lists none; that is a failure in the statistics."""
        with self.client.get("/v1/models", headers=self._key(), name="models", catch_response=True) as response:
            if response.status_code != 200:
                response.failure(_refusal(response))
                return None
            try:
                return str(response.json()["data"][0]["id"])
            except NONSENSE:
                response.failure(f"the server lists no models: {response.text}"[:300])
                return None

    def _key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.options.api_key}"}


class CodingAgent(Agent):
    """Many turns, quick tools: the most frequent kind."""

    weight = 6
    law_name = "coding"


class SearchAgent(Agent):
    """Many turns, slow tools."""

    weight = 3
    law_name = "search"


class MathAgent(Agent):
    """Few long turns."""

    weight = 1
    law_name = "math"


def _refusal(response: Any) -> str:
    """Why there is no answer: what the server says, or what kept the request from reaching one."""
    said = f"HTTP {response.status_code}: {response.text}" if response.text else str(response.error)
    return said[:300]


def _load(environment: Any) -> None:
    for kind in environment.user_classes:
        if issubclass(kind, Agent):
            workload_of(environment.parsed_options, kind.law_name)


def _read_stream(response: Any) -> tuple[Answer, float | None]:
    """The answer, and the instant of its first token.

    Locust's `iter_lines` waits for whole kilobytes, which hides the first token; the line reader beneath it does not.
    """
    assembly = Assembly()
    while line := response._response.readline(b"\n"):
        if line.startswith(b"data: {"):
            add_event(json.loads(line[6:]), assembly)
    return assembly.answer(), assembly.first_token_at
