"""Where `heddle trial` plays its rollouts: on engines behind a gateway that is each rollout's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from heddle.real import clear_prefix_cache
from heddle.rollouts import local_gateway, play
from loadtest.replayer import ReplaySettings
from loadtest.results import RolloutResult
from workloads.trajectories import Workload


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
        """A rollout from empty prefix caches. Answers are not streamed, so gateway and agents take little."""
        for engine in self.engines:
            await clear_prefix_cache(engine)
        flags = ("--log-level", "warning")
        async with local_gateway(self.engines, policy, self.work_dir, *flags, profile=self.profile) as gateway:
            settings = ReplaySettings(f"{gateway}/v1", model=self.model, stream_share=0.0, client="raw")
            return await play(workload, policy, settings, self.console)
