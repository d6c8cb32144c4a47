"""A rollout on a real vLLM against the same rollout in simulation, with the profile measured on that server.

The server has half of the cores, and gateway and agents have the others, because no profile of an engine can describe
what they take from an engine on the same cores. Answers are not streamed, so that gateway and agents take little from
each other, too.

Profile and rollout are measured alternately, and the mean of each counts. A slow machine slows both, and the fastest
of many short batches would come from a luckier moment than the fastest of a few long rollouts. On a machine that is
busy with something else, the test still measures the other load. It is therefore not part of `make real`, but has a
target of its own: `make fidelity`.
"""

import argparse
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from statistics import fmean

import httpx2
import pytest
import pytest_asyncio
from rich.console import Console

from engines.local_vllm import LocalEngine, LocalVllm, launch
from engines.profiling import Fit, Measurement, fit
from heddle import profile as profile_command
from heddle.rollouts import local_gateway
from heddle.trial import PROBE, overhead_of, simulated_makespan_s
from loadtest.replayer import ReplaySettings, replay
from loadtest.results import RolloutResult
from simulator.conditions import Conditions
from workloads.laws import draw, law_named
from workloads.trajectories import Workload

pytestmark = [pytest.mark.vllm, pytest.mark.quiet, pytest.mark.timeout(900)]

SEED = 1
NUM_ROUNDS = 3


@pytest_asyncio.fixture
async def engine(vllm_venv: Path, tiny_model: Path, tmp_path: Path) -> AsyncIterator[LocalEngine]:
    """A server of 4 slots on the first half of the cores; this process and its children have the others."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    try:
        os.sched_setaffinity(0, cores[:half] or cores)
        spec = LocalVllm(tiny_model, max_model_len=32_768, num_kv_blocks=4096, venv=vllm_venv)
        async with launch(spec, tmp_path / "vllm.log") as server:
            os.sched_setaffinity(0, cores[half:])
            yield server
    finally:
        os.sched_setaffinity(0, cores)


async def test_a_simulated_rollout_takes_as_long_as_the_real_one(
    engine: LocalEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Makespans within 10 %."""
    workload = draw(law_named("coding"), 24, SEED).with_max_turns(10).fitted(3_000).with_max_tool_s(1.0)
    profiles, probes, plays = [await profiled(engine.url)], [], []
    for _ in range(NUM_ROUNDS):
        probes.append(await rollout_on(PROBE, engine.url, tmp_path))
        plays.append(await rollout_on(workload, engine.url, tmp_path))
        profiles.append(await profiled(engine.url))
    fitted = fit(typical(measurements for _, measurements in profiles), profiles[0][0].profile)
    # The time of a turn outside the engine and its requests: gateway and agent.
    overhead_s = overhead_of(fmean(play.makespan_s for play in probes), fitted.profile)
    real_s = fmean(play.makespan_s for play in plays)
    untold = Conditions(tells_profiles=False)  # the gateway does not know the profile
    simulated_s = simulated_makespan_s(workload, [fitted.profile], "heddle", overhead_s, conditions=untold)
    error = simulated_s / real_s - 1
    with capsys.disabled():
        times = ", ".join(f"{play.makespan_s:.1f}" for play in plays)
        print(
            f"\nreal {times} s; simulated {simulated_s:.1f} s ({error:+.1%}); {1000 * overhead_s:.1f} ms/turn outside"
        )
    assert abs(error) < 0.1


def typical(runs: Iterable[Sequence[Measurement]]) -> list[Measurement]:
    """For each batch, the mean of its runs: a rollout, too, lives through the slow moments of a machine."""
    return [Measurement(same[0].batch, fmean(one.wall_s for one in same)) for same in zip(*runs, strict=True)]


async def profiled(url: str) -> tuple[Fit, list[Measurement]]:
    """What `heddle profile --quick` measures on an engine."""
    parser = argparse.ArgumentParser()
    profile_command.add_options(parser)
    parsed = parser.parse_args(["--name", "tiny-cpu-tp1", "--quick"])
    return await profile_command.measure(url, parsed, Console(quiet=True))


async def rollout_on(workload: Workload, url: str, work_dir: Path) -> RolloutResult:
    """A rollout on the engine, behind a gateway, from an empty prefix cache."""
    async with httpx2.AsyncClient() as client:
        assert (await client.post(f"{url}/reset_prefix_cache")).json() == {"success": True}
    async with local_gateway([url], "heddle", work_dir, "--log-level", "warning") as gateway:
        result = await replay(workload, ReplaySettings(base_url=f"{gateway}/v1", stream_share=0.0))
    assert not result.errors
    return result
