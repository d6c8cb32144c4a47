"""Turns at token level on real vLLM: they survive engines and gateways, and the answers equal the engine's own.

The model's greedy choices are far from ties, so every engine and every chain of legs must answer a prompt like an
undisturbed engine, token by token.
"""

import asyncio
import contextlib
import random
import signal
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from engines.local_vllm import LocalEngine
from tests.faults.asking import ask
from tests.faults.gateway_process import gateway_process, tokens_written
from tests.faults.kept_gateway import kept_gateway
from tests.faults.token_jobs import ENDURING, URGENT, content_of
from tests.support.gateway import ADMIN, PATIENT, running_gateway
from tests.support.rounds import LOOK_TIMEOUT_S, came_about, num_ended, play_rounds

IDLE_CHECK_S = 3.0  # longer than one of an engine's processes stalls beside the other on a busy machine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

TOKENS_BETWEEN_DRAINS = 20


def chat(number: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy chat request for this many tokens, unless it ends by itself."""
    messages = [{"role": "user", "content": f"Tell me of number {number}, and take your time."}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": max_tokens, **more}


def long_chats(seed: int, num: int, max_tokens: int) -> list[dict[str, Any]]:
    """Chat requests that do not end early; every other one is streamed, and some have log-probabilities."""
    dice = random.Random(seed)
    made = []
    for number in range(num):
        more: dict[str, Any] = {"ignore_eos": True, "stream": number % 2 == 0}
        if more["stream"]:
            more["stream_options"] = {"include_usage": True}
        if dice.random() < 0.2:
            more["logprobs"] = True
        made.append(chat(seed * 1_000 + number, max_tokens, **more))
    return made


async def contents_of_replies(
    client: httpx.AsyncClient, url: str, bodies: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The content of the reply to each of these requests, all sent at once."""
    received = await asyncio.gather(*(ask(client, url, "chat", body) for body in bodies))
    assert all(one.is_finished("chat") for one in received), [one.text[-300:] for one in received]
    return [_rounded(content_of(one, body["stream"])) for one, body in zip(received, bodies, strict=True)]


async def undisturbed_contents(
    client: httpx.AsyncClient, engines: list[LocalEngine], bodies: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The content of the answers of otherwise idle engines, without a gateway."""
    turn_of = cycle(engines)

    async def one(body: dict[str, Any]) -> dict[str, Any]:
        engine = next(turn_of)
        whole = body | {"stream": False, "stream_options": None}
        answer = await client.post(engine.url + "/v1/chat/completions", json=whole)
        assert answer.status_code == 200, answer.text
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        return _rounded(
            {
                "text": choice["message"]["content"],
                "calls": [],
                "logprobs": (choice["logprobs"] or {}).get("content") or [],
                "reason": choice["finish_reason"],
                "stop": choice["stop_reason"],
                "tokens": (usage["prompt_tokens"], usage["completion_tokens"]),
            }
        )

    return list(await asyncio.gather(*map(one, bodies)))


def _rounded(content: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities change in their last bits with the batch, so their tokens and two decimals are compared."""
    return content | {"logprobs": [(entry["token"], round(entry["logprob"], 2)) for entry in content["logprobs"]]}


async def has_progressed(client: httpx.AsyncClient, url: str, servers: list[LocalEngine], tokens: float) -> bool:
    """Whether this many tokens are generated in all, and turns run on both engines or hardly any turns are left."""
    engines = (await client.get(url + "/v1/engines")).json()["data"]
    run_on_both = all(engine["num_legs"] for engine in engines) or sum(engine["num_legs"] for engine in engines) < 3
    return run_on_both and await generated_by(client, *servers) >= tokens


async def generated_by(client: httpx.AsyncClient, *engines: LocalEngine) -> float:
    """All tokens that these engines have generated."""
    return sum([await metric(client, engine, "generation_tokens_total") for engine in engines])


async def generated_when_idle(client: httpx.AsyncClient, engines: list[LocalEngine]) -> float:
    """All tokens that these engines have generated, once nothing runs on them and the counters stand still.

    An engine's processes lag behind each other: on a machine that had stalled, an engine that reported no running
    request counted hundreds of tokens later.
    """
    made, is_idle = -1.0, False
    async with asyncio.timeout(LOOK_TIMEOUT_S):
        while True:
            before, made = made, await generated_by(client, *engines)
            if is_idle and made == before:
                return made
            is_idle = not any([await metric(client, engine, "num_requests_running") for engine in engines])
            await asyncio.sleep(IDLE_CHECK_S)


async def metric(client: httpx.AsyncClient, engine: LocalEngine, name: str) -> float:
    page = (await client.get(engine.url + "/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))


async def test_a_killed_engine_loses_no_turn(
    real_engines: list[LocalEngine], doomed_engine: LocalEngine, tmp_path: Path
) -> None:
    """SIGKILL while most of 16 turns run on it, streamed and not. Each continues elsewhere with the tokens it would
    have had, and tokens that the gateway had received are not generated again."""
    quiet, event_log = real_engines[0], tmp_path / "events.jsonl"

    async def play(round_number: int) -> bool:
        bodies = long_chats(1 + 100 * round_number, 16, 600)
        expected = await undisturbed_contents(client, real_engines, bodies)
        generated_before = await generated_by(client, quiet)
        received_before = sum(tokens_received(event_log).values())
        asked = [asyncio.create_task(contents_of_replies(client, gateway.url, [body])) for body in bodies]

        async def most_have_tokens() -> bool:
            return sum(tokens_received(event_log).values()) >= received_before + 16 * 50

        async def check() -> None:
            assert [one for contents in await asyncio.gather(*asked) for one in contents] == expected

        if not await came_about(most_have_tokens, lambda: num_ended(asked) > 8):
            await check()
            return False
        doomed_engine.server.send_signal(signal.SIGKILL)
        received = sum(tokens_received(event_log).values()) - received_before
        added = await client.post(gateway.url + "/v1/engines", json={"url": quiet.url}, headers=ADMIN)
        assert added.status_code == 201, added.text
        await check()
        made = await generated_by(client, quiet) - generated_before
        print(f"{received} tokens were received from the killed engine, and the other generated {made:.0f} of 9600")
        assert made <= 16 * 600 - received, "tokens received before are not generated again"
        return True

    enduring = ENDURING | PATIENT | {"event_log": str(event_log)}
    async with httpx.AsyncClient(timeout=600) as client, running_gateway(doomed_engine.url, **enduring) as gateway:
        await play_rounds("turns were in flight when the engine was killed", play)


async def test_preempted_turns_give_their_undisturbed_answers(real_engines: list[LocalEngine], tmp_path: Path) -> None:
    """More than fifty turns are paused, by the scheduler for more urgent ones and by drains, and continue on the same
    or the other engine. How many are paused in a round depends on the machine, so rounds are played until there were
    enough."""
    event_log = tmp_path / "events.jsonl"
    preempting: dict[str, Any] = {"policy": "remaining-first", "preempt_after_s": 0.0, "event_log": str(event_log)}

    async def play(round_number: int) -> bool:
        bodies = long_chats(2 + round_number, 60, 200)
        expected = await undisturbed_contents(client, real_engines, bodies)
        asked = asyncio.create_task(contents_of_replies(client, gateway.url, bodies))
        await disturb(client, gateway.url, real_engines, asked)
        assert await asked == expected
        paused, preempted = pauses_in(event_log)
        num_moved = sum(len(engines) > 1 for engines in paused.values())
        print(f"{len(paused)} turns paused, {len(preempted)} of them by the scheduler; {num_moved} moved")
        return bool(len(paused) >= 50 and preempted and num_moved)

    preempting_gateway = running_gateway(*(engine.url for engine in real_engines), **ENDURING | PATIENT | preempting)
    async with httpx.AsyncClient(timeout=600) as client, preempting_gateway as gateway:
        await play_rounds("fifty turns were paused in all, some by the scheduler, and some moved", play)


async def disturb(client: httpx.AsyncClient, url: str, servers: list[LocalEngine], asked: asyncio.Task[Any]) -> None:
    """Drain the engines alternately, and send urgent turns, until everything is answered.

    Between two drains the engines generate some tokens: a turn that was alone among drains was once stopped 213 times
    in 36 s.
    """
    engines = [engine["id"] for engine in (await client.get(url + "/v1/engines")).json()["data"]]
    num = 0
    while not asked.done():
        num += 1
        if num % 2 == 0:
            urgent = chat(5_000 + num, 2, nvext=URGENT)
            assert (await ask(client, url, "chat", urgent)).is_finished("chat")
        engine = f"{url}/v1/engines/{engines[num % 2]}"
        await client.post(f"{engine}/drain?timeout_s=60", headers=ADMIN)
        await client.post(f"{engine}/uncordon", headers=ADMIN)
        made = await generated_by(client, *servers)
        await came_about(partial(has_progressed, client, url, servers, made + TOKENS_BETWEEN_DRAINS), asked.done)


def pauses_in(event_log: Path) -> tuple[dict[str, set[str]], set[str]]:
    """The engines of each turn that was paused, and the turns that the scheduler preempted."""
    entries = [orjson.loads(line) for line in event_log.read_text().splitlines()]
    engines_of: dict[str, set[str]] = {}
    for line in entries:
        if line.get("type") == "Dispatch":
            engines_of.setdefault(line["turn_id"], set()).add(line["engine_id"])
    paused = {line["turn_id"]: engines_of[line["turn_id"]] for line in entries if line.get("type") == "TurnPaused"}
    return paused, {line["turn_id"] for line in entries if line.get("type") == "Preempt"}


async def test_a_killed_gateway_regenerates_no_stored_token(real_engines: list[LocalEngine], tmp_path: Path) -> None:
    """SIGKILL the gateway in the middle of eight turns: the SDK retries, and each turn continues from its stored
    tokens."""
    num, length = 8, 800

    async def play(round_number: int) -> bool:
        store, event_log = f"sqlite:{tmp_path / str(round_number)}.sqlite3", tmp_path / f"{round_number}.jsonl"
        options = [option for engine in real_engines for option in ("--engine", engine.url)]
        settings = PATIENT | {"token_legs": "auto", "save_tokens_s": 0.01, "event_log": str(event_log)}
        bodies = [chat(7_000 + 100 * round_number + n, length, ignore_eos=True) for n in range(num)]
        expected = [content["text"] for content in await undisturbed_contents(client, real_engines, bodies)]
        generated_before = await generated_by(client, *real_engines)
        environment = {f"HEDDLE_{name.upper()}": str(value) for name, value in settings.items()}
        async with (
            gateway_process("--store", store, *options, **environment) as gateway,
            sdk_of(gateway.url) as sdk,
        ):
            asked = [asyncio.create_task(sdk_answer(sdk, n, body)) for n, body in enumerate(bodies)]

            async def is_half_received() -> bool:
                return sum(tokens_received(event_log).values()) > num * length / 2

            is_in_the_middle = await came_about(is_half_received, lambda: num_ended(asked) > num / 2)
            await gateway.kill()
            received = sum(tokens_received(event_log).values())
            # Engines stop when they notice that their client is gone. Tokens until then count as generated before.
            at_kill = await generated_when_idle(client, real_engines) - generated_before
            stored = await tokens_written(store)
            await gateway.start()
            got = await asyncio.gather(*asked)
            again = await generated_by(client, *real_engines) - generated_before - num * length
        assert got == expected
        print(
            f"{again:.0f} of {num * length} again; at the kill {at_kill:.0f} made, {received} received, {stored} stored"
        )
        # One step of each turn may be counted late, or run for a request that is being aborted.
        assert again <= at_kill - stored + num, "tokens that the gateway had stored are not generated again"
        return is_in_the_middle and stored > num * length / 8

    async with httpx.AsyncClient(timeout=600) as client:
        await play_rounds("the gateway was killed in the middle of turns", play)


async def test_a_gateway_killed_under_its_keeper_regenerates_no_token(
    real_engines: list[LocalEngine], tmp_path: Path
) -> None:
    """SIGKILL it three times in the middle of eight turns, half of them streamed. The SDK retries, output of the
    engines in between is read later, and they have generated exactly the tokens of the answers."""
    num, length = 8, 800

    async def play(round_number: int) -> bool:
        store = f"sqlite:{tmp_path / str(round_number)}.sqlite3"
        options = [option for engine in real_engines for option in ("--engine", engine.url)]
        settings = PATIENT | {"token_legs": "auto", "save_tokens_s": 1000}
        environment = {f"HEDDLE_{name.upper()}": str(value) for name, value in settings.items()}
        bodies = [chat(9_000 + 100 * round_number + n, length, ignore_eos=True) for n in range(num)]
        expected = [content["text"] for content in await undisturbed_contents(client, real_engines, bodies)]
        generated_before = await generated_when_idle(client, real_engines)
        num_in_the_middle = 0
        async with (
            kept_gateway("--store", store, *options, **environment) as gateway,
            sdk_of(gateway.url) as sdk,
        ):
            asked = [asyncio.create_task(sdk_answer(sdk, n, body, n % 2 == 0)) for n, body in enumerate(bodies)]
            for part in (1, 2, 3):

                async def have_progressed(part: int = part) -> bool:
                    return await generated_by(client, *real_engines) - generated_before > part * num * length / 5

                num_in_the_middle += await came_about(have_progressed, lambda: num_ended(asked) > num / 2)
                await gateway.kill()
            got = await asyncio.gather(*asked)
            made = await generated_when_idle(client, real_engines) - generated_before
        assert got == expected
        print(f"{made:.0f} generated, {num * length} in the answers; killed {num_in_the_middle} times in the middle")
        assert made == num * length
        return num_in_the_middle == 3

    async with httpx.AsyncClient(timeout=600) as client:
        await play_rounds("the gateway was killed three times in the middle of turns", play)


def tokens_received(event_log: Path) -> dict[str, int]:
    """For each turn, how many tokens the gateway has reported to its scheduler; it stores them at the same time."""
    received: dict[str, int] = {}
    for line in event_log.read_bytes().splitlines() if event_log.exists() else ():
        if b'"TurnProgressed"' in line and line.endswith(b"}"):
            entry = orjson.loads(line)
            received[entry["turn_id"]] = entry["output_tokens"]
    return received


def sdk_of(url: str) -> Any:
    """An SDK that retries until the next gateway serves. It must be closed: see docs/frameworks.md."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=20, timeout=600)


async def sdk_answer(sdk: Any, number: int, body: dict[str, Any], stream: bool = False) -> str:
    """The text that an SDK gets for this request of a trajectory of its own. After a stream that broke, an agent
    retries, as the SDK does for a request without an answer."""
    import openai

    asked = partial(
        sdk.chat.completions.create,
        model=body["model"],
        messages=body["messages"],
        max_tokens=body["max_tokens"],
        temperature=0,
        extra_body={"ignore_eos": body["ignore_eos"]},
        extra_headers={"x-trajectory-id": f"killed-{number}"},
    )
    while stream:
        with contextlib.suppress(httpx.TransportError, openai.APIConnectionError):
            chunks = [chunk async for chunk in await asked(stream=True)]
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    answer = await asked()
    return str(answer.choices[0].message.content)
