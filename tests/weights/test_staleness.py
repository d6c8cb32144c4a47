"""Trajectories whose oldest token is too many versions old: refused or restarted, as configured."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault
from tests.faults.gateway_process import gateway_process
from tests.faults.kept_gateway import kept_gateway
from tests.support.engine import recorded_engine
from tests.support.gateway import ADMIN, eventually, running_gateway
from tests.weights.gateway_client import TOKENIZER, body_of, complete, engine, is_generated_by, last_turn, update

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
PROMPT = "Tell me about looms."


@asynccontextmanager
async def gateway_before(
    kind: str, speed_up: float = 50.0, slots: int = 256, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway before one engine."""
    profile = replace(load_profile("qwen3-14b-h100-tp1"), slots=slots)
    async with (
        serve_engine(engine(kind, speed_up=speed_up, profile=profile)) as url,
        running_gateway(url, **{"retry_pause_s": 0.1} | settings) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        yield client


async def has_legs(client: httpx.AsyncClient, number: int) -> bool:
    return bool((await client.get("/v1/engines")).json()["data"][0]["num_legs"] == number)


async def has_turn(client: httpx.AsyncClient, trajectory: str, state: str) -> bool:
    turns = (await client.get(f"/v1/trajectories/{trajectory}")).json()["live_turns"]
    return [turn["state"] for turn in turns] == [state]


async def ask(client: httpx.AsyncClient, trajectory: str) -> httpx.Response:
    return await client.post(f"/t/{trajectory}/v1/completions", json=body_of(PROMPT, 5))


@KINDS
async def test_a_trajectory_is_refused_only_beyond_the_limit(kind: str) -> None:
    """Its staleness is the number of versions set since its oldest token was generated, whatever their names."""
    async with gateway_before(kind, max_staleness=1) as client:
        await complete(client, "old", PROMPT, 5)
        assert (await client.post("/t/wrong/v1/completions", json=body_of(PROMPT, -1))).status_code == 400
        await update(client, "zebra")
        await complete(client, "old", PROMPT, 5)
        await complete(client, "young", PROMPT, 5)
        await update(client, "aardvark")
        refused = await ask(client, "old")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (409, "too_stale")
        assert "'default'" in error["message"] and refused.headers["x-should-retry"] == "false"
        assert (await ask(client, "young")).status_code == 200
        assert (await ask(client, "new")).status_code == 200
        assert (await ask(client, "wrong")).status_code == 200, "a turn that an engine refused made no token"
        again = await update(client, "aardvark")
        assert again.json()["status"] == "done"
        assert (await ask(client, "young")).status_code == 200, "setting the same version again does not age it"
        await update(client, "middle")
        assert (await ask(client, "young")).status_code == 409
        assert (await ask(client, "new")).status_code == 200


async def test_tokens_of_a_version_that_is_set_again_are_young_again() -> None:
    """As when a trainer returns to a checkpoint. The tokens of versions in between stay old."""
    async with gateway_before("vllm", max_staleness=1) as client:
        for version in ("good", "bad"):
            await update(client, version)
            await complete(client, "one", PROMPT, 5)
        await update(client, "worse")
        await update(client, "good")
        refused = await ask(client, "one")
        assert refused.status_code == 409 and "'bad', 2 versions behind" in refused.json()["error"]["message"]
        await complete(client, "two", PROMPT, 5)
        assert (await last_turn(client, "two"))["weight_versions"] == ["good"]


@KINDS
async def test_an_update_that_no_engine_takes_ages_nothing(kind: str) -> None:
    """While it tries, turns are served by the other engine. They were refused for good, though an update that fails
    leaves the version unchanged."""
    load = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[kind]
    async with (
        serve_engine(engine(kind)) as one,
        serve_engine(engine(kind)) as two,
        running_gateway(one, two, max_staleness=0, retry_pause_s=0.1) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        await complete(client, "old", PROMPT, 5)
        for url in (one, two):
            fault = {"kind": "hang", "path": load}
            assert (await client.post(url + "/simulate/faults", json={"faults": [fault]})).status_code == 200
        updating = asyncio.create_task(update(client, "v1"))
        await eventually(lambda: is_loading(client), 60)
        assert (await ask(client, "old")).status_code == 200
        assert not updating.done()
        updating.cancel()


async def is_loading(client: httpx.AsyncClient) -> bool:
    shown = (await client.get("/v1/weights")).json()["update"]
    return shown is not None and "loading" in [engine["state"] for engine in shown["engines"].values()]


@KINDS
async def test_without_a_limit_nothing_is_too_stale(kind: str) -> None:
    """The default."""
    async with gateway_before(kind) as client:
        await complete(client, "old", PROMPT, 5)
        for version in ("v1", "v2", "v3"):
            await update(client, version)
        await complete(client, "old", PROMPT, 5)


@KINDS
@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_a_running_turn_that_becomes_too_stale_fails(kind: str, token_legs: str) -> None:
    """Its tokens would be useless, and a turn that is young enough goes on. Rounds repeat until the young turn has
    tokens of both versions."""
    path, number, versions = "/t/{}-{}/v1/completions", 0, []
    async with gateway_before(kind, 5.0, max_staleness=1, token_legs=token_legs) as client:
        while len(versions) < 2:
            number += 2
            events: list[str] = []
            await complete(client, f"old-{number}", PROMPT, 5)
            await update(client, f"v{number - 1}")
            old = asyncio.create_task(client.post(path.format("old", number), json=body_of(PROMPT, 4_000)))
            body = body_of(PROMPT, 1_000, stream=True)
            async with client.stream("POST", path.format("young", number), json=body) as young:
                async for line in young.aiter_lines():
                    if line.startswith("data: {") and not events:  # it has a token of the older version
                        await eventually(partial(has_turn, client, f"old-{number}", "running"), 60)
                        await update(client, f"v{number}")
                    events += [line] if line else []
            refused = await old
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "too_stale"), refused.text
            assert refused.headers["x-should-retry"] == "false", "an SDK would retry in vain"
            assert ", 2 versions behind (max_staleness 1)." in refused.text
            assert young.status_code == 200 and events[-1] == "data: [DONE]"
            versions = (await last_turn(client, f"young-{number}"))["weight_versions"]
        assert versions == [f"v{number - 1}", f"v{number}"]


@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_a_waiting_turn_that_becomes_too_stale_fails(token_legs: str) -> None:
    """For example a turn that waits for a slot while the weights of all engines change."""
    async with gateway_before("vllm", 1.0, slots=1, max_staleness=1, token_legs=token_legs) as client:
        await complete(client, "old", PROMPT, 5)
        await update(client, "v1")
        body = body_of(PROMPT, 4_000, stream=True)
        async with client.stream("POST", "/t/young/v1/completions", json=body) as young:
            pieces = young.aiter_raw()
            await anext(pieces)
            waiting = asyncio.create_task(ask(client, "old"))
            await eventually(lambda: has_turn(client, "old", "waiting"), 60)
            assert (await update(client, "v2")).json()["status"] == "done"
        refused = await waiting
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "too_stale"), refused.text
        assert refused.headers["x-should-retry"] == "false"
        assert (await ask(client, "young")).status_code == 200, "its slot is free again"


