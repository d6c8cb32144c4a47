"""Turns at token level on real vLLM: they outlive engines and gateways, and say what the engine itself would say.

The model's greedy choices are far from ties, so what an undisturbed engine says of a prompt is what every engine and
every chain of legs must say of it, token by token.
"""

import asyncio
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from engines.local_vllm import LocalEngine, LocalVllm, launch
from tests.api.differential import compare
from tests.api.requests_table import make_cases
from tests.faults.asking import ask
from tests.faults.gateway_process import gateway_process
from tests.faults.test_token_legs import ENDURING, URGENT, told
from tests.support.gateway import ADMIN, eventually, running_gateway

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]


def chat(number: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy chat request of so many tokens, if it does not end by itself."""
    messages = [{"role": "user", "content": f"Tell me of number {number}, and take your time."}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": max_tokens, **more}


def long_chats(seed: int, num: int, max_tokens: int) -> list[dict[str, Any]]:
    """Such requests that do not end early, every other one streamed, some with log-probabilities."""
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


async def all_told(client: httpx.AsyncClient, url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each of these requests is told, all of them sent at once."""
    heard = await asyncio.gather(*(ask(client, url, "chat", body) for body in bodies))
    assert all(one.is_finished("chat") for one in heard), [one.text[-300:] for one in heard]
    return [_near(told(one, body["stream"])) for one, body in zip(heard, bodies, strict=True)]


async def undisturbed(client: httpx.AsyncClient, engine: LocalEngine, bodies: list[dict[str, Any]]) -> list[Any]:
    """What a quiet engine says, asked without a gateway."""

    async def one(body: dict[str, Any]) -> dict[str, Any]:
        whole = body | {"stream": False, "stream_options": None}
        answer = await client.post(engine.url + "/v1/chat/completions", json=whole)
        assert answer.status_code == 200, answer.text
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        return _near(
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


def _near(said: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities change in their last bits with the batch: the tokens are compared, and three decimals."""
    return said | {"logprobs": [(entry["token"], round(entry["logprob"], 2)) for entry in said["logprobs"]]}


async def has_come_on(client: httpx.AsyncClient, url: str) -> bool:
    """Whether turns run on both engines, or hardly any are left."""
    engines = (await client.get(url + "/v1/engines")).json()["data"]
    return all(engine["num_legs"] for engine in engines) or sum(engine["num_legs"] for engine in engines) < 3


async def made_by(client: httpx.AsyncClient, engine: LocalEngine) -> float:
    """All tokens that an engine has generated."""
    page = (await client.get(engine.url + "/metrics")).text
    return sum(
        float(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:generation_tokens_total{")
    )


async def test_answers_of_token_legs_are_the_engines_own(real_engines: list[LocalEngine]) -> None:
    """Two hundred requests with tools, schemas, log-probabilities, stop strings, streamed and not."""
    engine = real_engines[0].url
    async with (
        running_gateway(engine, token_legs="auto") as gateway,
        httpx.AsyncClient(base_url=engine, timeout=120) as straight,
        httpx.AsyncClient(base_url=gateway.url, timeout=120) as through,
    ):
        untold = frozenset({"system_fingerprint", "created_cache_tokens"})  # token routes do not tell them
        found = [one for case in make_cases("tiny") for one in await compare(straight, through, case, untold)]
    assert not found, "\n\n".join(found)


async def test_a_killed_engine_loses_no_turn(
    real_engines: list[LocalEngine], tiny_model: Path, vllm_venv: Path, tmp_path: Path
) -> None:
    """SIGKILL while 16 turns run on it, streamed and not: each goes on elsewhere, with the tokens it would have had."""
    quiet = real_engines[0]
    bodies = long_chats(1, 16, 600)
    spec = LocalVllm(tiny_model, max_num_seqs=16, venv=vllm_venv)
    async with httpx.AsyncClient(timeout=300) as client:
        wanted = await undisturbed(client, quiet, bodies)
        async with (
            launch(spec, tmp_path / "vllm.log") as doomed,
            running_gateway(doomed.url, **ENDURING | {"start_timeout_s": 60}) as gateway,
        ):
            url = gateway.url
            asked = asyncio.create_task(all_told(client, url, bodies))

            async def all_run() -> bool:
                engine = (await client.get(url + "/v1/engines")).json()["data"][0]
                return bool(engine["num_legs"] == 16) and await made_by(client, doomed) > before + 16 * 50

            before = await made_by(client, doomed)
            await eventually(all_run, 120)
            assert not asked.done()
            made = await made_by(client, doomed)
            doomed.send_signal(signal.SIGKILL)
            added = await client.post(url + "/v1/engines", json={"url": quiet.url}, headers=ADMIN)
            assert added.status_code == 201, added.text
            made_before = await made_by(client, quiet)
            got = await asked
            made_after = await made_by(client, quiet) - made_before
    assert got == wanted
    print(f"{made:.0f} tokens made by the engine that was killed, {made_after:.0f} of 9600 by the other")
    assert made_after < 16 * 600 - 16 * 40, "what was made before is not made again"


async def test_turns_that_are_preempted_at_any_token_say_what_they_would_have_said(
    real_engines: list[LocalEngine], tmp_path: Path
) -> None:
    """More than fifty turns are paused, by the scheduler for more urgent ones and by drains of their engine, and go on
    here or on the other engine. How often that comes to pass is the machine's affair, so they play until it did."""
    event_log = tmp_path / "events.jsonl"
    preempting: dict[str, Any] = {"policy": "remaining-first", "preempt_after_s": 0.0, "event_log": str(event_log)}
    paused: dict[str, set[str]] = {}
    preempted: set[str] = set()
    async with (
        httpx.AsyncClient(timeout=300) as client,
        running_gateway(*(engine.url for engine in real_engines), **ENDURING | preempting) as gateway,
    ):
        for seed in range(2, 10):
            bodies = long_chats(seed, 60, 200)
            wanted = await undisturbed(client, real_engines[0], bodies)
            asked = asyncio.create_task(all_told(client, gateway.url, bodies))
            await disturb(client, gateway.url, asked)
            assert await asked == wanted
            paused, preempted = pauses_in(event_log)
            if len(paused) >= 50 and preempted:
                break
    num_moved = sum(len(engines) > 1 for engines in paused.values())
    print(f"{len(paused)} turns paused, {len(preempted)} of them by the scheduler; {num_moved} moved")
    assert len(paused) >= 50 and preempted and num_moved


async def disturb(client: httpx.AsyncClient, url: str, asked: asyncio.Task[Any]) -> None:
    """Drain one engine and then the other, and send urgent turns, until all is answered."""
    engines = [engine["id"] for engine in (await client.get(url + "/v1/engines")).json()["data"]]
    num = 0
    while not asked.done():
        num += 1
        if num % 4 == 0:
            urgent = chat(5_000 + num, 2, nvext=URGENT)
            assert (await ask(client, url, "chat", urgent)).is_finished("chat")
        engine = f"{url}/v1/engines/{engines[num % 2]}"
        await client.post(f"{engine}/drain?timeout_s=60", headers=ADMIN)
        await client.post(f"{engine}/uncordon", headers=ADMIN)
        await eventually(partial(has_come_on, client, url), 60)


def pauses_in(event_log: Path) -> tuple[dict[str, set[str]], set[str]]:
    """The engines of each turn that was paused, and the turns that the scheduler preempted."""
    said = [orjson.loads(line) for line in event_log.read_text().splitlines()]
    engines_of: dict[str, set[str]] = {}
    for line in said:
        if line.get("type") == "Dispatch":
            engines_of.setdefault(line["turn_id"], set()).add(line["engine_id"])
    paused = {line["turn_id"]: engines_of[line["turn_id"]] for line in said if line.get("type") == "TurnPaused"}
    return paused, {line["turn_id"] for line in said if line.get("type") == "Preempt"}


async def test_a_killed_gateway_has_nothing_generated_twice(real_engines: list[LocalEngine], tmp_path: Path) -> None:
    """SIGKILL the gateway in the middle of eight turns: the SDK asks again, and each goes on from its tokens."""
    num, length, save_s = 8, 800, 0.01
    options = ["--store", f"sqlite:{tmp_path / 'heddle.sqlite3'}"]
    for engine in real_engines:
        options += ["--engine", engine.url]
    event_log = tmp_path / "events.jsonl"
    environment = {
        "HEDDLE_TOKEN_LEGS": "auto",
        "HEDDLE_SAVE_TOKENS_S": str(save_s),
        "HEDDLE_EVENT_LOG": str(event_log),
    }
    async with httpx.AsyncClient(timeout=300) as client:
        bodies = [chat(7_000 + n, length, ignore_eos=True) for n in range(num)]
        wanted = [said["text"] for said in await undisturbed(client, real_engines[0], bodies)]
        before = sum([await made_by(client, engine) for engine in real_engines])
        async with gateway_process(*options, **environment) as gateway:
            sdk = openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=10, timeout=300)
            asked = asyncio.create_task(asyncio.wait_for(all_of(sdk, bodies), 300))

            async def half_heard() -> bool:
                return sum(heard_of(event_log).values()) > num * length / 2

            await eventually(half_heard, 120)
            await gateway.kill()
            heard = sum(heard_of(event_log).values())
            at_kill = sum([await made_by(client, engine) for engine in real_engines]) - before
            await gateway.start()
            got = await asked
            made = sum([await made_by(client, engine) for engine in real_engines]) - before
    assert got == wanted
    again = made - num * length
    print(f"{again:.0f} of {num * length} tokens made again; at the kill {at_kill:.0f} were made, {heard} heard of")
    # In flight: what engines made and the gateway had not heard of, and what came since it last wrote.
    assert again < at_kill - heard + num * 200, "what the gateway had written down is not made again"


def heard_of(event_log: Path) -> dict[str, int]:
    """How many tokens of each turn the gateway told its scheduler of; it writes them down with the same word."""
    heard: dict[str, int] = {}
    for line in event_log.read_bytes().splitlines() if event_log.exists() else ():
        if b'"TurnProgressed"' in line and line.endswith(b"}"):
            said = orjson.loads(line)
            heard[said["turn_id"]] = said["output_tokens"]
    return heard


async def all_of(sdk: openai.AsyncOpenAI, bodies: list[dict[str, Any]]) -> list[str]:
    """The texts that an SDK gets for these requests, each of its own trajectory."""

    async def one(number: int, body: dict[str, Any]) -> str:
        extra = {"ignore_eos": body["ignore_eos"]}
        answer = await sdk.chat.completions.create(
            model=body["model"],
            messages=body["messages"],
            max_tokens=body["max_tokens"],
            temperature=0,
            extra_body=extra,
            extra_headers={"x-trajectory-id": f"killed-{number}"},
        )
        return str(answer.choices[0].message.content)

    return list(await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies))))
