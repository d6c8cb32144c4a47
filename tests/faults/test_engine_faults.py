"""Engines that fail a turn: before any of the answer is out, the turn goes elsewhere; afterwards, the client gets an
error."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.children import free_port
from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.faults.asking import APIS, PATHS, are_waiting, ask, body_of, check_error
from tests.faults.raw_engine import (
    CHAT_EVENT,
    STREAM_HEAD,
    Answer,
    RawEngine,
    chunk,
    endless_body,
    endless_headers,
    hangs,
    raw_engine,
    resets,
    whole,
    writes,
)
from tests.support.engine import Asked, Script, recorded_engine
from tests.support.gateway import ADMIN, eventually, running_gateway
from tests.support.rounds import play_rounds

HALF = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"choices": [{"in'
ASLEEP = (
    b'vllm:num_requests_running{engine="0"} 1\n'
    b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0\nprocess_start_time_seconds 1000.0\n'
)
FINISHED = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]'

ROLE_EVENT = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
ABORT_EVENT = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'

# What an engine may do before the client has received any of the answer.
BEFORE_FIRST_BYTE: dict[str, Answer] = {
    "reset": resets,
    "500": writes(whole(b'{"error":{"message":"EngineCore died","code":500}}', b"500 Internal Server Error")),
    "503": writes(whole(b'{"error":{"message":"overloaded","code":503}}', b"503 Service Unavailable")),
    "bad JSON": writes(whole(b'{"choices": [{"index": 0, "mess')),
    "bad JSON that looks finished": writes(whole(b"<" + FINISHED)),
    "cut JSON that looks finished": writes(whole(FINISHED)),
    "cut JSON that ends with its connection": writes(b"HTTP/1.0 200 OK\r\n\r\n" + FINISHED[:-1]),
    "HTML with 200": writes(whole(b"<html>welcome</html>", content_type=b"text/html")),
    "HTML with 502": writes(whole(b"<html>bad gateway</html>", b"502 Bad Gateway", b"text/html")),
    "not HTTP": writes(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "text": writes(whole(b"I am a teapot", content_type=b"text/plain")),
    "no head": writes(b""),
    "half a head": writes(b"HTTP/1.1 200 OK\r\ncontent-ty"),
    "endless headers": endless_headers,
    "half a body": writes(HALF),
    "endless body": endless_body,
    "redirect": writes(whole(b"", b"302 Found")),
    "empty": writes(whole(b"")),
    "null": writes(whole(b"null")),
}
# What a stream may do in addition, after its status line and before its first content.
BEFORE_CONTENT: dict[str, Answer] = {
    "only a head": writes(STREAM_HEAD),
    "ends at once": writes(STREAM_HEAD + b"0\r\n\r\n"),
    "error event": writes(STREAM_HEAD + chunk(b'data: {"error":{"message":"no","code":503}}\n\n') + b"0\r\n\r\n"),
    "half an event": writes(STREAM_HEAD + chunk(CHAT_EVENT[:30])),
    "nonsense event": writes(STREAM_HEAD + chunk(b'data: {"id": "c, "choices": <html>\n\n') + b"0\r\n\r\n"),
    "not chunked": writes(STREAM_HEAD + b"zzz" + CHAT_EVENT),
    "a role, then nothing": writes(STREAM_HEAD + chunk(ROLE_EVENT)),
    "a role, then an abort": writes(STREAM_HEAD + chunk(ROLE_EVENT) + chunk(ABORT_EVENT) + b"0\r\n\r\n"),
    "a role, then an end": writes(STREAM_HEAD + chunk(ROLE_EVENT) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"),
    "aborted": writes(STREAM_HEAD + chunk(ABORT_EVENT) + b"0\r\n\r\n"),
}
BUSY = [BEFORE_FIRST_BYTE["503"], BEFORE_CONTENT["error event"], BEFORE_CONTENT["aborted"]]
BUSY += [BEFORE_CONTENT[f"a role, then an {end}"] for end in ("abort", "end")]
FAULTS = [(name, answer, stream) for name, answer in BEFORE_FIRST_BYTE.items() for stream in (False, True)]
FAULTS += [(name, answer, True) for name, answer in BEFORE_CONTENT.items()]


@pytest.mark.parametrize(
    ("answer", "stream"),
    [pytest.param(answer, stream, id=f"{name}-{'stream' if stream else 'whole'}") for name, answer, stream in FAULTS],
)
async def test_a_turn_that_fails_before_its_first_byte_goes_to_another_engine(
    client: httpx.AsyncClient, answer: Answer, stream: bool
) -> None:
    """The client gets a whole answer and nothing of the failed engine. If that engine is alone, its attempts are
    limited (for a busy one, their time), and the client gets an error in OpenAI's form."""
    limits: dict[str, Any] = {
        "retry_pause_s": 0, "queue_timeout_s": 2, "max_answer_bytes": 100_000, "faults_to_open": 100
    }  # fmt: skip
    is_hopeless = answer is endless_body and not stream
    async with (
        raw_engine(answer) as bad,
        serve_engine(SimulatedEngineSettings(speed_up=50)) as good,
    ):

        async def is_refused_alone(number: int) -> bool:
            patience_s = 2 << number
            async with running_gateway(bad.url, **limits | {"queue_timeout_s": patience_s}) as gateway:
                alone = await ask(client, gateway.url, "chat", body_of("chat", stream))
                assert alone.status in (502, 503)
                assert alone.error("chat")
                assert bad.posts
                engines = (await client.get(gateway.url + "/v1/engines")).json()["data"]
                assert engines[0]["num_legs"] == 0
                [num_legs] = [turn["legs"] for turn in await turns_of(client, gateway.url, alone)]
                if answer in BUSY:
                    assert num_legs <= patience_s + 2, "once a second, until queue_timeout_s"
                    return num_legs > 1
                assert num_legs == (1 if is_hopeless else 3), "max_attempts"
                return True

        await play_rounds("an engine that is busy was tried again in time", is_refused_alone)
        if is_hopeless:
            return
        bad.posts.clear()
        async with running_gateway(bad.url, good, **limits | {"retry_pause_s": 30}) as gateway:
            pending = [ask(client, gateway.url, "chat", body_of("chat", stream, text=f"hello {n}")) for n in range(4)]
            replies = await asyncio.gather(*pending)
            assert all(one.is_finished("chat") for one in replies), replies
            assert bad.posts, "one of four turns went to the bad engine first"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", ["die", "reset", "nonsense"])
