"""Clients that leave, and clients that repeat a request: an engine works only for clients that still wait."""

import asyncio
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.faults.asking import APIS, Reply, are_waiting, ask, body_of, client_connection, request_bytes
from tests.faults.raw_engine import CHAT_EVENT, STREAM_HEAD, chunk, hangs, raw_engine, whole, writes
from tests.support.gateway import eventually, running_gateway
from tests.support.redis_server import RedisServer
from tests.support.rounds import came_about, num_ended, play_rounds

ONE_SLOT = replace(load_profile("qwen3-14b-h100-tp1"), slots=1)
LONG = 4000
"""Tokens of a turn that runs longer than any test."""
WHOLE = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}'
GAUGES = {"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}


async def test_a_request_without_a_trajectory_ends_when_its_client_leaves() -> None:
    """The engine used to continue for `silence_timeout_s`, for nobody."""
    async with raw_engine(hangs) as engine, running_gateway(engine.url) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n" + b'{"input":"x"}')
        await eventually(lambda: engine.num_open == 1)
        writer.transport.abort()
        await eventually(lambda: engine.num_open == 0)


async def test_a_client_that_leaves_during_such_an_answer_frees_the_engine() -> None:
    """The connection to the engine is closed. It stayed, with an engine that waited for it to be read."""
    is_coming = asyncio.Event()

    async def long_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % 2**25)
        for _ in range(2**8):  # 16 MiB, more than sockets hold: the gateway reads the body
            writer.write(bytes(2**16))
            await writer.drain()
        is_coming.set()
        await reader.read()

    async with raw_engine(long_answer) as engine, running_gateway(engine.url) as gateway, asyncio.timeout(60):
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n" + b'{"input":"x"}')
        await is_coming.wait()
        writer.transport.abort()
        await eventually(lambda: engine.num_open == 0)


