"""A GRPO trainer on real vLLM: its agents play through the gateway, it learns from the export, and gives its weights to
the engines while turns run.

The trainer is that of `examples/`. A further process compares all that was exported with what its checkpoints compute.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.local_vllm import LocalEngine
from tests.support.gateway import ADMIN_KEY, PATIENT, running_gateway
from tests.support.rounds import play_rounds

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.train,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]

_CHECKOUT = Path(__file__).parents[2]
TOLERANCE = 1e-3
"""Between log-probabilities of engine and trainer. Both compute with 32-bit floats, in different orders: 1.3e-4 was
the most among 100,000 tokens. Of two versions, half of the tokens differ by 0.1 and more."""


async def run_with_torch(venv: Path, *arguments: str | Path) -> str:
    """The output of a module run in the environment of the engines. It must end well."""
    process = await asyncio.create_subprocess_exec(
        *(str(part) for part in (venv / "bin" / "python", "-m", *arguments)),
        env=os.environ | {"HEDDLE_ADMIN_KEY": ADMIN_KEY, "PYTHONPATH": str(_CHECKOUT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()[-2000:]
    return out.decode()


async def trained(
    engines: Sequence[LocalEngine], model: Path, venv: Path, out: Path, *options: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the trainer reported of each step, and what the comparison found."""
    async with running_gateway(*(engine.url for engine in engines), **PATIENT, token_legs="auto") as gateway:
        told = await run_with_torch(venv, "examples.grpo.train", gateway.url, model, out, *options)
    reports = [json.loads(line) for line in told.splitlines()]
    for report in reports:
        print(report)
    found = json.loads((await run_with_torch(venv, "tests.real.training_worker", out)).splitlines()[-1])
    print(found)
    assert [report["num_left_out"] for report in reports] == [0] * len(reports)
    assert found["num_tokens"] == sum(report["num_tokens"] for report in reports)
    assert found["unlike"] == [], "agents saw other tokens than those that are marked for training"
    assert found["furthest_from_own"] < TOLERANCE, "recorded log-probabilities are those of the weights that are named"
    assert max(report["drift"] for report in reports) < TOLERANCE
    return reports, found


async def test_the_reward_rises(
    training_engines: list[LocalEngine], tiny_model: Path, vllm_venv: Path, tmp_path: Path
) -> None:
    """Each rollout is made by the newest weights only, and every marked token has their log-probability."""
    options = ("--steps", "8", "--seed", "0")
    reports, found = await trained(training_engines, tiny_model, vllm_venv, tmp_path, *options)
    assert [len(report["versions"]) for report in reports] == [1] * 8
    assert len({report["versions"][0] for report in reports}) == 8
    assert [report["stale_share"] for report in reports] == [0.0] * 8
    assert found["num_split_turns"] == 0
    rewards = [report["mean_reward"] for report in reports]
    assert min(rewards[-2:]) > rewards[0] + 0.25, rewards


async def test_an_update_in_a_turn_splits_its_tokens_between_two_versions(
    training_engines: list[LocalEngine], tiny_model: Path, vllm_venv: Path, tmp_path: Path
) -> None:
    """The next rollout begins while the trainer learns. Each token agrees with the weights that its span names, and not
    with those of the other span."""

    async def play(round_number: int) -> bool:
        options = ("--steps", "6", "--max-tokens", "256", "--asynchronous")
        out = tmp_path / str(round_number)
        reports, found = await trained(training_engines, tiny_model, vllm_venv, out, *options)
        assert reports[0]["stale_share"] == 0.0
        if found["num_split_turns"]:
            assert any(report["stale_share"] > 0 for report in reports)
            assert found["median_from_other"] > 10 * TOLERANCE
        return bool(found["num_split_turns"] >= 3)

    await play_rounds("three turns were in flight at an update", play)


async def test_the_trainer_tells_why_the_fleet_does_not_take_its_weights(
    tiny_model: Path, vllm_venv: Path, tmp_path: Path
) -> None:
    """Its last words have the gateway's reason, not only a status."""
    async with running_gateway(admin_key=None) as gateway:
        with pytest.raises(AssertionError, match="the gateway was started without one"):
            await run_with_torch(vllm_venv, "examples.grpo.train", gateway.url, tiny_model, tmp_path, "--steps", "1")


async def test_the_trainer_ends_where_it_has_nothing_to_learn_from(
    training_engines: list[LocalEngine], tiny_model: Path, vllm_venv: Path, tmp_path: Path
) -> None:
    """Without tokens, each step gave the fleet the same weights under another name."""
    async with running_gateway(training_engines[0].url, **PATIENT, token_legs="off") as gateway:
        with pytest.raises(AssertionError, match="gateways record them with token_legs=auto"):
            await run_with_torch(vllm_venv, "examples.grpo.train", gateway.url, tiny_model, tmp_path, "--steps", "2")