@KINDS
@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_a_stale_turn_restarts_under_the_new_weights_if_configured(kind: str, token_legs: str) -> None:
    """None of its answer is out: all of it is of the new weights, and older turns of its trajectory do not count."""
    async with gateway_before(kind, 5.0, max_staleness=0, stale="restart", token_legs=token_legs) as client:
        await complete(client, "one", PROMPT, 5)
        turn = asyncio.create_task(complete(client, "one", PROMPT, 400))
        await eventually(lambda: has_legs(client, 1), 60)
        await update(client, "v1")
        text = await turn
        assert len(TOKENIZER.encode(text)) == 400 and is_generated_by(["v1"], PROMPT, text)
        row = await last_turn(client, "one")
        assert (row["weight_versions"], row["legs"]) == (["v1"], 2)


@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_a_turn_that_restarts_may_have_run_for_longer_than_turns_may_wait(token_legs: str) -> None:
    """It did not wait while it ran. It was refused with `queue_timeout`, and counted as refused by a busy engine."""
    settings = {"max_staleness": 0, "stale": "restart", "queue_timeout_s": 0.5, "token_legs": token_legs}
    async with gateway_before("vllm", 5.0, **settings) as client:
        turn = asyncio.create_task(complete(client, "one", PROMPT, 1_200))
        await eventually(lambda: has_legs(client, 1), 60)
        runs_since = time.time()
        await eventually(lambda: time.time() > runs_since + 0.6, 60)
        await update(client, "v1")
        assert is_generated_by(["v1"], PROMPT, await turn)
        assert (await last_turn(client, "one"))["legs"] == 2
        assert 'heddle_retried_legs_total{fault="busy"} 1' not in (await client.get("/metrics")).text


