"""Servers that sleep, in the whole loop: a real gateway, processes of simulated engines, and the controller."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from controller.assembly import controller
from controller.dry_run import told
from controller.fleet_file import FleetFile
from controller.planning import relaunch_s
from controller.report import alarms
from controller.steps import SleepState
from tests.controller.fleet_site import (
    ENGINE,
    Rollout,
    acting,
    acting_without_its_journal,
    alive,
    fleet_file,
    launcher_for,
    play_through_changes,
    stopped_at_the_end,
    until,
    until_reached,
)
from tests.support.gateway import ADMIN, running_gateway

pytestmark = pytest.mark.timeout(300)


def sleeping_fleet(folder: Path, url: str, *flags: str, **sleep: object) -> FleetFile:
    """Both sizes may sleep; falling asleep and waking take 50 ms."""
    engine = ENGINE | {"flags": ("--sleep-s", "0.05", *flags)}
    return fleet_file(folder, url, engine=engine, sleep={"tp_sizes": (1, 2), **sleep})


async def test_shapes_swap_under_a_rollout_without_a_start(tmp_path: Path) -> None:
    """2 x TP 1 -> 1 x TP 2 -> 2 x TP 1 by the same three processes: no turn fails or differs, the seconds of each phase
    are kept, the next change is planned with the wake-up times measured here, and `--dry-run` shows them."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = sleeping_fleet(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            processes = (await alive(fleet)).keys()
            assert len(processes) == 3, "the other shape is there before it is wanted"
            rollout = Rollout(gateway.url, "simulated", 6)
            await play_through_changes(made, rollout)
            assert (await alive(fleet)).keys() == processes
            await until(lambda: len(made.journal.state.urls) == 2, lambda: made.journal.state)
            state = made.journal.state
            assert {phase for phase, _ in state.phase_s} == {"drain", "move", "sleep", "wake", "start", "register"}
            assert len(state.phase_s["start", 1]) == 2 and len(state.phase_s["start", 2]) == 1
            woken_s = relaunch_s(state.phase_s, (1, 1), (2,), [2])
            assert woken_s < relaunch_s(state.phase_s, (1, 1), (2,))
            rounds = made.desired.steps_to([2], made.observed())
            names = [type(step).__name__ for steps in rounds for step in steps]
            assert names.count("Sleep") == 2 and names.count("Wake") == 1 and not {"Launch", "Stop"} & set(names)
            undisturbed = Rollout(gateway.url, "simulated", 6)
            undisturbed.begin("again")
            await until(lambda: min(map(len, undisturbed.answers)) >= max(map(len, rollout.answers)))
            await undisturbed.end()
            made.ask(made.desired.scaled([2], made.observed()))
            lines = await told(fleet, launcher_for(fleet))
            assert any("put to sleep" in line and "s lately]" in line for line in lines), lines
            assert any(re.match(r"\d\. wake .*\[\d", line) for line in lines), lines
            assert not any("make ready" in line and "lately" in line for line in lines), "nothing is started"
            await until_reached(made, 2)
            made.ask(made.desired.scaled([], made.observed()))
            await until(lambda: not any(one.is_alive for one in made.seen), lambda: made.seen)
        for answers, expected in zip(rollout.answers, undisturbed.answers, strict=True):
            assert answers == expected[: len(answers)]


