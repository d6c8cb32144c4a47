"""New weights while turns run, on simulated engines of both kinds: what clients get, and what a failure costs."""

import asyncio
import functools
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from engines.simulated.answers import Wish, answer
from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.faults.asking import APIS, PATHS
from tests.faults.asking import body_of as body_in
from tests.support.engine import Asked, RecordedEngine, Script, recorded_engine
from tests.support.gateway import ADMIN, eventually, running_gateway
from tests.weights.gateway_client import (
    MEAN_TOKENS,
    TOKENIZER,
    body_of,
    complete,
    engine,
    is_generated_by,
    last_turn,
    update,
)

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])
STEPS = [
    ("vllm", "/pause", "pause"),
    ("vllm", "/collective_rpc", "load"),
    ("vllm", "/update_weight_version", "load"),
    ("vllm", "/resume", "resume"),
    ("sglang", "/pause_generation", "pause"),
    ("sglang", "/update_weights_from_disk", "load"),
    ("sglang", "/continue_generation", "resume"),
]


@asynccontextmanager
async def fleet(
    *engines: SimulatedEngineSettings, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, list[str]]]:
    """A client of a gateway before these engines, and their ids."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serve_engine(one)) for one in engines]
        gateway = await stack.enter_async_context(running_gateway(*urls, **settings))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=90))
        yield client, [url.removeprefix("http://") for url in urls]


async def running_on(client: httpx.AsyncClient, engine_id: str) -> int:
    """How many legs an engine has."""
    listed = (await client.get("/v1/engines")).json()["data"]
    return int(next(one["num_legs"] for one in listed if one["id"] == engine_id))


@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_every_turn_of_a_rollout_finishes_during_updates(token_legs: str) -> None:
    """Three updates in both modes: each answer is one generation by the weights that its row names, in their order."""
    versions = ["default", "v1", "v2", "v3"]
    answers: dict[str, tuple[str, str]] = {}
    are_done = asyncio.Event()

    async def trajectory(client: httpx.AsyncClient, number: int) -> None:
        for turn in itertools.count():  # until the last update, however slow the machine is
            if turn >= 4 and are_done.is_set():
                return
            prompt = f"Task {number}, turn {turn}: " + "look at the loom. " * 20
            name = f"t{number}-{turn}"
            answers[name] = (prompt, await complete(client, name, prompt, 250))

    engines = [engine(kind, weight_load_s=2.0, speed_up=15.0) for kind in ("vllm", "sglang", "vllm")]
    async with fleet(*engines, token_legs=token_legs) as (client, ids):
        async with asyncio.TaskGroup() as group:
            for number in range(9):
                group.create_task(trajectory(client, number))
            for version, mode in zip(versions[1:], ("keep", "restart", "keep"), strict=True):
                before = len(answers)
                await eventually(lambda before=before: len(answers) >= before + 5, 60)
                done = (await update(client, version, mode=mode)).json()
                assert done["status"] == "done", done
                assert set(done["engines"]) == set(ids)
            are_done.set()
        assert len(answers) >= 36
        num_mixed = 0
        for name, (prompt, text) in answers.items():
            made_by = (await last_turn(client, name))["weight_versions"]
            assert made_by and made_by == sorted(made_by, key=versions.index), made_by
            assert len(TOKENIZER.encode(text)) == 250
            assert is_generated_by(made_by, prompt, text), (name, made_by)
            num_mixed += not is_generated_by(made_by[-1:], prompt, text)
        assert num_mixed, "no turn was in flight at an update"
        assert (await client.get("/v1/weights")).json()["version"] == "v3"


async def test_requests_without_a_trajectory_avoid_an_engine_in_an_update() -> None:
    """It is paused and has the fewest turns, but the other engine gets them."""
    is_over = asyncio.Event()

    async def load(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        await is_over.wait()

    async with (
        recorded_engine(engine("vllm")) as one,
        recorded_engine(engine("vllm")) as other,
        running_gateway(one.url, other.url) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        one.scripts["/collective_rpc"] = Script(load, 500)
        order = asyncio.create_task(update(client, "v1"))
        await eventually(lambda: any(asked.path == "/collective_rpc" for asked in one.seen), 60)
        for _ in range(3):
            response = await client.post("/tokenize", json={"model": "simulated", "prompt": "Hello"})
            assert response.status_code == 200, response.text
        num_requests = [[asked.path for asked in each.seen].count("/tokenize") for each in (one, other)]
        is_over.set()
        await order
        assert num_requests == [0, 3]


async def test_a_drain_completes_while_the_only_other_engine_is_in_an_update() -> None:
    """The paused turn waits for the end of the load, which is soon. On the drained engine it could run for an hour."""
    is_over = asyncio.Event()

    async def load(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        await is_over.wait()

    async with (
        recorded_engine(engine("vllm", speed_up=5.0)) as one,
        recorded_engine(engine("vllm", speed_up=5.0)) as other,
        running_gateway(one.url, other.url, token_legs="auto") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=90, headers=ADMIN) as client,
    ):
        one_id, other_id = (each.url.removeprefix("http://") for each in (one, other))
        await client.post(f"/v1/engines/{other_id}/cordon")
        turn = asyncio.create_task(complete(client, "one", "Go on.", 1_200))
        await eventually(lambda: _has_legs(client, one_id), 60)
        await client.post(f"/v1/engines/{other_id}/uncordon")
        other.scripts["/collective_rpc"] = Script(load, 500)
        order = asyncio.create_task(update(client, "v1", engines=[other_id]))
        await eventually(lambda: any(asked.path == "/collective_rpc" for asked in other.seen), 60)
        drained = (await client.post(f"/v1/engines/{one_id}/drain?timeout_s=60")).json()
        assert drained["is_drained"] and not turn.done() and not is_over.is_set()
        await client.post(f"/v1/engines/{one_id}/uncordon")
        assert len(TOKENIZER.encode(await turn)) == 1_200
        assert (await last_turn(client, "one"))["legs"] == 2
        is_over.set()
        await order


@KINDS
@pytest.mark.parametrize("mode", ["keep", "restart"])
@pytest.mark.parametrize("api", APIS)
async def test_no_turn_reuses_kv_of_earlier_weights(kind: str, mode: str, api: str) -> None:
    """The first turn after an update finds nothing in the cache, whatever its API and its own salt; the second one
    does."""
    body = body_in(api, text="Tell me about looms. " * 30)
    async with fleet(engine(kind)) as (client, _):

        async def cached(**more: Any) -> int:
            answer = await client.post("/t/one" + PATHS[api], json=body | more)
            assert answer.status_code == 200, answer.text
            return int((await last_turn(client, "one"))["cached_tokens"] or 0)

        own: dict[str, Any]
        for own in ({}, {"cache_salt": "mine"}) if (kind, api) != ("sglang", "messages") else ({},):
            await cached(**own)
            assert await cached(**own) > 0
            for version in ("v1", "v2", "v1"):
                assert (await update(client, f"{version}{len(own)}", mode=mode)).json()["status"] == "done"
                assert await cached(**own) == 0
                assert await cached(**own) > 0


@KINDS
async def test_requests_have_no_salt_until_a_version_is_set(kind: str) -> None:
    """A salt of the client's own comes before the gateway's."""
    async with (
        recorded_engine(engine(kind)) as one,
        running_gateway(one.url) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        await complete(client, "one", "Hello", 5)
        assert "cache_salt" not in one.turns[-1].json
        assert (await update(client, "step/1")).json()["status"] == "done"
        await complete(client, "one", "Hello", 5)
        salt = one.turns[-1].json["cache_salt"]
        assert salt.startswith("w1-")
        await complete(client, "one", "Hello", 5, cache_salt="mine")
        assert one.turns[-1].json["cache_salt"] == f"mine.{salt}"


@pytest.mark.parametrize(("kind", "path", "step"), STEPS)
@pytest.mark.parametrize("fault", ["error", "die", "hang"])
async def test_an_engine_that_fails_at_a_step_is_held(kind: str, path: str, step: str, fault: Any) -> None:
    """The other gets the weights. The failed one gets no turns, its own turn continues elsewhere, and the same POST
    again brings it back."""
    bad = engine(kind, Fault(fault, path=path, count=1), speed_up=5.0)
    limits = {"weight_pause_timeout_s": 2.0, "weight_load_timeout_s": 2.0, "retry_pause_s": 0.1}
    async with fleet(engine(kind), bad, **limits) as (client, (good_id, bad_id)):
        await client.post(f"/v1/engines/{good_id}/cordon", headers=ADMIN)
        turn = asyncio.create_task(complete(client, "one", "Go on.", 300))
        await eventually(lambda: _has_legs(client, bad_id), 60)
        await client.post(f"/v1/engines/{good_id}/uncordon", headers=ADMIN)
        done = (await update(client, "v1")).json()
        assert done["status"] == "partial", done
        assert done["engines"][good_id]["state"] == "done"
        assert done["engines"][bad_id]["state"] == "failed"
        assert done["engines"][bad_id]["error"].startswith(step)
        assert len(TOKENIZER.encode(await turn)) == 300
        shown = {one["id"]: one for one in (await client.get("/v1/engines")).json()["data"]}
        assert shown[bad_id]["is_cordoned"] and "v1" in shown[bad_id]["cordon_reason"], shown[bad_id]
        assert not shown[good_id]["is_cordoned"]
        for number in range(4):
            await complete(client, f"later{number}", "Go on.", 5)
            assert (await last_turn(client, f"later{number}"))["engine"] == good_id
        again = (await update(client, "v1")).json()
        assert again["status"] == "done", again
        assert again["engines"][good_id]["load_s"] is None, "it has them already"
        shown = {one["id"]: one for one in (await client.get("/v1/engines")).json()["data"]}
        assert not shown[bad_id]["is_cordoned"] and shown[bad_id]["weight_version"] == "v1"


async def _has_legs(client: httpx.AsyncClient, engine_id: str) -> bool:
    return await running_on(client, engine_id) > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_every_turn_finishes_under_random_update_failures(seed: int, token_legs: str) -> None:
    """Half of all control calls fail in some way, and updates are repeated until all engines have them. The tokens of
    each turn are of the versions that its row names."""
    kinds = ("error", "die", "reset", "html", "hang")
    paths = sorted({path for _, path, _ in STEPS})
    dice = random.Random(seed)
    engines = [
        engine(
            kind,
            *(Fault(dice.choice(kinds), path=path, probability=0.5, count=3) for path in paths),  # type: ignore[arg-type]
            speed_up=15.0,
            seed=seed,
        )
        for kind in ("vllm", "sglang", "vllm")
    ]
    limits = {"weight_pause_timeout_s": 0.3, "weight_load_timeout_s": 0.3, "retry_pause_s": 0.05, "max_attempts": 50}
    prompt, versions = "Tell me about looms.", ["default", "v1", "v2"]
    async with fleet(*engines, token_legs=token_legs, **limits) as (client, _):

        async def trajectory(number: int) -> None:
            for turn in range(3):
                name = f"t{number}-{turn}"
                text = await complete(client, name, prompt, 120)
                row = await last_turn(client, name)
                assert len(TOKENIZER.encode(text)) == 120 and is_generated_by(row["weight_versions"], prompt, text), row
                assert row["weight_versions"] == sorted(row["weight_versions"], key=versions.index)

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(trajectory(number))
            for version in versions[1:]:
                tries = 0
                while (await update(client, version, mode=dice.choice(["keep", "restart"]))).json()["status"] != "done":
                    tries += 1
                    assert tries < 40
        assert all(one["version"] == "v2" for one in (await client.get("/v1/weights")).json()["engines"].values())


@KINDS
async def test_a_path_that_the_first_engine_refuses_leaves_the_others_alone(kind: str) -> None:
    """A trainer's mistake costs one engine. The version does not change, and an update to the last good version repairs
    the engine."""
    async with fleet(*[engine(kind)] * 3) as (client, _):
        assert (await update(client, "v1")).json()["status"] == "done"
        for _ in range(2):  # again, as a trainer that retries
            refused = await update(client, "v2", path="/weights/missing-v2")
            assert refused.status_code == 502 and "missing-v2" in refused.json()["error"]["message"]
            states = sorted(one["state"] for one in refused.json()["engines"].values())
            assert states == ["failed", "untouched", "untouched"]
        shown = (await client.get("/v1/weights")).json()
        assert shown["version"] == "v1"
        assert sorted(bool(one["held"]) for one in shown["engines"].values()) == [False, False, True]
        await complete(client, "one", "Hello", 5)
        assert (await last_turn(client, "one"))["weight_versions"] == ["v1"]
        assert (await update(client, "v1")).json()["status"] == "done"
        assert not any(one["held"] for one in (await client.get("/v1/weights")).json()["engines"].values())


@KINDS
async def test_an_engine_that_lacks_every_path_does_not_stop_later_updates(kind: str) -> None:
    """Its mount is lost. It is held, so it has the fewest turns, and went first: each later update ended there."""
    load = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[kind]
    async with fleet(engine(kind, speed_up=5.0), engine(kind, Fault("error", path=load))) as (
        client,
        (good_id, bad_id),
    ):
        assert (await update(client, "v1")).json()["status"] == "partial"
        turn = asyncio.create_task(complete(client, "one", "Go on.", 600))
        await eventually(lambda: _has_legs(client, good_id), 60)
        done = (await update(client, "v2")).json()
        assert done["status"] == "partial", done
        assert {engine_id: one["state"] for engine_id, one in done["engines"].items()} == {
            good_id: "done",
            bad_id: "failed",
        }
        await turn


@KINDS
async def test_the_record_has_the_weights_of_every_token_of_paused_legs(kind: str) -> None:
    """A whole answer arrives in events of 32 tokens: those of an event that spans an update are not taken for the newer
    weights'."""
    slow = engine(kind, speed_up=5.0)
    async with fleet(slow, slow, token_legs="auto", retry_pause_s=0.05) as (client, engine_ids):
        turn = asyncio.create_task(complete(client, "one", "Tell me about looms.", 1_200))

        async def has_made(num: int) -> bool:
            turns = (await client.get("/v1/trajectories/one")).json().get("live_turns") or [{"chunks": 0}]
            return bool(turns[0]["chunks"] >= num)

        for number in range(1, 5):
            await eventually(functools.partial(has_made, 200 * number), 60)
            assert (await update(client, f"v{number}")).json()["status"] == "done"
            await eventually(functools.partial(has_made, 200 * number + 50), 60)
            [home] = [engine_id for engine_id in engine_ids if await running_on(client, engine_id)]
            await client.post(f"/v1/engines/{home}/drain?timeout_s=60", headers=ADMIN)
            await client.post(f"/v1/engines/{home}/uncordon", headers=ADMIN)
        await turn
        [row] = (await client.get("/v1/trajectories/one")).json()["turns"]
        [made] = (await client.get("/v1/trajectories/one/tokens")).json()["turns"]
        ids, wish = made["prompt_ids"] + made["output_ids"], Wish(max_tokens=1, ignore_eos=True)
        assert row["legs"] == 5 and [span["version"] for span in made["versions"]] == [
            "default",
            "v1",
            "v2",
            "v3",
            "v4",
        ]
        num_prompt = len(made["prompt_ids"])
        for span in made["versions"]:
            for at in range(num_prompt + span["start"], num_prompt + span["end"]):
                next_ids = answer(ids[:at], wish, TOKENIZER, span["version"], MEAN_TOKENS).token_ids
                assert next_ids == [ids[at]], (at, span)


