"""Turns at token level under every disturbance there is: what a client gets is one uninterrupted generation.

On fleets of both kinds of engine, and of both in one. `FAULT_SEEDS` says how many seeds of each are played.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.faults.asking import Heard, ask
from tests.faults.gateway_process import gateway_process
from tests.support.gateway import ADMIN, eventually, running_gateway
from tests.support.rounds import play_rounds

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"x": {}}}}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": ["n t", " of the"]},
    "stop that is told": {"stop": ["e w"], "include_stop_str_in_output": True},
    "ends by itself": {"ignore_eos": False, "max_tokens": 400},
    "json": {"response_format": SCHEMA},
    "tools": {"tools": [TOOL]},
    "tool required": {"tools": [TOOL], "tool_choice": "required"},
}
NUM_TURNS = 100
NUM_SEEDS = int(os.environ.get("FAULT_SEEDS", "2"))
FLEETS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm", "vllm"),
    "sglang": ("sglang", "sglang", "sglang-incremental"),
    "mixed": ("vllm", "sglang", "sglang-incremental"),
}
PAIRS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm"),
    "sglang": ("sglang-incremental", "sglang"),
    "mixed": ("vllm", "sglang"),
}
GENERATE = {"vllm": "/inference", "sglang": "/generate"}
on_every_fleet = pytest.mark.parametrize("fleet", FLEETS)
URGENT = {"agent_hints": {"priority": 9}}
ENDURING: dict[str, Any] = {
    "token_legs": "auto", "max_attempts": 100, "retry_pause_s": 0.0, "faults_to_open": 10_000, "save_tokens_s": 0.01
}  # fmt: skip


def body_of(number: int, kind: str, api: str, stream: bool) -> dict[str, Any]:
    """A request for about eighty tokens."""
    body = {"model": "simulated", "stream": stream, "max_tokens": 80, "ignore_eos": True, "temperature": 0}
    body |= KINDS[kind]
    if stream:
        body["stream_options"] = {"include_usage": True}
    if api == "chat":
        return body | {"messages": [{"role": "user", "content": f"question {number}"}]}
    return body | {"prompt": f"question {number}", "logprobs": 2 if kind == "logprobs" else None}


def told(heard: Heard, stream: bool) -> dict[str, Any]:
    """All that an answer says: text, calls, log-probabilities, how it ended, how many tokens it took."""
    answers = heard.events if stream else [heard.json]
    said: dict[str, Any] = {"text": "", "calls": [], "logprobs": [], "reason": None, "stop": None, "tokens": None}
    for answer in answers:
        if usage := answer.get("usage"):
            said["tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in answer["choices"]:
            part = choice.get("delta") or choice.get("message") or {}
            said["text"] += choice.get("text") or part.get("content") or ""
            for call in part.get("tool_calls") or ():
                said["calls"].append(call["function"].get("name"))
                said["text"] += call["function"].get("arguments") or ""
            logprobs = choice.get("logprobs") or {}
            said["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            said["reason"] = said["reason"] or choice.get("finish_reason")
            said["stop"] = said["stop"] or choice.get("stop_reason") or choice.get("matched_stop")
    said["calls"] = [name for name in said["calls"] if name]
    if said["reason"] == "stop" and said["stop"]:
        said["tokens"] = None  # a stop string found over a seam comes late, see gateway/turns/chain.py
        said["logprobs"] = said["logprobs"][:1]
    return said


def engine_of(kind: str, **more: Any) -> SimulatedEngineSettings:
    """The settings of an engine of a fleet."""
    dialect, _, is_incremental = kind.partition("-")
    more |= {"incremental_streaming_output": bool(is_incremental)}
    return SimulatedEngineSettings(dialect=dialect, **more)  # type: ignore[arg-type]


def jobs(seed: int, num: int, fleet: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all kinds that the fleet serves at token level, in both APIs, streamed and not."""
    dice = random.Random(seed)
    made = []
    # What holds a call to a grammar is known only to SGLang's chat route.
    kinds = [kind for kind in KINDS if fleet == "vllm" or kind != "tool required"]
    for number in range(num):
        kind, api, stream = dice.choice(kinds), dice.choice(("chat", "completions")), dice.random() < 0.6
        if kind.startswith("tool"):
            api = "chat"
        made.append((api, body_of(seed * 10_000 + number, kind, api, stream)))
    return made


