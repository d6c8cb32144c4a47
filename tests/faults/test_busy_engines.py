"""Engines that refuse work for now are left alone, and others are asked."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from tests.faults.asking import ask, body_of, check_error
from tests.faults.raw_engine import raw_engine, resets, whole, writes
from tests.support.engine import Asked, Script, recorded_engine
from tests.support.gateway import eventually, running_gateway

ANSWER = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}'


@pytest.mark.parametrize("status", [b"503 Service Unavailable", b"429 Too Many Requests"])
async def test_a_busy_engine_is_not_asked_before_its_retry_after(client: httpx.AsyncClient, status: bytes) -> None:
    """Also if `retry_pause_s` is shorter."""
    asked_at = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_at.append(asyncio.get_running_loop().time())
        busy = b"HTTP/1.1 %s\r\nretry-after: 3\r\ncontent-length: 0\r\n\r\n" % status
        writer.write(busy if len(asked_at) == 1 else whole(ANSWER))
        await writer.drain()

    async with raw_engine(answer) as engine, running_gateway(engine.url, retry_pause_s=0) as gateway:
        assert (await ask(client, gateway.url, "chat", body_of("chat"))).is_finished("chat")
    assert len(asked_at) == 2 and asked_at[1] - asked_at[0] > 2.9


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/inference/v1/generate"])
async def test_a_busy_engine_is_left_alone_at_token_level(client: httpx.AsyncClient, path: str) -> None:
    """Whichever of its token routes refused."""
    busy = Fault("refuse", path=path, count=1, retry_after_s=3)
    engine_settings = SimulatedEngineSettings(dialect="vllm", speed_up=200, faults=(busy,))
    async with (
        serve_engine(engine_settings) as engine,
        running_gateway(engine, retry_pause_s=0, token_legs="auto") as gateway,
    ):
        began_at = asyncio.get_running_loop().time()
        assert (await ask(client, gateway.url, "chat", body_of("chat"))).is_finished("chat")
        assert asyncio.get_running_loop().time() - began_at > 2.9


@pytest.mark.parametrize("token_legs", ["auto", "off"])
async def test_a_long_leg_that_its_engine_aborts_goes_on(token_legs: str, client: httpx.AsyncClient) -> None:
    """Or begins again, if it passes through. As vLLM does when it is paused or shut down. A turn that had run for
    longer than turns may wait was refused with `queue_timeout`."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=1)) as engine,
        running_gateway(engine, queue_timeout_s=3, retry_pause_s=0, token_legs=token_legs) as gateway,
    ):
        asking = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", tokens=400)))
        began_at = time.monotonic()
        await eventually(lambda: time.monotonic() > began_at + 3.2)
        assert not asking.done()
        await client.post(engine + "/abort_requests")
        reply = await asking
    assert reply.is_finished("chat") and reply.json["usage"]["completion_tokens"] == 400


async def test_a_render_that_is_refused_for_now_is_asked_for_again(client: httpx.AsyncClient) -> None:
    """With 429, as by a proxy before the engine. A turn that passed through would have no tokens for its trainer."""
    render = "/v1/chat/completions/render"
    async with (
        recorded_engine(SimulatedEngineSettings(speed_up=200)) as engine,
        running_gateway(engine.url, retry_pause_s=0, token_legs="auto") as gateway,
    ):

        async def refuse(_: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
            del engine.scripts[render]
            await write(b"{}")

        engine.scripts[render] = Script(refuse, 429)
        reply = await ask(client, gateway.url, "chat", body_of("chat"), {"x-trajectory-id": "mine"})
        assert reply.is_finished("chat") and render not in engine.scripts
        (turn,) = (await client.get(f"{gateway.url}/v1/trajectories/mine")).json()["turns"]
        assert (turn["tokens"], turn["legs"]) == ("kept", 2)


@pytest.mark.parametrize(
    "failure", [b"503 Service Unavailable", b"429 Too Many Requests", b"500 Internal Server Error"]
)
async def test_a_refused_request_without_a_trajectory_goes_to_another_engine(
    client: httpx.AsyncClient, failure: bytes
) -> None:
    """If all engines refuse, the client gets the refusal. A wrong request goes to one engine only."""
    async with (
        raw_engine(writes(whole(b"{}", failure))) as bad,
        raw_engine(writes(whole(b'{"data":[]}'))) as good,
        running_gateway(bad.url, good.url) as gateway,
    ):
        response = await client.post(gateway.url + "/v1/embeddings", json={"model": "simulated", "input": "x"})
        assert (response.status_code, response.content) == (200, b'{"data":[]}')
        assert (len(bad.posts), len(good.posts)) == (1, 1)
        good.answer = writes(whole(b"{}", failure))
        response = await client.post(gateway.url + "/v1/embeddings", json={"model": "simulated", "input": "x"})
        assert response.status_code == int(failure[:3])
        bad.answer = good.answer = resets
        response = await client.post(gateway.url + "/v1/embeddings", json={"model": "simulated", "input": "x"})
        check_error("other", response, 502, "engine_failed")
        assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("1", "true")
        bad.answer = writes(whole(b"{}", b"400 Bad Request"))
        response = await client.post(gateway.url + "/v1/embeddings", json={"model": "simulated", "input": "x"})
        assert response.status_code == 400
        assert (len(bad.posts), len(good.posts)) == (4, 3)


async def test_an_engine_that_refuses_within_a_stream_of_messages_costs_no_attempt(client: httpx.AsyncClient) -> None:
    """vLLM answers 200 before its engine accepts a stream. While that is paused, the first event is the error."""
    error = b'{"type":"error","error":{"type":"overloaded_error","message":"The engine is paused."}}'
    num_refused = 0

    async def refuse(_: Asked, write: Callable[[bytes], Awaitable[None]]) -> None:
        nonlocal num_refused
        num_refused += 1
        if num_refused == 2:
            del engine.scripts["/v1/messages"]
        await write(b"event: error\ndata: %s\n\n" % error)

    settings = {"max_attempts": 1, "retry_pause_s": 0}
    async with (
        recorded_engine(SimulatedEngineSettings(speed_up=200)) as engine,
        running_gateway(engine.url, **settings) as gateway,
    ):
        engine.scripts["/v1/messages"] = Script(refuse)
        reply = await ask(client, gateway.url, "messages", body_of("messages", stream=True))
    assert reply.is_finished("messages") and num_refused == 2
