"""Plays a workload against any OpenAI base URL, as agents would: turn, tool, turn, all trajectories at once.

Each agent is a task that sends its whole conversation at every turn, waits for the answer, waits as long as its tool
takes, and goes on. The tools are the only sleeping here. A turn must bring exactly the tokens of its trajectory;
anything else is a failed turn with its reason, and a turn without any answer ends its trajectory.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote
from uuid import uuid4

from loadtest.agent import Conversation, Identity, Writer, address_of, chat_body, sent_id
from loadtest.answers import NONSENSE
from loadtest.clients import ChatClient, RequestFailed, if_known, patience_s
from loadtest.raw_client import RawClient
from loadtest.results import RolloutResult, TrajectoryResult, TurnResult
from workloads.trajectories import Trajectory, Turn, Workload

OnTurn = Callable[[TurnResult], None]
# The queueing time of each turn of a trajectory, in order; None if the server does not report it.
QueuedSource = Callable[[ChatClient, str], Awaitable[Sequence[float | None] | None]]

# The SDK's connection pool keeps 100 idle connections and searches all of them for each request.
AGENTS_PER_CLIENT = 100
# Two prompts of these sizes separate the template's tokens from the text's.
CALIBRATION_TOKENS = (16, 256)


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How a workload is played.

    Args:
        base_url: Ends in `/v1`.
        model: None: the first that the server lists.
        identity: How agents name their trajectory.
        stream_share: The share of trajectories that stream: 1 all, 0 none; the same ones in each replay.
        speed_up: Divides tool times.
        concurrency: The most trajectories at once. None: all.
        max_retries: Of a request; see `loadtest.clients` for how long that bridges a restart.
        timeout_s: Of a request without a byte; with `raw`, of a whole turn. A turn may queue long in a rollout, so this
            is far above the SDK's 600 s.
        models_timeout_s: Of the question for the server's models, which queues nowhere, beside what its retries wait
            for a restart. Seen: over 10 s, from a vLLM that had just started on a busy machine.
        finish: Report the end of each trajectory to the gateway. A server without that route is left alone.
        calibrate: Ask two one-token questions first, to learn how many characters make a token.
        client: `sdk` is what agents use; `raw` costs less if thousands of agents share a processor.
        rollout_id: Begins every trajectory's id, so that two replays do not collide. None: a new one.
    """

    base_url: str
    api_key: str = "none"
    model: str | None = None
    identity: Identity = "header"
    stream_share: float = 1.0
    speed_up: float = 1.0
    concurrency: int | None = None
    max_retries: int = 8
    timeout_s: float = 3_600.0
    models_timeout_s: float = 60.0
    finish: bool = True
    calibrate: bool = True
    client: Literal["sdk", "raw"] = "sdk"
    rollout_id: str | None = None


async def queued_by_trajectory_route(client: ChatClient, trajectory_id: str) -> Sequence[float | None] | None:
    """The queueing times that the gateway reports: `queued_s` of the turns of `GET /v1/trajectories/{id}`."""
    record = await if_known(client.get(f"/trajectories/{quote(trajectory_id, safe='')}"))
    return None if record is None else [turn.get("queued_s") for turn in record.get("turns", ())]


async def replay(
    workload: Workload,
    settings: ReplaySettings,
    *,
    name: str = "replay",
    on_turn: OnTurn | None = None,
    queued_source: QueuedSource | None = queued_by_trajectory_route,
) -> RolloutResult:
    """Play every trajectory of the workload to its end, and return the measurements.

    Args:
        name: The result's name in tables.
        on_turn: Called after each turn, for a progress bar; must not block.
        queued_source: Asked at the end of a trajectory for turns whose answer had no `x-heddle-queued-ms`. None: not
            asked.

    Raises:
        RequestFailed: If the server does not even list its models. Later failures are in the result.
    """
    rollout_id = settings.rollout_id or f"r{uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:
        at_once = min(settings.concurrency or len(workload.trajectories), len(workload.trajectories))
        num_clients = math.ceil(at_once / AGENTS_PER_CLIENT) if settings.client == "sdk" else 1
        clients = [await stack.enter_async_context(aclosing(_new_client(settings))) for _ in range(num_clients)]
        settings = replace(settings, model=settings.model or await _first_model(clients[0], settings))
        writer = Writer()
        if settings.calibrate:
            await _calibrate(clients[0], writer, settings)
        limit = asyncio.Semaphore(settings.concurrency) if settings.concurrency else nullcontext()
        began_at = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            agents = [
                _Agent(trajectory, clients[index % len(clients)], writer, settings, rollout_id, began_at)
                for index, trajectory in enumerate(workload.trajectories)
            ]
            running = [tasks.create_task(agent.run(limit, on_turn, queued_source)) for agent in agents]
        results = tuple(task.result() for task in running)
    # Not the time at which the last task ended: fetching queueing times and finishing are not part of a trajectory.
    makespan_s = max(result.ended_at for result in results)
    return RolloutResult(name, rollout_id, makespan_s, results)


def streams(trajectory: Trajectory, stream_share: float) -> bool:
    """Whether a trajectory is in the share that streams: decided by its id, so the same in every replay."""
    return random.Random(trajectory.trajectory_id).random() < stream_share


def _new_client(settings: ReplaySettings) -> ChatClient:
    arguments = (settings.base_url, settings.api_key, settings.max_retries, settings.timeout_s)
    if settings.client == "raw":
        return RawClient(*arguments)
    from loadtest.sdk_client import SdkClient  # a second of a core, which most verbs do without

    return SdkClient(*arguments)


