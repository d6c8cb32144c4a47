"""A gateway that is killed under `heddle keep` has nothing generated twice: counted by the engines, to the token."""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.asking import PATHS, Heard, ask
from tests.faults.kept_gateway import KeptGateway, kept_gateway
from tests.faults.token_jobs import PAIRS, differences, engine_of, fleet_of, jobs, told_of
from tests.support.gateway import eventually
from tests.support.rounds import play_rounds

NUM_SEEDS = int(os.environ.get("FAULT_SEEDS", "2"))
NUM_TURNS = 24
NUM_KILLS = 3
MADE = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
Job = tuple[str, dict[str, Any]]

pytestmark = pytest.mark.timeout(300)


async def made_by(client: httpx.AsyncClient, *engines: str) -> float:
    """All tokens that these engines have generated."""
    made = 0.0
    for engine in engines:
        page = (await client.get(engine + "/metrics")).text
        made += sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(MADE))
    return made


async def told_at_last(client: httpx.AsyncClient, gateway: KeptGateway, name: str, job: Job) -> Heard:
    """What a client hears that asks until it has a whole answer, and says so, as SDKs do."""
    api, body = job
    for number in range(10_000):
        headers = {"x-trajectory-id": name} | ({"x-stainless-retry-count": str(number)} if number else {})
        try:
            heard = await ask(client, gateway.url, api, body, headers)
        except httpx.TransportError:
            await asyncio.sleep(0.02)
            continue
        assert heard.is_finished(api), heard.text[-500:]
        return heard
    raise AssertionError("never")


def said(heard: Heard, body: dict[str, Any]) -> Any:
    """All that an answer says; of several choices, which come interleaved, the text of each."""
    texts: dict[int, str] = {}
    for answer in heard.events if body["stream"] else [heard.json]:
        for choice in answer.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or {}
            texts[choice["index"]] = texts.get(choice["index"], "") + (part.get("content") or "")
    return texts if len(texts) > 1 else told_of(heard, body)


async def said_undisturbed(asked: list[Job], fleet: str) -> list[Any]:
    """The same of a quiet engine, of the fleet's kind if all are of one."""
    settings = engine_of("sglang" if fleet == "sglang" else "vllm", speed_up=200)
    async with httpx.AsyncClient(timeout=120) as client, fleet_of(settings) as [engine]:
        answers = [await client.post(engine + PATHS[api], json=body) for api, body in asked]
    heard = [Heard(answer.status_code, answer.headers, answer.text) for answer in answers]
    return [said(one, body) for one, (_, body) in zip(heard, asked, strict=True)]


def tokens_of(heard: Heard, stream: bool) -> int:
    """How many tokens an answer says that it has."""
    for answer in heard.events if stream else [heard.json]:
        usage = (answer.get("response") or answer).get("usage")
        number = usage and (usage.get("completion_tokens") or usage.get("output_tokens"))
        if number:
            made = int(number)
    return made


def long_jobs(seed: int, fleet: str) -> list[Job]:
    """Turns of all kinds, longer than most, some for two choices."""
    dice = random.Random(seed)
    made = jobs(seed, NUM_TURNS, fleet)
    for api, body in made:
        for name in ("max_tokens", "max_output_tokens"):
            if body.get(name) == 80:
                body[name] = 300
        if api == "chat" and "tools" not in body and dice.random() < 0.3:
            body |= {"n": 2, "seed": 7}  # with a seed, each choice has its own, through the gateway too
    return made


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("fleet", PAIRS)
async def test_nothing_is_generated_twice(client: httpx.AsyncClient, tmp_path: Path, fleet: str, seed: int) -> None:
    """SIGKILL at moments that dice choose, serving or not yet: what the engines made is what the answers have."""
    # An engine of SGLang's that says in each event all that it said before takes a megabyte for 100 tokens and rivals.
    environment = {"HEDDLE_SAVE_TOKENS_S": "1000", "HEDDLE_KEPT_LEG_BYTES": str(64 * 2**20)}
    made, in_answers = await played(client, tmp_path, fleet, 40 + seed, environment)
    assert made == in_answers


async def test_what_is_too_long_to_be_kept_goes_on_from_what_was_written_down(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Answers are whole all the same; what was not written down is made again."""
    environment = {"HEDDLE_SAVE_TOKENS_S": "0.01", "HEDDLE_KEPT_LEG_BYTES": str(64 * 2**10)}

    async def play(number: int) -> bool:
        folder = tmp_path / str(number)
        folder.mkdir()
        made, in_answers = await played(client, folder, "sglang", 50 + number, environment)
        assert made >= in_answers
        return made > in_answers

    await play_rounds("a leg was too long to be kept when the gateway was killed", play)


async def played(
    client: httpx.AsyncClient, tmp_path: Path, fleet: str, seed: int, environment: dict[str, str]
) -> tuple[float, int]:
    """Have a gateway killed under many turns, each of which is told what it would have been told; how many tokens the
    engines made, and how many the answers have."""
    dice = random.Random(seed)
    asked = long_jobs(seed, fleet)
    expected = await said_undisturbed(asked, fleet)
    settings = [engine_of(kind, speed_up=2, seed=n) for n, kind in enumerate(PAIRS[fleet])]
    async with fleet_of(*settings) as engines:
        options = [option for engine in engines for option in ("--engine", engine)]
        store = ("--store", f"sqlite:{tmp_path}/h.sqlite3")
        async with kept_gateway(*store, *options, HEDDLE_TOKEN_LEGS="auto", **environment) as gateway:
            telling = asyncio.gather(
                *(told_at_last(client, gateway, f"kept-{number}", job) for number, job in enumerate(asked))
            )
            for _ in range(NUM_KILLS):
                until = await made_by(client, *engines) + dice.randrange(1, 800)

                async def has_come(until: float = until) -> bool:
                    return telling.done() or await made_by(client, *engines) >= until

                await eventually(has_come, 120)
                await gateway.kill()
            heard = await telling
        made = await made_by(client, *engines)
    got = [said(one, body) for one, (_, body) in zip(heard, asked, strict=True)]
    assert not (found := differences(expected, got, asked)), "\n".join(one[:2000] for one in found[:3])
    return made, sum(tokens_of(one, body["stream"]) for one, (_, body) in zip(heard, asked, strict=True))
