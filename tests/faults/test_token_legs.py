"""Turns at token level under every disturbance there is: what a client gets is one uninterrupted generation.

On fleets of both kinds of engine, and of both in one. `FAULT_SEEDS` says how many seeds of each are played.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault
from tests.faults.asking import Heard, ask
from tests.faults.gateway_process import gateway_process, tokens_written
from tests.faults.token_jobs import (
    ENDURING,
    FLEETS,
    PAIRS,
    URGENT,
    all_told,
    body_of,
    count_of,
    differences,
    engine_of,
    fleet_of,
    jobs,
    told,
    undisturbed,
)
from tests.support.gateway import ADMIN, eventually, running_gateway
from tests.support.rounds import play_rounds

NUM_TURNS = 100
ONE_ATTEMPT: dict[str, Any] = {"token_legs": "auto", "max_attempts": 1}
NUM_SEEDS = int(os.environ.get("FAULT_SEEDS", "2"))
GENERATE = {"vllm": "/inference", "sglang": "/generate"}
on_every_fleet = pytest.mark.parametrize("fleet", FLEETS)


@on_every_fleet
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
async def test_legs_that_break_anywhere_leave_no_trace_in_any_answer(
    client: httpx.AsyncClient, fleet: str, seed: int
) -> None:
    """Connections reset, streams end, nonsense comes, at a token that dice choose; some engines refuse."""
    dice = random.Random(seed)
    asked = jobs(seed, NUM_TURNS, fleet)
    settings = [engine_of(kind, speed_up=100, seed=seed * 10 + n) for n, kind in enumerate(FLEETS[fleet])]
    async with fleet_of(*settings) as engines, running_gateway(*engines, **ENDURING) as gateway:
        # Only now: an engine that refuses to say whether it has token routes has none.
        for engine, one in zip(engines, settings, strict=True):
            generate = GENERATE[one.dialect]
            faults = [
                Fault(kind, after_chunks=dice.randrange(1, 60), probability=0.12, path=generate)
                for kind in ("die", "reset", "nonsense", "die", "reset")
            ]
            faults += [Fault("error", probability=0.05, path="/v1"), Fault("refuse", probability=0.05, path=generate)]
            put = await client.post(engine + "/simulate/faults", json={"faults": [asdict(fault) for fault in faults]})
            assert put.status_code == 200
        got = await all_told(client, gateway.url, asked)
        metrics = (await client.get(gateway.url + "/metrics")).text
    assert not (found := differences(await undisturbed(asked, fleet), got, asked)), "\n".join(found[:3])
    assert count_of(metrics, 'heddle_retried_legs_total{fault="engine"}') > NUM_TURNS / 4


async def test_the_error_that_ends_a_response_has_the_next_number(client: httpx.AsyncClient) -> None:
    """A client that puts events in order by their numbers sees it last."""
    async with fleet_of(engine_of("vllm", speed_up=20)) as [engine], running_gateway(engine, **ONE_ATTEMPT) as gateway:
        fault = Fault("die", after_chunks=12, path=GENERATE["vllm"])
        put = await client.post(engine + "/simulate/faults", json={"faults": [asdict(fault)]})
        assert put.status_code == 200
        heard = await ask(client, gateway.url, "responses", body_of(1, "plain", "responses", stream=True))
    assert heard.events[-1]["type"] == "error" and len(heard.events) > 2
    assert [event["sequence_number"] for event in heard.events] == list(range(len(heard.events)))


class Crowd:
    """Turns that keep engines busy for as long as it takes to do something to them, however slow the machine is.

    Attributes:
        asked: the requests that were sent.
        got: what each was told.
    """

    def __init__(self, client: httpx.AsyncClient, url: str, asked: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.got: list[Any] = []
        self._client = client
        self._url = url
        self._waiting = list(reversed(asked))
        self._is_leaving = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Crowd":
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(24)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_leaving = True
        await asyncio.gather(*self._tasks)

    async def _ask_on(self) -> None:
        while self._waiting and not self._is_leaving:
            one = self._waiting.pop()
            (got,) = await all_told(self._client, self._url, [one])
            self.asked.append(one)
            self.got.append(got)


@on_every_fleet
async def test_engines_that_are_drained_and_come_back_all_the_time_leave_no_trace(
    client: httpx.AsyncClient, fleet: str
) -> None:
    """Each drain pauses what runs there at whatever token it has come to; it goes on at another engine."""
    settings = [engine_of(kind, speed_up=2, seed=n) for n, kind in enumerate(PAIRS[fleet])]
    async with fleet_of(*settings) as engines, running_gateway(*engines, **ENDURING) as gateway:
        ids = [engine["id"] for engine in await engines_of(client, gateway.url)]
        moved = 0
        async with Crowd(client, gateway.url, jobs(10, 2000, fleet)) as crowd:
            for drained in (0, 1) * 3:
                await eventually(lambda n=drained: has_legs(client, gateway.url, n, 3), 120)
                moved += (await engines_of(client, gateway.url))[drained]["num_legs"]
                url = f"{gateway.url}/v1/engines/{ids[drained]}"
                answer = await client.post(f"{url}/drain?timeout_s=60", headers=ADMIN, timeout=90)
                assert answer.json()["is_drained"] and answer.json()["token_legs"]
                await client.post(f"{url}/uncordon", headers=ADMIN)
    assert moved > 6
    assert not (found := differences(await undisturbed(crowd.asked, fleet), crowd.got, crowd.asked)), "\n".join(
        found[:3]
    )


@on_every_fleet
async def test_engines_that_hang_in_mid_turn_lose_no_turn(client: httpx.AsyncClient, fleet: str) -> None:
    """An engine stands still with its turns, which go on at the other."""
    settings = [engine_of(kind, speed_up=4, seed=n) for n, kind in enumerate(PAIRS[fleet])]
    impatient: dict[str, Any] = ENDURING | {"silence_timeout_s": 2, "stall_timeout_s": 2, "observe_interval_s": 0.5}
    async with fleet_of(*settings) as engines, running_gateway(*engines, **impatient) as gateway:
        async with Crowd(client, gateway.url, jobs(20, 2000, fleet)) as crowd:
            await eventually(lambda: has_legs(client, gateway.url, 0, 3), 120)
            await stand_still(client, engines[0], settings[0].dialect)
            await eventually(lambda: has_failed_over(client, gateway.url), 120)
        await go_on(client, engines[0], settings[0].dialect)
    assert not (found := differences(await undisturbed(crowd.asked, fleet), crowd.got, crowd.asked)), "\n".join(
        found[:3]
    )


async def has_failed_over(client: httpx.AsyncClient, url: str) -> bool:
    return count_of((await client.get(url + "/metrics")).text, 'heddle_retried_legs_total{fault="engine"}') >= 3


async def stand_still(client: httpx.AsyncClient, engine: str, dialect: str) -> None:
    if dialect == "vllm":
        await client.post(engine + "/pause?mode=keep&clear_cache=false")
    else:
        await client.post(engine + "/pause_generation", json={"mode": "in_place"})


async def go_on(client: httpx.AsyncClient, engine: str, dialect: str) -> None:
    await client.post(engine + ("/resume" if dialect == "vllm" else "/continue_generation"), json={})


async def engines_of(client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await client.get(url + "/v1/engines")).json()["data"]
    return listed


async def has_legs(client: httpx.AsyncClient, url: str, number: int, num: int) -> bool:
    return bool((await engines_of(client, url))[number]["num_legs"] >= num)


@on_every_fleet
async def test_urgent_turns_take_slots_from_others_which_lose_nothing(
    client: httpx.AsyncClient, tmp_path: Path, fleet: str
) -> None:
    """The scheduler's own Preempt, over and over: a leg is stopped at its engine, and goes on when a slot is free."""
    settings = [engine_of(kind, speed_up=1, seed=n) for n, kind in enumerate(PAIRS[fleet])]
    preempting: dict[str, Any] = {"policy": "remaining-first", "preempt_after_s": 0.0}

    async def play(round_number: int) -> bool:
        asked = jobs(77 + round_number, 40, fleet)
        event_log = tmp_path / f"{round_number}.jsonl"
        async with fleet_of(*settings) as engines:
            chosen: list[Any] = [{"url": engine, "slots": 6} for engine in engines]
            async with running_gateway(*chosen, **ENDURING | preempting, event_log=str(event_log)) as gateway:
                got = asyncio.create_task(all_told(client, gateway.url, asked))
                for num in range(12):
                    urgent = body_of(90_000 + num, "plain", "chat", False) | {"max_tokens": 2, "nvext": URGENT}
                    assert (await ask(client, gateway.url, "chat", urgent)).is_finished("chat")
                said = await got
        assert not (found := differences(await undisturbed(asked, fleet), said, asked)), "\n".join(found[:3])
        log = event_log.read_text()
        return min(log.count('"Preempt"'), log.count('"TurnPaused"')) > 5

    await play_rounds("more than five turns were preempted", play)


