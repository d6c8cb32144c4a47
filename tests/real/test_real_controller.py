"""The controller reshapes a fleet of real vLLM servers during a rollout, and KV follows the trajectories."""

import os
from pathlib import Path
from typing import Any

import pytest

from controller.fleet_file import FleetFile
from controller.loop import Controller
from controller.planning import PhaseTimes
from engines.local_vllm import LocalVllm
from tests.controller.fleet_site import (
    Rollout,
    acting,
    cached_at_new_homes,
    kv_moves,
    play_through_changes,
    stopped_at_the_end,
    until_reached,
)
from tests.support.gateway import ADMIN_KEY, PATIENT, running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

START_TIMEOUT_S = 600.0
NUM_AGENTS = 3
# Long enough that starting servers get most of the machine, and that servers mostly leave while an agent runs a tool;
# short enough that every agent has many turns in a change.
TOOL_S = 6.0
# In every trajectory from its first turn on, so that its KV is worth a move.
TASK = "Weave the warp through the heddle, thread by thread. " * 40


def real_fleet(
    state_dir: Path, gateway_url: str, model: Path, venv: Path, kv: dict[str, Any], **more: Any
) -> FleetFile:
    """Four CPU slots with vLLM, of which a fleet takes two: a new server starts beside those that it replaces.

    Flags and environment are the same as for every real server of the tests.

    Args:
        kv: fields of `engine` that set how KV reaches other servers.
    """
    server = LocalVllm(model, max_model_len=16_384, num_kv_blocks=4096, venv=venv)
    # Outside the test's own folder, because the paths of a server's sockets may have 107 characters.
    sockets = state_dir.parent / "vllm"
    sockets.mkdir(exist_ok=True)
    environment = {**dict(server.environment().items() - os.environ.items()), "TMPDIR": str(sockets)}
    flags = ("--max-model-len", "16384", "--num-gpu-blocks-override", "4096", "--block-size", "32")
    fields: dict[str, Any] = {
        "fleet": "real",
        "model": str(model),
        "served_name": "tiny",
        "gateway": gateway_url,
        "state_dir": state_dir,
        "cpu_slots": 4,
        "tp_sizes": (1, 2),
        "first": (1, 1),
        "engine": {
            "kind": "vllm",
            "program": (str(venv.absolute() / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
            "flags": (*flags, "--dtype", "float32", "--enforce-eager"),
            "environment": environment,
            "slots": 4,
            **kv,
        },
        "limits": {"observe_interval_s": 0.2, "start_timeout_s": START_TIMEOUT_S, "min_engines": 1},
        "admin_key": ADMIN_KEY,
    }
    return FleetFile(**fields | more)


async def test_two_servers_become_one_and_two_again_during_a_rollout(
    tmp_path: Path,
    tiny_model: Path,
    vllm_venv: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """2 x TP 1 -> 1 x TP 2 -> 2 x TP 1: no turn fails, every greedy answer equals that of an undisturbed fleet, and in
    its first turn at a new home each trajectory finds at least 90 % of its context, fetched over NIXL."""
    caplog.set_level("INFO", "heddle")
    settings = {"observe_interval_s": 0.2, "token_legs": "auto", "kv_move_timeout_s": 25.0} | PATIENT
    async with running_gateway(**settings) as gateway:
        fleet = real_fleet(tmp_path, gateway.url, tiny_model, vllm_venv, {"kv_transfer": "nixl"})
        async with stopped_at_the_end(fleet), acting(fleet) as controller:
            await until_reached(controller, 1, 1, timeout_s=START_TIMEOUT_S)
            rollout = Rollout(gateway.url, "tiny", NUM_AGENTS, tool_s=TOOL_S, task=TASK)
            await play_without_server_failures(controller, rollout)
            shares = [share for number in range(NUM_AGENTS) for share in await cached_at_new_homes(gateway.url, number)]
            moves = await kv_moves(gateway.url)
            await rollout.check_undisturbed()
            seconds = controller.journal.state.phase_s
    assert len(shares) >= NUM_AGENTS and min(shares) >= 0.9, shares
    told = [str(vars(record)["fields"]) for record in caplog.records if record.msg == "kv moved"]
    assert moves["fetched"] >= 2 * NUM_AGENTS and not moves["failed"], "\n".join(told)
    with capsys.disabled():
        print(
            f"\n{rollout.num_turns} turns, none failed, none altered; {len(shares)} first turns at a new home,", end=""
        )
        print(f" where at least {min(shares):.1%} of the context was; seconds of each phase:")
        print(phase_lines(seconds))


@pytest.mark.tier
async def test_kv_outlives_servers_that_free_their_slots_first(
    tmp_path: Path,
    tiny_model: Path,
    vllm_venv: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """2 x TP 1 -> 1 x TP 2 -> 2 x TP 1 on two CPU slots: the old servers are gone before a new one starts. No turn
    fails, no answer changes, and in its first turn at a new home each trajectory finds its context in the KV tier."""
    settings = {"observe_interval_s": 0.2, "token_legs": "auto", "kv_move_timeout_s": 25.0} | PATIENT
    async with running_gateway(**settings) as gateway:
        tier = {"kv_tier": tmp_path / "kv", "kv_tier_host_bytes": 2**26}
        limits = {"observe_interval_s": 0.2, "start_timeout_s": START_TIMEOUT_S}
        fleet = real_fleet(tmp_path, gateway.url, tiny_model, vllm_venv, tier, cpu_slots=2, limits=limits)
        async with stopped_at_the_end(fleet), acting(fleet) as controller:
            await until_reached(controller, 1, 1, timeout_s=START_TIMEOUT_S)
            rollout = Rollout(gateway.url, "tiny", NUM_AGENTS, tool_s=TOOL_S, task=TASK)
            await play_without_server_failures(controller, rollout)
            shares = [share for number in range(NUM_AGENTS) for share in await cached_at_new_homes(gateway.url, number)]
            moves = await kv_moves(gateway.url)
            await rollout.check_undisturbed()
    assert len(shares) >= NUM_AGENTS and min(shares) >= 0.9, shares
    assert moves["loaded"] >= NUM_AGENTS and not moves["failed"], moves
    with capsys.disabled():
        print(f"\n{rollout.num_turns} turns, {len(shares)} first ones at a new home; of its context at least ", end="")
        print(f"{min(shares):.1%} was there, loaded {moves['loaded']} times from the tier")


async def play_without_server_failures(controller: Controller, rollout: Rollout) -> None:
    """Play the rollout while the fleet becomes one engine of TP 2 and two of TP 1 again; no turn and no server
    fails."""
    await play_through_changes(controller, rollout, START_TIMEOUT_S)
    assert controller.journal.state.failures == ()


def phase_lines(seconds: PhaseTimes) -> str:
    """A line for each phase and TP size."""
    lines = (f"  {phase} of TP {tp}: {', '.join(f'{one:.2f}' for one in seconds[phase, tp])}" for phase, tp in seconds)
    return "\n".join(sorted(lines))
