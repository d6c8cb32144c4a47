"""The whole loop: a real gateway, real processes of simulated engines, and the controller between them."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from controller.assembly import controller
from controller.desired import Refused
from controller.dry_run import told
from controller.fleet_file import FleetFile
from controller.launcher import ServerState
from controller.records import step_record
from controller.report import alarms
from controller.steps import Register, is_reached
from tests.controller.fleet_site import (
    ENGINE,
    Rollout,
    acting,
    acting_without_its_journal,
    alive,
    cached_at_new_homes,
    engines,
    fleet_file,
    kv_moves,
    launcher_for,
    play_through_changes,
    stopped_at_the_end,
    until,
    until_reached,
)
from tests.support.gateway import ADMIN, running_gateway

# Dozens of processes start here, and a busy machine takes seconds for each.
pytestmark = pytest.mark.timeout(300)


def next_rollout_fleet(state_dir: Path, gateway_url: str, interval_s: float) -> FleetFile:
    """Four small engines, which three long trajectories would leave for a larger one."""
    sizes = (1, 2, 4)
    return fleet_file(
        state_dir,
        gateway_url,
        cpu_slots=4,
        tp_sizes=sizes,
        engine={
            "kind": "sim",
            "profiles": {tp: f"qwen3-14b-h100-tp{tp}" for tp in sizes},
            "flags": ("--speed-up", "500"),
        },
        planning={"interval_s": interval_s, "is_automatic": True},
        first=(1, 1, 1, 1),
    )


async def test_a_fleet_changes_shape_under_a_rollout(tmp_path: Path) -> None:
    """2 x TP 1 -> 1 x TP 2 -> 2 x TP 1: no turn fails, and greedy answers equal those of an undisturbed gateway."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            rollout = Rollout(gateway.url, "simulated", 6)
            await play_through_changes(made, rollout)
            assert len({one["url"] for one in await engines(gateway.url)}) == 2, "old engines are forgotten"
            phases = {phase for phase, _ in made.journal.state.phase_s}
            assert phases == {"drain", "move", "stop", "start", "register"}
            undisturbed = Rollout(gateway.url, "simulated", 6)
            undisturbed.begin("again")
            await until(lambda: min(map(len, undisturbed.answers)) >= max(map(len, rollout.answers)))
            await undisturbed.end()
        for answers, expected in zip(rollout.answers, undisturbed.answers, strict=True):
            assert answers == expected[: len(answers)]


async def test_trajectories_take_their_kv_along_if_devices_are_free(tmp_path: Path) -> None:
    """The new server starts beside the old ones. It fetches the KV of trajectories that continue there before the old
    ones are stopped."""
    settings = {"observe_interval_s": 0.1, "token_legs": "auto", "kv_move_min_tokens": 100}
    async with running_gateway(**settings) as gateway:
        engine = ENGINE | {"kv_transfer": "nixl"}
        limits = {"observe_interval_s": 0.05, "stop_grace_s": 5.0, "min_engines": 1}
        fleet = fleet_file(tmp_path, gateway.url, cpu_slots=4, first=(1, 1), engine=engine, limits=limits)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            rollout = Rollout(gateway.url, "simulated", 4, task=" Weave the warp through the heddle." * 40)
            await play_through_changes(made, rollout)
            shares = [share for number in range(4) for share in await cached_at_new_homes(gateway.url, number)]
            assert shares and min(shares) >= 0.85, shares
            moves = await kv_moves(gateway.url)
            assert moves["fetched"] >= 8 and moves["failed"] == 0, moves
            assert {phase for phase, _ in made.journal.state.phase_s} >= {"move"}


async def test_kv_in_a_tier_survives_a_change_of_shape_on_the_same_devices(tmp_path: Path) -> None:
    """Both old servers are gone before the new one starts. It finds what they computed in the tier."""
    settings = {"observe_interval_s": 0.1, "token_legs": "auto", "kv_move_min_tokens": 100}
    async with running_gateway(**settings) as gateway:
        engine = ENGINE | {"kv_tier": tmp_path / "kv"}
        fleet = fleet_file(tmp_path, gateway.url, first=(1, 1), engine=engine)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            assert {one["kv_tier"] for one in await engines(gateway.url)} == {str(tmp_path / "kv")}
            rollout = Rollout(gateway.url, "simulated", 4, task=" Weave the warp through the heddle." * 40)
            await play_through_changes(made, rollout)
            shares = [share for number in range(4) for share in await cached_at_new_homes(gateway.url, number)]
            assert shares and min(shares) >= 0.85, shares
            moves = await kv_moves(gateway.url)
            assert moves["loaded"] > 0 and moves["failed"] == 0, moves


