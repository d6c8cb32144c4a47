"""Where `heddle trial` plays its rollouts: on engines behind a gateway that is each rollout's own.

A rollout ends as soon as its gateway has lost an engine. Its turns would wait for one as long as in a fleet (half an
hour) or crowd the others, and its makespan would say nothing of the policy. The gateway knows a lost engine from a slow
one. Until it is ready, which without an engine it never is, the engines are looked at here.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
from rich.console import Console

from engines.http import FAULTS, EngineUnreachable, HttpClient
from heddle.real import clear_prefix_cache
from heddle.rollouts import local_gateway, play
from loadtest.replayer import ReplaySettings
from loadtest.results import RolloutResult
from workloads.trajectories import Workload

Made = TypeVar("Made")
_LOOK_S = 1.0  # as often as the gateway looks at its engines
_LOOK_TIMEOUT_S = 60.0  # a gateway on a busy machine stalls for many seconds


class EngineGone(Exception):
    """An engine was lost during a rollout; the message names it and says why. Safe to repeat once it is back."""


@dataclass(frozen=True, slots=True)
class Track:
    """Engines, and what is the same for all rollouts on them.

    Args:
        model: what each turn asks for.
        profile: of each engine, as FILE:NAME or a name.
        work_dir: for the gateways' files.
    """

    engines: Sequence[str]
    model: str
    profile: str
    work_dir: Path
    console: Console

    async def played(self, workload: Workload, policy: str) -> RolloutResult:
        """A rollout from empty prefix caches. Answers are not streamed, so gateway and agents take little.

        Raises:
            EngineGone: it was ended, because the gateway lost an engine, or before it began, because one is gone.
        """
        for engine in self.engines:
            await clear_prefix_cache(engine)
        flags = ("--log-level", "warning")
        async with AsyncExitStack() as stack:
            of_its_own = local_gateway(self.engines, policy, self.work_dir, *flags, profile=self.profile)
            gateway = await _unless_lost(stack.enter_async_context(of_its_own), _first_gone(self.engines))
            settings = ReplaySettings(f"{gateway}/v1", model=self.model, stream_share=0.0, client="raw")
            return await _unless_lost(play(workload, policy, settings, self.console), _first_loss(gateway))


async def _unless_lost(work: Coroutine[Any, Any, Made], loss: Coroutine[Any, Any, str]) -> Made:
    """What some work gives, which is cancelled once an engine is lost."""
    working, watching = asyncio.create_task(work), asyncio.create_task(loss)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise EngineGone(watching.result())
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _first_gone(engines: Sequence[str]) -> str:
    """Wait until an engine accepts no connection; one that is only slow does. Returns: which, and why."""
    while True:
        await asyncio.sleep(_LOOK_S)
        for engine in engines:
            http = HttpClient(engine)
            try:
                await http.get("/health", _LOOK_TIMEOUT_S)
            except EngineUnreachable as fault:
                return f"{engine} was lost while a gateway started: {fault}"
            except FAULTS:
                continue
            finally:
                http.close()


async def _first_loss(gateway: str) -> str:
    """Wait until a gateway has lost an engine. Returns: which, and why."""
    http = HttpClient(gateway)
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            if (lost := await _lost(http)) is not None:
                return lost
    finally:
        http.close()


async def _lost(http: HttpClient) -> str | None:
    """An engine that the gateway has lost. A gateway that does not answer has lost none: turns fail if it is gone."""
    try:
        status, body = await http.get("/v1/engines", _LOOK_TIMEOUT_S)
    except FAULTS:
        return None
    for engine in orjson.loads(body)["data"] if status == 200 else ():
        if engine["state"] == "lost":
            return f"{engine['url']} was lost during a rollout: {engine['last_fault']}"
    return None