async def test_only_one_update_runs_at_a_time() -> None:
    """Another version is refused with the version that runs. A repeat of the same one waits for its end, and loads
    nothing twice."""
    async with fleet(engine("vllm", weight_load_s=50.0), engine("sglang", weight_load_s=50.0)) as (client, _):
        begun = await update(client, "v1", wait=False)
        assert (begun.status_code, begun.json()["status"]) == (202, "running")
        other = await update(client, "v2")
        assert other.status_code == 409 and "'v1'" in other.json()["error"]["message"]
        assert other.headers["x-should-retry"] == "false"
        same = await update(client, "v1")
        assert (same.status_code, same.json()["status"]) == (200, "done")
        assert (await client.get("/v1/weights")).json()["update"] == same.json()
        again = await update(client, "v1")
        assert [one["load_s"] for one in again.json()["engines"].values()] == [None, None]


async def test_a_version_that_all_engines_have_is_refused_with_another_path() -> None:
    """A second run that counts its versions from 1 again would train on with the old weights. Engines that lack the
    version may take it from another path, because nodes need not have the same paths."""
    slow = engine("vllm", weight_load_s=50.0)
    async with fleet(slow, slow) as (client, (first_id, second_id)):
        begun = await update(client, "v1", engines=[first_id])
        assert begun.json()["status"] == "done"
        assert (await update(client, "v1", path="/other/v1", wait=False)).status_code == 202
        for path in ("/another/v1", "/other/v1"):
            joined = await update(client, "v1", path=path)
            assert joined.status_code == (200 if path == "/other/v1" else 409), joined.text
        refused = await update(client, "v1", path="/another/v1")
        assert refused.status_code == 409 and "'v1'" in refused.json()["error"]["message"]
        assert (await client.get("/v1/weights")).json()["path"] == "/other/v1"
        assert (await update(client, "v1", path="/other/v1")).json()["status"] == "done"
        assert (await update(client, "v1", path="/node/v1", engines=[second_id])).json()["status"] == "done"