async def test_an_engine_that_dies_at_startup_is_retried_and_given_up(tmp_path: Path) -> None:
    """Its last lines are kept. Then the fleet before comes back, and this size is no longer planned."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        broken = {**ENGINE, "flags_by_tp": {2: ("--no-such-flag",)}}
        fleet = fleet_file(tmp_path, gateway.url, engine=broken)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            made.ask(made.desired.scaled([2], made.seen))
            await until(lambda: bool(made.journal.state.blocked_tps), lambda: made.journal.state)
            await until_reached(made, 1, 1)
            state = made.journal.state
            assert len(state.failures) == 3 and state.blocked_tps == {2}
            for failure in state.failures:
                assert failure.tp == 2 and "exit status 2" in failure.cause
                assert "unknown argument '--no-such-flag'" in failure.last_lines[-1]


@pytest.mark.parametrize("max_tokens", [0, 8])
async def test_an_engine_that_serves_another_model_has_not_started(max_tokens: int, tmp_path: Path) -> None:
    """Its flags name another one, or another server has its port. Without a warm-up request it counted as serving."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        other = {**ENGINE, "flags": ("--model", "another")}
        fleet = fleet_file(tmp_path, gateway.url, engine=other, warm_up={"max_tokens": max_tokens})
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until(lambda: bool(made.journal.state.failures), lambda: made.journal.state)
            assert not await engines(gateway.url)
            cause = made.journal.state.failures[0].cause
            assert cause == "it serves another, not simulated" if not max_tokens else "answered with 404" in cause


async def test_a_fleet_that_was_seen_to_serve_can_come_back(tmp_path: Path) -> None:
    """Another one may be asked for as soon as it is seen, before the controller has decided anything more."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), controller(fleet, launcher_for(fleet)) as made:
            async with asyncio.timeout(60):
                while len(made.journal.state.urls) < 2:
                    await made.tick()
                while not is_reached(made.journal.state.wanted, made.seen):
                    await made.observe()
            assert len(made.journal.state.wanted) == 2
            assert made.journal.state.proven == made.journal.state.wanted


async def test_a_refused_step_is_not_tried_again_before_the_next_look(tmp_path: Path) -> None:
    """With a wrong admin key, a controller asked the gateway to register its engine hundreds of times a second, with a
    line in its log and a write to its disk each time."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        limits = {"observe_interval_s": 60.0, "stop_grace_s": 5.0}
        fleet = fleet_file(tmp_path, gateway.url, first=(2,), limits=limits, admin_key="not-the-key")
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until(lambda: "gateway_refused" in made.alarms, lambda: made.alarms)
            for _ in range(20):
                await made.observe()
            assert (tmp_path / "journal.jsonl").read_text().count('"step": "Register"') == 1


async def test_the_alarm_of_a_refused_step_ends_once_no_step_is_left(tmp_path: Path) -> None:
    """Somebody took the step by hand: there is nothing more that the gateway could grant."""
    async with running_gateway(observe_interval_s=0.1) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        fleet = fleet_file(tmp_path, gateway.url, first=(2,), admin_key="not-the-key")
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until(lambda: "gateway_refused" in made.alarms, lambda: made.alarms)
            [server] = made.servers
            added = await client.post("/v1/engines", json={"url": server.url, "tp": 2}, headers=ADMIN)
            assert added.status_code == 201, added.text
            await until(lambda: "gateway_refused" not in made.alarms, lambda: made.alarms)


