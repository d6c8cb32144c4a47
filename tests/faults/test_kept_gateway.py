"""A gateway that is killed under `heddle keep` has nothing generated twice: counted by the engines, to the token."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault
from tests.faults.asking import PATHS, Heard, ask
from tests.faults.kept_gateway import KeptGateway, kept_gateway
from tests.faults.token_jobs import PAIRS, body_of, differences, engine_of, fleet_of, jobs, told_of
from tests.support.gateway import ADMIN, ADMIN_KEY, eventually
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
    """Answers are whole all the same; what was not written down is made again, and no more."""
    environment = {
        "HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_SAVE_TOKENS_S": "0.01", "HEDDLE_KEPT_LEG_BYTES": str(64 * 2**10)
    }  # fmt: skip
    asked = [
        ("chat", body_of(1, "logprobs", "chat", True) | {"max_tokens": 600}),
        ("completions", body_of(2, "plain", "completions", False) | {"max_tokens": 600}),
        ("chat", body_of(3, "plain", "chat", False) | {"max_tokens": 600}),
        ("completions", body_of(4, "plain", "completions", True) | {"max_tokens": 600}),
    ]
    expected = await said_undisturbed(asked, "sglang")

    async def play(number: int) -> bool:
        store = f"sqlite:{tmp_path}/{number}.sqlite3"
        async with (
            fleet_of(engine_of("sglang", speed_up=2)) as [engine],
            kept_gateway("--store", store, "--engine", engine, **environment) as gateway,
        ):
            telling = [
                asyncio.create_task(told_at_last(client, gateway, f"kept-{name}", job))
                for name, job in enumerate(asked)
            ]

            async def are_too_long() -> bool:
                return await made_by(client, engine) > 600 and gateway.num_tapes == 0

            await eventually(are_too_long, 120)
            made_before = await made_by(client, engine)
            were_running = not any(one.done() for one in telling)
            await gateway.kill()
            heard = await asyncio.gather(*telling)
            made = await made_by(client, engine)
        got = [said(one, body) for one, (_, body) in zip(heard, asked, strict=True)]
        assert not (found := differences(expected, got, asked)), "\n".join(one[:2000] for one in found)
        in_answers = sum(tokens_of(one, body["stream"]) for one, (_, body) in zip(heard, asked, strict=True))
        assert made >= in_answers == 2400
        return were_running and made - in_answers < made_before  # of turns that begin anew all of it is made again

    await play_rounds("turns ran whose legs were too long to be kept, and the store had some of each", play)


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
            await eventually(lambda: gateway.num_tapes == 0, 120)
        made = await made_by(client, *engines)
    got = [said(one, body) for one, (_, body) in zip(heard, asked, strict=True)]
    assert not (found := differences(expected, got, asked)), "\n".join(one[:2000] for one in found[:3])
    return made, sum(tokens_of(one, body["stream"]) for one, (_, body) in zip(heard, asked, strict=True))


SLOW = engine_of("vllm", speed_up=0.3)
ALONE = {"x-trajectory-id": "alone"}


@asynccontextmanager
async def one_turn(
    client: httpx.AsyncClient,
    tmp_path: Path,
    *engines: str,
    max_tokens: int = 400,
    begun_tokens: int = 100,
    faults: Sequence[Fault] = (),
    **environment: str,
) -> AsyncIterator[tuple[KeptGateway, dict[str, Any]]]:
    """A gateway that was killed while its only turn, of so many tokens, ran; and the turn's request.

    Args:
        faults: of the engines, from the kill on.
    """
    body = body_of(1, "plain", "chat", stream=False) | {"max_tokens": max_tokens}
    options = [option for engine in engines for option in ("--engine", engine)]
    environment |= {"HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_SAVE_TOKENS_S": "1000", "HEDDLE_ADMIN_KEY": ADMIN_KEY}
    async with kept_gateway("--store", f"sqlite:{tmp_path}/h.sqlite3", *options, **environment) as gateway:
        asked = asyncio.create_task(client.post(gateway.url + PATHS["chat"], json=body, headers=ALONE))

        async def has_begun() -> bool:
            return await made_by(client, *engines) > begun_tokens

        await eventually(has_begun, 120)
        for engine in engines:
            put = await client.post(engine + "/simulate/faults", json={"faults": [asdict(fault) for fault in faults]})
            assert put.status_code == 200, put.text
        await gateway.kill()
        with pytest.raises(httpx.TransportError):
            await asked
        yield gateway, body


async def is_idle(client: httpx.AsyncClient, engine: str) -> bool:
    page = (await client.get(engine + "/metrics")).text
    running = [line for line in page.splitlines() if line.startswith(("vllm:num_requests_running", "sglang:num_run"))]
    return bool(running) and all(float(line.split()[-1]) == 0 for line in running)


async def test_what_nobody_asks_for_again_is_stopped(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """After a while, long before the engine is done; the turn is made anew then."""
    async with (
        fleet_of(SLOW) as [engine],
        one_turn(client, tmp_path, engine, max_tokens=20_000, HEDDLE_KEPT_LEG_S="0.2") as (gateway, _),
    ):
        await eventually(lambda: is_idle(client, engine), 120)
        assert await made_by(client, engine) < 20_000
        assert await gateway.is_healthy()


async def test_another_question_does_not_get_what_was_kept(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """It goes by the very request."""
    async with (
        fleet_of(SLOW) as [engine],
        one_turn(client, tmp_path, engine, max_tokens=130, begun_tokens=10) as (gateway, body),
    ):
        other = body | {"messages": [{"role": "user", "content": "something else"}], "max_tokens": 7}
        heard = await ask(client, gateway.url, "chat", other, ALONE)
        assert tokens_of(heard, stream=False) == 7
        again = await told_at_last(client, gateway, "alone", ("chat", body))
        assert tokens_of(again, stream=False) == 130
        assert await made_by(client, engine) == 137


async def add_engine(client: httpx.AsyncClient, gateway: KeptGateway, url: str) -> None:
    """Have a gateway that has no engine which is ready serve by this one."""
    added = await client.post(gateway.url + "/v1/engines", json={"url": url}, headers=ADMIN)
    assert added.status_code == 201, added.text

    async def is_ready() -> bool:
        return (await client.get(gateway.url + "/readyz")).status_code == 200

    await eventually(is_ready, 120)


async def test_an_engine_that_dies_before_the_next_gateway_comes_loses_no_turn(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """What it had said until then is not made again elsewhere."""
    async with AsyncExitStack() as stack, serve_engine(engine_of("vllm", speed_up=20)) as second:
        first = await stack.enter_async_context(serve_engine(SLOW))
        async with one_turn(client, tmp_path, first) as (gateway, body):
            await stack.aclose()
            refused = await client.post(gateway.url + PATHS["chat"], json=body, headers=ALONE, timeout=120)
            assert refused.status_code == 503, "what was kept waits for the next try"
            await add_engine(client, gateway, second)
            heard = await told_at_last(client, gateway, "alone", ("chat", body))
            assert tokens_of(heard, stream=False) == 400
            assert await made_by(client, second) <= 400 - 64, "an event has 32 tokens"
            assert told_of(heard, body) == (await said_undisturbed([("chat", body)], "vllm"))[0]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_an_engine_that_is_not_ready_again_goes_on_with_what_it_was_asked(
    client: httpx.AsyncClient, tmp_path: Path, kind: str
) -> None:
    """It makes tokens, and cannot say how it is: whichever kind of engine the turn is sent to, none are made twice."""
    unseen = {"HEDDLE_OBSERVE_INTERVAL_S": "1000", "HEDDLE_FAULTS_TO_OPEN": "1"}
    async with (
        fleet_of(SLOW, engine_of(kind, speed_up=20)) as [first, second],
        one_turn(
            client,
            tmp_path,
            first,
            max_tokens=200,
            begun_tokens=50,
            faults=[Fault("refuse", path="/metrics")],
            **unseen,
        ) as (gateway, body),
    ):
        await add_engine(client, gateway, second)
        heard = await told_at_last(client, gateway, "alone", ("chat", body))
        assert (await client.request("DELETE", first + "/simulate/faults")).status_code == 200
        assert await made_by(client, first, second) == tokens_of(heard, stream=False) == 200
        assert told_of(heard, body) == (await said_undisturbed([("chat", body)], "vllm"))[0]


async def test_who_connects_between_two_gateways_waits(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """The listening socket is kept, too: nobody is refused."""
    async with kept_gateway("--store", f"sqlite:{tmp_path}/h.sqlite3") as gateway:
        await gateway.kill()
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.close()
        assert (await client.get(gateway.url + "/healthz", timeout=120)).status_code == 200
