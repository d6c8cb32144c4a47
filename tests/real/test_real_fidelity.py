"""A rollout on a real vLLM against the same rollout in simulation, with the profile that was measured on that server.

One engine, because two of them on two cores slow each other, which no profile of one engine can say. Answers are not
streamed, so that gateway and agents, which share the machine, take little from the engine.

On a machine that is busy with something else this measures the something else: turns and batches then stand still for
seconds (seen: 12 to 22 s for the same rollout within minutes). So it is not among the tests of `make real`, and has a
target of its own: `make fidelity`.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from rich.console import Console

from engines.local_vllm import LocalEngine
from engines.profiling import Fit, Measurement, fit
from heddle import profile as profile_command
from heddle.rollouts import local_gateway
from loadtest.replayer import ReplaySettings, replay
from loadtest.results import RolloutResult
from predictor.siblings import SiblingPredictor
from scheduling.limits import Limits
from scheduling.policy import HEDDLE
from simulator.rollout import Rollout
from workloads.laws import draw, law_named
from workloads.trajectories import Trajectory, Turn, Workload

pytestmark = [pytest.mark.vllm, pytest.mark.quiet, pytest.mark.timeout(900)]

SEED = 1
NUM_PLAYS = 3


async def test_a_simulated_rollout_takes_as_long_as_the_real_one(
    real_engines: list[LocalEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Makespans within 10 %. Whatever else a machine does only adds time: so the fastest of three plays counts, and the
    fastest of the profile's runs of each batch, which are taken before, between and after the plays."""
    workload = draw(law_named("coding"), 24, SEED).with_max_turns(10).fitted(3_000).with_max_tool_s(1.0)
    url = real_engines[0].url
    probe = Workload("probe", (Trajectory("probe", "probe", 64, (Turn(0, 1, 0.0), *[Turn(24, 1, 0.0)] * 40)),))
    profiles, probes, plays = [await profiled(url)], [], []
    for _ in range(NUM_PLAYS):
        probes.append(await played(probe, url, tmp_path))
        plays.append(await played(workload, url, tmp_path))
        profiles.append(await profiled(url))
    fitted = fit(fastest(measurements for _, measurements in profiles), profiles[0][0].profile)
    real_s = [play.makespan_s for play in plays]
    # What a turn takes beside the engine: the gateway, HTTP and the agent.
    beside_s = (min(play.makespan_s for play in probes) - simulated_makespan_s(probe, fitted, 0.0)) / 41
    simulated_s = simulated_makespan_s(workload, fitted, max(0.0, beside_s))
    error = simulated_s / min(real_s) - 1
    with capsys.disabled():
        times = ", ".join(f"{makespan_s:.1f}" for makespan_s in real_s)
        print(f"\nreal {times} s; simulated {simulated_s:.1f} s ({error:+.1%}); {1000 * beside_s:.1f} ms a turn beside")
    assert abs(error) < 0.1


def fastest(runs: Iterable[Sequence[Measurement]]) -> list[Measurement]:
    """Of each batch, the run that took least."""
    return [min(same, key=lambda one: one.wall_s) for same in zip(*runs, strict=True)]


async def profiled(url: str) -> tuple[Fit, list[Measurement]]:
    """What `heddle profile --quick` makes of an engine."""
    parser = argparse.ArgumentParser()
    profile_command.add_arguments(parser)
    parsed = parser.parse_args([url, "--name", "tiny-cpu-tp1", "--quick"])
    return await profile_command.measure(parsed, Console(quiet=True))


async def played(workload: Workload, url: str, work_dir: Path) -> RolloutResult:
    """A rollout on the engine, behind a gateway, from an empty prefix cache."""
    async with httpx2.AsyncClient() as client:
        assert (await client.post(f"{url}/reset_prefix_cache")).json() == {"success": True}
    async with local_gateway([url], "heddle", work_dir, "--log-level", "warning") as gateway:
        result = await replay(workload, ReplaySettings(base_url=f"{gateway}/v1", stream_share=0.0))
    assert not result.errors
    return result


def simulated_makespan_s(workload: Workload, fitted: Fit, beside_s: float) -> float:
    """The same in virtual time. What a turn takes beside the engine is a longer tool call there."""

    def longer(turn: Turn) -> Turn:
        return replace(turn, tool_s=turn.tool_s + beside_s)

    trajectories = tuple(replace(t, turns=tuple(map(longer, t.turns))) for t in workload.trajectories)
    slowed = replace(workload, trajectories=trajectories)
    return Rollout(slowed, [fitted.profile], HEDDLE, Limits(), SiblingPredictor()).run().makespan_s