async def test_an_engine_that_dies_while_it_serves_is_replaced(tmp_path: Path) -> None:
    """The replacement is on the same device, under another id; the gateway forgets the dead engine."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            first = made.journal.state.wanted
            victim = first[0]
            process = tmp_path / "servers" / "test" / victim.server_id / "process.json"
            os.killpg(int(process.read_text().split('"pid": ')[1].split(",")[0]), signal.SIGKILL)
            await until(lambda: made.journal.state.wanted != first, lambda: made.seen)
            await until_reached(made, 1, 1)
            assert {one.devices for one in made.journal.state.wanted} == {one.devices for one in first}
            assert victim.server_id not in {one.server_id for one in made.journal.state.wanted}
            await until(lambda: len(made.journal.state.urls) == 2)
            assert len(await engines(gateway.url)) == 2


async def test_an_engine_that_lacks_transferred_weights_is_an_alarm(tmp_path: Path) -> None:
    """Another one that died is replaced, and gets no turn until the weights are sent again."""
    async with running_gateway(observe_interval_s=0.1) as gateway, httpx.AsyncClient(timeout=60) as client:

        async def send() -> None:
            order = {"version": "v1", "transfer": {"init_info": {}, "update_info": {}}}
            sent = await client.post(f"{gateway.url}/v1/weights", json=order, headers=ADMIN)
            assert sent.json()["status"] == "done", sent.text

        fleet = fleet_file(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            await send()
            victim = made.journal.state.wanted[1].server_id
            await launcher_for(fleet).stop(victim, 0.0)
            await until(lambda: "engine_held" in alarms(made, 0.0), lambda: made.seen)
            held = made.journal.state.wanted[1].server_id
            why = f"{held} gets no turns: it has weights 'default'; 'v1' came by transfer: send them again"
            assert held != victim and alarms(made, 0.0)["engine_held"] == why
            await send()
            await until_reached(made, 1, 1)
            assert "engine_held" not in alarms(made, 0.0)


async def test_no_working_engine_is_stopped_while_the_gateway_is_away(tmp_path: Path) -> None:
    """Another fleet is wanted meanwhile, and nothing happens. When the gateway is back, it is told of its engines
    again."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        port = int(gateway.url.rpartition(":")[2])
    fleet = fleet_file(tmp_path, gateway.url)
    async with stopped_at_the_end(fleet), controller(fleet, launcher_for(fleet)) as made:
        await made.tick()
        with pytest.raises(Refused, match="the fleet has not been seen yet"):
            made.observed()
        async with running_gateway(observe_interval_s=0.1, port=port):
            while [one.is_serving for one in made.seen] != [True, True]:
                await made.tick()
        assert not await made.observe() and f"the gateway at {gateway.url}: " in made.alarms["gateway_away"]
        made.ask(made.desired.scaled([2], made.observed()))
        for _ in range(20):
            await made.tick()
        servers = await launcher_for(fleet).find("test")
        assert [server.state for server in servers] == [ServerState.RUNNING] * 2
        made.ask(made.desired.scaled([1, 1], made.observed()))
        async with running_gateway(observe_interval_s=0.1, port=port):
            await made.tick()
            while [one.is_serving for one in made.seen] != [True, True]:
                await made.tick()
        after = await launcher_for(fleet).find("test")
        assert [(one.spec, one.state) for one in after] == [(one.spec, one.state) for one in servers]


async def test_a_gateway_restarted_during_a_change_gets_its_engines_back(tmp_path: Path) -> None:
    """Two of four engines have left and the new server is not there yet: the others keep serving, though they are to
    leave, too."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        port = int(gateway.url.rpartition(":")[2])
    engine = ENGINE | {"flags_by_tp": {2: ("--start-s", "1000000")}}
    limits = {"observe_interval_s": 0.05, "stop_grace_s": 5.0, "min_engines": 1}
    fleet = fleet_file(tmp_path, gateway.url, cpu_slots=4, first=(1, 1, 1, 1), engine=engine, limits=limits)
    launcher = launcher_for(fleet)
    async with stopped_at_the_end(fleet), controller(fleet, launcher) as made:
        async with running_gateway(observe_interval_s=0.1, port=port):
            while len(made.journal.state.urls) < 4:
                await made.tick()
            while [one.is_serving for one in made.seen] != [True] * 4:
                await made.observe()  # and nothing is recorded of it before another fleet is asked for
            made.ask(made.desired.scaled([2, 2], made.observed()))
            while [one.is_alive for one in made.seen].count(True) != 3 or len(made.seen) < 5:
                await made.tick()
            last = [one.server_id for one in made.seen if one.is_serving]
            assert len(last) == 2
        assert not await made.observe()
        async with running_gateway(observe_interval_s=0.1, port=port):
            while [one.server_id for one in made.seen if one.is_serving] != last or made.alarms:
                await made.tick()
            for _ in range(20):
                await made.tick()
            assert [one.server_id for one in made.seen if one.is_serving] == last


async def test_old_engines_serve_while_a_new_one_starts_on_free_devices(tmp_path: Path) -> None:
    """No minimum is set, and nothing has to make room: the turns of this time are not held up."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        engine = ENGINE | {"flags_by_tp": {2: ("--start-s", "1000000")}}
        fleet = fleet_file(tmp_path, gateway.url, cpu_slots=4, first=(1, 1), engine=engine)
        async with stopped_at_the_end(fleet), controller(fleet, launcher_for(fleet)) as made:
            while len(made.journal.state.served_at) < 2:
                await made.tick()
            made.ask(made.desired.scaled([2], made.observed()))
            while len(made.seen) < 3:
                await made.tick()
            for _ in range(20):
                await made.tick()
            assert sorted((one.tp, one.is_serving) for one in made.seen) == [(1, True), (1, True), (2, False)]
            assert made.journal.state.served_at.keys() == {one.server_id for one in made.seen if one.is_serving}