async def test_a_stream_that_breaks_after_its_first_event_ends_with_an_error_event(
    client: httpx.AsyncClient, api: str, kind: Any
) -> None:
    """What is out cannot be taken back: no retry and no silence, but an error in the API's own form."""
    fault = Fault(kind, after_chunks=3, path=PATHS[api])
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=5, faults=(fault,))) as bad,
        running_gateway(bad, retry_pause_s=0) as gateway,
    ):
        reply = await ask(client, gateway.url, api, body_of(api, stream=True, tokens=20))
        assert reply.status == 200
        assert len(reply.events) >= 2
        assert reply.error(api)
        turns = await turns_of(client, gateway.url, reply)
        assert [(turn["outcome"], turn["legs"]) for turn in turns] == [("failed", 1)]


OPENINGS = {
    "responses": (
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"opening"}}\n\n'
        b'event: response.in_progress\ndata: {"type":"response.in_progress","response":{"id":"opening"}}\n\n'
    ),
    "messages": (
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"opening","role":"assistant"}}\n\n'
    ),
}
ANSWERS = {
    "responses": (
        b"event: response.completed\n"
        b'data: {"type":"response.completed","response":{"id":"opening","status":"completed","output":[]}}\n\n'
    ),
    "messages": (
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    ),
}
FULL = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"The queue is full."}}\n\n'


@pytest.mark.parametrize("api", OPENINGS)
@pytest.mark.parametrize("end", [b"", chunk(FULL)], ids=["breaks off", "error"])
async def test_a_stream_that_fails_after_its_opening_goes_to_another_engine(
    client: httpx.AsyncClient, api: str, end: bytes
) -> None:
    """Engines open these streams before they accept the request. The client gets one opening."""
    async with (
        raw_engine(writes(STREAM_HEAD + chunk(OPENINGS[api]) + end)) as bad,
        serve_engine(SimulatedEngineSettings(speed_up=50)) as good,
        running_gateway(bad.url, good, retry_pause_s=30) as gateway,
    ):
        pending = [ask(client, gateway.url, api, body_of(api, True, text=f"hello {n}")) for n in range(4)]
        replies = await asyncio.gather(*pending)
        assert all(one.is_finished(api) and "opening" not in one.text for one in replies), replies
        assert bad.posts, "one of four turns went to the bad engine first"