@on_every_fleet
async def test_an_engine_that_is_killed_loses_no_turn(client: httpx.AsyncClient, fleet: str) -> None:
    """Every turn goes on from its last token on the engine that is left."""
    second_kind, first_kind = PAIRS[fleet]  # in a mixed fleet SGLang dies: the other way is that of the drains
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serve_engine(engine_of(first_kind, speed_up=4)))
        async with (
            serve_engine(engine_of(second_kind, speed_up=20)) as second,
            running_gateway(first, second, **ENDURING) as gateway,
            Crowd(client, gateway.url, jobs(5, 2000, fleet)) as crowd,
        ):
            await eventually(lambda: has_legs(client, gateway.url, 0, 6), 120)
            await stack.aclose()
    assert not (found := differences(await undisturbed(crowd.asked, fleet), crowd.got, crowd.asked)), "\n".join(
        found[:3]
    )


async def test_a_call_that_only_its_first_engine_can_end_waits_for_it(client: httpx.AsyncClient) -> None:
    """SGLang tells nothing of a call that the limit cuts: the turn goes back to vLLM, and the client hears it all.

    Unless the client had heard nothing of the call yet, as where the machine is slow: then SGLang's nothing is all.
    """
    settings = engine_of("vllm", speed_up=0.1), engine_of("sglang", speed_up=20)

    async def play(round_number: int) -> bool:
        asked = [
            ("chat", body_of(31_000 + 100 * round_number + n, "tools", "chat", True) | {"max_tokens": 24})
            for n in range(12)
        ]
        async with fleet_of(*settings) as engines, running_gateway(*engines, **ENDURING) as gateway:
            first, second = [
                f"{gateway.url}/v1/engines/{engine['id']}" for engine in await engines_of(client, gateway.url)
            ]
            await client.post(f"{second}/cordon", headers=ADMIN)
            got = asyncio.create_task(all_told(client, gateway.url, asked))

            async def is_half_made() -> bool:
                return got.done() or await made_by(client, engines[0]) > 12 * 17

            await eventually(is_half_made, 60)
            await client.post(f"{second}/uncordon", headers=ADMIN)
            answer = await client.post(f"{first}/drain?timeout_s=60", headers=ADMIN, timeout=90)
            assert answer.json()["is_drained"]

            async def was_refused() -> bool:
                metrics = (await client.get(gateway.url + "/metrics")).text
                return got.done() or count_of(metrics, 'heddle_retried_legs_total{fault="busy"}') > 0

            await eventually(was_refused, 60)
            has_waited = not got.done()
            await client.post(f"{first}/uncordon", headers=ADMIN)
            said, expected = await got, await undisturbed(asked)
            expected = [
                want | {"text": "", "calls": []} if not heard["text"] and not heard["calls"] else want
                for want, heard in zip(expected, said, strict=True)
            ]
            assert not (found := differences(expected, said, asked)), "\n".join(found[:3])
        return has_waited

    await play_rounds("a call that the client knew a part of was cut at the other engine", play)


