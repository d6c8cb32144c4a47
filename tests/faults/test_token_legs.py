"""Turns at token level under every kind of disturbance: the client gets one uninterrupted generation.

On fleets of either kind of engine, and of both. `FAULT_SEEDS` sets how many seeds of each are played.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault
from engines.simulated.text import END, Tokenizer
from store import open_store
from tests.faults.asking import Reply, ask
from tests.faults.gateway_process import gateway_process, tokens_written
from tests.faults.token_jobs import (
    ENDURING,
    FLEETS,
    PAIRS,
    URGENT,
    body_of,
    content_of,
    contents_of_replies,
    count_of,
    differences,
    engine_of,
    fleet_of,
    requests_of_all_kinds,
    undisturbed_contents,
)
from tests.support.engine import Asked, Script, recorded_engine
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
    """Connections reset, streams end early and nonsense arrives, at random tokens; some requests are refused."""
    dice = random.Random(seed)
    requests = requests_of_all_kinds(seed, NUM_TURNS, fleet)
    settings = [engine_of(kind, speed_up=100, seed=seed * 10 + n) for n, kind in enumerate(FLEETS[fleet])]
    async with fleet_of(*settings) as engines, running_gateway(*engines, **ENDURING) as gateway:
        # Only now, because an engine whose token probe is refused counts as one without token routes.
        for engine, one in zip(engines, settings, strict=True):
            generate = GENERATE[one.dialect]
            faults = [
                Fault(kind, after_chunks=dice.randrange(1, 60), probability=0.2, path=generate)
                for kind in ("die", "reset", "nonsense", "die", "reset")
            ]
            faults += [Fault("error", probability=0.05, path="/v1"), Fault("refuse", probability=0.05, path=generate)]
            put = await client.post(engine + "/simulate/faults", json={"faults": [asdict(fault) for fault in faults]})
            assert put.status_code == 200
        got = await contents_of_replies(client, gateway.url, requests)
        metrics = (await client.get(gateway.url + "/metrics")).text
    assert not (found := differences(await undisturbed_contents(requests, fleet), got, requests)), "\n".join(found[:3])
    assert count_of(metrics, 'heddle_retried_legs_total{fault="engine"}') > NUM_TURNS / 4


async def test_an_error_that_ends_a_response_has_the_next_sequence_number(client: httpx.AsyncClient) -> None:
    """A client that sorts events by their numbers sees it last."""
    async with fleet_of(engine_of("vllm", speed_up=20)) as [engine], running_gateway(engine, **ONE_ATTEMPT) as gateway:
        fault = Fault("die", after_chunks=12, path=GENERATE["vllm"])
        put = await client.post(engine + "/simulate/faults", json={"faults": [asdict(fault)]})
        assert put.status_code == 200
        reply = await ask(client, gateway.url, "responses", body_of(1, "plain", "responses", stream=True))
    assert reply.events[-1]["type"] == "error" and len(reply.events) > 2
    assert [event["sequence_number"] for event in reply.events] == list(range(len(reply.events)))


class SustainedLoad:
    """Turns that keep engines busy while a test disturbs them, however slow the machine is.

    Attributes:
        requests: those that were sent.
        got: the content of each reply.
    """

    def __init__(self, client: httpx.AsyncClient, url: str, requests: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.got: list[Any] = []
        self._client = client
        self._url = url
        self._waiting = list(reversed(requests))
        self._is_leaving = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "SustainedLoad":
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(24)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_leaving = True
        await asyncio.gather(*self._tasks)

    async def _ask_on(self) -> None:
        while self._waiting and not self._is_leaving:
            one = self._waiting.pop()
            (got,) = await contents_of_replies(self._client, self._url, [one])
            self.requests.append(one)
            self.got.append(got)


@on_every_fleet
async def test_repeated_drains_leave_no_trace_in_any_answer(client: httpx.AsyncClient, fleet: str) -> None:
    """Each drain pauses the engine's turns at whatever token they have reached; they continue on another engine."""
    settings = [engine_of(kind, speed_up=2, seed=n) for n, kind in enumerate(PAIRS[fleet])]
    async with fleet_of(*settings) as engines, running_gateway(*engines, **ENDURING) as gateway:
        ids = [engine["id"] for engine in await engines_of(client, gateway.url)]
        moved = 0
        async with SustainedLoad(client, gateway.url, requests_of_all_kinds(10, 2000, fleet)) as load:
            for drained in (0, 1) * 3:
                await eventually(lambda n=drained: has_legs(client, gateway.url, n, 3), 120)
                moved += (await engines_of(client, gateway.url))[drained]["num_legs"]
                url = f"{gateway.url}/v1/engines/{ids[drained]}"
                answer = await client.post(f"{url}/drain?timeout_s=60", headers=ADMIN, timeout=90)
                assert answer.json()["is_drained"] and answer.json()["token_legs"]
                await client.post(f"{url}/uncordon", headers=ADMIN)
    assert moved > 6
    assert not (found := differences(await undisturbed_contents(load.requests, fleet), load.got, load.requests)), (
        "\n".join(found[:3])
    )