async def test_an_update_of_some_engines_does_not_answer_for_others() -> None:
    """The same version for another engine is refused until the update ends, instead of being reported as done."""
    slow = engine("vllm", weight_load_s=50.0)
    async with fleet(slow, slow) as (client, (first_id, second_id)):
        assert (await update(client, "v1", engines=[first_id], wait=False)).status_code == 202
        for others in ({"engines": [second_id]}, {"engines": [first_id, second_id]}, {}):
            refused = await update(client, "v1", **others)
            assert refused.status_code == 409 and first_id in refused.json()["error"]["message"], refused.text
        assert (await update(client, "v1", engines=[first_id])).json()["status"] == "done"
        assert (await update(client, "v1", wait=False)).status_code == 202
        assert (await update(client, "v1", engines=[second_id])).json()["status"] == "done"
        versions = (await client.get("/v1/weights")).json()["engines"].values()
        assert [one["version"] for one in versions] == ["v1", "v1"]


async def test_an_engine_that_is_removed_in_mid_update_stays_removed() -> None:
    """It does not return, and the update ends without it."""
    async with fleet(engine("vllm"), engine("vllm", weight_load_s=5000.0)) as (client, (first_id, second_id)):
        begun = await update(client, "v1", wait=False)
        assert begun.status_code == 202

        async def is_loading() -> bool:
            engines = (await client.get("/v1/weights")).json()["update"]["engines"]
            return bool(engines[first_id]["state"] == "done" and engines[second_id]["state"] == "loading")

        await eventually(is_loading, 60)
        await client.delete(f"/v1/engines/{second_id}", headers=ADMIN)

        async def has_ended() -> bool:
            shown = (await client.get("/v1/weights")).json()["update"]
            return bool(shown["status"] == "partial" and shown["engines"][second_id]["state"] == "failed")

        await eventually(has_ended, 60)
        assert [one["id"] for one in (await client.get("/v1/engines")).json()["data"]] == [first_id]
        for number in range(3):
            await complete(client, f"t{number}", "Hello", 5)
            assert (await last_turn(client, f"t{number}"))["engine"] == first_id


