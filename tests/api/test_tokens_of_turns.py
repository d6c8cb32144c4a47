"""Turns served at token level, from the client's request to the trainer's record, on a simulated engine."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from tests.api.conftest import HELLO, MODEL, Site, running_site, toy

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
    """Of a whole answer, or of all events of a stream."""
    if "event-stream" not in answer.headers["content-type"]:
        return list(answer.json()["choices"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in orjson.loads(event)["choices"]]


async def text_of(site: Site, ids: list[int]) -> str:
    """What tokens say, by the engine's own word."""
    asked = {"model": MODEL, "tokens": ids}
    return str((await site.client.post("/detokenize", json=asked)).json()["prompt"])


async def tree(site: Site) -> dict[str, Any]:
    answer = await site.client.get("/v1/trajectories/a/tokens")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_later_turn_continues_the_tokens_of_the_earlier(site: Site) -> None:
    """Its prompt begins with them; the mask marks what the answers say, and nothing else; versions are told."""
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
@pytest.mark.parametrize("asks", [False, True])
async def test_log_probabilities_are_for_the_record_and_told_to_who_asks(site: Site, stream: bool, asks: bool) -> None:
    """One of each token, with and without tools, whose answers are derendered; those that are told are the same."""
    fields: dict[str, Any] = {"logprobs": True} if asks else {}
    for tools in ({}, {} if stream else {"tools": [TOOL]}):
        answer = await site.chat(messages=HELLO, headers={"x-trajectory-id": "a"}, stream=stream, **fields, **tools)
        turn = (await tree(site))["turns"][-1]
        assert len(turn["logprobs"]) == len(turn["output_ids"]) and max(turn["logprobs"]) < 0
        told = [
            entry["logprob"]
            for choice in choices_of(answer)
            for entry in (choice.get("logprobs") or {}).get("content", ())
        ]
        assert told == (pytest.approx(turn["logprobs"], abs=1e-6) if asks else [])


async def test_a_changed_history_begins_a_branch(site: Site) -> None:
    """What the client rewrote is a prompt that nothing was sampled of; two answers to one question share its turn."""
    first = await ask(site, HELLO)
    await ask(site, [*HELLO, first, MORE])
    await ask(site, [*HELLO, first, {"role": "user", "content": "Or else?"}])
    await ask(site, [*HELLO, {"role": "assistant", "content": "I never said that."}, MORE])
    told = await tree(site)
    one, two, three, four = (turn["turn_id"] for turn in told["turns"])
    assert told["branches"] == [[one, two], [one, three], [four]]
    assert told["turns"][3]["num_before"] == 0


async def test_a_turn_that_its_client_wants_forgotten_says_so(site: Site) -> None:
    """Streamed or not; the others of its trajectory are kept."""
    first = await ask(site, HELLO)
    for stream in (False, True):
        await ask(site, [*HELLO, first, MORE], headers={"prefer": "tokens=none"}, stream=stream)
    told, turns = await tree(site), (await site.trajectory("a"))["turns"]
    assert [turn["turn_id"] for turn in told["turns"]] == [turns[0]["turn_id"]]
    assert told["missing"] == [{"turn_id": turn["turn_id"], "why": "not_wanted"} for turn in turns[1:]]


async def test_a_turn_that_is_passed_through_has_no_tokens_and_says_so() -> None:
    """The gateway saw only text, whatever the engine could."""
    async with running_site(token_legs="off") as site:
        await ask(site, HELLO)
        told = await tree(site)
        assert (told["turns"], [each["why"] for each in told["missing"]]) == ([], ["no_token_legs"])


async def test_nothing_is_kept_of_a_trajectory_that_was_declared_so(site: Site) -> None:
    """Nor where the setting says so; turns are answered all the same."""
    declared = {"json": {"id": "a", "rollout_id": "r"}, "headers": {"prefer": "tokens=none"}}
    assert (await site.client.post("/v1/trajectories", **declared)).status_code == 201
    await ask(site, HELLO)
    told = await tree(site)
    assert (told["turns"], [each["why"] for each in told["missing"]]) == ([], ["not_wanted"])


async def test_a_gateway_can_keep_nothing() -> None:
    """`keep_tokens` off."""
    async with running_site(token_legs="auto", keep_tokens=False) as site:
        await ask(site, HELLO)
        assert [each["why"] for each in (await tree(site))["missing"]] == ["not_wanted"]