@on_every_fleet
async def test_an_engine_that_hangs_in_mid_turn_loses_no_turn(client: httpx.AsyncClient, fleet: str) -> None:
    """An engine stalls with its turns, which continue on the other."""
    settings = [engine_of(kind, speed_up=4, seed=n) for n, kind in enumerate(PAIRS[fleet])]
    impatient: dict[str, Any] = ENDURING | {"silence_timeout_s": 2, "stall_timeout_s": 2, "observe_interval_s": 0.5}
    async with fleet_of(*settings) as engines, running_gateway(*engines, **impatient) as gateway:
        async with SustainedLoad(client, gateway.url, requests_of_all_kinds(20, 2000, fleet)) as load:
            await eventually(lambda: has_legs(client, gateway.url, 0, 3), 120)
            await stall(client, engines[0], settings[0].dialect)
            await eventually(lambda: has_failed_over(client, gateway.url), 120)
        await resume(client, engines[0], settings[0].dialect)
    assert not (found := differences(await undisturbed_contents(load.requests, fleet), load.got, load.requests)), (
        "\n".join(found[:3])
    )


async def has_failed_over(client: httpx.AsyncClient, url: str) -> bool:
    return count_of((await client.get(url + "/metrics")).text, 'heddle_retried_legs_total{fault="engine"}') >= 3


async def stall(client: httpx.AsyncClient, engine: str, dialect: str) -> None:
    if dialect == "vllm":
        await client.post(engine + "/pause?mode=keep&clear_cache=false")
    else:
        await client.post(engine + "/pause_generation", json={"mode": "in_place"})


async def resume(client: httpx.AsyncClient, engine: str, dialect: str) -> None:
    await client.post(engine + ("/resume" if dialect == "vllm" else "/continue_generation"), json={})


async def engines_of(client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await client.get(url + "/v1/engines")).json()["data"]
    return listed


async def has_legs(client: httpx.AsyncClient, url: str, number: int, num: int) -> bool:
    return bool((await engines_of(client, url))[number]["num_legs"] >= num)


@on_every_fleet
async def test_preempted_turns_lose_nothing(client: httpx.AsyncClient, tmp_path: Path, fleet: str) -> None:
    """The scheduler's own Preempt, over and over: a leg is stopped at its engine, and the turn continues when a slot is
    free."""
    settings = [engine_of(kind, speed_up=1, seed=n) for n, kind in enumerate(PAIRS[fleet])]
    preempting: dict[str, Any] = {"policy": "remaining-first", "preempt_after_s": 0.0}

    async def play(round_number: int) -> bool:
        requests = requests_of_all_kinds(77 + round_number, 40, fleet)
        event_log = tmp_path / f"{round_number}.jsonl"
        async with fleet_of(*settings) as engines:
            chosen: list[Any] = [{"url": engine, "slots": 6} for engine in engines]
            async with running_gateway(*chosen, **ENDURING | preempting, event_log=str(event_log)) as gateway:
                got = asyncio.create_task(contents_of_replies(client, gateway.url, requests))
                for num in range(12):
                    urgent = body_of(90_000 + num, "plain", "chat", False) | {"max_tokens": 2, "nvext": URGENT}
                    assert (await ask(client, gateway.url, "chat", urgent)).is_finished("chat")
                received = await got
        assert not (found := differences(await undisturbed_contents(requests, fleet), received, requests)), "\n".join(
            found[:3]
        )
        log = event_log.read_text()
        return min(log.count('"Preempt"'), log.count('"TurnPaused"')) > 5

    await play_rounds("more than five turns were preempted", play)