@pytest.mark.parametrize(
    ("order", "status", "message"),
    [
        ({"path": None}, 400, "either"),
        ({"transfer": {"update_info": {}}, "path": "/weights/v1"}, 400, "either"),
        ({"transfer": {"names": []}}, 400, "update_info"),
        ({"transfer": {"init_info": {"port": 2**64}, "update_info": {}}}, 400, "64-bit"),
        ({"transfer": {"update_info": {}}, "transfer_of": {"a": {"seed": 2**64}}}, 400, "64-bit"),
        ({"engines": ["nobody"]}, 404, "nobody"),
        ({"transfer": {"update_info": {}}, "transfer_of": {"nobody": {"init_info": {}}}}, 404, "nobody"),
        ({"mode": "abort"}, 400, "mode"),
        ({"version": ""}, 400, "version"),
        ({"version": "default"}, 400, "started with"),
        ({"version": "as-started"}, 400, "started with"),
    ],
)
async def test_an_invalid_update_is_refused(order: dict[str, Any], status: int, message: str) -> None:
    """With a clear message, and nothing begins."""
    async with fleet(engine("vllm")) as (client, _):
        response = await update(client, **{"version": "v1"} | order)
        assert response.status_code == status and message in response.json()["error"]["message"], response.text
        assert (await client.get("/v1/weights")).json()["version"] is None


