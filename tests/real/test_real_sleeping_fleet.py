"""The controller swaps the shapes of a fleet of real vLLM servers, which sleep and wake while a rollout goes on."""

from pathlib import Path

import pytest

from controller.fleet_file import FleetFile
from controller.launcher import ServerState
from tests.controller.fleet_site import Rollout, acting, launcher_for, stopped_at_the_end, until_reached
from tests.real.test_real_controller import NUM_AGENTS, START_TIMEOUT_S, goes_on, real_fleet
from tests.support.gateway import PATIENT, running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.sleeping, pytest.mark.timeout(1800)]


async def test_two_servers_fall_asleep_for_a_larger_one_and_wake_again(
    tmp_path: Path, tiny_model: Path, vllm_venv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 x TP 1 -> 1 x TP 2 -> 2 x TP 1 on the same two slots by the same three servers: no turn fails, and every greedy
    answer is what an undisturbed fleet says."""
    settings = {"observe_interval_s": 0.2, "token_legs": "auto"} | PATIENT
    async with running_gateway(**settings) as gateway:
        fleet = real_fleet(
            tmp_path,
            gateway.url,
            tiny_model,
            vllm_venv,
            cpu_slots=2,
            limits={"observe_interval_s": 0.2, "start_timeout_s": START_TIMEOUT_S},
            sleep={"tp_sizes": (1, 2), "weight_bytes": 10**6, "host_bytes": 10**8},
        )
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1, timeout_s=START_TIMEOUT_S)
            servers = await _alive(fleet)
            rollout = Rollout(gateway.url, "tiny", NUM_AGENTS, tool_s=1.0)
            rollout.begin()
            for tps in ([2], [1, 1]):
                await goes_on(rollout)
                made.ask(made.will.scaled(tps, made.in_sight()))
                await until_reached(made, *tps, timeout_s=START_TIMEOUT_S)
            await goes_on(rollout)
            await rollout.end()
            assert rollout.failures == [] and made.journal.state.failures == ()
            assert await _alive(fleet) == servers and len(servers) == 3
            seconds = made.journal.state.phase_s
            undisturbed = Rollout(gateway.url, "tiny", NUM_AGENTS, tool_s=0.0, num_turns=max(map(len, rollout.answers)))
            undisturbed.begin("again")
            await undisturbed.end(stop=False)
    assert undisturbed.failures == []
    for answers, expected in zip(rollout.answers, undisturbed.answers, strict=True):
        assert answers == expected[: len(answers)]
    with capsys.disabled():
        print(f"\n{rollout.num_turns} turns, none failed, none altered; seconds of each phase:")
        for (phase, tp), times in sorted(seconds.items()):
            print(f"  {phase} of TP {tp}: {', '.join(f'{one:.2f}' for one in times)}")


async def _alive(fleet: FleetFile) -> set[str]:
    found = await launcher_for(fleet).find(fleet.fleet)
    return {one.spec.server_id for one in found if one.state is not ServerState.EXITED}
