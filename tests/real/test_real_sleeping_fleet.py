"""The controller reshapes a fleet of real vLLM servers that sleep and wake during a rollout."""

from pathlib import Path

import pytest

from tests.controller.fleet_site import Rollout, acting, alive, stopped_at_the_end, until_reached
from tests.real.test_real_controller import (
    NUM_AGENTS,
    START_TIMEOUT_S,
    phase_lines,
    play_without_server_failures,
    real_fleet,
)
from tests.support.gateway import PATIENT, running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.sleeping, pytest.mark.timeout(1800)]


async def test_two_servers_fall_asleep_for_a_larger_one_and_wake_again(
    tmp_path: Path, tiny_model: Path, vllm_venv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 x TP 1 -> 1 x TP 2 -> 2 x TP 1 on the same two slots with the same three servers: no turn fails, and every
    greedy answer equals that of an undisturbed fleet."""
    settings = {"observe_interval_s": 0.2, "token_legs": "auto"} | PATIENT
    async with running_gateway(**settings) as gateway:
        fleet = real_fleet(
            tmp_path,
            gateway.url,
            tiny_model,
            vllm_venv,
            {"kv_transfer": "nixl"},
            cpu_slots=2,
            limits={"observe_interval_s": 0.2, "start_timeout_s": START_TIMEOUT_S},
            sleep={"tp_sizes": (1, 2), "weight_bytes": 10**6, "host_bytes": 10**8},
        )
        async with stopped_at_the_end(fleet), acting(fleet) as controller:
            await until_reached(controller, 1, 1, timeout_s=START_TIMEOUT_S)
            servers = (await alive(fleet)).keys()
            rollout = Rollout(gateway.url, "tiny", NUM_AGENTS, tool_s=1.0)
            await play_without_server_failures(controller, rollout)
            assert (await alive(fleet)).keys() == servers and len(servers) == 3
            await rollout.check_undisturbed()
            seconds = controller.journal.state.phase_s
    with capsys.disabled():
        print(f"\n{rollout.num_turns} turns, none failed, none altered; seconds of each phase:")
        print(phase_lines(seconds))
