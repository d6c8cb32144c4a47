"""Where `heddle trial` plays its rollouts: on engines behind a gateway that is each rollout's own.

A rollout ends as soon as its gateway has lost an engine. Its turns would wait for one as long as in a fleet (half an
hour) or crowd the others, and its makespan would say nothing of the policy. The gateway knows a lost engine from a slow
one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.console import Console

from engines.http import FAULTS, HttpClient
from heddle.real import clear_prefix_cache
from heddle.rollouts import local_gateway, play
from loadtest.replayer import ReplaySettings
from loadtest.results import RolloutResult
from workloads.trajectories import Workload

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
            EngineGone: it was ended, because the gateway lost an engine.
        """
        for engine in self.engines:
            await clear_prefix_cache(engine)
        flags = ("--log-level", "warning")
        async with local_gateway(self.engines, policy, self.work_dir, *flags, profile=self.profile) as gateway:
            settings = ReplaySettings(f"{gateway}/v1", model=self.model, stream_share=0.0, client="raw")
            playing = asyncio.create_task(play(workload, policy, settings, self.console))
            return await _unless_lost(playing, gateway)


async def _unless_lost(playing: asyncio.Task[RolloutResult], gateway: str) -> RolloutResult:
    """The result of a rollout, which is cancelled once its gateway has lost an engine."""
    watching = asyncio.create_task(_first_loss(gateway))
    try:
        await asyncio.wait((playing, watching), return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            raise EngineGone(watching.result())
        return playing.result()
    finally:
        for task in (playing, watching):
            task.cancel()
        await asyncio.gather(playing, watching, return_exceptions=True)


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