async def test_running_engines_are_adopted_when_the_journal_is_lost(tmp_path: Path) -> None:
    """No engine is stopped, and none is launched."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), acting_without_its_journal(fleet, 1, 1):
            assert len(await launcher_for(fleet).find("test")) == 2


async def test_a_drained_server_is_gone_until_the_fleet_is_scaled(tmp_path: Path) -> None:
    """Its device rests meanwhile."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            victim = made.journal.state.wanted[1]
            made.ask(made.desired.drained(victim.server_id, made.seen))
            await until_reached(made, 1)
            assert made.journal.state.resting == set(victim.devices)
            # The state that a controller leaves if it is killed between a request to forget the engine and its record.
            made.journal.write(**step_record("begun", Register(victim.server_id), 0.0, url="http://127.0.0.1:9"))
            await until(lambda: victim.server_id not in made.journal.state.urls)
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{gateway.url}/readyz")).status_code == 200
            made.ask(made.desired.scaled([1, 1], made.seen))
            await until_reached(made, 1, 1)


async def test_a_fleet_can_be_ended_although_an_engine_must_keep_serving(tmp_path: Path) -> None:
    """`min_engines` is for changes, and whoever ends a fleet says so: that was refused, and no command ended the fleet.
    Draining its last server is still refused."""
    limits = {"observe_interval_s": 0.05, "stop_grace_s": 5.0, "min_engines": 1}
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = fleet_file(tmp_path, gateway.url, limits=limits)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1)
            made.ask(made.desired.drained(made.journal.state.wanted[0].server_id, made.observed()))
            await until_reached(made, 1)
            with pytest.raises(Refused, match="min_engines"):
                made.desired.drained(made.journal.state.wanted[0].server_id, made.observed())
            assert made.desired.steps_to([], made.observed(), is_scaled=True)
            made.ask(made.desired.scaled([], made.observed()))
            await until_reached(made)
            assert not await alive(fleet)