@on_every_fleet
async def test_a_killed_engine_loses_no_turn(client: httpx.AsyncClient, fleet: str) -> None:
    """Every turn continues from its last token on the remaining engine."""
    second_kind, first_kind = PAIRS[fleet]  # in a mixed fleet SGLang dies; the drains test the other way
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serve_engine(engine_of(first_kind, speed_up=4)))
        async with (
            serve_engine(engine_of(second_kind, speed_up=20)) as second,
            running_gateway(first, second, **ENDURING) as gateway,
            SustainedLoad(client, gateway.url, requests_of_all_kinds(5, 2000, fleet)) as load,
        ):
            await eventually(lambda: has_legs(client, gateway.url, 0, 6), 120)
            await stack.aclose()
    assert not (found := differences(await undisturbed_contents(load.requests, fleet), load.got, load.requests)), (
        "\n".join(found[:3])
    )


async def test_a_call_that_only_its_first_engine_can_end_waits_for_that_engine(client: httpx.AsyncClient) -> None:
    """SGLang returns nothing of a call that the limit truncates. The turn returns to vLLM, and the client gets all of
    it.

    The exception, on a slow machine: if the client had received nothing of the call yet, SGLang's empty answer is
    final.
    """
    settings = engine_of("vllm", speed_up=0.1), engine_of("sglang", speed_up=20)

    async def play(round_number: int) -> bool:
        requests = [
            ("chat", body_of(31_000 + 100 * round_number + n, "tools", "chat", True) | {"max_tokens": 24})
            for n in range(12)
        ]
        async with fleet_of(*settings) as engines, running_gateway(*engines, **ENDURING) as gateway:
            first, second = [
                f"{gateway.url}/v1/engines/{engine['id']}" for engine in await engines_of(client, gateway.url)
            ]
            await client.post(f"{second}/cordon", headers=ADMIN)
            fault = Fault("die", after_chunks=5, count=12, path=GENERATE["vllm"])
            await client.post(engines[0] + "/simulate/faults", json={"faults": [asdict(fault)]})
            got = asyncio.create_task(contents_of_replies(client, gateway.url, requests))
            await eventually(lambda: has_legs(client, gateway.url, 0, 12), 60)
            await client.post(f"{second}/uncordon", headers=ADMIN)
            await client.post(f"{first}/cordon", headers=ADMIN)

            async def was_refused() -> bool:
                metrics = (await client.get(gateway.url + "/metrics")).text
                return got.done() or count_of(metrics, 'heddle_retried_legs_total{fault="busy"}') > 0

            await eventually(was_refused, 60)
            has_waited = not got.done()
            await client.post(f"{first}/uncordon", headers=ADMIN)
            received, expected = await got, await undisturbed_contents(requests)
            expected = [
                want | {"text": "", "calls": []} if not reply["text"] and not reply["calls"] else want
                for want, reply in zip(expected, received, strict=True)
            ]
            assert not (found := differences(expected, received, requests)), "\n".join(found[:3])
        return has_waited

    await play_rounds("a call of which the client had a part was truncated at the other engine", play)


@pytest.mark.parametrize(("kind", "stream"), [("vllm", False), ("sglang", True)])
async def test_a_restarted_gateway_continues_from_its_stored_tokens(
    client: httpx.AsyncClient, tmp_path: Path, kind: str, stream: bool
) -> None:
    """A request that is repeated after a restart gets the whole answer; stored tokens are not generated again."""
    num, length = 12, 400

    async def play(round_number: int) -> bool:
        bodies = [body_of(number, "plain", "chat", stream) | {"max_tokens": length} for number in range(num)]
        async with serve_engine(engine_of(kind, speed_up=2 ** (1 - round_number))) as engine:
            store = f"sqlite:{tmp_path / f'heddle-{round_number}.sqlite3'}"
            options = ("--engine", engine, "--store", store)
            environment = {"HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_SAVE_TOKENS_S": "0.05"}
            async with gateway_process(*options, **environment) as gateway:

                async def one(number: int) -> Reply:
                    while True:
                        with contextlib.suppress(httpx.TransportError):
                            named = {"x-trajectory-id": f"killed-{number}"}
                            return await ask(client, gateway.url, "chat", bodies[number], named)
                        await asyncio.sleep(0.05)

                pending = asyncio.gather(*map(one, range(num)))

                async def is_half_generated() -> bool:
                    return await generated_by(client, engine) > num * length / 2

                async def is_idle() -> bool:
                    return await sum_of(client, engine, RUNNING) == 0

                await eventually(is_half_generated, 60)
                await gateway.kill()
                await eventually(is_idle, 60)
                generated_at_kill, stored = await generated_by(client, engine), await tokens_written(store)
                await gateway.start()
                replies = await pending
            generated = await generated_by(client, engine)
        asked_for = [("chat", body) for body in bodies]
        got = [content_of(one, stream) for one in replies]
        assert not (found := differences(await undisturbed_contents(asked_for), got, asked_for)), "\n".join(found[:3])
        assert generated - num * length <= generated_at_kill - stored, "stored tokens are not generated again"
        return stored > num * length / 4

    await play_rounds("many tokens were stored of turns that ran when the gateway was killed", play)