async def test_a_restarted_turns_first_byte_is_that_of_the_answer_that_its_client_gets() -> None:
    """Its first leg made tokens, but they could not be read before the weights changed. The history, and the metric of
    the first byte, had the time of these."""
    derender = "/v1/chat/completions/derender"
    messages, tool = [{"role": "user", "content": PROMPT}], {"type": "function", "function": {"name": "weave"}}
    body = {"model": "simulated", "messages": messages, "tools": [tool], "stream": True, "max_tokens": 400}
    async with (
        recorded_engine(engine("vllm", Fault("hang", path=derender, count=1), speed_up=5.0)) as recorded,
        running_gateway(recorded.url, max_staleness=0, stale="restart", token_legs="auto") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90) as client,
    ):
        turn = asyncio.create_task(client.post("/t/one/v1/chat/completions", json=body | {"ignore_eos": True}))
        await eventually(lambda: derender in [asked.path for asked in recorded.seen])
        hangs_since = time.time()
        await update(client, "v1")
        assert "[DONE]" in (await turn).text
        row = await last_turn(client, "one")
        assert (row["weight_versions"], row["legs"]) == (["v1"], 2)
        assert row["first_byte_at"] > hangs_since
        page = (await client.get("/metrics")).text
        assert "heddle_turn_first_token_seconds_count 1.0" in page


@KINDS
async def test_a_stale_stream_that_has_begun_is_not_restarted(kind: str) -> None:
    """What is out cannot be taken back, so it ends with the error."""
    async with gateway_before(kind, 5.0, max_staleness=0, stale="restart") as client:
        text, done = "", None
        async with client.stream("POST", "/t/one/v1/completions", json=body_of(PROMPT, 400, stream=True)) as response:
            async for line in response.aiter_lines():
                text += line
                if line.startswith("data: {"):
                    done = done or asyncio.create_task(update(client, "v1"))
        assert done is not None and (await done).json()["status"] == "done"
        assert '"too_stale"' in text and "[DONE]" not in text


@pytest.mark.parametrize("is_kept", [False, True], ids=["tokens were stored", "its leg was kept"])
@pytest.mark.parametrize(("stale", "status"), [("refuse", 409), ("restart", 200)])
async def test_tokens_of_an_earlier_process_are_not_taken_up_if_they_are_too_stale(
    tmp_path: Path, is_kept: bool, stale: str, status: int
) -> None:
    """The gateway is killed in mid-turn, the weights change, and the agent asks again. Its turn went on from the old
    weights' tokens."""
    environment = {
        "HEDDLE_TOKEN_LEGS": "auto",
        "HEDDLE_SAVE_TOKENS_S": "3600" if is_kept else "0.000001",
        "HEDDLE_SETTLE_TIMEOUT_S": "60",
        "HEDDLE_MAX_STALENESS": "0",
        "HEDDLE_STALE": stale,
        "HEDDLE_ADMIN_KEY": ADMIN["authorization"].removeprefix("Bearer "),
    }
    body = body_of(PROMPT, 600, stream=True)
    store = ("--store", f"sqlite:{tmp_path}/heddle.sqlite3")
    async with serve_engine(engine("vllm", speed_up=2.0)) as url:
        process = (kept_gateway if is_kept else gateway_process)("--engine", url, *store, **environment)
        async with process as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=90) as client:

            async def is_ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get("/readyz")).status_code == 200
                return False

            await eventually(is_ready, 60)
            async with client.stream("POST", "/t/one/v1/completions", json=body) as first:
                await anext(first.aiter_raw())
                await complete(client, "other", PROMPT, 5)  # it ends only when the store has all earlier writes
                await gateway.kill()
            if not is_kept:
                await gateway.start()
            await eventually(is_ready, 60)
            assert (await update(client, "v1")).json()["status"] == "done"
            again = await client.post("/t/one/v1/completions", json=body)
            assert again.status_code == status, again.text
            row = await last_turn(client, "one")
            assert row["weight_versions"] == (["v1"] if status == 200 else [])
            await eventually(lambda: has_legs(client, 0), 60)
            assert (await ask(client, "new")).status_code == 200
