"""Turns served at token level, from the client's request to the trainer's record, on a simulated engine."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from engines.simulated.server import serve_engine
from tests.api.conftest import CHAT, GENERATE, HELLO, MODEL, Site, running_site, toy
from tests.support.engine import Asked, Script, recorded_engine
from tests.support.gateway import REUSED_FOR, running_gateway

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
MORE = {"role": "user", "content": "And more?"}


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site(toy("vllm"), token_legs="auto") as opened:
        yield opened


async def ask(site: Site, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A turn of the trajectory `a` in the rollout `r`; its answer's message."""
    headers = {"x-trajectory-id": "a", "x-rollout-id": "r"} | fields.pop("headers", {})
    answer = await site.chat(messages=messages, headers=headers, **fields)
    assert answer.status_code == 200, answer.text
    return {} if fields.get("stream") else answer.json()["choices"][0]["message"]


def choices_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The choices of a whole answer, or of all events of a stream."""
    if "event-stream" not in answer.headers["content-type"]:
        return list(answer.json()["choices"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in orjson.loads(event)["choices"]]


async def text_of(site: Site, ids: list[int]) -> str:
    """The text of these tokens, as the engine detokenises them."""
    body = {"model": MODEL, "tokens": ids}
    return str((await site.client.post("/detokenize", json=body)).json()["prompt"])


async def tree(site: Site) -> dict[str, Any]:
    answer = await site.client.get("/v1/trajectories/a/tokens")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_later_turn_continues_the_earlier_turns_tokens(site: Site) -> None:
    """Its prompt begins with them, the mask marks only the answers, and versions cover them."""
    first = await ask(site, HELLO)
    second = await ask(site, [*HELLO, first, MORE], max_tokens=9)
    turns = (await tree(site))["turns"]
    assert [turn["parent"] for turn in turns] == [None, turns[0]["turn_id"]]
    assert [await text_of(site, turn["output_ids"]) for turn in turns] == [first["content"], second["content"]]
    assert turns[1]["num_before"] == len(turns[0]["prompt_ids"] + turns[0]["output_ids"])
    exported = await site.client.post("/v1/rollouts/r/export")
    [record] = [orjson.loads(line) for line in exported.text.splitlines()]
    assert record["missing"] == []
    assert record["token_ids"] == [id for turn in turns for id in turn["prompt_ids"] + turn["output_ids"]]
    assert sum(record["loss_mask"]) == 4 + 9
    spans = [(span["start"], span["end"]) for span in record["versions"]]
    assert spans == [(turn["output_start"], turn["end"]) for turn in record["turns"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
async def test_a_turn_that_ends_with_a_call_is_recorded_as_such(site: Site, api: str, stream: bool) -> None:
    """In a chat's words, whatever API its client uses, and streamed or not."""
    function = TOOL["function"]
    body = {
        "chat/completions": {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"},
        "responses": {"input": "Hello", "tools": [{"type": "function", **function}], "tool_choice": "required"},
        "messages": {
            "messages": HELLO,
            "max_tokens": 99,
            "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    }[api]
    answer = await site.client.post(f"/t/a/v1/{api}", json={"model": MODEL, "stream": stream, **body})
    assert answer.status_code == 200, answer.text
    (turn,) = (await tree(site))["turns"]
    (shown,) = (await site.trajectory("a"))["turns"]
    assert (turn["finish_reason"], shown["finish_reason"]) == ("tool_calls", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asks", [False, True])
async def test_log_probabilities_are_recorded_and_sent_on_request(site: Site, stream: bool, asks: bool) -> None:
    """One for each token, with and without tools, whose answers are derendered; those sent equal those recorded."""
    fields: dict[str, Any] = {"logprobs": True} if asks else {}
    for tools in ({}, {} if stream else {"tools": [TOOL]}):
        answer = await site.chat(messages=HELLO, headers={"x-trajectory-id": "a"}, stream=stream, **fields, **tools)
        turn = (await tree(site))["turns"][-1]
        assert len(turn["logprobs"]) == len(turn["output_ids"]) and max(turn["logprobs"]) < 0
        sent = [
            entry["logprob"]
            for choice in choices_of(answer)
            for entry in (choice.get("logprobs") or {}).get("content", ())
        ]
        assert sent == (pytest.approx(turn["logprobs"], abs=1e-6) if asks else [])


async def test_each_turn_names_the_model_that_made_it() -> None:
    """In its row, in the tree and in the export, also for further choices: a trainer learns from its own model's turns
    only, and a trajectory may have those of others, such as a user that another model plays."""
    async with (
        serve_engine(toy("vllm", model="user")) as other,
        recorded_engine(toy("vllm", model="policy")) as recorded,
        running_gateway(recorded.url, other, token_legs="auto") as listening,
        httpx.AsyncClient(base_url=listening.url, timeout=30, limits=REUSED_FOR) as client,
    ):
        site = Site(recorded, listening.url, client)
        first = await ask(site, HELLO, model="policy")
        second = await ask(site, [*HELLO, first, MORE], model="user")
        await ask(site, [*HELLO, first, MORE, second, MORE], model="policy", n=2)
        models = ["policy", "user", "policy", "policy"]
        assert [turn["model"] for turn in (await tree(site))["turns"]] == models
        assert [row["model"] for row in (await site.trajectory("a"))["turns"]] == models[:3]
        exported = await client.post("/v1/rollouts/r/export")
        records = [orjson.loads(line) for line in exported.text.splitlines()]
        assert [[turn["model"] for turn in one["turns"]] for one in records] == [models[:3]] * 2


@pytest.mark.parametrize("held_up", ["render", "generate"])
async def test_a_turn_continues_tokens_that_others_push_out_of_memory(held_up: str) -> None:
    """Others end before it is rendered, or while it is generated, and there is memory for one. It was not spliced, and
    was kept as a root with its whole prompt."""
    async with (
        serve_engine(toy("vllm")) as backend,
        httpx.AsyncClient(base_url=backend) as to_backend,
        running_site(toy("vllm"), token_legs="auto", max_token_memory_bytes=0) as site,
    ):
        is_second = False

        async def play(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
            nonlocal is_second
            if is_second and held_up in asked.path:
                is_second = False
                for name in ("b", "c"):
                    assert (await site.chat(headers={"x-trajectory-id": name})).status_code == 200
            headers = {"content-type": "application/json"}
            await write((await to_backend.post(asked.path, content=asked.body, headers=headers)).content)

        site.engine.scripts = {
            GENERATE: Script(play),
            "/v1/chat/completions/render": Script(play, headers=((b"content-type", b"application/json"),)),
        }
        first = await ask(site, HELLO)
        is_second = True
        await ask(site, [*HELLO, first, MORE])
        turns = (await tree(site))["turns"]
        assert not is_second
        assert [turn["parent"] for turn in turns] == [None, turns[0]["turn_id"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_record_has_the_finish_reason_that_the_client_is_told(kind: str, stream: bool) -> None:
    """For a call, an answer and one that the limit cuts off. To the engine a call is an answer like any other."""
    told: list[str] = []
    async with running_site(toy(kind), token_legs="auto") as site:
        for number in range(20):
            messages = [{"role": "user", "content": f"What about {number}?"}]
            headers = {"x-trajectory-id": "a", "x-rollout-id": "r"}
            limit = 2 if number == 0 else 400
            answer = await site.chat(messages=messages, headers=headers, tools=[TOOL], stream=stream, max_tokens=limit)
            told += [choice["finish_reason"] for choice in choices_of(answer) if choice["finish_reason"]]
            if set(told) == {"length", "stop", "tool_calls"}:
                break
        assert set(told) == {"length", "stop", "tool_calls"}
        assert [row["finish_reason"] for row in (await site.trajectory("a"))["turns"]] == told
        assert [turn["finish_reason"] for turn in (await tree(site))["turns"]] == told


async def test_a_changed_history_begins_a_branch(site: Site) -> None:
    """A rewritten answer is a prompt that nothing was sampled for; two turns that follow the same answer share it."""
    first = await ask(site, HELLO)
    await ask(site, [*HELLO, first, MORE])
    await ask(site, [*HELLO, first, {"role": "user", "content": "Or else?"}])
    await ask(site, [*HELLO, {"role": "assistant", "content": "I never said that."}, MORE])
    shown = await tree(site)
    one, two, three, four = (turn["turn_id"] for turn in shown["turns"])
    assert shown["branches"] == [[one, two], [one, three], [four]]
    assert shown["turns"][3]["num_before"] == 0


async def test_a_turn_with_prefer_tokens_none_is_listed_as_not_wanted(site: Site) -> None:
    """Streamed or not; the other turns of its trajectory are kept."""
    first = await ask(site, HELLO)
    for stream in (False, True):
        await ask(site, [*HELLO, first, MORE], headers={"prefer": "tokens=none"}, stream=stream)
    shown, turns = await tree(site), (await site.trajectory("a"))["turns"]
    assert [turn["turn_id"] for turn in shown["turns"]] == [turns[0]["turn_id"]]
    assert shown["missing"] == [{"turn_id": turn["turn_id"], "why": "not_wanted"} for turn in turns[1:]]


async def test_a_turn_that_is_passed_through_is_listed_without_tokens() -> None:
    """The gateway saw only text."""
    async with running_site(token_legs="off") as site:
        await ask(site, HELLO)
        shown = await tree(site)
        assert (shown["turns"], [each["why"] for each in shown["missing"]]) == ([], ["no_token_legs"])


async def test_a_trajectory_declared_without_tokens_keeps_none(site: Site) -> None:
    """Its turns are answered all the same."""
    declared = {"json": {"id": "a", "rollout_id": "r"}, "headers": {"prefer": "tokens=none"}}
    assert (await site.client.post("/v1/trajectories", **declared)).status_code == 201
    await ask(site, HELLO)
    shown = await tree(site)
    assert (shown["turns"], [each["why"] for each in shown["missing"]]) == ([], ["not_wanted"])


async def test_a_gateway_without_keep_tokens_keeps_none() -> None:
    """Its turns are listed as not wanted."""
    async with running_site(token_legs="auto", keep_tokens=False) as site:
        await ask(site, HELLO)
        assert [each["why"] for each in (await tree(site))["missing"]] == ["not_wanted"]


async def test_an_answer_that_ends_at_once_has_an_empty_text(site: Site) -> None:
    """Beside tools too, as the engine's own answers; it was null, which clients take for a call."""
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "max_tokens": 1}
    async with httpx.AsyncClient(base_url=site.engine.url, timeout=30) as straight:
        for seed in range(500):
            body["seed"] = seed
            [choice] = choices_of(await straight.post("/v1/chat/completions", json=body))
            if choice["finish_reason"] == "stop":
                break
    [passed] = choices_of(await site.client.post("/v1/chat/completions", json=body))
    assert [each["finish_reason"] for each in (choice, passed)] == ["stop", "stop"]
    assert [each["message"]["content"] for each in (choice, passed)] == ["", ""]


async def test_a_turn_with_an_image_passes_through_however_large_the_image_is(site: Site) -> None:
    """vLLM's render has an image's tensors, tens of megabytes, unless it is asked for none."""

    async def render(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        features: dict[str, Any] = {"mm_hashes": {"image": ["5f"]}, "kwargs_data": None}
        if asked.json.get("mm_payload", "tensors") == "tensors":
            features["kwargs_data"] = {"image": ["A" * 17 * 2**20]}
        made = {"token_ids": [300, 301], "sampling_params": {"max_tokens": 4}, "features": features}
        await write(orjson.dumps(made))

    site.engine.scripts["/v1/chat/completions/render"] = Script(render)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    await ask(site, [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}])
    assert [asked.path for asked in site.engine.turns] == [CHAT]
    assert "mm_payload" not in site.engine.turns[0].json