@pytest.mark.parametrize("api", OPENINGS)
async def test_an_opened_stream_waits_as_one_that_is_not(client: httpx.AsyncClient, api: str) -> None:
    """Until its first token it gets comments, and `turn_timeout_s` applies."""
    is_told = asyncio.Event()

    async def open_and_wait(_: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        await write(OPENINGS[api])
        await is_told.wait()
        await write(ANSWERS[api])

    settings = {"heartbeat_s": 1, "silence_timeout_s": 0.5, "turn_timeout_s": 60}
    async with (
        recorded_engine(SimulatedEngineSettings(speed_up=50)) as engine,
        running_gateway(engine.url, **settings) as gateway,
    ):
        engine.scripts[PATHS[api]] = Script(open_and_wait)
        async with client.stream("POST", gateway.url + PATHS[api], json=body_of(api, stream=True)) as answer:
            text = ""
            async for piece in answer.aiter_text():
                text += piece
                if text.count(": waiting") == 2:
                    is_told.set()
    assert text.startswith(": waiting\n\n: waiting\n\n")
    assert text.endswith((OPENINGS[api] + ANSWERS[api]).decode())


@pytest.mark.parametrize("api", ["chat", "completions", "messages"])
async def test_an_answer_that_its_engine_aborts_is_made_again(client: httpx.AsyncClient, api: str) -> None:
    """vLLM ends it with 200: as `abort`, or on its messages route with no stop reason. On responses it cannot be told
    from an answer."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=1)) as engine,
        running_gateway(engine, retry_pause_s=0) as gateway,
    ):
        asking = asyncio.create_task(ask(client, gateway.url, api, body_of(api, tokens=100)))

        async def generates() -> bool:
            samples = (await client.get(engine + "/metrics")).text.splitlines()
            return any(float(one.split()[-1]) > 0 for one in samples if one.startswith("vllm:generation_tokens_total"))

        await eventually(generates, 60)
        await client.post(engine + "/abort_requests")
        reply = await asking
        assert reply.is_finished(api)
        usage = reply.json["usage"]
        assert usage["output_tokens" if api == "messages" else "completion_tokens"] == 100
        turns = await turns_of(client, gateway.url, reply)
        assert [(turn["outcome"], turn["legs"]) for turn in turns] == [("finished", 2)]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["refuse", "error", "html", "reset"])
async def test_every_api_fails_over_to_another_engine(
    client: httpx.AsyncClient, api: str, stream: bool, kind: Any
) -> None:
    """An engine that fails every request of an API, beside one that serves them."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50, faults=(Fault(kind, path=PATHS[api]),))) as bad,
        serve_engine(SimulatedEngineSettings(speed_up=50)) as good,
        running_gateway(bad, good) as gateway,
    ):
        pending = [ask(client, gateway.url, api, body_of(api, stream, text=f"hello {n}")) for n in range(4)]
        replies = await asyncio.gather(*pending)
        assert all(one.is_finished(api) for one in replies), replies
        legs = [turn["legs"] for one in replies for turn in await turns_of(client, gateway.url, one)]
        assert max(legs) > 1, "one of four turns went to the bad engine first"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_kills_engines_kills_two(client: httpx.AsyncClient, stream: bool) -> None:
    """SGLang's process dies of more `top_logprobs` than its vocabulary has. The third engine is not asked, and no SDK
    repeats the request; another turn is served there."""
    asked: list[int] = []
    ending: list[asyncio.Task[None]] = []
    async with AsyncExitStack() as stack:
        lives = [await stack.enter_async_context(AsyncExitStack()) for _ in range(3)]

        def dies(number: int) -> Answer:
            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                asked.append(number)
                await writes(b"HTTP/1.1 200 OK")(reader, writer)  # else a reused connection could have been closed
                await eventually(lambda: num_lost(len(asked) - 1))
                ending.append(asyncio.create_task(lives[number].aclose()))
                await asyncio.sleep(60)  # until the process is gone

            return answer

        async def num_lost(num: int) -> bool:
            return list((await engine_states(client, gateway.url)).values()).count("lost") == num

        engines = [await life.enter_async_context(raw_engine(dies(number))) for number, life in enumerate(lives)]
        # With a heartbeat, a stream that waits for long has begun, with 200.
        settings: dict[str, Any] = {"observe_interval_s": 0.05, "max_attempts": 9, "heartbeat_s": 600}
        gateway = await stack.enter_async_context(running_gateway(*[one.url for one in engines], **settings))
        reply = await ask(client, gateway.url, "chat", body_of("chat", stream))
        assert (reply.status, reply.error("chat")["code"]) == (502, "engines_killed")
        assert "max_killed_engines" in reply.error("chat")["message"]
        assert reply.headers["x-should-retry"] == "false" and "retry-after" not in reply.headers
        assert len(asked) == 2
        (spared,) = (engine for number, engine in enumerate(engines) if number not in asked)
        spared.answer = writes(whole(FINISHED + b"}"))
        assert (await ask(client, gateway.url, "chat", body_of("chat", text="again"))).is_finished("chat")
        await asyncio.gather(*ending)


@pytest.mark.parametrize("what", ["silent", "hangs", "asleep"])
async def test_engines_that_may_be_alive_are_not_blamed_on_the_turn(client: httpx.AsyncClient, what: str) -> None:
    """Overload, the network, a disk that all share, or a trainer that lets all engines sleep may be the reason, for
    every engine and every turn: it goes on at a third."""
    async with AsyncExitStack() as stack:
        engines: list[RawEngine] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = [engine for engine in engines if engine.posts]
            if len(asked) > 2:
                await writes(whole(FINISHED + b"}"))(reader, writer)
            for engine in asked:
                engine.watched = what != "silent"
                engine.running = int(what == "hangs")
                engine.page = ASLEEP if what == "asleep" else None
            await hangs(reader, writer)

        engines += [await stack.enter_async_context(raw_engine(answer)) for _ in range(3)]
        settings: dict[str, Any] = {"observe_interval_s": 0.05, "observe_timeout_s": 0.2, "retry_pause_s": 60}
        settings["stall_timeout_s"] = 0.2 if what == "hangs" else 60
        gateway = await stack.enter_async_context(running_gateway(*[one.url for one in engines], **settings))
        reply = await ask(client, gateway.url, "chat", body_of("chat"))
        assert reply.is_finished("chat"), reply
        assert [len(engine.posts) for engine in engines] == [1, 1, 1]