async def test_a_woken_server_has_the_weights_set_while_it_slept(tmp_path: Path) -> None:
    """It has them before its first turn, at both sleep levels; asleep it has none or old ones."""
    async with running_gateway(observe_interval_s=0.1) as gateway, httpx.AsyncClient(timeout=60) as client:
        for level in (1, 2):
            fleet = sleeping_fleet(tmp_path / str(level), gateway.url, level=level)
            async with stopped_at_the_end(fleet), acting(fleet) as made:
                await until_reached(made, 1, 1)
                order = {"version": f"v{level}", "path": f"/weights/v{level}"}
                answer = await client.post(f"{gateway.url}/v1/weights", json=order, headers=ADMIN)
                assert answer.json()["status"] == "done", answer.text
                made.ask(made.desired.scaled([2], made.observed()))
                await until_reached(made, 2)
                body = {"model": "simulated", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
                url = f"{gateway.url}/t/of-{level}"
                assert (await client.post(f"{url}/v1/chat/completions", json=body)).status_code == 200
                (row,) = (await client.get(f"{gateway.url}/v1/trajectories/of-{level}")).json()["turns"]
                assert row["weight_versions"] == [f"v{level}"]
                made.ask(made.desired.scaled([], made.observed()))
                await until(lambda: not any(one.is_alive or one.is_member for one in made.seen), lambda: made.seen)


async def test_a_woken_server_has_its_weights_even_if_the_level_changed(tmp_path: Path) -> None:
    """Weights dropped at level 2 are loaded again by a controller whose file sets level 1."""
    async with (
        running_gateway(observe_interval_s=0.1) as gateway,
        stopped_at_the_end(sleeping_fleet(tmp_path, gateway.url)),
    ):
        async with acting(sleeping_fleet(tmp_path, gateway.url, level=2)) as made:
            await until_reached(made, 1, 1)
        async with acting(sleeping_fleet(tmp_path, gateway.url, level=1)) as made:
            for tps in ([2], [1, 1]):
                rollout = Rollout(gateway.url, "simulated", 2, num_turns=2)
                rollout.begin(f"before-{len(tps)}")
                await rollout.end(stop=False)
                await until(lambda: made.has_observed)
                made.ask(made.desired.scaled(tps, made.observed()))
                await until_reached(made, *tps)
                again = Rollout(gateway.url, "simulated", 2, num_turns=2)
                again.begin(f"after-{len(tps)}")
                await again.end(stop=False)
                assert again.answers == rollout.answers and not again.failures


async def test_a_server_that_was_drained_before_the_gateway_was_restarted_serves_when_it_wakes(tmp_path: Path) -> None:
    """The gateway remembers the cordon of an address, and was never told to forget the engine. The server came back
    with that cordon, and no engine served any more, with no alarm."""
    store = {"store": f"sqlite:{tmp_path / 'store.sqlite3'}", "observe_interval_s": 0.1}
    async with running_gateway(**store) as gateway:
        port = int(gateway.url.rpartition(":")[2])
    fleet = sleeping_fleet(tmp_path, gateway.url)
    async with stopped_at_the_end(fleet):
        async with running_gateway(port=port, **store), controller(fleet, launcher_for(fleet)) as made:
            while not made.journal.state.proven:
                await made.tick()
            made.ask(made.desired.scaled([2], made.observed()))
            while [one.is_cordoned for one in made.seen].count(True) < 2:
                await made.tick()
        async with running_gateway(port=port, **store), acting(fleet) as made:
            for tps in ([2], [1, 1]):
                await until(lambda: made.has_observed)
                made.ask(made.desired.scaled(tps, made.observed()))
                await until_reached(made, *tps)
            await until(lambda: not made.journal.state.drained, lambda: made.journal.state)  # later cordons are others'


async def test_engines_that_cannot_sleep_are_stopped(tmp_path: Path) -> None:
    """The engine's message is an alarm until an operator scales. The change is made all the same."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = sleeping_fleet(tmp_path, gateway.url, "--dialect", "sglang", is_ahead=False)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            first = (await alive(fleet)).keys()
            made.ask(made.desired.scaled([2], made.observed()))
            await until_reached(made, 2)
            assert made.journal.state.sleepless == "it has no /sleep" and not first & (await alive(fleet)).keys()
            assert made.journal.state.failures == ()
            assert "it has no /sleep" in alarms(made, 0.0)["cannot_sleep"]
            made.ask(made.desired.scaled([2], made.observed()))
            assert "cannot_sleep" not in alarms(made, 0.0), "an operator may have fixed it"


async def test_a_sleeper_that_dies_does_no_harm(tmp_path: Path) -> None:
    """Its end is recorded, and the next change launches a server in its place. A sleeper that is drained by hand just
    ends."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = sleeping_fleet(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            (spare,) = made.journal.state.spares
            process = tmp_path / "servers" / "test" / spare.server_id / "process.json"
            os.killpg(int(process.read_text().split('"pid": ')[1].split(",")[0]), signal.SIGKILL)
            await until(lambda: made.journal.state.spares == (), lambda: made.journal.state)
            await until_reached(made, 1, 1)
            assert [failure.server_id for failure in made.journal.state.failures] == [spare.server_id]
            made.ask(made.desired.scaled([2], made.observed()))
            await until_reached(made, 2)
            assert {one.tp for one in made.journal.state.spares} == {1}
            one, other = made.journal.state.spares
            made.ask(made.desired.drained(one.server_id, made.observed()))
            await until(lambda: not any(seen.server_id == one.server_id and seen.is_alive for seen in made.seen))
            assert made.journal.state.spares == (other,) and not made.journal.state.resting
            await until_reached(made, 2)


async def test_sleepers_are_found_again_when_the_journal_is_lost(tmp_path: Path) -> None:
    """The servers' own answers count: a sleeping one is a spare, the others are the fleet, and a change wakes the
    spare."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = sleeping_fleet(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), acting_without_its_journal(fleet, 1, 1) as made:
            (spare,) = made.journal.state.spares
            assert made.journal.state.rest[spare.server_id] == SleepState.ASLEEP
            made.ask(made.desired.scaled([2], made.observed()))
            await until_reached(made, 2)
            assert made.journal.state.wanted == (spare,)