async def _first_model(client: ChatClient, settings: ReplaySettings) -> str:
    limit_s = patience_s(settings.max_retries) + settings.models_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            listed = await client.get("/models")
    except TimeoutError:
        asked = f"GET {settings.base_url.rstrip('/')}/models"
        raise RequestFailed(
            f"the server does not list its models: no answer to {asked} within {limit_s:,g} s"
        ) from None
    except RequestFailed as failure:
        raise RequestFailed(f"the server does not list its models: {failure}", failure.status) from failure
    if not listed.get("data"):
        raise RequestFailed("the server lists no model: no engine is ready there, perhaps not yet; or name a model")
    try:
        return str(listed["data"][0]["id"])
    except NONSENSE as error:
        raise RequestFailed(f"the server does not list its models: not an answer of this API: {error!r}") from error


async def _calibrate(client: ChatClient, writer: Writer, settings: ReplaySettings) -> None:
    for num_tokens in CALIBRATION_TOKENS:
        turns = (Turn(0, 1, 0.0),)
        # New ids, because a gateway refuses turns of an aborted trajectory; and of no rollout, whose counts they would
        # change.
        name = f"calibration-{num_tokens}"
        probe = Trajectory(f"{name}-{uuid4().hex[:8]}", name, num_tokens, turns)
        agent = _Agent(probe, client, writer, replace(settings, finish=False), "", time.perf_counter())
        # A probe that fails teaches nothing about the text; the first real turn will report what is wrong.
        await agent.run(nullcontext(), None, None)
        await agent.abort()


class _Agent:
    """One trajectory being played. Its results are its only output."""

    def __init__(
        self,
        trajectory: Trajectory,
        client: ChatClient,
        writer: Writer,
        settings: ReplaySettings,
        rollout_id: str,
        began_at: float,
    ) -> None:
        self._trajectory = trajectory
        self._client = client
        self._settings = settings
        self._began_at = began_at
        self._conversation = Conversation(trajectory, writer)
        name = sent_id("-".join(filter(None, (rollout_id, trajectory.trajectory_id))))
        self._address = address_of(settings.identity, name, trajectory.group_id, rollout_id)
        # An agent without an identity learns the gateway's id from the answers.
        self._known_as = None if settings.identity == "none" else name

    async def run(
        self,
        limit: AbstractAsyncContextManager[Any],
        on_turn: OnTurn | None,
        queued_source: QueuedSource | None,
    ) -> TrajectoryResult:
        """All turns, then what the gateway reports of them. Never raises for what a server does."""
        async with limit:
            started_at = self._now()
            turns = await self._play(on_turn)
            ended_at = self._now()
            error = None
            try:
                if queued_source is not None:
                    turns = await self._with_queued(turns, queued_source)
                if self._settings.finish and self._known_as is not None:
                    await self._client.post(f"/trajectories/{quote(self._known_as, safe='')}/finish")
            except RequestFailed as failure:
                error = str(failure)
        trajectory = self._trajectory
        return TrajectoryResult(
            trajectory.trajectory_id,
            trajectory.group_id,
            len(trajectory.turns),
            started_at,
            ended_at,
            tuple(turns),
            error,
        )

    async def abort(self) -> None:
        """Have the gateway forget the trajectory, and learn nothing from it. A server without that route is left
        alone.
        """
        if self._known_as is not None:
            with suppress(RequestFailed):
                await self._client.delete(f"/trajectories/{quote(self._known_as, safe='')}")

    async def _play(self, on_turn: OnTurn | None) -> list[TurnResult]:
        results: list[TurnResult] = []
        for index, turn in enumerate(self._trajectory.turns):
            result, answered = await self._take_turn(index, turn)
            results.append(result)
            if on_turn is not None:
                on_turn(result)
            if not answered:
                break
            if index + 1 < len(self._trajectory.turns):
                await asyncio.sleep(turn.tool_s / self._settings.speed_up)
        return results

    async def _take_turn(self, index: int, turn: Turn) -> tuple[TurnResult, bool]:
        """The turn's result, and whether the conversation can continue from it."""
        settings = self._settings
        assert settings.model is not None, "the model is known before the first turn"
        stream = streams(self._trajectory, settings.stream_share)
        messages = self._conversation.ask()
        body = chat_body(settings.model, messages, turn.output_tokens, stream)
        started_at = self._now()
        result = TurnResult(
            self._trajectory.trajectory_id,
            index,
            turn.output_tokens,
            started_at,
            None,
            started_at,
            0,
            0,
            0,
            0,
            None,
            None,
        )
        try:
            reply = await self._client.chat(body, self._address)
        except RequestFailed as failure:
            failed = replace(result, ended_at=self._now(), num_retries=failure.num_retries, error=str(failure))
            return failed, False
        self._known_as = reply.trajectory_id or self._known_as
        answer = reply.answer
        result = replace(
            result,
            first_token_at=None if reply.first_token_at is None else reply.first_token_at - self._began_at,
            ended_at=self._now(),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            num_retries=reply.num_retries,
            queued_s=reply.queued_s,
            error=self._conversation.hear(answer),
        )
        return result, True

    async def _with_queued(self, turns: list[TurnResult], source: QueuedSource) -> list[TurnResult]:
        if self._known_as is None or all(turn.queued_s is not None for turn in turns):
            return turns
        told = await source(self._client, self._known_as)
        if told is None or len(told) != len(turns):
            return turns
        return [
            turn if turn.queued_s is not None else replace(turn, queued_s=queued_s)
            for turn, queued_s in zip(turns, told, strict=True)
        ]

    def _now(self) -> float:
        return time.perf_counter() - self._began_at