async def test_engines_that_are_removed_are_not_blamed_on_the_turn(client: httpx.AsyncClient) -> None:
    """A fleet that shrinks twice under a long turn has killed nothing."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(raw_engine(hangs)) for _ in range(3)]
        gateway = await stack.enter_async_context(running_gateway(*[one.url for one in engines]))
        pending = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat")))
        for _ in range(2):
            await eventually(lambda: any(engine.posts for engine in engines))
            (asked,) = (engine for engine in engines if engine.posts)
            engines.remove(asked)
            if len(engines) == 1:
                engines[0].answer = writes(whole(FINISHED + b"}"))
            url = f"{gateway.url}/v1/engines/{asked.url.removeprefix('http://')}"
            assert (await client.delete(url, headers=ADMIN)).status_code == 200
        assert (await pending).is_finished("chat")


async def test_engines_that_die_after_tokens_are_not_blamed_on_the_turn(client: httpx.AsyncClient) -> None:
    """Its request did not kill them, so it goes on at a third."""
    slow = SimulatedEngineSettings(dialect="sglang", speed_up=1)
    async with AsyncExitStack() as stack:
        lives = [await stack.enter_async_context(AsyncExitStack()) for _ in range(3)]
        alive = {await life.enter_async_context(serve_engine(slow)): life for life in lives}
        settings: dict[str, Any] = {"token_legs": "auto", "observe_interval_s": 0.05}
        gateway = await stack.enter_async_context(running_gateway(*alive, **settings))
        asking = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", tokens=300)))
        serving: list[str] = []

        async def generates() -> bool:
            for url in alive:
                samples = (await client.get(url + "/metrics")).text.splitlines()
                if any(
                    float(one.split()[-1]) > 5 for one in samples if one.startswith("sglang:generation_tokens_total")
                ):
                    serving.append(url)
            return bool(serving)

        for _ in range(2):
            await eventually(generates, 60)
            await alive.pop(serving.pop()).aclose()
        reply = await asking
        assert reply.is_finished("chat") and reply.json["usage"]["completion_tokens"] == 300
        assert [turn["legs"] for turn in await turns_of(client, gateway.url, reply)] == [3]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_slow_first_byte_is_waited_for(client: httpx.AsyncClient, stream: bool) -> None:
    """A queue inside the engine is not a fault: one leg, no retry."""
    fault = Fault("slow", delay_s=1.5, path="/v1/chat")
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50, faults=(fault,))) as engine,
        running_gateway(engine, observe_interval_s=0.1) as gateway,
    ):
        reply = await ask(client, gateway.url, "chat", body_of("chat", stream))
        assert reply.is_finished("chat")
        assert [turn["legs"] for turn in await turns_of(client, gateway.url, reply)] == [1]


async def test_a_refused_connection_opens_the_circuit_until_the_relaunch(
    client: httpx.AsyncClient,
) -> None:
    """A turn waits for the only engine while nothing listens there. The relaunched server is a new engine."""
    async with raw_engine(writes(b""), started_at=1.0) as first:
        port = int(first.url.rpartition(":")[2])
        address = first.url.removeprefix("http://")
        async with running_gateway(first.url, observe_interval_s=0.05, retry_pause_s=0) as gateway:
            assert await engine_states(client, gateway.url) == {address: "ready"}
            # The server frees its port when this block exits.
            server = first
    async with running_gateway(f"http://127.0.0.1:{port}", observe_interval_s=0.05, retry_pause_s=0) as gateway:
        assert await engine_states(client, gateway.url) == {address: "lost"}
        refused = await ask(client, gateway.url, "chat", body_of("chat"))
        assert (refused.status, refused.error("chat")["code"]) == (503, "no_engine")
        assert refused.headers["retry-after"]
        async with raw_engine(writes(whole(FINISHED + b"}")), port=port, started_at=2.0):
            await eventually(lambda: is_ready(client, gateway.url))
            assert await engine_states(client, gateway.url) == {address: "ready"}, "first seen, so no new id"
        await eventually(lambda: has_states(client, gateway.url, {address: "lost"}))
        waiting = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat")))
        await eventually(lambda: are_waiting(client, gateway.url, 1))
        async with raw_engine(writes(whole(FINISHED + b"}")), port=port, started_at=3.0):
            reply = await waiting
            assert reply.is_finished("chat")
            assert await engine_states(client, gateway.url) == {f"{address}~2": "ready"}, "another process"
    assert server.posts == []


async def test_a_model_that_an_unseen_engine_may_serve_is_not_said_to_be_unknown(client: httpx.AsyncClient) -> None:
    """A gateway was restarted while the only engine of a second model was away. SDKs do not repeat a 404, which its
    turns got. Once every engine has been seen, a model that none serves is unknown."""
    port = free_port()
    async with (
        serve_engine(SimulatedEngineSettings()) as first,
        running_gateway(first, f"http://127.0.0.1:{port}", observe_interval_s=0.05) as gateway,
    ):
        body = body_of("chat", model="another")
        turn = await client.post(gateway.url + "/v1/chat/completions", json=body)
        passed = await client.post(gateway.url + "/tokenize", json={"model": "another", "prompt": "hello"})
        shown = await client.get(gateway.url + "/v1/models/another")
        for refused in (turn, passed, shown):
            check_error("other", refused, 503, "no_engine")
            assert refused.headers["x-should-retry"] == "true"
            assert "'another'" in refused.json()["error"]["message"]
        assert (await ask(client, gateway.url, "chat", body_of("chat"))).is_finished("chat")
        async with serve_engine(SimulatedEngineSettings(model="another"), port=port):
            await eventually(lambda: knows(client, gateway.url, "another"))
            assert (await ask(client, gateway.url, "chat", body)).is_finished("chat")
            unknown = await client.post(gateway.url + "/v1/chat/completions", json=body | {"model": "third"})
            check_error("other", unknown, 404, "model_not_found")


async def test_a_turn_that_waits_for_a_model_is_told_when_the_model_is_gone(client: httpx.AsyncClient) -> None:
    """It waits while the model's engines are away, for they may come back. Once one has come back with another model,
    it gets what a new turn gets."""
    port = free_port()
    settings = {"observe_interval_s": 0.05, "retry_pause_s": 0, "queue_timeout_s": 60}
    async with running_gateway(f"http://127.0.0.1:{port}", **settings) as gateway:
        async with serve_engine(SimulatedEngineSettings(), port=port):
            await eventually(lambda: knows(client, gateway.url, "simulated"))
        turn = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat")))
        await eventually(lambda: are_waiting(client, gateway.url, 1))
        assert await knows(client, gateway.url, "simulated") and not turn.done()
        async with serve_engine(SimulatedEngineSettings(model="another"), port=port):
            reply = await turn
            assert (reply.status, reply.error("chat")["code"]) == (404, "model_not_found")
            assert reply.headers["x-should-retry"] == "false"
            assert not await knows(client, gateway.url, "simulated")
            again = await ask(client, gateway.url, "chat", body_of("chat"))
            assert (again.status, again.error("chat")["code"]) == (404, "model_not_found")


async def knows(client: httpx.AsyncClient, url: str, model: str) -> bool:
    """Whether a gateway lists this model."""
    return model in {card["id"] for card in (await client.get(url + "/v1/models")).json()["data"]}


@pytest.mark.parametrize(
    "page",
    [
        b"vllm:num_requests_running 1e300\n",
        b"vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 1e300\n",
        b'vllm:num_requests_running 0\nvllm:cache_config_info{block_size="16",num_gpu_blocks="1%s"} 1\n' % (b"0" * 30),
    ],
)
async def test_an_engine_with_impossible_metrics_is_lost(
    client: httpx.AsyncClient, tmp_path: Path, page: bytes
) -> None:
    """It was once ready for the fleet and unknown to the scheduler, and GET /v1/engines returned 500."""
    settings: dict[str, Any] = {"observe_interval_s": 0.05, "event_log": str(tmp_path / "events.jsonl")}
    async with raw_engine(resets, page=page) as engine, running_gateway(engine.url, **settings) as gateway:
        address = engine.url.removeprefix("http://")
        await eventually(lambda: has_states(client, gateway.url, {address: "lost"}))
        (shown,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
        assert shown["last_fault"].startswith("it tells a number that cannot be")


async def test_a_turn_between_two_legs_is_shown_as_waiting(client: httpx.AsyncClient) -> None:
    """The trajectory's record and the counts agree."""
    may_reset = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_reset.wait()
        await resets(reader, writer)

    async with (
        raw_engine(answer) as engine,
        running_gateway(engine.url, retry_pause_s=600) as gateway,
    ):
        body, mine = body_of("chat"), {"x-trajectory-id": "mine"}
        pending = asyncio.create_task(ask(client, gateway.url, "chat", body, mine))

        async def live() -> list[tuple[str, int]]:
            shown = (await client.get(gateway.url + "/v1/trajectories/mine")).json()
            return [(turn["state"], turn["legs"]) for turn in shown.get("live_turns", [])]

        async def shows(state: str, num_waiting: int) -> bool:
            waiting = (await client.get(gateway.url + "/healthz")).json()["waiting_turns"]
            return await live() == [(state, 1)] and waiting == num_waiting

        await eventually(lambda: shows("running", 0))
        reset_at = time.monotonic()
        may_reset.set()
        await eventually(lambda: shows("waiting", 1))

        async def has_waited() -> bool:
            (turn,) = (await client.get(gateway.url + "/v1/trajectories/mine")).json()["live_turns"]
            assert turn["waited_s"] < time.monotonic() - reset_at, "it does not wait while a leg runs"
            return float(turn["waited_s"]) > 0.5

        await eventually(has_waited)  # for the leg to come; it was what it had waited for its first one
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)