async def test_only_the_admin_may_change_weights() -> None:
    """401 without a key, and nothing begins."""
    async with fleet(engine("vllm")) as (client, _):
        response = await client.post("/v1/weights", json={"version": "v1", "path": "/weights/v1"})
        assert response.status_code == 401
        assert (await client.get("/v1/weights")).json()["version"] is None


async def test_a_transfer_reaches_each_engine_in_its_own_form() -> None:
    """Common fields, those of one engine, and calls in the dialect of each engine."""

    def calls(one: RecordedEngine) -> list[tuple[str, Any]]:
        return [(asked.path, asked.json if asked.body else None) for asked in one.turns]

    transfer = {"update_info": {"weights": "v1"}, "distributed": {"names": ["a"], "dtypes": ["f"], "shapes": [[1]]}}
    async with (
        recorded_engine(engine("vllm")) as vllm,
        recorded_engine(engine("sglang")) as sglang,
        running_gateway(vllm.url, sglang.url) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
    ):
        of_vllm = {vllm.url.removeprefix("http://"): {"init_info": {"rank_offset": 1}}}
        done = (await update(client, "v1", transfer=transfer, transfer_of=of_vllm)).json()
        assert done["status"] == "done", done
        assert calls(vllm) == [
            ("/pause", None),
            ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1}}),
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"weights": "v1"}}),
            ("/finish_weight_update", {"weight_version": "v1"}),
            ("/resume", None),
        ]
        assert [path for path, _ in calls(sglang)] == [
            "/pause_generation",
            "/begin_weight_update",
            "/update_weights_from_distributed",
            "/end_weight_update",
            "/continue_generation",
        ]
        prompt = "Tell me about looms."
        assert is_generated_by(["v1"], prompt, await complete(client, "one", prompt, 40))
        sglang_id = sglang.url.removeprefix("http://")
        refused = await update(client, "v2", transfer=transfer, transfer_of=of_vllm, engines=[sglang_id])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "transfer_of")


async def test_a_stream_pauses_during_an_update() -> None:
    """No event is missing or duplicated."""
    async with fleet(engine("vllm", weight_load_s=20.0, speed_up=10.0)) as (client, _):
        prompt, text = "Go on.", ""
        path, body = "/t/one/v1/completions", body_of(prompt, 400, stream=True)
        done: asyncio.Task[httpx.Response] | None = None
        async with client.stream("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    choices = httpx.Response(200, text=line[6:]).json()["choices"]
                    text += "".join(choice["text"] for choice in choices)
                    done = done or asyncio.create_task(update(client, "v1"))
        assert done is not None and (await done).json()["status"] == "done"
        assert len(TOKENIZER.encode(text)) == 400
        assert is_generated_by(["default", "v1"], prompt, text) and not is_generated_by(["default"], prompt, text)