async def test_a_plan_that_pays_is_carried_out(tmp_path: Path) -> None:
    """Two long trajectories are at work on four small engines: the fleet gets a larger one, and the reason is kept."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        sizes = (1, 2, 4)
        fleet = fleet_file(
            tmp_path,
            gateway.url,
            cpu_slots=4,
            tp_sizes=sizes,
            engine={"kind": "sim", "profiles": {tp: f"qwen3-14b-h100-tp{tp}" for tp in sizes}},
            planning={"interval_s": 0.1, "is_automatic": True, "min_correlation": 0.0},
            first=(1, 1, 1, 1),
        )
        async with stopped_at_the_end(fleet), acting(fleet) as made, httpx.AsyncClient(base_url=gateway.url) as client:
            await until_reached(made, 1, 1, 1, 1)
            for number in range(2):
                declared = {"id": f"long-{number}", "expected_output_tokens": 200_000}
                assert (await client.post("/v1/trajectories", json=declared)).status_code == 201
            await until(lambda: len(made.journal.state.wanted) < 4, lambda: made.proposal)
            planned = [one.tp for one in made.journal.state.wanted]
            await until_reached(made, *planned)
            assert max(planned) > 1 and "2 trajectories end in" in made.journal.state.why
            await until(lambda: "best one" in getattr(made.proposal, "why", ""), lambda: made.proposal)


async def test_a_dry_run_after_a_rollout_shows_the_plan_for_the_next(tmp_path: Path) -> None:
    """The controller that recorded nothing of the rollout is gone. A dry run said that there is nothing to do, and the
    next controller relaunched the fleet."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = next_rollout_fleet(tmp_path, gateway.url, 1e6)
        async with stopped_at_the_end(fleet):
            async with acting(fleet) as made:
                await until_reached(made, 1, 1, 1, 1)
                rollout = Rollout(gateway.url, "simulated", 3, max_tokens=16_000, num_turns=2)
                rollout.begin("first")
                await rollout.end(stop=False)
            before = (tmp_path / "journal.jsonl").read_bytes()
            lines = await told(fleet, launcher_for(fleet))
            assert (tmp_path / "journal.jsonl").read_bytes() == before
            (plan,) = [line for line in lines if line.startswith("Plan: ")]
            assert "the next rollout: 3 trajectories" in plan and any(line.startswith("1. drain ") for line in lines)
            async with acting(next_rollout_fleet(tmp_path, gateway.url, 0.1)) as made:
                await until(lambda: len(made.journal.state.wanted) < 4, lambda: made.proposal)
                assert made.journal.state.why in plan
                await until_reached(made, *(one.tp for one in made.journal.state.wanted))


async def test_a_plan_for_the_next_rollout_waits_until_it_may_be_carried_out(tmp_path: Path) -> None:
    """An operator's fleet holds when the rollout ends, and another controller is there when plans may decide again. The
    plan was shown as worth it, and came only after another rollout."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = next_rollout_fleet(tmp_path, gateway.url, 0.1)
        async with stopped_at_the_end(fleet):
            async with acting(fleet) as made:
                await until_reached(made, 1, 1, 1, 1)
                made.ask(made.desired.scaled([1, 1, 1, 1], made.seen))
                rollout = Rollout(gateway.url, "simulated", 3, max_tokens=16_000, num_turns=2)
                rollout.begin("first")
                await rollout.end(stop=False)
                await until(lambda: "the next rollout" in getattr(made.proposal, "why", ""), lambda: made.proposal)
                await until_reached(made, 1, 1, 1, 1)
            async with acting(fleet) as made:
                await until_reached(made, 1, 1, 1, 1)
                made.ask(made.desired.let_plans_decide(made.seen))
                await until(lambda: len(made.journal.state.wanted) < 4, lambda: made.proposal)
                assert made.journal.state.why.startswith("the next rollout: 3 trajectories")
                await until_reached(made, *(one.tp for one in made.journal.state.wanted))


async def test_the_fleet_is_reshaped_for_the_next_rollout_and_stays(tmp_path: Path) -> None:
    """Three trajectories run on four small engines. Nothing changes while they run, because the predictor has shown
    nothing. When they have ended, the fleet is reshaped for the next three, with the start times measured here; it then
    stays."""
    async with running_gateway(observe_interval_s=0.1) as gateway:
        fleet = next_rollout_fleet(tmp_path, gateway.url, 0.1)
        async with stopped_at_the_end(fleet), acting(fleet) as made:
            await until_reached(made, 1, 1, 1, 1)
            first = Rollout(gateway.url, "simulated", 3, max_tokens=16_000, num_turns=2)
            first.begin("first")
            await first.end(stop=False)
            assert first.failures == []
            await until(lambda: len(made.journal.state.wanted) < 4, lambda: made.proposal)
            state = made.journal.state
            assert state.why.startswith("the next rollout: 3 trajectories like those of the last 1 rollouts end in")
            assert [one.output_tokens for one in state.history.next_rollout()] == [32_000] * 3
            planned = [one.tp for one in state.wanted]
            await until_reached(made, *planned)
            second = Rollout(gateway.url, "simulated", 3, max_tokens=16_000, num_turns=2)
            second.begin("second")
            await second.end(stop=False)
            await until(lambda: "for which the fleet was chosen" in str(made.proposal), lambda: made.proposal)
            assert [one.tp for one in made.journal.state.wanted] == planned