async def test_sglang_is_told_to_abort_the_leg_that_it_runs(client: httpx.AsyncClient) -> None:
    """The turn goes on elsewhere at once. The abort named its next leg, so the engine went on with the last one; and if
    both ran there, the new one was aborted."""
    hangs_once = Fault("hang", path=PATHS["chat"], count=1)
    settings = SimulatedEngineSettings(dialect="sglang", faults=(hangs_once,), speed_up=50)
    async with (
        recorded_engine(settings) as one,
        recorded_engine(settings) as two,
        running_gateway(one.url, two.url, turn_timeout_s=1.0, retry_pause_s=0.1) as gateway,
    ):
        reply = await ask(client, gateway.url, "chat", body_of("chat"))
        assert reply.is_finished("chat")
        shown = (await client.get(f"{gateway.url}/v1/trajectories/{reply.headers['x-trajectory-id']}")).json()
        (row,) = shown["turns"]
        assert row["ended_at"] - row["dispatched_at"] > 1.0, "the first leg is the one that the turn waited for"
        for engine in (one, two):
            await eventually(lambda engine=engine: "/abort_request" in [asked.path for asked in engine.seen])
            hung, *_ = [asked.json["rid"] for asked in engine.seen if asked.path == PATHS["chat"]]
            (aborted,) = [asked.json["rid"] for asked in engine.seen if asked.path == "/abort_request"]
            assert aborted == hung