@pytest.mark.parametrize(("kind", "stream"), [("vllm", False), ("sglang", True)])
async def test_a_killed_gateway_goes_on_where_it_was(
    client: httpx.AsyncClient, tmp_path: Path, kind: str, stream: bool
) -> None:
    """A request that is sent again after a restart gets the whole answer; what was written down is not made again."""
    num, length = 12, 400

    async def play(round_number: int) -> bool:
        bodies = [body_of(number, "plain", "chat", stream) | {"max_tokens": length} for number in range(num)]
        async with serve_engine(engine_of(kind, speed_up=2)) as engine:
            store = f"sqlite:{tmp_path / f'heddle-{round_number}.sqlite3'}"
            options = ("--engine", engine, "--store", store)
            environment = {"HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_SAVE_TOKENS_S": "0.05"}
            async with gateway_process(*options, **environment) as gateway:

                async def one(number: int) -> Heard:
                    while True:
                        with contextlib.suppress(httpx.TransportError):
                            named = {"x-trajectory-id": f"killed-{number}"}
                            return await ask(client, gateway.url, "chat", bodies[number], named)
                        await asyncio.sleep(0.05)

                asked = asyncio.gather(*map(one, range(num)))

                async def half_made() -> bool:
                    return await made_by(client, engine) > num * length / 2

                async def is_idle() -> bool:
                    return await sum_of(client, engine, RUNNING) == 0

                await eventually(half_made, 60)
                await gateway.kill()
                await eventually(is_idle, 60)
                made_at_kill, written = await made_by(client, engine), await tokens_written(store)
                await gateway.start()
                heard = await asked
            made = await made_by(client, engine)
        asked_for = [("chat", body) for body in bodies]
        got = [told(one, stream) for one in heard]
        assert not (found := differences(await undisturbed(asked_for), got, asked_for)), "\n".join(found[:3])
        assert made - num * length <= made_at_kill - written, "what was written down is not made again"
        return written > num * length / 4

    await play_rounds("much was written down of turns that ran when the gateway was killed", play)


MADE = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")


async def made_by(client: httpx.AsyncClient, engine: str) -> float:
    return await sum_of(client, engine, MADE)


async def sum_of(client: httpx.AsyncClient, engine: str, metric: tuple[str, ...]) -> float:
    page = (await client.get(engine + "/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(metric))
