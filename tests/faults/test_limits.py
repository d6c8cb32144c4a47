"""Limits on clients, and how they are reported: statuses, `Retry-After` and bodies in the API's own form."""

import asyncio
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.faults.asking import APIS, PATHS, are_waiting, ask, body_of, check_error, client_connection, raw
from tests.faults.gateway_process import gateway_process
from tests.faults.raw_engine import hangs, raw_engine, whole, writes
from tests.support.gateway import ADMIN, eventually, running_gateway

ONE_SLOT = SimulatedEngineSettings(profile=replace(load_profile("qwen3-14b-h100-tp1"), slots=1))
ANSWER = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
async def test_a_full_queue_answers_429_with_retry_after(client: httpx.AsyncClient, api: str, stream: bool) -> None:
    """One turn runs, one waits, and the third is refused."""
    async with serve_engine(ONE_SLOT) as engine, running_gateway(engine, max_waiting_turns=1) as gateway:
        held = [
            asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", tokens=4000, text=f"hello {n}")))
            for n in range(2)
        ]
        await eventually(lambda: are_waiting(client, gateway.url, 1))
        refused = await client.post(gateway.url + PATHS[api], json=body_of(api, stream))
        check_error(api, refused, 429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-should-retry"] == "true"
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
async def test_a_turn_that_waits_too_long_gets_503(client: httpx.AsyncClient, api: str, stream: bool) -> None:
    """Or an error event, if heartbeats have kept its stream open."""
    settings = {"queue_timeout_s": 0.3, "heartbeat_s": 0.1}
    async with serve_engine(ONE_SLOT) as engine, running_gateway(engine, **settings) as gateway:
        held = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", tokens=4000)))
        await eventually(lambda: has_legs(client, gateway.url, 1))
        reply = await ask(client, gateway.url, api, body_of(api, stream))
        assert reply.error(api)
        if stream:
            assert reply.status == 200 and reply.text.startswith(": waiting\n\n")
        else:
            assert reply.status == 503 and reply.headers["retry-after"]
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


@pytest.mark.parametrize("path", [*PATHS.values(), "/v1/embeddings", "/v1/trajectories", "/v1/engines"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_above_the_limit_gets_413(client: httpx.AsyncClient, path: str, chunked: bool) -> None:
    """Whether its length is declared or it comes in chunks. The gateway goes on serving."""
    api = "messages" if path == "/v1/messages" else "other"

    async def chunks() -> Any:
        for _ in range(40):
            yield b" " * 100

    async with (
        serve_engine(SimulatedEngineSettings()) as engine,
        running_gateway(engine, max_body_bytes=2000) as gateway,
    ):
        content: Any = chunks() if chunked else b" " * 4000
        response = await client.post(gateway.url + path, content=content, headers=ADMIN)
        check_error(api, response, 413, "body_too_large")
        assert (await client.get(gateway.url + "/healthz")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/trajectories", "/nowhere"])
async def test_headers_above_the_limit_get_431(client: httpx.AsyncClient, path: str) -> None:
    """Many small ones as well as a large one."""
    api = "messages" if path == "/v1/messages" else "other"
    async with running_gateway(max_header_bytes=2000) as gateway:
        for headers in ({"x-large": "y" * 3000}, {f"x-small-{n}": "y" * 20 for n in range(100)}):
            response = await client.post(gateway.url + path, json={}, headers=headers)
            check_error(api, response, 431, "headers_too_large")


async def test_headers_far_above_the_limit_are_told_the_same_limit() -> None:
    """They were told its double, at which reading stops."""
    async with running_gateway(max_header_bytes=2000) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nx-large: " + b"y" * 10_000)
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert b"431 " in answer and b"larger than 2,000 bytes (max_header_bytes)" in answer
        writer.close()


async def test_endless_headers_are_cut_off() -> None:
    """They do not accumulate in memory: the connection is closed soon after the limit."""
    async with running_gateway(max_header_bytes=2000) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        sent = 0
        async with asyncio.timeout(60):
            try:
                while not reader.at_eof() and not writer.is_closing() and sent < 50_000_000:
                    writer.write(b"x-more: " + b"y" * 990 + b"\r\n")
                    await writer.drain()
                    sent += 1000
                    await asyncio.sleep(0)
            except ConnectionError:
                pass
        assert sent < 10_000_000
        writer.close()


async def test_a_stalled_body_gets_408_and_closes_the_connection() -> None:
    """A stuck client holds nothing forever."""
    async with running_gateway(body_timeout_s=0.2) as gateway:
        for path in ("/v1/chat/completions", "/v1/trajectories"):
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{{".encode()
            answer = await raw(gateway.url, head)
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert b'"code":"body_timeout"' in answer


async def test_a_stalled_head_closes_the_connection() -> None:
    """Half a request line, half the headers, or nothing at all."""
    async with running_gateway(body_timeout_s=0.2) as gateway:
        for data in (b"", b"POST /v1/ch", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"):
            assert await raw(gateway.url, data) == b""


async def test_each_key_has_its_own_turn_limit(client: httpx.AsyncClient) -> None:
    """The greedy client gets 429, the other one is served."""
    keys = ("first", "second")
    async with (
        serve_engine(SimulatedEngineSettings()) as engine,
        running_gateway(engine, api_keys=keys, max_turns_per_key=1) as gateway,
    ):
        first, second = ({"authorization": f"Bearer {key}"} for key in keys)
        held = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", tokens=4000), first))
        await eventually(lambda: has_legs(client, gateway.url, 1, first))
        refused = await client.post(gateway.url + PATHS["chat"], json=body_of("chat"), headers=first)
        check_error("chat", refused, 429, "too_many_turns")
        assert refused.headers["retry-after"]
        assert (await ask(client, gateway.url, "chat", body_of("chat"), second)).is_finished("chat")
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await eventually(lambda: has_legs(client, gateway.url, 0, first))
        assert (await ask(client, gateway.url, "chat", body_of("chat"), first)).is_finished("chat")


async def test_a_conversation_continues_after_a_refused_turn(client: httpx.AsyncClient) -> None:
    """The client sends no id and then asks something else. Its trajectory was once taken for one that still has a
    turn."""
    async with (
        serve_engine(SimulatedEngineSettings()) as engine,
        running_gateway(engine, max_turns_per_key=1) as gateway,
    ):
        question = {"role": "user", "content": "hello"}
        first = await ask(client, gateway.url, "chat", body_of("chat", messages=[question]))
        messages = [question, first.json["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        held = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", tokens=4000)))
        await eventually(lambda: has_legs(client, gateway.url, 1))
        refused = await client.post(gateway.url + PATHS["chat"], json=body_of("chat", messages=messages))
        check_error("chat", refused, 429, "too_many_turns")
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await eventually(lambda: has_legs(client, gateway.url, 0))
        other = await ask(client, gateway.url, "chat", body_of("chat", messages=[*messages[:-1], question]))
        assert other.is_finished("chat")
        assert other.headers["x-trajectory-id"] == first.headers["x-trajectory-id"]


@pytest.mark.parametrize("how", ["is refused", "is left by its client"])
async def test_a_conversation_is_at_work_although_its_repeated_request_ends_early(
    client: httpx.AsyncClient, how: str
) -> None:
    """No request has an id or says that it is a retry. The trajectory counted as idle, although its turn ran, and got
    the next turn of a sibling with the same first answer."""
    keys, answer = ("first", "second"), {"role": "assistant", "content": "x"}
    answers = writes(whole(orjson.dumps({"choices": [{"index": 0, "message": answer, "finish_reason": "stop"}]})))
    async with (
        raw_engine(answers) as engine,
        running_gateway(engine.url, api_keys=keys, max_turns_per_key=1 if how == "is refused" else 2) as gateway,
    ):
        first, second = ({"authorization": f"Bearer {key}"} for key in keys)
        question = {"role": "user", "content": "hello"}
        mine = await trajectory_of(client, gateway.url, first, question)
        record = f"{gateway.url}/v1/trajectories/{mine}"
        body = body_of("chat", messages=[question, answer, question])
        engine.answer = hangs
        async with client_connection(gateway.url, "chat", body, first):
            await eventually(lambda: engine.num_open == 1)
            if how == "is refused":
                refused = await client.post(gateway.url + PATHS["chat"], json=body, headers=first)
                check_error("chat", refused, 429, "too_many_turns")
                assert refused.headers["x-trajectory-id"] == mine
            else:
                async with client_connection(gateway.url, "chat", body, first):
                    await eventually(lambda: engine.num_open == 2)
                await eventually(lambda: runs(client, record, first, 1, 1))
            engine.answer = answers
            sibling = await trajectory_of(client, gateway.url, second, question)
            other = [question, answer, {"role": "user", "content": "and then?"}]
            assert await trajectory_of(client, gateway.url, second, *other) == sibling
        await eventually(lambda: runs(client, record, first, 0, 1 if how == "is refused" else 2))
        again = await trajectory_of(client, gateway.url, first, *other)
        assert again == mine, "its turn is over, so it can go on"


async def trajectory_of(client: httpx.AsyncClient, url: str, headers: dict[str, str], *messages: dict[str, str]) -> str:
    """The trajectory whose next turn a chat is."""
    reply = await ask(client, url, "chat", body_of("chat", messages=messages), headers)
    assert reply.is_finished("chat")
    return reply.headers["x-trajectory-id"]


async def runs(client: httpx.AsyncClient, url: str, headers: dict[str, str], num_turns: int, num_left: int) -> bool:
    """Whether so many turns of a trajectory are under way, and so many were left by their clients."""
    record = (await client.get(url, headers=headers)).json()
    left = [turn for turn in record["turns"] if turn["outcome"] == "left"]
    return (len(record["live_turns"]), len(left)) == (num_turns, num_left)


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Three requests in one write, with an error between two answers; the connection stays open."""
    async with serve_engine(SimulatedEngineSettings(speed_up=50)) as engine, running_gateway(engine) as gateway:
        bodies = [orjson.dumps(body_of("chat", tokens=3)), b"{bad", orjson.dumps(body_of("chat", True, 3))]
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n"
        data = b"".join(head.format(len(body)).encode() + body for body in bodies)
        last = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answer = await raw(gateway.url, data + last)
        statuses = [line for line in answer.split(b"\r\n") if b"HTTP/1.1 " in line]
        assert [line[-len(b"HTTP/1.1 200 OK") :] for line in statuses if b"400" not in line] == [b"HTTP/1.1 200 OK"] * 3
        assert [b"400" in line for line in statuses] == [False, True, False, False]


async def test_without_an_engine_a_turn_gets_503(client: httpx.AsyncClient) -> None:
    """With a `Retry-After`."""
    async with running_gateway(start_timeout_s=0) as gateway:
        for api in APIS:
            response = await client.post(gateway.url + PATHS[api], json=body_of(api))
            check_error(api, response, 503, "no_engine")
            assert response.headers["retry-after"]


async def test_a_gateway_with_few_descriptors_says_so_and_serves_all_clients_in_the_end(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Connections beyond them close as soon as they come, and their clients retry. The engine is not to blame."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n 64\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    async with serve_engine(SimulatedEngineSettings(speed_up=20)) as engine:
        options = ("--store", "memory:", "--engine", engine, "--log-level", "warning")
        async with gateway_process(*options, python=str(python)) as gateway:

            async def ask_until_served(number: int) -> int:
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        return (await ask(client, gateway.url, "chat", body_of("chat", text=f"hello {number}"))).status

            assert await asyncio.gather(*map(ask_until_served, range(80))) == [200] * 80
            (shown,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
            assert shown["state"] == "ready" and shown["last_fault"] is None
            assert await gateway.terminate() == 0
            line = orjson.loads((await gateway.output()).partition("\n")[0])
    assert (line["level"], line["message"], line["limit"]) == ("warning", "few file descriptors", 64)


async def has_legs(client: httpx.AsyncClient, url: str, num: int, headers: dict[str, str] | None = None) -> bool:
    engines = (await client.get(url + "/v1/engines", headers=headers)).json()["data"]
    return sum(engine["num_legs"] for engine in engines) == num