async def test_a_turn_between_two_legs_is_aborted_with_its_trajectory(client: httpx.AsyncClient) -> None:
    """Its history, and the metric behind an alert, said that it failed."""
    async with raw_engine(resets) as engine, running_gateway(engine.url, retry_pause_s=600) as gateway:
        mine = f"{gateway.url}/v1/trajectories/mine"
        pending = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat"), {"x-trajectory-id": "mine"}))

        async def waits_again() -> bool:
            turns = (await client.get(mine)).json().get("live_turns", [])
            return [(turn["state"], turn["legs"]) for turn in turns] == [("waiting", 1)]

        await eventually(waits_again)
        assert (await client.delete(mine)).status_code == 200
        reply = await pending
        assert (reply.status, reply.error("chat")["code"]) == (409, "trajectory_aborted")
        (row,) = (await client.get(mine)).json()["turns"]
        assert row["outcome"] == "aborted"
        page = (await client.get(gateway.url + "/metrics")).text
        assert 'heddle_turns_total{api="chat",outcome="failed"} 0' in page


async def test_an_engine_relaunched_between_two_checks_is_discovered_again(client: httpx.AsyncClient) -> None:
    """Nobody saw the gap, and the new process may serve another model."""
    async with (
        raw_engine(writes(whole(FINISHED + b"}"))) as engine,
        running_gateway(engine.url, observe_interval_s=0.05) as gateway,
    ):
        address = engine.url.removeprefix("http://")
        assert await engine_states(client, gateway.url) == {address: "ready"}
        engine.models, engine.started_at = engine.models.replace(b"simulated", b"another"), 2000.0
        await eventually(lambda: has_states(client, gateway.url, {f"{address}~2": "ready"}))
        assert (await ask(client, gateway.url, "chat", body_of("chat", model="another"))).is_finished("chat")
        unknown = await ask(client, gateway.url, "chat", body_of("chat"))
        assert unknown.error("chat")["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_of_an_engine_whose_metrics_hang_go_to_another(client: httpx.AsyncClient, stream: bool) -> None:
    """It accepts connections and answers nothing. After some checks its circuit opens, and its turns start over."""
    settings: dict[str, Any] = {"observe_interval_s": 0.05, "observe_timeout_s": 0.3}
    async with (
        raw_engine(hangs) as bad,
        serve_engine(SimulatedEngineSettings(speed_up=50)) as good,
        running_gateway(bad.url, **settings) as gateway,
    ):
        pending = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", stream)))
        await eventually(lambda: bad.num_open == 1)
        await add_engine(client, gateway.url, good)
        bad.watched = False
        reply = await pending
        assert reply.is_finished("chat")
        assert reply.headers["x-heddle-engine"] == good.removeprefix("http://")
        await eventually(lambda: bad.num_open == 0)
        bad.watched = True
        await eventually(lambda: is_ready(client, gateway.url, num=2))


@pytest.mark.parametrize("running", [0, 1], ids=["gauge-shows-nothing", "gauge-shows-the-turn"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_whose_token_counter_stalls_is_hung(
    client: httpx.AsyncClient, stream: bool, running: int
) -> None:
    """Its metrics answer, but it generates nothing. A paused vLLM does not even count the request in its gauges."""
    settings: dict[str, Any] = {"observe_interval_s": 0.05, "stall_timeout_s": 0.5}
    async with (
        raw_engine(hangs, running=running) as bad,
        serve_engine(SimulatedEngineSettings(speed_up=50)) as good,
        running_gateway(bad.url, **settings) as gateway,
    ):
        pending = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", stream)))
        await eventually(lambda: bad.num_open == 1)
        await add_engine(client, gateway.url, good)
        reply = await pending
        assert reply.is_finished("chat")
        assert reply.headers["x-heddle-engine"] == good.removeprefix("http://")
        await eventually(lambda: bad.num_open == 0)
        bad.running = 0
        await eventually(lambda: is_ready(client, gateway.url, num=2))


async def test_a_long_generation_never_opens_the_circuit(client: httpx.AsyncClient) -> None:
    """Turns exceed the time limit of a leg, many in a row, and only these turns fail: the engine keeps its others."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=1)) as engine,
        running_gateway(
            engine, turn_timeout_s=0.3, faults_to_open=2, observe_interval_s=30, retry_pause_s=0, max_attempts=2
        ) as gateway,
    ):
        long_stream = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", True, 200, "streams")))
        pending = [ask(client, gateway.url, "chat", body_of("chat", False, 2000, f"hello {n}")) for n in range(4)]
        for reply in await asyncio.gather(*pending):
            assert (reply.status, reply.error("chat")["code"]) == (502, "engine_failed")
            assert [turn["legs"] for turn in await turns_of(client, gateway.url, reply)] == [2]
        assert await engine_states(client, gateway.url) == {engine.removeprefix("http://"): "ready"}
        assert (await long_stream).is_finished("chat")


async def test_an_answer_that_is_too_large_fails_its_turn_and_not_the_engine(client: httpx.AsyncClient) -> None:
    """Another engine would answer the same, so there is no retry, and the circuit stays closed."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=1000)) as engine,
        running_gateway(engine, max_answer_bytes=1024, faults_to_open=1, observe_interval_s=30) as gateway,
    ):
        for tokens in (500, 5000):
            reply = await ask(client, gateway.url, "chat", body_of("chat", tokens=tokens))
            assert (reply.status, reply.error("chat")["code"]) == (502, "answer_too_large")
            assert reply.headers["x-should-retry"] == "false", "an SDK would have it generated again, twice"
            assert [turn["legs"] for turn in await turns_of(client, gateway.url, reply)] == [1]
        assert await engine_states(client, gateway.url) == {engine.removeprefix("http://"): "ready"}


async def test_embeddings_that_are_too_large_are_made_once(client: httpx.AsyncClient) -> None:
    """As for a turn: another engine would answer the same, so neither it nor the client's SDK tries again."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b'{"data":"%b"}' % (b"x" * 2000)))
        await writer.drain()

    async with (
        raw_engine(answer) as one,
        raw_engine(answer) as other,
        running_gateway(one.url, other.url, max_answer_bytes=1024) as gateway,
    ):
        await eventually(lambda: is_ready(client, gateway.url, 2))
        response = await client.post(gateway.url + "/v1/embeddings", json={"model": "simulated", "input": ["x"]})
        check_error("other", response, 502, "answer_too_large")
        assert response.headers["x-should-retry"] == "false"
        assert len(one.posts) + len(other.posts) == 1


async def test_embeddings_in_bytes_come_with_what_describes_them(client: httpx.AsyncClient) -> None:
    """vLLM's `"encoding_format": "bytes"`: a header tells where each vector is. They came as JSON, without it."""
    vectors, metadata = b"\x00\x00\x80?", '{"data":[{"index":0,"start":0,"end":4}]}'

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        described = b"application/octet-stream\r\nmetadata: " + metadata.encode()
        writer.write(whole(vectors, content_type=described))
        await writer.drain()

    async with raw_engine(answer) as engine, running_gateway(engine.url) as gateway:
        await eventually(lambda: is_ready(client, gateway.url, 1))
        asked = {"model": "simulated", "input": ["x"], "encoding_format": "bytes"}
        response = await client.post(gateway.url + "/v1/embeddings", json=asked)
        assert (response.status_code, response.content) == (200, vectors)
        assert response.headers["content-type"] == "application/octet-stream"
        assert response.headers["metadata"] == metadata


async def test_a_cut_answer_that_ends_with_its_connection_is_no_answer_to_tokenize(client: httpx.AsyncClient) -> None:
    """As for a turn: a proxy that speaks HTTP/1.0 tells no length, so an engine that dies looks like the end. Another
    engine is asked."""
    answer_body = b'{"count":2,"max_model_len":40960,"tokens":[1,2]}'

    async with (
        raw_engine(writes(b"HTTP/1.0 200 OK\r\n\r\n" + answer_body[:-3])) as dying,
        raw_engine(writes(b"HTTP/1.0 200 OK\r\n\r\n" + answer_body)) as good,
        running_gateway(dying.url, good.url) as gateway,
    ):
        await eventually(lambda: is_ready(client, gateway.url, 2))
        response = await client.post(gateway.url + "/tokenize", json={"model": "simulated", "prompt": "x"})
        assert (response.status_code, response.content) == (200, answer_body)
        assert (len(dying.posts), len(good.posts)) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_loses_only_streams_that_had_begun(client: httpx.AsyncClient, stream: bool) -> None:
    """Of sixteen turns, whole answers all come from the other engine; streams that had begun end with an error
    event."""
    async with serve_engine(SimulatedEngineSettings(speed_up=20)) as good:
        async with serve_engine(SimulatedEngineSettings(speed_up=1)) as dying:
            engine = running_gateway(dying, observe_interval_s=0.1, retry_pause_s=0)
            gateway = await engine.__aenter__()
            bodies = [body_of("chat", stream, 300, f"hello {n}") for n in range(16)]
            pending = [asyncio.create_task(ask(client, gateway.url, "chat", body)) for body in bodies]
            await eventually(lambda: gauge(client, dying, "vllm:num_requests_running", 16))
            await add_engine(client, gateway.url, good)
        try:
            replies = await asyncio.gather(*pending)
            for one in replies:
                assert one.is_finished("chat") or (stream and len(one.events) > 1 and one.error("chat")), one
            assert stream or all(one.is_finished("chat") for one in replies)
            assert await engine_states(client, gateway.url) == {
                dying.removeprefix("http://"): "lost",
                good.removeprefix("http://"): "ready",
            }
        finally:
            await engine.__aexit__(None, None, None)


BAD_PAGES = {
    "no value": b'vllm:num_requests_running{engine="0"}\n',
    "no number": b'vllm:num_requests_running{engine="0"} many\n',
    "not a number": b'vllm:num_requests_running{engine="0"} NaN\n',
    "infinite": b'vllm:num_requests_running{engine="0"} +Inf\n',
    "HTML": b"<html>",
    "bytes": b"\xff\xfe\x00",
}
BAD_MODELS = {
    "list": b"[]",
    "names": b'{"data":["simulated"]}',
    "numbers": b'{"data":[1]}',
    "null": b'{"data":null}',
    "HTML": b"<html>",
    "bytes": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("page", BAD_PAGES.values(), ids=BAD_PAGES.keys())
async def test_an_engine_with_nonsense_metrics_is_not_used_until_they_are_valid(
    client: httpx.AsyncClient, page: bytes
) -> None:
    """Whatever it shows, it is checked again, and used once its metrics are valid."""
    async with raw_engine(writes(whole(FINISHED + b"}")), page=page) as engine:
        await never_ready_then_ready(client, engine.url, lambda: setattr(engine, "page", None))


@pytest.mark.parametrize("models", BAD_MODELS.values(), ids=BAD_MODELS.keys())
async def test_an_engine_with_nonsense_models_is_not_used_until_they_are_valid(
    client: httpx.AsyncClient, models: bytes
) -> None:
    """Whatever it shows, it is checked again, and used once its models are valid."""
    good = b'{"data":[{"id":"simulated","owned_by":"vllm","max_model_len":"many"}]}'
    async with raw_engine(writes(whole(FINISHED + b"}")), models=models) as engine:
        await never_ready_then_ready(client, engine.url, lambda: setattr(engine, "models", good))


async def never_ready_then_ready(client: httpx.AsyncClient, engine: str, fix: Callable[[], None]) -> None:
    async with running_gateway(engine, observe_interval_s=0.02, start_timeout_s=0.3) as gateway:
        assert (await client.get(gateway.url + "/readyz")).status_code == 503
        fix()
        await eventually(lambda: is_ready(client, gateway.url))
        assert (await ask(client, gateway.url, "chat", body_of("chat"))).is_finished("chat")


async def turns_of(client: httpx.AsyncClient, url: str, reply: Any) -> list[dict[str, Any]]:
    answer = await client.get(f"{url}/v1/trajectories/{reply.headers['x-trajectory-id']}")
    turns: list[dict[str, Any]] = answer.json()["turns"]
    return turns


async def add_engine(client: httpx.AsyncClient, url: str, engine: str) -> None:
    from tests.support.gateway import ADMIN

    assert (await client.post(url + "/v1/engines", json={"url": engine}, headers=ADMIN)).status_code == 201


async def engine_states(client: httpx.AsyncClient, url: str) -> dict[str, str]:
    engines = (await client.get(url + "/v1/engines")).json()["data"]
    return {engine["id"]: engine["state"] for engine in engines}


async def has_states(client: httpx.AsyncClient, url: str, states: dict[str, str]) -> bool:
    return await engine_states(client, url) == states


async def is_ready(client: httpx.AsyncClient, url: str, num: int = 1) -> bool:
    return list((await engine_states(client, url)).values()).count("ready") == num


async def gauge(client: httpx.AsyncClient, engine: str, name: str, value: float) -> bool:
    page = (await client.get(engine + "/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith(name + "{")]
    return sum(float(line.split()[-1]) for line in lines) == value
