"""Engines that are relaunched, removed or lost during a weight update, and engines whose weights are in doubt after
one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault
from tests.faults.gateway_process import gateway_process
from tests.support.engine import Asked, RecordedEngine, Script, recorded_engine
from tests.support.gateway import ADMIN, ADMIN_KEY, eventually, running_gateway
from tests.weights.gateway_client import complete, engine, is_generated_by, last_turn, update
from tests.weights.relaunched import server

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
LOADS = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
PROMPT = "Tell me about looms."
QUICK = {"observe_interval_s": 0.05}


@dataclass
class HeldCall:
    """A call to an engine that is answered when the test allows it."""

    status: int = 200
    has_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    def script(self) -> Script:
        """The answer, for a recorded engine."""

        async def play(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
            self.has_arrived.set()
            await self.may_end.wait()
            await write(b"{}")

        return Script(play, self.status)


@asynccontextmanager
async def gateway_of(*urls: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway before these engines."""
    async with (
        running_gateway(*urls, **QUICK | settings) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        yield client


def id_of(url: str) -> str:
    return url.removeprefix("http://")


async def shown(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """The engine at this address, as GET /v1/engines shows it."""
    listed = (await client.get("/v1/engines")).json()["data"]
    found: dict[str, Any] = next(one for one in listed if one["url"] == url)
    return found


async def wait_for_state(client: httpx.AsyncClient, url: str, state: str) -> dict[str, Any]:
    """Wait until the engine at this address has this state; returns the engine."""

    async def has_state() -> bool:
        return bool((await shown(client, url))["state"] == state)

    await eventually(has_state)
    return await shown(client, url)


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    """The state of each engine in the last update."""
    engines = (await client.get("/v1/weights")).json()["update"]["engines"]
    return {engine_id: progress["state"] for engine_id, progress in engines.items()}


async def ended_update(client: httpx.AsyncClient) -> dict[str, Any]:
    """The last update, once it has ended_update."""

    async def has_ended() -> bool:
        return (await client.get("/v1/weights")).json()["update"]["ended_at"] is not None

    await eventually(has_ended)
    last: dict[str, Any] = (await client.get("/v1/weights")).json()["update"]
    return last


async def make_lost(client: httpx.AsyncClient, url: str) -> None:
    """Its process lives, but its metrics fail until it counts as lost."""
    faults = [{"kind": "error", "path": "/metrics"}]
    await client.post(url + "/simulate/faults", json={"faults": faults})
    await wait_for_state(client, url, "lost")


async def restore_metrics(client: httpx.AsyncClient, url: str) -> None:
    await client.delete(url + "/simulate/faults")


def loads(one: RecordedEngine) -> list[str]:
    """The paths that a vLLM loaded weights from."""
    return [asked.json["kwargs"]["weights_path"] for asked in one.seen if asked.path == LOADS["vllm"]]


@KINDS
async def test_an_engine_relaunched_while_another_loads_does_not_end_the_update(kind: str) -> None:
    """It is a new engine and loads the weights itself; the update continues with the engines that wait."""
    load = HeldCall()
    async with (
        recorded_engine(engine(kind)) as slow,
        server(engine(kind)) as relaunched,
        serve_engine(engine(kind)) as waiting,
        gateway_of(slow.url, relaunched.url, waiting) as client,
    ):
        slow.scripts[LOADS[kind]] = load.script()
        await update(client, "v1", wait=False)
        await load.has_arrived.wait()
        await relaunched.end()
        await wait_for_state(client, relaunched.url, "lost")
        await relaunched.start(engine(kind))
        again = await wait_for_state(client, relaunched.url, "ready")
        assert (again["id"], again["weight_version"]) == (id_of(relaunched.url) + "~2", "v1")
        load.may_end.set()
        assert (await ended_update(client))["status"] == "done"
        assert await states(client) == {
            id_of(slow.url): "done",
            id_of(relaunched.url): "absent",
            id_of(waiting): "done",
        }
        assert (await update(client, "v1")).json()["status"] == "done"


async def test_a_refused_update_is_taken_back_despite_a_relaunched_engine() -> None:
    """The trainer gets 502, and the version does not change."""
    load = HeldCall(status=500)
    async with (
        recorded_engine(engine("vllm")) as refusing,
        server(engine("vllm")) as relaunched,
        gateway_of(refusing.url, relaunched.url) as client,
    ):
        assert (await update(client, "v1")).json()["status"] == "done"
        refusing.scripts[LOADS["vllm"]] = load.script()
        order = asyncio.create_task(update(client, "v2", path="/weights/missing-v2"))
        await load.has_arrived.wait()
        await relaunched.end()
        await wait_for_state(client, relaunched.url, "lost")
        await relaunched.start(engine("vllm"))
        await wait_for_state(client, relaunched.url, "ready")
        load.may_end.set()
        assert (await order).status_code == 502
        assert (await client.get("/v1/weights")).json()["version"] == "v1"


async def test_an_engine_removed_during_an_update_gets_no_weights() -> None:
    """The update finishes without it, and the next process at its address gets a new id."""
    load = HeldCall()
    async with (
        recorded_engine(engine("vllm")) as slow,
        recorded_engine(engine("vllm")) as removed,
        gateway_of(slow.url, removed.url) as client,
    ):
        slow.scripts[LOADS["vllm"]] = load.script()
        await update(client, "v1", wait=False)
        await load.has_arrived.wait()
        await client.delete(f"/v1/engines/{id_of(removed.url)}", headers=ADMIN)
        load.may_end.set()
        assert (await ended_update(client))["status"] == "done"
        assert await states(client) == {id_of(slow.url): "done", id_of(removed.url): "absent"}
        assert loads(removed) == []
        added = await client.post("/v1/engines", json={"url": removed.url}, headers=ADMIN)
        assert added.json()["id"] == id_of(removed.url) + "~2"


async def test_an_engine_lost_during_an_update_loads_the_weights_once() -> None:
    """It loads them itself when it is back; the update does not load them into it at the same time."""
    first_load, own_load = HeldCall(), HeldCall()
    async with (
        serve_engine(engine("vllm")) as first,
        recorded_engine(engine("vllm")) as slow,
        recorded_engine(engine("vllm")) as lost,
        gateway_of(first, slow.url, lost.url, weight_loads_at_once=1) as client,
    ):
        slow.scripts[LOADS["vllm"]], lost.scripts[LOADS["vllm"]] = first_load.script(), own_load.script()
        await update(client, "v1", wait=False)
        await first_load.has_arrived.wait()
        await make_lost(client, lost.url)
        await restore_metrics(client, lost.url)
        await own_load.has_arrived.wait()
        first_load.may_end.set()

        async def has_reached_all() -> bool:
            return "waiting" not in (await states(client)).values()

        await eventually(has_reached_all)
        assert (await states(client))[id_of(lost.url)] == "absent"
        own_load.may_end.set()
        await wait_for_state(client, lost.url, "ready")
        assert loads(lost) == ["/weights/v1"]


async def take_back(
    client: httpx.AsyncClient, version: str, refusing: RecordedEngine, joining: RecordedEngine, naming: HeldCall
) -> None:
    """An update that one engine refuses, while another one joins, has loaded it, and is about to name it."""
    refusal = HeldCall(status=500)
    refusing.scripts[LOADS["vllm"]] = refusal.script()
    joining.scripts["/update_weight_version"] = naming.script()
    order = asyncio.create_task(update(client, version))
    await refusal.has_arrived.wait()
    await make_lost(client, joining.url)
    await restore_metrics(client, joining.url)
    await naming.has_arrived.wait()
    refusal.may_end.set()
    assert (await order).status_code == 502


async def test_a_failed_load_of_a_joining_engine_leaves_its_weights_in_doubt() -> None:
    """It loaded v2, which another engine refused and which was taken back: it loads v1 again before its next turn."""
    naming = HeldCall(status=500)
    async with (
        recorded_engine(engine("vllm")) as refusing,
        recorded_engine(engine("vllm")) as joining,
        gateway_of(refusing.url, joining.url) as client,
    ):
        assert (await update(client, "v1")).json()["status"] == "done"
        await take_back(client, "v2", refusing, joining, naming)
        del joining.scripts["/update_weight_version"]
        naming.may_end.set()
        await wait_for_state(client, joining.url, "ready")
        assert loads(joining) == ["/weights/v1", "/weights/v2", "/weights/v1"]
        assert is_generated_by(["v1"], PROMPT, await complete(client, "one", PROMPT, 40))


async def test_an_engine_that_joins_with_a_first_version_that_was_taken_back_is_held() -> None:
    """Another engine refused it, so no version is set. It got turns with these weights, which no engine had by the
    trainer's answer."""
    naming = HeldCall()
    async with (
        recorded_engine(engine("vllm")) as refusing,
        recorded_engine(engine("vllm")) as joining,
        gateway_of(refusing.url, joining.url) as client,
    ):
        await take_back(client, "v1", refusing, joining, naming)
        naming.may_end.set()
        assert "was set before" in ((await wait_for_state(client, joining.url, "ready"))["cordon_reason"] or "")
        del refusing.scripts[LOADS["vllm"]], joining.scripts["/update_weight_version"]
        assert (await update(client, "v2")).json()["status"] == "done"
        assert loads(joining) == ["/weights/v1", "/weights/v2"]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["lost-for-a-while", "gateway-restarted"])
async def test_weights_in_doubt_before_any_version_was_set_keep_the_engine_held(
    tmp_path: Path, is_restarted: bool
) -> None:
    """The first update failed in the middle, so there is no version to return to: the engine waits for another
    update."""
    store = f"sqlite:{tmp_path / 'store.sqlite3'}"
    async with serve_engine(engine("vllm", Fault("error", path="/update_weight_version", count=1))) as url:
        async with gateway_of(url, store=store) as client:
            assert (await update(client, "v1")).status_code == 502, "loaded, but without its version"
            if not is_restarted:
                await make_lost(client, url)
                await restore_metrics(client, url)
                assert "was set before" in (await wait_for_state(client, url, "ready"))["cordon_reason"]
        async with gateway_of(url, store=store) as client:
            if is_restarted:
                assert "was set before" in (await wait_for_state(client, url, "ready"))["cordon_reason"]
            assert (await update(client, "v1")).json()["status"] == "done"
            assert is_generated_by(["v1"], PROMPT, await complete(client, "one", PROMPT, 40))


@pytest.mark.parametrize("is_restarted", [False, True], ids=["lost-for-a-while", "gateway-restarted"])
async def test_weights_in_doubt_stay_so_if_the_next_update_does_not_get_to_its_load(
    tmp_path: Path, is_restarted: bool
) -> None:
    """v2 failed in the middle, and the pause for v1 failed, too: the engine loads v1 before its next turn."""
    store = f"sqlite:{tmp_path / 'store.sqlite3'}"
    async with serve_engine(engine("vllm")) as url:
        async with gateway_of(url, store=store) as client:
            assert (await update(client, "v1")).json()["status"] == "done"
            for version, path in (("v2", "/update_weight_version"), ("v1", "/pause")):
                fault = {"kind": "error", "path": path, "count": 1}
                await client.post(url + "/simulate/faults", json={"faults": [fault]})
                assert (await update(client, version)).status_code == 502
            if not is_restarted:
                await make_lost(client, url)
                await restore_metrics(client, url)
                await wait_for_state(client, url, "ready")
                assert is_generated_by(["v1"], PROMPT, await complete(client, "one", PROMPT, 40))
        if is_restarted:
            async with gateway_of(url, store=store) as client:
                assert is_generated_by(["v1"], PROMPT, await complete(client, "one", PROMPT, 40))


async def test_weights_in_doubt_stay_so_if_the_engine_is_removed_and_added() -> None:
    """It is the same process: it still reports the old version for weights that were overwritten."""
    async with serve_engine(engine("vllm")) as url, gateway_of(url) as client:
        assert (await update(client, "v1")).json()["status"] == "done"
        fault = {"kind": "error", "path": "/update_weight_version", "count": 1}
        await client.post(url + "/simulate/faults", json={"faults": [fault]})
        assert (await update(client, "v2")).status_code == 502
        await client.delete(f"/v1/engines/{id_of(url)}", headers=ADMIN)
        await client.post("/v1/engines", json={"url": url}, headers=ADMIN)
        assert (await wait_for_state(client, url, "ready"))["cordon_reason"] is None
        assert is_generated_by(["v1"], PROMPT, await complete(client, "one", PROMPT, 40))


@pytest.mark.parametrize("is_removed", [False, True], ids=["out-of-sight", "removed-and-added"])
@pytest.mark.parametrize("by_transfer", [False, True], ids=["from-a-path", "by-transfer"])
async def test_an_engine_that_does_not_tell_when_it_started_stays_in_doubt(is_removed: bool, by_transfer: bool) -> None:
    """It may be the same process, whose weights were overwritten: it loads v1 again before its next turn, or waits for
    it if it came by transfer. It got turns as v1 after it could not be reached for a moment."""
    async with recorded_engine(engine("sglang")) as one, gateway_of(one.url) as client:
        transfer = {"transfer": {"distributed": {"names": []}}} if by_transfer else {}
        assert (await update(client, "v1", **transfer)).json()["status"] == "done"
        await set_faults(client, one.url, LOADS["sglang"])
        assert (await update(client, "v2")).status_code == 502
        one.seen.clear()
        if is_removed:
            await client.delete(f"/v1/engines/{id_of(one.url)}", headers=ADMIN)
            await client.delete(one.url + "/simulate/faults")
            await client.post("/v1/engines", json={"url": one.url}, headers=ADMIN)
        else:
            await set_faults(client, one.url, "/v1/loads")
            await wait_for_state(client, one.url, "lost")
            await client.delete(one.url + "/simulate/faults")
        again = await wait_for_state(client, one.url, "ready")
        loaded = [asked.json["model_path"] for asked in one.seen if asked.path == LOADS["sglang"]]
        if by_transfer:
            assert "came by transfer: send them again" in again["cordon_reason"] and not loaded
            assert (await update(client, "v1", **transfer)).json()["status"] == "done"
        else:
            assert (again["cordon_reason"], loaded) == (None, ["/weights/v1"])
        await complete(client, "one", PROMPT, 5)


async def set_faults(client: httpx.AsyncClient, url: str, path: str) -> None:
    """The engine answers this path with errors, and others well."""
    await client.post(url + "/simulate/faults", json={"faults": [{"kind": "error", "path": path}]})


async def test_a_new_process_at_a_removed_engines_address_is_not_in_doubt() -> None:
    """No version was ever set, so its weights are not suspect."""
    async with (
        server(engine("vllm", Fault("error", path="/update_weight_version", count=1))) as one,
        gateway_of(one.url) as client,
    ):
        assert (await update(client, "v1")).status_code == 502
        await client.delete(f"/v1/engines/{id_of(one.url)}", headers=ADMIN)
        await one.end()
        await one.start(engine("vllm"))
        await client.post("/v1/engines", json={"url": one.url}, headers=ADMIN)
        again = await wait_for_state(client, one.url, "ready")
        assert again["cordon_reason"] is None and again["id"] != id_of(one.url)
        await complete(client, "one", PROMPT, 5)
        assert (await last_turn(client, "one"))["engine"] == again["id"]


async def test_an_engine_that_joined_as_the_gateway_died_is_resumed(tmp_path: Path) -> None:
    """SGLang names its weights itself: the load ended after the gateway was killed, and nobody resumed the engine."""
    options = ("--store", f"sqlite:{tmp_path / 'store.sqlite3'}")
    async with (
        serve_engine(engine("sglang")) as first,
        recorded_engine(engine("sglang", weight_load_s=50.0)) as joining,
        gateway_process("--engine", first, *options, HEDDLE_ADMIN_KEY=ADMIN_KEY) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        assert (await update(client, "v1")).json()["status"] == "done"
        await client.post("/v1/engines", json={"url": joining.url}, headers=ADMIN)
        await eventually(lambda: any(asked.path == LOADS["sglang"] for asked in joining.seen))
        await gateway.kill()

        async def has_loaded() -> bool:
            info = (await client.get(joining.url + "/model_info")).json()
            return bool(info["weight_version"] == "v1")

        await eventually(has_loaded)
        await gateway.start()
        await client.post(f"/v1/engines/{id_of(first)}/cordon", headers=ADMIN)
        await client.post("/v1/engines", json={"url": joining.url}, headers=ADMIN)
        assert is_generated_by(["v1"], PROMPT, await complete(client, "one", PROMPT, 40))


async def test_a_joined_engine_that_did_not_resume_is_not_left_paused() -> None:
    """It is held with the reason. After it was lost for a while, it loads the weights again before its next turn."""
    async with server(engine("vllm")) as one, gateway_of(one.url) as client:
        assert (await update(client, "v1")).json()["status"] == "done"
        await one.end()
        await wait_for_state(client, one.url, "lost")
        await one.start(engine("vllm", Fault("error", path="/resume", count=1)))
        assert "resume" in (await wait_for_state(client, one.url, "ready"))["cordon_reason"]
        await make_lost(client, one.url)
        await restore_metrics(client, one.url)
        assert (await wait_for_state(client, one.url, "ready"))["cordon_reason"] is None
        assert is_generated_by(["v1"], PROMPT, await complete(client, "one", PROMPT, 40))


@KINDS
async def test_a_relaunched_engine_gets_one_id_if_its_version_cannot_be_read(kind: str) -> None:
    """Its first checks fail when they ask for its weights; its id does not change with each of them."""
    path = "/weight_info" if kind == "vllm" else "/model_info"
    async with server(engine(kind)) as one, gateway_of(one.url) as client:
        assert (await update(client, "v1")).json()["status"] == "done"
        await one.end()
        await wait_for_state(client, one.url, "lost")
        await one.start(engine(kind, Fault("reset", path=path, count=4)))
        assert (await wait_for_state(client, one.url, "ready"))["id"] == id_of(one.url) + "~2"


@pytest.mark.parametrize("action", ["cordon", "uncordon"])
async def test_an_engine_named_after_its_weights_keeps_its_models_through_a_restart(
    tmp_path: Path, action: str
) -> None:
    """SGLang names its model by the path of its weights. An operator cordons it before a new gateway has seen it."""
    store = f"sqlite:{tmp_path / 'store.sqlite3'}"
    async with serve_engine(engine("sglang")) as url:
        async with gateway_of(url, store=store) as client:
            assert (await update(client, "v1")).json()["status"] == "done"
        async with httpx.AsyncClient() as direct:
            await direct.post(url + "/simulate/faults", json={"faults": [{"kind": "error", "path": "/v1/models"}]})
        async with gateway_of(url, store=store, start_timeout_s=0) as client:
            await client.post(f"/v1/engines/{id_of(url)}/{action}", headers=ADMIN)
            await restore_metrics(client, url)
            assert (await wait_for_state(client, url, "ready"))["models"] == ["simulated"]


async def test_an_engine_named_after_its_weights_keeps_its_models_when_removed_and_added() -> None:
    """The same SGLang server comes back to the fleet, for example after maintenance of its node."""
    async with serve_engine(engine("sglang")) as url, gateway_of(url) as client:
        assert (await update(client, "v1")).json()["status"] == "done"
        await client.delete(f"/v1/engines/{id_of(url)}", headers=ADMIN)
        await client.post("/v1/engines", json={"url": url}, headers=ADMIN)
        assert (await wait_for_state(client, url, "ready"))["models"] == ["simulated"]
        await complete(client, "one", PROMPT, 5)


async def test_an_engine_that_joined_well_is_not_given_its_weights_again() -> None:
    """It was lost for a while and has kept them: its turns need not wait for another load."""
    async with (
        serve_engine(engine("vllm")) as first,
        recorded_engine(engine("vllm")) as joining,
        gateway_of(first) as client,
    ):
        assert (await update(client, "v1")).json()["status"] == "done"
        await client.post("/v1/engines", json={"url": joining.url}, headers=ADMIN)
        joined = await wait_for_state(client, joining.url, "ready")
        assert (joined["weight_version"], loads(joining)) == ("v1", ["/weights/v1"])
        await make_lost(client, joining.url)
        await restore_metrics(client, joining.url)
        again = await wait_for_state(client, joining.url, "ready")
        assert (again["id"], again["weight_version"], loads(joining)) == (joined["id"], "v1", ["/weights/v1"])


@KINDS
async def test_an_engine_whose_version_cannot_be_read_is_used_if_none_was_set(kind: str) -> None:
    """No weights are asked of it, so it need not say which it has."""
    path = "/weight_info" if kind == "vllm" else "/model_info"
    async with server(engine(kind, Fault("reset", path=path))) as one, gateway_of(one.url) as client:
        assert (await wait_for_state(client, one.url, "ready"))["weight_version"] is None
        await complete(client, "one", PROMPT, 5)


@KINDS
async def test_an_update_reports_how_long_each_engine_loaded_and_paused(kind: str) -> None:
    """In seconds; the pause includes the load."""
    async with server(engine(kind, weight_load_s=10.0, speed_up=50.0)) as one, gateway_of(one.url) as client:
        [progress] = (await update(client, "v1")).json()["engines"].values()
        assert 0.2 <= progress["load_s"] <= progress["paused_s"] < 60
