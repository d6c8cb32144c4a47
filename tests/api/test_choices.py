"""Several choices of one turn at token level: each is what it would be alone, and continues by itself after a fault."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.api.conftest import HELLO, running_site, toy
from tests.api.differential import assembled, events_of, merged, normalised
from tests.api.test_token_prompts import TOOL, generated, tokens_of
from tests.faults.gateway_process import gateway_process
from tests.faults.token_jobs import ENDURING, SCHEMA, count_of
from tests.support.gateway import running_gateway
from tests.support.rounds import came_about, play_rounds

CHAT = "/v1/chat/completions"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": ["n t", " of the"]},
    "json": {"response_format": SCHEMA},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
}


def body_of(kind: str, stream: bool, **more: Any) -> dict[str, Any]:
    """A chat request with a seed, from which each choice gets its own."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    fields = {"model": "simulated", "messages": HELLO, "seed": 7, "stream": stream, "max_tokens": 40}
    return {**fields, **options, **KINDS[kind], **more}


async def answer_to(client: httpx.AsyncClient, url: str, body: dict[str, Any], headers: Any = None) -> dict[str, Any]:
    """The whole answer; a stream is assembled from its events."""
    answer = await client.post(url + CHAT, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return _comparable(normalised(answer.json()))
    assert answer.text.endswith("data: [DONE]\n\n")
    whole: dict[str, Any] = normalised(assembled(events_of(answer.text)))
    for choice in whole["choices"]:
        choice["message"] = merged({}, choice.pop("delta"))
        for call in choice["message"].get("tool_calls") or ():
            del call["index"]
    return _comparable(whole | {"object": "chat.completion"})


def _comparable(whole: dict[str, Any]) -> dict[str, Any]:
    """The answer without what token routes do not report, and without cached tokens: earlier requests decide these."""
    whole.pop("system_fingerprint", None)
    whole["usage"].pop("prompt_tokens_details", None)
    return whole


@asynccontextmanager
async def fleet(num: int, *faults: Fault, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, list[str]]]:
    """Engines with these faults, then one without faults, and a client."""
    chosen = [SimulatedEngineSettings(**{"speed_up": 100, "faults": faults} | settings, seed=n) for n in range(num)]
    async with httpx.AsyncClient(timeout=120) as client, serve_engine(SimulatedEngineSettings(speed_up=100)) as quiet:
        if num == 1:
            async with serve_engine(chosen[0]) as first:
                yield client, [first, quiet]
        else:
            async with serve_engine(chosen[0]) as first, serve_engine(chosen[1]) as second:
                yield client, [first, second, quiet]


async def differences(
    client: httpx.AsyncClient, engine: str, gateway: str, bodies: list[dict[str, Any]]
) -> list[tuple[Any, Any]]:
    """The answers of the engine that differ from those through the gateway, in pairs."""
    expected = [await answer_to(client, engine, body) for body in bodies]
    got = await asyncio.gather(*(answer_to(client, gateway, body) for body in bodies))
    return [(want, have) for want, have in zip(expected, got, strict=True) if want != have]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_choices_equal_those_of_the_engine(kind: str, stream: bool) -> None:
    """Whole answer or stream: indices, texts, calls, log-probabilities, reasons, and the usage of all choices."""
    async with fleet(1) as (client, [_, engine]), running_gateway(engine, token_legs="auto") as gateway:
        found = await differences(client, engine, gateway.url, [body_of(kind, stream, n=5)])
        served = (await client.get(gateway.url + "/v1/trajectories")).json()["data"]
        [turn] = (await client.get(f"{gateway.url}/v1/trajectories/{served[0]['id']}")).json()["turns"]
    assert not found, found[0]
    assert turn["tokens"] == "kept", "not passed through"


async def test_each_choice_has_its_own_seed() -> None:
    """Derived from the request's seed; without a seed, this engine's choices are all equal."""
    async with running_site(token_legs="auto") as site:
        for seed, num in ((3, 4), (None, 1)):
            answer = (await site.chat(n=4, max_tokens=12, seed=seed)).json()
            assert len({choice["message"]["content"] for choice in answer["choices"]}) == num
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        requests = generated(site)
        assert [one["sampling_params"]["seed"] for one in requests] == [3, 4, 5, 6, None, None, None, None]
        assert {one["sampling_params"]["n"] for one in requests} == {1}
        assert len({one["request_id"] for one in requests}) == 8


async def test_a_stream_sends_the_events_of_choices_as_they_come() -> None:
    """Events of all choices are mixed; each choice has one role and one end."""
    async with running_site(token_legs="auto") as site:
        answer = await site.chat(n=3, max_tokens=30, seed=1, stream=True, ignore_eos=True)
    choices = [data["choices"][0] for _, data in events_of(answer.text) if isinstance(data, dict)]
    order = [choice["index"] for choice in choices]
    assert order != sorted(order)
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


