"""A gateway that is killed under `heddle keep`: no token is generated twice, by the engines' own counts."""

import asyncio
import os
import random
import resource
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault
from engines.weights import STARTED_WITH
from tests.faults.asking import PATHS, Reply, ask
from tests.faults.kept_gateway import KeptGateway, kept_gateway
from tests.faults.token_jobs import (
    PAIRS,
    body_of,
    comparable_content_of,
    differences,
    engine_of,
    fleet_of,
    requests_of_all_kinds,
)
from tests.support.gateway import ADMIN, ADMIN_KEY, eventually
from tests.support.rounds import play_rounds

NUM_SEEDS = int(os.environ.get("FAULT_SEEDS", "2"))
NUM_TURNS = 24
NUM_KILLS = 3
MADE = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
Job = tuple[str, dict[str, Any]]

pytestmark = pytest.mark.timeout(300)


async def generated_by(client: httpx.AsyncClient, *engines: str) -> float:
    """All tokens that these engines have generated."""
    made = 0.0
    for engine in engines:
        page = (await client.get(engine + "/metrics")).text
        made += sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(MADE))
    return made


async def reply_after_retries(client: httpx.AsyncClient, gateway: KeptGateway, name: str, job: Job) -> Reply:
    """What a client gets that retries until it has a whole answer, and marks its retries, as SDKs do."""
    api, body = job
    for number in range(10_000):
        headers = {"x-trajectory-id": name} | ({"x-stainless-retry-count": str(number)} if number else {})
        try:
            reply = await ask(client, gateway.url, api, body, headers)
        except httpx.TransportError:
            await asyncio.sleep(0.02)
            continue
        assert reply.is_finished(api), reply.text[-500:]
        return reply
    raise AssertionError("never")


def content_of_reply(reply: Reply, body: dict[str, Any]) -> Any:
    """All content of an answer; for several choices, which arrive interleaved, the text of each."""
    texts: dict[int, str] = {}
    for answer in reply.events if body["stream"] else [reply.json]:
        for choice in answer.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or {}
            texts[choice["index"]] = texts.get(choice["index"], "") + (part.get("content") or "")
    return texts if len(texts) > 1 else comparable_content_of(reply, body)


async def undisturbed_contents(requests: list[Job], fleet: str) -> list[Any]:
    """The content of an undisturbed engine's answers; it is of the fleet's kind if the fleet has one kind."""
    settings = engine_of("sglang" if fleet == "sglang" else "vllm", speed_up=200)
    async with httpx.AsyncClient(timeout=120) as client, fleet_of(settings) as [engine]:
        answers = [await client.post(engine + PATHS[api], json=body) for api, body in requests]
    replies = [Reply(answer.status_code, answer.headers, answer.text) for answer in answers]
    return [content_of_reply(one, body) for one, (_, body) in zip(replies, requests, strict=True)]


def tokens_of(reply: Reply, stream: bool) -> int:
    """How many tokens an answer reports."""
    for answer in reply.events if stream else [reply.json]:
        usage = (answer.get("response") or answer).get("usage")
        number = usage and (usage.get("completion_tokens") or usage.get("output_tokens"))
        if number:
            made = int(number)
    return made


def long_jobs(seed: int, fleet: str) -> list[Job]:
    """Turns of all kinds, longer than most, some with two choices."""
    dice = random.Random(seed)
    made = requests_of_all_kinds(seed, NUM_TURNS, fleet)
    for api, body in made:
        for name in ("max_tokens", "max_output_tokens"):
            if body.get(name) == 80:
                body[name] = 300
        if api == "chat" and "tools" not in body and dice.random() < 0.3:
            body |= {"n": 2, "seed": 7}  # with a seed, each choice has its own, also through the gateway
    return made


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("fleet", PAIRS)
async def test_no_token_is_generated_twice(client: httpx.AsyncClient, tmp_path: Path, fleet: str, seed: int) -> None:
    """SIGKILL at random moments, whether it serves yet or not: the engines generated what the answers contain."""
    # SGLang's cumulative events take a megabyte for 100 tokens with alternatives.
    environment = {"HEDDLE_SAVE_TOKENS_S": "1000", "HEDDLE_KEPT_LEG_BYTES": str(64 * 2**20)}
    made, in_answers = await kill_repeatedly(client, tmp_path, fleet, 40 + seed, environment)
    assert made == in_answers