async def num_running(client: httpx.AsyncClient, engine: str, dialect: str = "vllm") -> int:
    """The engine's own gauge."""
    page = (await client.get(engine + "/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith(GAUGES[dialect] + "{")]
    return int(sum(float(line.split()[-1]) for line in lines))


async def health(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    answer: dict[str, Any] = (await client.get(url + "/healthz")).json()
    return answer


async def turns_of(client: httpx.AsyncClient, url: str, trajectory_id: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = (await client.get(f"{url}/v1/trajectories/{trajectory_id}")).json()["turns"]
    return turns


async def metric(client: httpx.AsyncClient, url: str, name: str) -> float:
    page = (await client.get(url + "/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_client_that_leaves_frees_its_engine_within_a_second(
    client: httpx.AsyncClient, dialect: Any, stream: bool, api: str, record_property: Any
) -> None:
    """The engine's gauge of running requests falls, in every API, streaming or not."""
    async with (
        serve_engine(SimulatedEngineSettings(dialect=dialect)) as engine,
        running_gateway(engine) as gateway,
    ):
        async with client_connection(gateway.url, api, body_of(api, stream, LONG), {"x-trajectory-id": "leaver"}):
            await eventually(lambda: is_running(client, engine, 1, dialect))
            left_at = time.perf_counter()
        await eventually(lambda: is_running(client, engine, 0, dialect), timeout_s=1.0)
        record_property("freed_after_s", round(time.perf_counter() - left_at, 4))
        await eventually(lambda: outcomes_are(client, gateway.url, "leaver", ["left"]))
        engines = (await client.get(gateway.url + "/v1/engines")).json()["data"]
        assert engines[0]["num_legs"] == 0
        assert (await ask(client, gateway.url, api, body_of(api, stream))).is_finished(api)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_the_queue_leaves_no_trace(client: httpx.AsyncClient, stream: bool) -> None:
    """It waits for a slot and leaves. Its turn never reaches the engine, and the next turn is served."""
    async with (
        serve_engine(SimulatedEngineSettings(profile=ONE_SLOT)) as engine,
        running_gateway(engine) as gateway,
        client_connection(gateway.url, "chat", body_of("chat", True, LONG), {"x-trajectory-id": "holder"}),
    ):
        await eventually(lambda: is_running(client, engine, 1))
        waiter = {"x-trajectory-id": "waiter"}
        async with client_connection(gateway.url, "chat", body_of("chat", stream, text="I wait"), waiter):
            await eventually(lambda: are_waiting(client, gateway.url, 1))
        await eventually(lambda: are_waiting(client, gateway.url, 0), timeout_s=1.0)
        assert [turn["legs"] for turn in await turns_of(client, gateway.url, "waiter")] == [0]
        await client.delete(gateway.url + "/v1/trajectories/holder")
        assert (await ask(client, gateway.url, "chat", body_of("chat"))).is_finished("chat")
        total = (await client.get(engine + "/metrics")).text
        counted = [line for line in total.splitlines() if line.startswith("vllm:request_success_total")]
        assert sum(float(line.split()[-1]) for line in counted) <= 2, "the holder and the last one, never the waiter"


async def test_a_client_that_leaves_in_mid_body_leaves_no_trace(client: httpx.AsyncClient) -> None:
    """Half a request is not a request."""
    async with serve_engine(SimulatedEngineSettings()) as engine, running_gateway(engine) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
        assert (await ask(client, gateway.url, "chat", body_of("chat"))).is_finished("chat")
        listed = (await client.get(gateway.url + "/v1/trajectories")).json()["data"]
        assert len(listed) == 1


@pytest.mark.parametrize("sign", ["its own id", "the SDK's retry header", "its idempotency key"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
async def test_a_repeated_request_joins_the_running_turn(
    client: httpx.AsyncClient, api: str, stream: bool, sign: str
) -> None:
    """Both clients get the same whole answer, and the engine generates it once."""
    has_id = sign == "its own id"
    async with serve_engine(SimulatedEngineSettings(speed_up=2)) as engine, running_gateway(engine) as gateway:

        async def play(number: int) -> bool:
            name = f"alice-{number}"  # another trajectory in each round
            user = {} if has_id else {"metadata": {"user_id": name}, "user": name}
            first_headers = {"x-trajectory-id": f"mine-{number}"} if has_id else {}
            if sign == "its idempotency key":
                first_headers = {"idempotency-key": f"key-{number}"}
            again_headers = first_headers or {"x-stainless-retry-count": "1"}
            body = body_of(api, stream, 60, f"hello {number}") | user
            joined = await metric(client, gateway.url, "heddle_joined_turns_total")
            first = asyncio.create_task(ask(client, gateway.url, api, body, first_headers))
            if not await came_about(lambda: is_running(client, engine, 1), first.done):
                return False
            again = asyncio.create_task(ask(client, gateway.url, api, body, again_headers))
            has_joined_it = await came_about(lambda: has_joined(client, gateway.url, joined + 1), first.done)
            reply, reply_again = await first, await again
            if not has_joined_it:
                return False
            assert reply.is_finished(api)
            assert reply.text == reply_again.text
            assert reply.headers["x-request-id"] == reply_again.headers["x-request-id"]
            trajectory_id = reply.headers["x-trajectory-id"]
            assert [turn["outcome"] for turn in await turns_of(client, gateway.url, trajectory_id)] == ["finished"]
            return True

        await play_rounds("the turn still ran when its request was repeated", play)


@pytest.mark.parametrize(
    "sent",
    [(), ("idempotency-key",), ("idempotency-key", "x-stainless-retry-count")],
    ids=["without keys", "each with a key", "each retried with a key"],
)
async def test_siblings_that_share_a_user_are_not_joined(client: httpx.AsyncClient, sent: tuple[str, ...]) -> None:
    """GRPO siblings ask the same question under one user, and each needs its own answer; so do those whose client gives
    each request an idempotency key, also if its SDK retries them."""
    async with serve_engine(SimulatedEngineSettings(speed_up=5)) as engine, running_gateway(engine) as gateway:

        async def play(number: int) -> bool:
            body = body_of("chat", tokens=60, text=f"hello {number}", user="trainer")
            headers = [dict.fromkeys(sent, str(n)) for n in range(1, 5)]
            pending = [asyncio.create_task(ask(client, gateway.url, "chat", body, one)) for one in headers]
            ran_at_once = await came_about(lambda: is_running(client, engine, 4), lambda: num_ended(pending) > 0)
            replies = await asyncio.gather(*pending)
            assert all(one.is_finished("chat") for one in replies)
            assert len({one.json["id"] for one in replies}) == 4
            assert await metric(client, gateway.url, "heddle_joined_turns_total") == 0
            return ran_at_once

        await play_rounds("four siblings ran at once", play)


async def test_another_request_of_the_same_trajectory_is_not_joined(client: httpx.AsyncClient) -> None:
    """Only the same bytes on the same route are a retry."""
    async with serve_engine(SimulatedEngineSettings(speed_up=5)) as engine, running_gateway(engine) as gateway:

        async def play(number: int) -> bool:
            mine = {"x-trajectory-id": f"mine-{number}"}
            pending = [
                asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", tokens=60, text=text), mine))
                for text in ("one", "two")
            ]
            ran_at_once = await came_about(lambda: is_running(client, engine, 2), lambda: num_ended(pending) > 0)
            assert all(one.is_finished("chat") for one in await asyncio.gather(*pending))
            assert await metric(client, gateway.url, "heddle_joined_turns_total") == 0
            return ran_at_once

        await play_rounds("both ran at once", play)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_joined_gets_everything_if_the_first_leaves(
    client: httpx.AsyncClient, stream: bool
) -> None:
    """From the first byte of the answer, which is generated once."""
    async with serve_engine(SimulatedEngineSettings(speed_up=2)) as engine, running_gateway(engine) as gateway:

        async def play(number: int) -> bool:
            trajectory_id = f"mine-{number}"
            body, mine = body_of("chat", stream, 100, f"hello {number}"), {"x-trajectory-id": trajectory_id}
            joined = await metric(client, gateway.url, "heddle_joined_turns_total")
            async with client_connection(gateway.url, "chat", body, mine) as answer:
                await eventually(lambda: has_begun(client, gateway.url, trajectory_id))
                if stream:
                    assert await answer.readuntil(b"data: ")
                again = asyncio.create_task(ask(client, gateway.url, "chat", body, mine))
                has_joined_it = await came_about(lambda: has_joined(client, gateway.url, joined + 1), again.done)
            reply = await again
            assert reply.is_finished("chat")
            assert num_tokens(reply, stream) == 100
            turns = await turns_of(client, gateway.url, trajectory_id)
            assert [(turn["outcome"], turn["legs"]) for turn in turns] == [("finished", 1)]
            return has_joined_it

        await play_rounds("the turn still ran when its second client joined", play)


async def test_a_repeated_request_joins_a_turn_that_still_reads_the_store(
    client: httpx.AsyncClient, redis_server: RedisServer
) -> None:
    """A turn at token level reads its trajectory's tokens first. Its client may leave meanwhile."""
    mine, settings = {"x-trajectory-id": "mine"}, {"store": redis_server.url(12), "token_legs": "auto"}
    async with serve_engine(SimulatedEngineSettings(speed_up=2)) as engine:
        async with running_gateway(engine, **settings) as gateway:
            assert (await ask(client, gateway.url, "chat", body_of("chat"), mine)).is_finished("chat")
        async with running_gateway(engine, **settings) as gateway:
            body = body_of("chat", tokens=100, text="and then?")
            with redis_server.paused():
                async with client_connection(gateway.url, "chat", body, mine):
                    again = asyncio.create_task(ask(client, gateway.url, "chat", body, mine))
                    await eventually(lambda: has_joined(client, gateway.url, 1))
            assert (await again).is_finished("chat")
            turns = await turns_of(client, gateway.url, "mine")
            assert [(turn["outcome"], turn["tokens"]) for turn in turns] == [("finished", "kept")] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_is_aborted_when_all_its_clients_have_left(client: httpx.AsyncClient, stream: bool) -> None:
    """If one leaves, it runs on; if both leave, the engine is free."""
    async with serve_engine(SimulatedEngineSettings()) as engine, running_gateway(engine) as gateway:
        body, mine = body_of("chat", stream, LONG), {"x-trajectory-id": "mine"}
        async with client_connection(gateway.url, "chat", body, mine):
            await eventually(lambda: is_running(client, engine, 1))
            async with client_connection(gateway.url, "chat", body, mine):
                await eventually(lambda: has_joined(client, gateway.url, 1))
            assert (await ask(client, gateway.url, "chat", body_of("chat"))).is_finished("chat")
            assert await num_running(client, engine) == 1
        await eventually(lambda: is_running(client, engine, 0), timeout_s=1.0)
        await eventually(lambda: outcomes_are(client, gateway.url, "mine", ["left"]))


@pytest.mark.parametrize("outcome", ["left", "aborted"])
async def test_a_turn_that_does_not_finish_keeps_no_tokens_and_says_so(client: httpx.AsyncClient, outcome: str) -> None:
    """Its history said that they were kept; neither the export nor the tokens of its trajectory had them."""
    mine = {"x-trajectory-id": "mine"}
    async with (
        serve_engine(SimulatedEngineSettings()) as engine,
        running_gateway(engine, token_legs="auto") as gateway,
    ):
        async with client_connection(gateway.url, "chat", body_of("chat", True, LONG), mine) as answer:
            await answer.readuntil(b"data: ")
            if outcome == "aborted":
                assert (await client.delete(f"{gateway.url}/v1/trajectories/mine")).status_code == 200
                await eventually(lambda: outcomes_are(client, gateway.url, "mine", [outcome]))
        await eventually(lambda: outcomes_are(client, gateway.url, "mine", [outcome]))
        [turn] = await turns_of(client, gateway.url, "mine")
        assert turn["output_tokens"] > 0 and turn["tokens"] == "none"
        assert (await client.get(f"{gateway.url}/v1/trajectories/mine/tokens")).json()["turns"] == []


async def test_a_client_that_repeats_at_once_after_leaving_gets_a_new_turn(client: httpx.AsyncClient) -> None:
    """The abandoned turn is about to be aborted; joining it would mean waiting for nothing."""
    async with serve_engine(SimulatedEngineSettings(speed_up=100)) as engine, running_gateway(engine) as gateway:
        for number in range(20):
            body, mine = body_of("chat", False, 60, f"hello {number}"), {"x-trajectory-id": f"mine-{number}"}
            async with client_connection(gateway.url, "chat", body, mine):
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                assert (await ask(client, gateway.url, "chat", body, mine)).is_finished("chat")


@pytest.mark.parametrize("token_legs", ["off", "auto"])
async def test_a_repeat_that_arrives_together_with_the_leaving_is_answered(
    client: httpx.AsyncClient, token_legs: str
) -> None:
    """A busy gateway reads both at once. The repeat joined the turn, which then ended for want of clients, and waited
    forever."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=2)) as engine,
        running_gateway(engine, token_legs=token_legs) as gateway,
    ):
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        request = request_bytes("chat", body_of("chat", False, 100), {"x-trajectory-id": "mine"})
        with socket.create_connection((host, int(port))) as again, socket.create_connection((host, int(port))) as first:
            first.sendall(request)
            await eventually(lambda: has_begun(client, gateway.url, "mine"))
            first.close()
            again.sendall(request)
            again.setblocking(False)
            async with asyncio.timeout(20):
                assert (await asyncio.get_running_loop().sock_recv(again, 15)) == b"HTTP/1.1 200 OK"


async def test_a_slow_reader_does_not_block_other_turns(client: httpx.AsyncClient) -> None:
    """A client reads nothing of a large stream: others are served, and its leaving frees the engine."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=10_000)) as engine,
        running_gateway(engine) as gateway,
    ):
        body = body_of("chat", True, 30_000)
        async with client_connection(gateway.url, "chat", body, {"x-trajectory-id": "slow"}):
            await eventually(lambda: has_begun(client, gateway.url, "slow"))
            assert (await ask(client, gateway.url, "chat", body_of("chat"))).is_finished("chat")
        await eventually(lambda: has_ended(client, gateway.url, "slow"), timeout_s=2.0)
        await eventually(lambda: is_running(client, engine, 0), timeout_s=1.0)


def num_tokens(reply: Reply, stream: bool) -> int:
    if not stream:
        return int(reply.json["usage"]["completion_tokens"])
    return sum(bool(choice["delta"].get("content")) for event in reply.events for choice in event["choices"])


async def is_running(client: httpx.AsyncClient, engine: str, num: int, dialect: str = "vllm") -> bool:
    return await num_running(client, engine, dialect) == num


async def has_joined(client: httpx.AsyncClient, url: str, num: int) -> bool:
    return await metric(client, url, "heddle_joined_turns_total") == num


async def outcomes_are(client: httpx.AsyncClient, url: str, trajectory_id: str, outcomes: list[str]) -> bool:
    return [turn["outcome"] for turn in await turns_of(client, url, trajectory_id)] == outcomes


async def has_begun(client: httpx.AsyncClient, url: str, trajectory_id: str) -> bool:
    answer = (await client.get(f"{url}/v1/trajectories/{trajectory_id}")).json()
    return bool(answer.get("live_turns") or answer.get("turns"))


async def has_ended(client: httpx.AsyncClient, url: str, trajectory_id: str) -> bool:
    return bool(await turns_of(client, url, trajectory_id))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_reads_nothing_is_disconnected(client: httpx.AsyncClient, stream: bool) -> None:
    """Otherwise it would hold its slot and its answer forever. Its engine is not to blame and stays ready."""
    content = b"y" * 2**16
    event = chunk(CHAT_EVENT.replace(b'"x"', b'"%b"' % content))
    answer = [STREAM_HEAD, *[event] * 400] if stream else [whole(WHOLE.replace(b'"x"', b'"%b"' % (content * 400)))]

    async def never_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in answer:
            writer.write(piece)
            await writer.drain()
            engine.tokens += 1
        await hangs(reader, writer)

    settings = {"silence_timeout_s": 6, "stall_timeout_s": 3} if stream else {"silence_timeout_s": 1}
    async with raw_engine(never_ends) as engine, running_gateway(engine.url, **settings) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as suspended:
            body = orjson.dumps(body_of("chat", stream))
            suspended.send(b"POST /t/t/v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            suspended.send(b"content-length: %d\r\n\r\n%b" % (len(body), body))
            mine = suspended.getsockname()[1]
            await eventually(lambda: has_any_turn(client, gateway.url))
            await eventually(lambda: not is_served(mine))
        [turn] = await turns_of(client, gateway.url, "t")
        assert turn["outcome"] == ("left" if stream else "finished")
        [known] = (await client.get(gateway.url + "/v1/engines")).json()["data"]
        assert (known["state"], known["num_legs"], known["last_fault"]) == ("ready", 0, None)


async def test_a_client_that_leaves_the_last_bytes_unread_is_disconnected(client: httpx.AsyncClient) -> None:
    """Also if they are too few to stop the gateway: its descriptor was kept as long as the client lived."""
    answer = whole(WHOLE.replace(b'"x"', b'"%b"' % (b"y" * 25_000)))
    async with (
        raw_engine(writes(answer)) as engine,
        running_gateway(engine.url, silence_timeout_s=1) as gateway,
    ):
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as suspended:
            mine = suspended.getsockname()[1]
            num_turns = num_waiting = 0
            while num_waiting == 0:  # the system's buffers hold all
                num_turns += 1
                suspended.send(request_bytes("chat", body_of("chat"), {"x-trajectory-id": "t"}))
                await eventually(partial(has_turns, client, gateway.url, num_turns))
                num_waiting = bytes_waiting(mine)
            assert num_waiting < HIGH_WATER_LIMIT, "the test's premise"
            await eventually(lambda: not is_served(mine), timeout_s=20)


async def test_a_watcher_that_reads_nothing_does_not_hold_up_a_shutdown() -> None:
    """A pager, or a process that was stopped. The gateway waited for it until `shutdown_timeout_s`."""
    with socket.socket() as suspended:
        suspended.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with asyncio.timeout(110), running_gateway(shutdown_timeout_s=3600) as gateway:
            host, _, port = gateway.url.removeprefix("http://").partition(":")
            suspended.connect((host, int(port)))
            suspended.send(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")
            mine, body = suspended.getsockname()[1], orjson.dumps({"rollout_id": "r" * 256, "group_id": "g" * 256})
            head = b"POST /v1/trajectories HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write((head + b"content-length: %d\r\n\r\n%b" % (len(body), body)) * 10_000)
            reading = asyncio.create_task(reader.read())
            await eventually(lambda: bytes_waiting(mine) > HIGH_WATER_LIMIT)
            writer.close()
            await reading


async def has_turns(client: httpx.AsyncClient, url: str, num: int) -> bool:
    shown = (await client.get(f"{url}/v1/trajectories/t")).json()
    return len(shown.get("turns", ())) == num


async def has_any_turn(client: httpx.AsyncClient, url: str) -> bool:
    shown = (await client.get(f"{url}/v1/trajectories/t")).json()
    return bool(shown.get("turns") or shown.get("live_turns"))


def bytes_waiting(port: int) -> int:
    """Bytes to the connection from this local port that wait in this process, where its other end is."""
    loop: Any = asyncio.get_running_loop()
    for transport in loop._transports.values():
        if (transport.get_extra_info("peername") or ("", 0))[1] == port:
            return int(transport.get_write_buffer_size())
    return 0


def is_served(port: int) -> bool:
    """Whether a connection from this local port is still open at its other end."""
    ends = [line.split()[2:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(peer.endswith(f":{port:04X}") and state == "01" for peer, state in ends)