async def test_the_next_turn_continues_the_choice_that_its_client_took() -> None:
    """All choices are kept, and each is a branch; the next prompt begins with the very tokens of one of them."""
    headers = {"x-trajectory-id": "chosen"}
    async with running_site(toy(), token_legs="auto") as site:
        answer = (await site.chat(n=3, seed=5, max_tokens=9, ignore_eos=True, headers=headers)).json()
        taken = answer["choices"][2]["message"]
        messages = [*HELLO, {"role": "assistant", "content": taken["content"]}, {"role": "user", "content": "More?"}]
        assert (await site.chat(messages=messages, headers=headers)).status_code == 200
        *choices, later = await tokens_of(site, "chosen")
        turn_id = choices[0]["turn_id"]
        assert [one["turn_id"] for one in choices] == [turn_id, f"{turn_id}/1", f"{turn_id}/2"]
        assert later["parent"] == f"{turn_id}/2"
        whole = choices[2]["prompt_ids"] + choices[2]["output_ids"] + later["prompt_ids"]
        assert generated(site)[-1]["token_ids"] == whole
        assert all(len(one["logprobs"]) == len(one["output_ids"]) for one in choices)
        turn = (await site.trajectory("chosen"))["turns"][0]
        assert turn["output_tokens"] == sum(len(one["output_ids"]) for one in choices) == 27


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_survive_engines_that_die(stream: bool) -> None:
    """Each continues from its own last token. They are greedy, so each equals what an undisturbed engine answers."""
    faults = [Fault("die", after_chunks=n, probability=0.2, path="/inference") for n in (1, 3, 9, 20)]
    bodies = [
        body_of(kind, stream, n=3, seed=None, temperature=0, messages=[{"role": "user", "content": f"{kind} {number}"}])
        for number in range(6)
        for kind in KINDS
    ]
    async with (
        fleet(2, *faults) as (client, [first, second, quiet]),
        running_gateway(first, second, **ENDURING) as gateway,
    ):
        expected = [await answer_to(client, quiet, body | {"n": 1}) for body in bodies]
        got = await asyncio.gather(*(answer_to(client, gateway.url, body) for body in bodies))
        metrics = (await client.get(gateway.url + "/metrics")).text
    for body, want, have in zip(bodies, expected, got, strict=True):
        [one] = want["choices"]
        if one["finish_reason"] == "stop" and one.get("stop_reason"):  # found late at a seam: gateway/turns/chain.py
            assert {choice["message"]["content"] for choice in have["choices"]} == {one["message"]["content"]}
            continue
        assert have["choices"] == [one | {"index": index} for index in range(3)], body
        assert have["usage"]["completion_tokens"] == 3 * want["usage"]["completion_tokens"]
        assert have["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    assert count_of(metrics, 'heddle_retried_legs_total{fault="engine"}') > 15


async def test_a_killed_gateway_continues_every_choice(tmp_path: Path) -> None:
    """What was saved of each choice is not made again."""
    body = body_of("plain", False, n=3, seed=None, temperature=0, max_tokens=400, ignore_eos=True)
    async with fleet(1, speed_up=2) as (client, [engine, quiet]):
        [want] = (await answer_to(client, quiet, body | {"n": 1}))["choices"]

        async def play(number: int) -> bool:
            options = ("--engine", engine, "--store", f"sqlite:{tmp_path / f'{number}.sqlite3'}")
            environment = {"HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_SAVE_TOKENS_S": "0.02"}
            headers = {"x-trajectory-id": "killed"}
            made_earlier = await made_by(client, engine)

            async def half_made() -> bool:
                return await made_by(client, engine) > made_earlier + 600

            async with gateway_process(*options, **environment) as gateway:
                request = asyncio.create_task(client.post(gateway.url + CHAT, json=body, headers=headers))
                if not await came_about(half_made, request.done):
                    return False
                await gateway.kill()
                with pytest.raises(httpx.TransportError):
                    await request
                before = await made_by(client, engine)
                await gateway.start()
                got = await answer_to(client, gateway.url, body, headers)
                made = await made_by(client, engine) - before
            assert [choice["message"] for choice in got["choices"]] == [want["message"]] * 3
            assert got["usage"]["completion_tokens"] == 1200
            assert made < 1000, "half was made before the kill"
            return True

        await play_rounds("the gateway was killed in the middle of the turn", play)


async def made_by(client: httpx.AsyncClient, engine: str) -> float:
    return count_of((await client.get(engine + "/metrics")).text, "vllm:generation_tokens_total")
