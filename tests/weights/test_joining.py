"""Engines and gateways that die and return around a weight update: which engines get turns, and with which weights."""

import asyncio
from pathlib import Path

import httpx
import pytest

from engines.simulated.settings import Fault
from tests.faults.gateway_process import gateway_process
from tests.support.gateway import ADMIN_KEY, eventually, running_gateway
from tests.weights.gateway_client import TOKENIZER, complete, engine, engines, is_generated_by, last_turn, update
from tests.weights.relaunched import server

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
PROMPT = "Tell me about looms."
QUICK = {"observe_interval_s": 0.05}


async def has_state(client: httpx.AsyncClient, number: int, state: str) -> bool:
    return bool((await engines(client))[number]["state"] == state)


@KINDS
async def test_a_relaunched_engine_joins_only_with_the_current_weights(kind: str) -> None:
    """It was started with older ones, so it loads the current ones from their path before its first turn."""
    async with (
        server(engine(kind)) as one,
        running_gateway(one.url, **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        assert (await update(client, "v1")).json()["status"] == "done"
        await one.end()
        await eventually(lambda: has_state(client, 0, "lost"), 60)
        turn = asyncio.create_task(complete(client, "one", PROMPT, 40))
        await one.start(engine(kind, weight_load_s=20.0))
        assert is_generated_by(["v1"], PROMPT, await turn)
        assert (await last_turn(client, "one"))["weight_versions"] == ["v1"]
        (shown,) = await engines(client)
        assert (shown["weight_version"], shown["is_cordoned"], shown["models"]) == ("v1", False, ["simulated"])


@KINDS
async def test_a_relaunched_engine_is_held_until_weights_are_transferred_again(kind: str) -> None:
    """The reason is shown. After the transfer its turns are served."""
    transfer = {
        "init_info": {},
        "update_info": {"weights": "v1"},
        "distributed": {"names": ["a"], "dtypes": ["f"], "shapes": [[1]]},
    }
    async with (
        server(engine(kind)) as one,
        running_gateway(one.url, **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        assert (await update(client, "v1", transfer=transfer)).json()["status"] == "done"
        await one.end()
        await eventually(lambda: has_state(client, 0, "lost"), 60)
        turn = asyncio.create_task(complete(client, "one", PROMPT, 40))
        await one.start(engine(kind))
        await eventually(lambda: has_state(client, 0, "ready"), 60)
        (shown,) = await engines(client)
        assert shown["is_cordoned"] and "'default'" in shown["cordon_reason"] and "'v1'" in shown["cordon_reason"]
        assert not turn.done()
        assert (await update(client, "v1", transfer=transfer)).json()["status"] == "done"
        assert is_generated_by(["v1"], PROMPT, await turn)


async def test_an_engine_of_unknown_weights_joins_only_before_any_update() -> None:
    """For example a vLLM without its development routes."""
    silent = engine("vllm", Fault("error", path="/weight_info"))
    async with (
        server(engine("vllm")) as one,
        server(silent) as other,
        running_gateway(one.url, **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        assert (await update(client, "v1")).json()["status"] == "done"
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        await client.post("/v1/engines", json={"url": other.url}, headers=headers)
        await eventually(lambda: has_state(client, 1, "ready"), 60)
        shown = (await engines(client))[1]
        assert shown["is_cordoned"] and "does not tell" in shown["cordon_reason"], shown
    async with (
        server(silent) as one,
        running_gateway(one.url) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        await complete(client, "one", PROMPT, 5)
        assert (await last_turn(client, "one"))["weight_versions"] == []


@KINDS
async def test_an_absent_engine_gets_the_weights_when_it_returns(kind: str) -> None:
    """The update does not wait for it."""
    async with (
        server(engine(kind)) as one,
        server(engine(kind)) as other,
        running_gateway(one.url, other.url, **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        await other.end()
        await eventually(lambda: has_state(client, 1, "lost"), 60)
        done = (await update(client, "v1")).json()
        assert done["status"] == "done"
        assert sorted(one["state"] for one in done["engines"].values()) == ["absent", "done"]
        await other.start(engine(kind))
        await eventually(lambda: has_state(client, 1, "ready"), 60)
        assert [one["weight_version"] for one in await engines(client)] == ["v1", "v1"]


@KINDS
async def test_a_transfer_without_any_engine_fails(kind: str) -> None:
    """An absent engine cannot get the weights later, so the trainer gets an error, and the version does not change."""
    transfer = {"update_info": {}, "distributed": {"names": []}}
    async with (
        server(engine(kind)) as one,
        running_gateway(one.url, **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        await update(client, "v1")
        await one.end()
        await eventually(lambda: has_state(client, 0, "lost"), 60)
        failed = await update(client, "v2", transfer=transfer)
        assert (failed.status_code, failed.json()["status"]) == (502, "failed")
        assert "none of the engines is there" in failed.json()["error"]["message"]
        assert (await client.get("/v1/weights")).json()["version"] == "v1"
        await one.start(engine(kind))
        await eventually(lambda: has_state(client, 0, "ready"), 60)
        assert [(one["weight_version"], one["cordon_reason"]) for one in await engines(client)] == [("v1", None)]


@KINDS
async def test_an_update_survives_a_killed_gateway(kind: str, tmp_path: Path) -> None:
    """The engine that had the new weights, and the one that was loading them: neither serves the old ones."""
    async with server(engine(kind)) as one, server(engine(kind, weight_load_s=100.0)) as other:
        options = ("--engine", one.url, "--engine", other.url, "--store", f"sqlite:{tmp_path / 'store.sqlite3'}")
        async with (
            gateway_process(*options, HEDDLE_ADMIN_KEY=ADMIN_KEY) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
        ):
            await complete(client, "before", PROMPT, 10)
            await update(client, "v1", mode="restart", wait=False)

            async def is_half_done() -> bool:
                states = (await client.get("/v1/weights")).json()["update"]["engines"].values()
                return sorted(one["state"] for one in states) == ["done", "loading"]

            await eventually(is_half_done, 60)
            await gateway.kill()
            await gateway.start()
            texts = await asyncio.gather(*(complete(client, f"t{n}", PROMPT, 60) for n in range(6)))
            assert all(is_generated_by(["v1"], PROMPT, text) for text in texts)
            await eventually(lambda: has_state(client, 1, "ready"), 60)
            shown = (await client.get("/v1/weights")).json()
            assert shown["version"] == "v1"
            assert [one["version"] for one in shown["engines"].values()] == ["v1", "v1"]
            assert not any(one["held"] for one in shown["engines"].values())
            assert [one["models"] for one in await engines(client)] == [["simulated"]] * 2
            await complete(client, "before", PROMPT, 10)
            rows = (await client.get("/v1/trajectories/before")).json()["turns"]
            assert [row["weight_versions"] for row in rows] == [["default"], ["v1"]]
            assert rows[-1]["cached_tokens"] == 0


async def test_a_gateway_that_knows_nothing_of_an_engines_weights_reuses_no_older_kv() -> None:
    """An earlier gateway set them, and its store is gone: KV of the weights that the engine was started with is still
    there, under no salt."""
    prompt = PROMPT * 20
    async with server(engine("vllm")) as one:
        for version in ("v1", "v2"):
            async with (
                running_gateway(one.url) as gateway,
                httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
            ):
                for number in range(2):
                    await complete(client, f"t{number}", prompt, 5)
                rows = [await last_turn(client, f"t{number}") for number in range(2)]
                assert [bool(row["cached_tokens"]) for row in rows] == [False, True]
                assert (await update(client, version)).json()["status"] == "done"


async def test_weights_in_doubt_are_loaded_again_after_a_restart(tmp_path: Path) -> None:
    """The last step of a load failed: the engine reports the old version, and the fleet's version is the old one
    again."""
    store = f"sqlite:{tmp_path / 'store.sqlite3'}"
    async with server(engine("vllm", Fault("error", path="/update_weight_version", count=1))) as one:
        async with (
            running_gateway(one.url, store=store) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
        ):
            assert (await update(client, "v1")).status_code == 502, "loaded, but without its version"
            assert (await update(client, "v1")).json()["status"] == "done"
            fault = {"kind": "error", "path": "/update_weight_version", "count": 1}
            await client.post(one.url + "/simulate/faults", json={"faults": [fault]})
            assert (await update(client, "v2")).status_code == 502
            assert (await client.get("/v1/weights")).json()["version"] == "v1"
        async with (
            running_gateway(one.url, store=store) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
        ):
            text = await complete(client, "one", PROMPT, 60)
            assert is_generated_by(["v1"], PROMPT, text) and not is_generated_by(["v2"], PROMPT, text)


@KINDS
async def test_a_joining_engine_that_cannot_load_the_weights_is_held(kind: str) -> None:
    """The reason is shown. The fleet's checks do not try again; an update does."""
    path = "/collective_rpc" if kind == "vllm" else "/update_weights_from_disk"
    async with (
        server(engine(kind)) as one,
        running_gateway(one.url, **QUICK) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        assert (await update(client, "v1")).json()["status"] == "done"
        await one.end()
        await eventually(lambda: has_state(client, 0, "lost"), 60)
        await one.start(engine(kind, Fault("error", path=path, count=1)))
        await eventually(lambda: has_state(client, 0, "ready"), 60)
        (shown,) = await engines(client)
        assert shown["is_cordoned"] and "load" in shown["cordon_reason"], shown
        assert (await update(client, "v1")).json()["status"] == "done"
        text = await complete(client, "one", PROMPT, 30)
        assert is_generated_by(["v1"], PROMPT, text) and len(TOKENIZER.encode(text)) == 30