async def test_legs_too_long_to_keep_continue_from_the_stored_tokens(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """Answers are still whole. Only tokens that were not stored are generated again."""
    environment = {
        "HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_SAVE_TOKENS_S": "0.01", "HEDDLE_KEPT_LEG_BYTES": str(64 * 2**10)
    }  # fmt: skip
    requests = [
        ("chat", body_of(1, "logprobs", "chat", True) | {"max_tokens": 600}),
        ("completions", body_of(2, "plain", "completions", False) | {"max_tokens": 600}),
        ("chat", body_of(3, "plain", "chat", False) | {"max_tokens": 600}),
        ("completions", body_of(4, "plain", "completions", True) | {"max_tokens": 600}),
    ]
    expected = await undisturbed_contents(requests, "sglang")

    async def play(number: int) -> bool:
        store = f"sqlite:{tmp_path}/{number}.sqlite3"
        async with (
            fleet_of(engine_of("sglang", speed_up=2 ** (1 - number))) as [engine],
            kept_gateway("--store", store, "--engine", engine, **environment) as gateway,
        ):
            pending = [
                asyncio.create_task(reply_after_retries(client, gateway, f"kept-{name}", job))
                for name, job in enumerate(requests)
            ]

            async def are_too_long() -> bool:
                return await generated_by(client, engine) > 600 and gateway.num_tapes == 0

            await eventually(are_too_long, 120)
            generated_before = await generated_by(client, engine)
            were_running = not any(one.done() for one in pending)
            await gateway.kill()
            replies = await asyncio.gather(*pending)
            made = await generated_by(client, engine)
        got = [content_of_reply(one, body) for one, (_, body) in zip(replies, requests, strict=True)]
        assert not (found := differences(expected, got, requests)), "\n".join(one[:2000] for one in found)
        in_answers = sum(tokens_of(one, body["stream"]) for one, (_, body) in zip(replies, requests, strict=True))
        assert made >= in_answers == 2400
        # A turn that starts over generates all its tokens again.
        return were_running and made - in_answers < generated_before

    await play_rounds("turns ran whose legs were too long to keep, and the store had some tokens of each", play)


async def kill_repeatedly(
    client: httpx.AsyncClient, tmp_path: Path, fleet: str, seed: int, environment: dict[str, str]
) -> tuple[float, int]:
    """Kill a gateway under many turns, and check that each gets its undisturbed answer. Returns how many tokens the
    engines generated, and how many the answers contain."""
    dice = random.Random(seed)
    requests = long_jobs(seed, fleet)
    expected = await undisturbed_contents(requests, fleet)
    settings = [engine_of(kind, speed_up=2, seed=n) for n, kind in enumerate(PAIRS[fleet])]
    async with fleet_of(*settings) as engines:
        options = [option for engine in engines for option in ("--engine", engine)]
        store = ("--store", f"sqlite:{tmp_path}/h.sqlite3")
        environment = environment | {"HEDDLE_TOKEN_LEGS": "auto"}
        async with kept_gateway(*store, *options, **environment) as gateway:
            pending = asyncio.gather(
                *(reply_after_retries(client, gateway, f"kept-{number}", job) for number, job in enumerate(requests))
            )
            for _ in range(NUM_KILLS):
                until = await generated_by(client, *engines) + dice.randrange(1, 800)

                async def is_reached(until: float = until) -> bool:
                    return pending.done() or await generated_by(client, *engines) >= until

                await eventually(is_reached, 120)
                await gateway.kill()
            replies = await pending
            await eventually(lambda: gateway.num_tapes == 0, 120)
            kept = [await client.get(f"{gateway.url}/v1/trajectories/kept-{n}/tokens") for n in range(NUM_TURNS)]
        made = await generated_by(client, *engines)
    got = [content_of_reply(one, body) for one, (_, body) in zip(replies, requests, strict=True)]
    assert not (found := differences(expected, got, requests)), "\n".join(one[:2000] for one in found[:3])
    in_answers = [tokens_of(one, body["stream"]) for one, (_, body) in zip(replies, requests, strict=True)]
    for trajectory, num_tokens in zip([one.json() for one in kept], in_answers, strict=True):
        assert trajectory["missing"] == []
        assert sum(len(turn["output_ids"]) for turn in trajectory["turns"]) == num_tokens, trajectory["id"]
    return made, sum(in_answers)


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
    """A gateway that was killed while its only turn, of this many tokens, ran; and the turn's request.

    Args:
        faults: of the engines, from the kill on.
    """
    body = body_of(1, "plain", "chat", stream=False) | {"max_tokens": max_tokens}
    options = [option for engine in engines for option in ("--engine", engine)]
    environment |= {"HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_SAVE_TOKENS_S": "1000", "HEDDLE_ADMIN_KEY": ADMIN_KEY}
    async with kept_gateway("--store", f"sqlite:{tmp_path}/h.sqlite3", *options, **environment) as gateway:
        turn = asyncio.create_task(client.post(gateway.url + PATHS["chat"], json=body, headers=ALONE))

        async def has_begun() -> bool:
            return await generated_by(client, *engines) > begun_tokens

        await eventually(has_begun, 120)
        for engine in engines:
            put = await client.post(engine + "/simulate/faults", json={"faults": [asdict(fault) for fault in faults]})
            assert put.status_code == 200, put.text
        await gateway.kill()
        with pytest.raises(httpx.TransportError):
            await turn
        yield gateway, body


async def is_idle(client: httpx.AsyncClient, engine: str) -> bool:
    page = (await client.get(engine + "/metrics")).text
    running = [line for line in page.splitlines() if line.startswith(("vllm:num_requests_running", "sglang:num_run"))]
    return bool(running) and all(float(line.split()[-1]) == 0 for line in running)


async def test_a_kept_leg_that_nobody_asks_for_again_is_stopped(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """After `kept_leg_s`, long before the engine is done."""
    async with (
        fleet_of(SLOW) as [engine],
        one_turn(client, tmp_path, engine, max_tokens=20_000, HEDDLE_KEPT_LEG_S="0.2") as (gateway, _),
    ):
        await eventually(lambda: is_idle(client, engine), 120)
        assert await generated_by(client, engine) < 20_000
        assert await gateway.is_healthy()


async def test_a_kept_leg_serves_only_its_own_request(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """Another request of the same trajectory gets its own answer; the first request then gets the kept one."""
    async with (
        fleet_of(SLOW) as [engine],
        one_turn(client, tmp_path, engine, max_tokens=130, begun_tokens=10) as (gateway, body),
    ):
        other = body | {"messages": [{"role": "user", "content": "something else"}], "max_tokens": 7}
        reply = await ask(client, gateway.url, "chat", other, ALONE)
        assert tokens_of(reply, stream=False) == 7
        again = await reply_after_retries(client, gateway, "alone", ("chat", body))
        assert tokens_of(again, stream=False) == 130
        assert await generated_by(client, engine) == 137


async def add_engine(client: httpx.AsyncClient, gateway: KeptGateway, url: str) -> None:
    """Add this engine to a gateway that has no ready engine, and wait until it serves."""
    added = await client.post(gateway.url + "/v1/engines", json={"url": url}, headers=ADMIN)
    assert added.status_code == 201, added.text

    async def is_ready() -> bool:
        return (await client.get(gateway.url + "/readyz")).status_code == 200

    await eventually(is_ready, 120)


async def test_an_engine_that_dies_before_the_next_gateway_loses_no_turn(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """What it had sent until then is not generated again elsewhere."""
    async with AsyncExitStack() as stack, serve_engine(engine_of("vllm", speed_up=20)) as second:
        first = await stack.enter_async_context(serve_engine(SLOW))
        async with one_turn(client, tmp_path, first) as (gateway, body):
            await stack.aclose()
            refused = await client.post(gateway.url + PATHS["chat"], json=body, headers=ALONE, timeout=120)
            assert refused.status_code == 503, "the kept leg waits for the next try"
            await add_engine(client, gateway, second)
            reply = await reply_after_retries(client, gateway, "alone", ("chat", body))
            assert tokens_of(reply, stream=False) == 400
            assert await generated_by(client, second) <= 400 - 64, "an event has 32 tokens"
            assert comparable_content_of(reply, body) == (await undisturbed_contents([("chat", body)], "vllm"))[0]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_kept_leg_continues_while_its_engine_is_not_ready(
    client: httpx.AsyncClient, tmp_path: Path, kind: str
) -> None:
    """It generates, but its metrics fail. Whichever kind of engine gets the turn next, no token is generated twice."""
    unobserved = {"HEDDLE_OBSERVE_INTERVAL_S": "1000", "HEDDLE_FAULTS_TO_OPEN": "1"}
    async with (
        fleet_of(SLOW, engine_of(kind, speed_up=20)) as [first, second],
        one_turn(
            client,
            tmp_path,
            first,
            max_tokens=200,
            begun_tokens=50,
            faults=[Fault("refuse", path="/metrics")],
            **unobserved,
        ) as (gateway, body),
    ):
        await add_engine(client, gateway, second)
        reply = await reply_after_retries(client, gateway, "alone", ("chat", body))
        assert (await client.request("DELETE", first + "/simulate/faults")).status_code == 200
        assert await generated_by(client, first, second) == tokens_of(reply, stream=False) == 200
        assert comparable_content_of(reply, body) == (await undisturbed_contents([("chat", body)], "vllm"))[0]


async def test_the_tokens_of_a_kept_leg_have_the_version_that_it_began_with(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Its engine cannot be observed by the new gateway, and dies before it tells which weights made which tokens. They
    had the version "", which counts as older than all others: the turn could be refused as too stale.
    """
    unobserved = {"HEDDLE_OBSERVE_INTERVAL_S": "1000", "HEDDLE_FAULTS_TO_OPEN": "1"}
    async with AsyncExitStack() as stack, serve_engine(engine_of("vllm", speed_up=20)) as second:
        first = await stack.enter_async_context(serve_engine(SLOW))
        refuse = [Fault("refuse", path="/metrics")]
        async with one_turn(client, tmp_path, first, begun_tokens=50, faults=refuse, **unobserved) as (gateway, body):
            await add_engine(client, gateway, second)
            pending = asyncio.create_task(reply_after_retries(client, gateway, "alone", ("chat", body)))

            async def is_taken_up() -> bool:
                shown = await client.get(gateway.url + "/v1/trajectories/alone")
                return any(turn["chunks"] for turn in shown.json().get("live_turns", ()))

            await eventually(is_taken_up, 120)
            await stack.aclose()
            assert tokens_of(await pending, stream=False) == 400
            assert await generated_by(client, second) < 400, "the rest only"
            [row] = (await client.get(gateway.url + "/v1/trajectories/alone")).json()["turns"]
            assert (row["legs"], row["weight_versions"]) == (2, [STARTED_WITH])


async def test_the_history_says_where_a_kept_leg_ran(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """At the engine where it began, which gets no more turns. It named the engine that the scheduler chose instead, and
    the next turn looked for its KV there.
    """
    async with (
        fleet_of(SLOW, engine_of("vllm", speed_up=20)) as [first, second],
        one_turn(client, tmp_path, first, max_tokens=200, begun_tokens=50) as (gateway, body),
    ):
        id_of_first = first.removeprefix("http://")
        cordoned = await client.post(f"{gateway.url}/v1/engines/{id_of_first}/cordon", headers=ADMIN)
        assert cordoned.status_code == 200, cordoned.text
        await add_engine(client, gateway, second)
        reply = await reply_after_retries(client, gateway, "alone", ("chat", body))
        assert await generated_by(client, first) == 200
        [row] = (await client.get(gateway.url + "/v1/trajectories/alone")).json()["turns"]
        assert row["engine"] == reply.headers["x-heddle-engine"] == id_of_first


async def test_connections_between_two_gateways_wait(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """The keeper holds the listening socket too, so no connection is refused."""
    async with kept_gateway("--store", f"sqlite:{tmp_path}/h.sqlite3") as gateway:
        await gateway.kill()
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.close()
        assert (await client.get(gateway.url + "/healthz", timeout=120)).status_code == 200


async def test_a_gateway_that_a_script_started_is_started_again(tmp_path: Path) -> None:
    """It is not told which descriptors are its own. It left its listening socket with the keeper all the same, so no
    later gateway could listen there: "Address already in use".
    """
    script = ("sh", "-c", 'trap "kill \\$pid" TERM; "$@" & pid=$!; wait $pid; wait $pid', "sh")
    async with kept_gateway("--store", f"sqlite:{tmp_path}/h.sqlite3", starter=script) as gateway:
        await gateway.kill()
        await eventually(gateway.is_healthy, 120)


async def test_turns_go_on_when_their_clients_have_all_descriptors(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """A leg that is kept takes three descriptors. If there are none, it uses an idle connection, and is not kept.

    All turns waited for `queue_timeout_s`, or failed as by a defect if only the third was missing.
    """
    environment = {"HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_QUEUE_TIMEOUT_S": "10"}
    options = ("--store", f"sqlite:{tmp_path}/h.sqlite3", "--engine")
    async with (
        serve_engine(engine_of("vllm", speed_up=20)) as engine,
        kept_gateway(*options, engine, **environment) as gateway,
    ):
        body = {"model": "simulated", "prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": False}
        await reply_after_retries(client, gateway, "first", ("completions", body))
        pid = gateway.pid
        assert pid is not None
        num_open = len(os.listdir(f"/proc/{pid}/fd"))
        for num_more in (20, 21, 22, 23):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open + num_more, num_open + 23))
            names = [f"{num_more}-{number}" for number in range(30)]
            pending = [reply_after_retries(client, gateway, name, ("completions", body)) for name in names]
            replies = await asyncio.gather(*pending)
            assert [tokens_of(one, stream=False) for one in replies] == [20] * 30
        assert gateway.pid == pid
        (shown,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
        assert shown["state"] == "ready" and shown["last_fault"] is None