async def test_a_character_that_a_second_leg_made_otherwise_is_restored_as_it_made_it(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """The first leg breaks off within a character, after its tokens were stored. They stayed in the store, before what
    the second leg made instead of them: the next process went on from tokens that were never sampled in that order."""
    begun, half, rest = (Tokenizer().encode(text) for text in (" one two", "🙂", " then more text at last"))
    pieces = [
        (" one two", [*begun, half[0]], None),
        (" then more text", rest[:3], None),
        (" at last", rest[3:], "stop"),
    ]
    has_hung, may_end = asyncio.Event(), asyncio.Event()
    asked_for: list[list[int]] = []

    async def play(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        asked_for.append(asked.json["token_ids"])
        if len(asked_for) == 3:  # until the gateway stops
            has_hung.set()
            await may_end.wait()
            return
        text, ids, reason = pieces[min(len(asked_for), 3) - 1]
        entries = [{"token": "", "logprob": -float(id % 7), "bytes": None, "top_logprobs": []} for id in ids]
        choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": {"content": entries}, "finish_reason": reason}
        await write(
            b"data: " + orjson.dumps({"request_id": "g", "choices": [choice | {"stop_reason": None}]}) + b"\n\n"
        )

    settings: dict[str, Any] = {
        "token_legs": "auto",
        "store": f"sqlite:{tmp_path}/heddle.sqlite3",
        "save_tokens_s": 1e-9,
    }
    body, named = body_of(0, "plain", "chat", False), {"x-trajectory-id": "a"}
    async with recorded_engine(engine_of("vllm")) as engine:
        engine.scripts["/inference/v1/generate"] = Script(play)
        async with running_gateway(engine.url, **settings) as gateway:
            unanswered = asyncio.create_task(ask(client, gateway.url, "chat", body, named))
            await has_hung.wait()
        may_end.set()
        with contextlib.suppress(httpx.TransportError):
            assert (await unanswered).status == 503
        async with running_gateway(engine.url, **settings) as gateway:
            assert (await ask(client, gateway.url, "chat", body, named)).status == 200
            shown = (await client.get(f"{gateway.url}/v1/trajectories/a/tokens")).json()
    prompt, again, *later = asked_for
    assert again == prompt + begun, "the half of the character is made again"
    assert later == [prompt + begun + rest[:3]] * 2
    [turn] = shown["turns"]
    assert turn["output_ids"] == begun + rest
    assert turn["logprobs"] == [-float(id % 7) for id in begun + rest]


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
async def test_a_choice_that_had_ended_is_not_continued_behind_its_end(
    client: httpx.AsyncClient, tmp_path: Path, field: str
) -> None:
    """The gateway stops while another choice of the turn still runs. The next process had the engine go on behind the
    token that had ended the first one, unless that has no text."""
    ended, begun, rest = (Tokenizer().encode(text) for text in (" one two", " then more", " text at last"))
    stop: Any = "two" if field == "stop" else ended[-1]
    may_end = asyncio.Event()
    asked_for: dict[bool, list[list[int]]] = {True: [], False: []}  # by whether it is for the first choice

    async def play(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        is_first = not asked.json["request_id"].endswith(".1")
        prompts = asked_for[is_first]
        prompts.append(asked.json["token_ids"])
        is_again = len(prompts) > 1
        if is_first:
            text, ids, reason = ("", ended[-1:], "stop") if is_again else (" one ", ended, "stop")
        else:
            text, ids, reason = (" text at last", [*rest, END], "stop") if is_again else (" then more", begun, None)
        entries = [{"token": "", "logprob": -float(id % 7), "bytes": None, "top_logprobs": []} for id in ids]
        choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": {"content": entries}, "finish_reason": reason}
        choice["stop_reason"] = stop if is_first else None
        event = orjson.dumps({"request_id": "g", "choices": [choice]})
        await write(b"data: %b\n\n" % event + (b"data: [DONE]\n\n" if reason else b""))
        if reason is None:
            await may_end.wait()

    settings: dict[str, Any] = {
        "token_legs": "auto",
        "store": f"sqlite:{tmp_path}/heddle.sqlite3",
        "save_tokens_s": 1e-9,
    }
    body, named = body_of(0, "plain", "chat", False) | {"n": 2, field: [stop]}, {"x-trajectory-id": "a"}
    async with recorded_engine(engine_of("vllm")) as engine:
        engine.scripts["/inference/v1/generate"] = Script(play)
        async with running_gateway(engine.url, **settings) as gateway:

            async def has_come() -> bool:
                shown = (await client.get(f"{gateway.url}/v1/trajectories/a")).json()
                return [turn["chunks"] for turn in shown.get("live_turns", ())] == [len(ended) + len(begun)]

            unanswered = asyncio.create_task(ask(client, gateway.url, "chat", body, named))
            await eventually(has_come)
        may_end.set()
        with contextlib.suppress(httpx.TransportError):
            assert (await unanswered).status == 503
        async with running_gateway(engine.url, **settings) as gateway:
            assert (await ask(client, gateway.url, "chat", body, named)).status == 200
            shown = (await client.get(f"{gateway.url}/v1/trajectories/a/tokens")).json()
    prompt = asked_for[True][0]
    assert asked_for == {True: [prompt, prompt + ended[:-1]], False: [prompt, prompt + begun]}
    made = {turn["turn_id"].partition("/")[2]: turn for turn in shown["turns"]}
    assert {index: turn["output_ids"] for index, turn in made.items()} == {"": ended, "1": [*begun, *rest, END]}
    for turn in made.values():
        assert turn["logprobs"] == [-float(id % 7) for id in turn["output_ids"]]


async def test_stored_tokens_behind_a_lost_part_do_not_come_back(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """The store lost a part of a turn's tokens, as it does when its queue is full, and the gateway stops twice. What
    the second process wrote ended where a later part still was: the third process went on from tokens of both, which
    were never sampled in that order."""
    made = [Tokenizer().encode(text) for text in (" aa bb cc dd", " ee ff gg hh")]
    asked_for: list[list[int]] = []
    has_hung, may_end = asyncio.Event(), asyncio.Event()
    url, store_url = "", f"sqlite:{tmp_path}/heddle.sqlite3"

    async def has_come(num: int) -> bool:
        shown = (await client.get(f"{url}/v1/trajectories/a")).json()
        return [turn["chunks"] for turn in shown.get("live_turns", ())] == [num]

    async def play(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        asked_for.append(asked.json["token_ids"])
        num_made = len(asked_for[-1]) - len(asked_for[0])
        for id in made[len(asked_for) - 1] if len(asked_for) < 3 else [END]:
            entry = {"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []}
            choice = {"index": 0, "text": "", "token_ids": [id], "logprobs": {"content": [entry]}, "stop_reason": None}
            choice["finish_reason"] = "stop" if id == END else None
            await write(b"data: %b\n\n" % orjson.dumps({"request_id": "g", "choices": [choice]}))
            num_made += 1
            if id != END:  # each token is a part of its own
                await eventually(lambda num=num_made: has_come(num))
        has_hung.set()
        await may_end.wait()

    settings: dict[str, Any] = {"token_legs": "auto", "store": store_url, "save_tokens_s": 1e-9}
    body, named = body_of(0, "plain", "chat", False), {"x-trajectory-id": "a"}
    async with recorded_engine(engine_of("vllm")) as engine:
        engine.scripts["/inference/v1/generate"] = Script(play)
        for is_first in (True, False):
            has_hung.clear()
            may_end.clear()
            async with running_gateway(engine.url, **settings) as gateway:
                url = gateway.url
                unanswered = asyncio.create_task(ask(client, url, "chat", body, named))
                await has_hung.wait()
            may_end.set()
            with contextlib.suppress(httpx.TransportError):
                assert (await unanswered).status == 503
            if is_first:
                store = open_store(store_url)
                await store.open()
                store.drop_pieces("a", sorted(await store.get_pieces("a", "partial/"))[2])
                await store.close()
        async with running_gateway(engine.url, **settings) as gateway:
            assert (await ask(client, gateway.url, "chat", body, named)).status == 200
    prompt, *later = asked_for
    assert later == [prompt + made[0][:2], prompt + made[0][:2] + made[1]]


@pytest.mark.parametrize("is_same", [True, False])
async def test_stored_tokens_of_another_prompt_are_not_continued(
    client: httpx.AsyncClient, tmp_path: Path, is_same: bool
) -> None:
    """The first turn's thoughts, which the client leaves out, are in the second one's prompt only where they fit into
    the context. The next process has an engine of another context, and went on from tokens that were made behind
    the thoughts: the record had a prompt behind which they were never sampled."""
    answers = ["<think> plan" + " with care" * 150 + "</think>done", " one two", " then more at last"]
    asked_for: list[list[int]] = []
    has_hung, may_end = asyncio.Event(), asyncio.Event()

    async def play(asked: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        asked_for.append(asked.json["token_ids"])
        text = answers[len(asked_for) - 1]
        is_second = len(asked_for) == 2
        ids = Tokenizer().encode(text) + ([] if is_second else [END])
        entries = [{"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]
        choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": {"content": entries}, "stop_reason": None}
        choice["finish_reason"] = None if is_second else "stop"
        await write(b"data: %b\n\n" % orjson.dumps({"request_id": "g", "choices": [choice]}))
        if is_second:
            has_hung.set()
            await may_end.wait()

    settings: dict[str, Any] = {
        "token_legs": "auto",
        "store": f"sqlite:{tmp_path}/heddle.sqlite3",
        "save_tokens_s": 1e-9,
    }
    named = {"x-trajectory-id": "a"}
    first = body_of(0, "plain", "chat", False) | {"max_tokens": 500}
    done, more = {"role": "assistant", "content": "done"}, {"role": "user", "content": "go on"}
    second = first | {"messages": [*first["messages"], done, more]}
    async with recorded_engine(engine_of("vllm", max_model_len=4_000)) as engine:
        engine.scripts["/inference/v1/generate"] = Script(play)
        async with running_gateway(engine.url, **settings) as gateway:
            assert (await ask(client, gateway.url, "chat", first, named)).status == 200
            unanswered = asyncio.create_task(ask(client, gateway.url, "chat", second, named))
            await has_hung.wait()
            await eventually(lambda: has_chunks(client, gateway.url))
        may_end.set()
        with contextlib.suppress(httpx.TransportError):
            assert (await unanswered).status == 503
        async with recorded_engine(engine_of("vllm", max_model_len=4_000 if is_same else 700)) as other:
            other.scripts["/inference/v1/generate"] = Script(play)
            async with running_gateway(other.url, **settings) as gateway:
                assert (await ask(client, gateway.url, "chat", second, named)).status == 200
                shown = (await client.get(f"{gateway.url}/v1/trajectories/a/tokens")).json()
    _, before, after = asked_for
    begun, rest = (Tokenizer().encode(text) for text in answers[1:])
    turn = shown["turns"][-1]
    if is_same:
        assert after == before + begun and turn["output_ids"] == [*begun, *rest, END]
    else:
        assert len(after) < len(before) and turn["output_ids"] == [*rest, END]


async def has_chunks(client: httpx.AsyncClient, url: str) -> bool:
    """Whether some of a running turn has come."""
    shown = (await client.get(f"{url}/v1/trajectories/a")).json()
    return any(turn["chunks"] for turn in shown.get("live_turns", ()))


MADE = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")


async def generated_by(client: httpx.AsyncClient, engine: str) -> float:
    return await sum_of(client, engine, MADE)


async def sum_of(client: httpx.AsyncClient, engine: str, metric: tuple[str, ...]) -> float:
    page = (await client.get(engine + "/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(metric))