async def all_told(client: httpx.AsyncClient, url: str, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What each of these requests is told, all of them sent at once."""
    heard = await asyncio.gather(*(ask(client, url, api, body) for api, body in asked))
    return [
        told(one, body["stream"]) if one.is_finished(api) else one.text
        for one, (api, body) in zip(heard, asked, strict=True)
    ]


@asynccontextmanager
async def fleet_of(*settings: SimulatedEngineSettings) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serve_engine(one)) for one in settings]


async def undisturbed(asked: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What a quiet engine says, asked without a gateway."""
    async with httpx.AsyncClient(timeout=120) as client, serve_engine(SimulatedEngineSettings(speed_up=200)) as engine:
        said = []
        for start in range(0, len(asked), 50):
            for api, body in asked[start : start + 50]:
                path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
                answer = await client.post(engine + path, json=body)
                said.append(told(Heard(answer.status_code, answer.headers, answer.text), body["stream"]))
        return said


def count_of(metrics: str, series: str) -> float:
    return next((float(line.split()[1]) for line in metrics.splitlines() if line.startswith(series)), 0.0)


def differences(expected: Sequence[Any], got: Sequence[Any], asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    return [
        f"{api} {orjson.dumps(body).decode()}\n  wanted {want}\n  got    {have}"
        for want, have, (api, body) in zip(expected, got, asked, strict=True)
        if want != have
    ]


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
    assert not (found := differences(await undisturbed(asked), got, asked)), "\n".join(found[:3])
    assert count_of(metrics, 'heddle_retried_legs_total{fault="engine"}') > NUM_TURNS / 4


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
    assert not (found := differences(await undisturbed(crowd.asked), crowd.got, crowd.asked)), "\n".join(found[:3])


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
    assert not (found := differences(await undisturbed(crowd.asked), crowd.got, crowd.asked)), "\n".join(found[:3])


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
        assert not (found := differences(await undisturbed(asked), said, asked)), "\n".join(found[:3])
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
    assert not (found := differences(await undisturbed(crowd.asked), crowd.got, crowd.asked)), "\n".join(found[:3])


@pytest.mark.parametrize(("kind", "stream"), [("vllm", False), ("sglang", True)])
async def test_a_killed_gateway_goes_on_where_it_was(
    client: httpx.AsyncClient, tmp_path: Path, kind: str, stream: bool
) -> None:
    """A request that is sent again after a restart gets the whole answer, and little of it is generated twice."""
    num, length = 12, 400

    async def play(round_number: int) -> bool:
        bodies = [body_of(number, "plain", "chat", stream) | {"max_tokens": length} for number in range(num)]
        async with serve_engine(engine_of(kind, speed_up=2)) as engine:
            options = ("--engine", engine, "--store", f"sqlite:{tmp_path / f'heddle-{round_number}.sqlite3'}")
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
                made_at_kill = await made_by(client, engine)
                await gateway.start()
                heard = await asked
            made = await made_by(client, engine)
        asked_for = [("chat", body) for body in bodies]
        got = [told(one, stream) for one in heard]
        assert not (found := differences(await undisturbed(asked_for), got, asked_for)), "\n".join(found[:3])
        if made_at_kill > num * length * 0.6:
            return False
        assert made < num * length * 1.25, "half was made before the kill; what was not written down is made again"
        return True

    await play_rounds("the gateway was killed when half was made", play)


MADE = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")


async def made_by(client: httpx.AsyncClient, engine: str) -> float:
    return await sum_of(client, engine, MADE)


async def sum_of(client: httpx.AsyncClient, engine: str, metric: tuple[str, ...]) -> float:
    page = (await client.get(engine + "/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(metric))
