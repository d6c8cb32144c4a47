"""How the process starts and stops: one clear line if it cannot start, and no client is cut off when it stops."""

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from engines.children import free_port
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from heddle.cli import main
from tests.faults.asking import ask, body_of, check_error
from tests.faults.gateway_process import START_TIMEOUT_S, GatewayProcess, gateway_process, refused_start
from tests.faults.raw_engine import hangs, raw_engine, whole, writes
from tests.support.gateway import eventually, running_gateway
from tests.support.redis_server import RedisServer

ANSWER = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}'


async def test_a_second_gateway_on_the_same_store_is_refused_with_one_line(tmp_path: Any) -> None:
    """Two schedulers on one record would undo each other's work."""
    store = f"sqlite:{tmp_path / 'heddle.sqlite3'}"
    async with gateway_process("--store", store):
        status, errors = await refused_start("--store", store, "--port", "0")
        assert status == 2
        assert len(errors.splitlines()) == 1 and errors.startswith("heddle serve: "), errors
        assert "heddle.sqlite3" in errors


BadStart = tuple[str, tuple[str, ...], dict[str, str]]  # a configuration file, options, environment variables
BAD_STARTS: dict[str, BadStart] = {
    "bad TOML": ("port = = 5", ("--config", "FILE"), {}),
    "bad store": ("", ("--store", "mysql://host"), {}),
    "store in no directory": ("", ("--store", "sqlite:/dev/null/heddle.sqlite3"), {}),
    "event log in no directory": ('event_log = "/dev/null/events.jsonl"', ("--config", "FILE"), {}),
    "bad host": ("", ("--host", "256.1.1.1"), {}),
}
# Found before anything of the process is set up, so they need no process of their own.
BAD_SETTINGS: dict[str, BadStart] = {
    "unknown key": ("prot = 5", ("--config", "FILE"), {}),
    "wrong type": ('max_attempts = "many"', ("--config", "FILE"), {}),
    "out of bounds": ("max_attempts = 0", ("--config", "FILE"), {}),
    "not UTF-8": ("\udcff", ("--config", "FILE"), {}),
    "no such file": ("", ("--config", "/nowhere/heddle.toml"), {}),
    "a directory": ("", ("--config", "/"), {}),
    "unknown environment": ("", (), {"HEDDLE_PROT": "5"}),
    "bad environment": ("", (), {"HEDDLE_MAX_ATTEMPTS": "many"}),
    "bad URL": ("", ("--engine", "host:8000"), {}),
    "bad port in a URL": ("", ("--engine", "http://host:99999"), {}),
    "the same engine twice": ("", ("--engine", "http://a:1", "--engine", "http://a:1/v1"), {}),
    "unknown kind": ("", ("--engine", "trt+http://host:8000"), {}),
    "unknown profile": ('engines = [{url = "http://a:1", profile = "nope"}]', ("--config", "FILE"), {}),
    "unknown policy": ("", ("--policy", "nope"), {}),
    "port out of range": ("", ("--port", "99999"), {}),
}


@pytest.mark.parametrize(("toml", "options", "environment"), BAD_STARTS.values(), ids=BAD_STARTS.keys())
async def test_a_bad_start_ends_with_one_line(
    tmp_path: Path, toml: str, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    """Exit status 2, no traceback."""
    status, errors = await refused_start(*options_of(tmp_path, toml, options), **environment)
    assert status == 2, errors
    assert len(errors.splitlines()) == 1 and errors.startswith("heddle serve: "), errors


@pytest.mark.parametrize(("toml", "options", "environment"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_bad_settings_stop_the_start_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    toml: str,
    options: tuple[str, ...],
    environment: dict[str, str],
) -> None:
    """Exit status 2, no traceback."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        status: Any = main(("serve", *options_of(tmp_path, toml, options)))
    except SystemExit as ended:
        status = ended.code
    errors = capfd.readouterr().err
    assert status == 2, errors
    assert len(errors.splitlines()) == 1 and errors.startswith("heddle serve: "), errors


def options_of(folder: Path, toml: str, options: tuple[str, ...]) -> list[str]:
    """The options, with this configuration file in the place of FILE."""
    file = folder / "heddle.toml"
    file.write_bytes(toml.encode("utf-8", "surrogateescape"))
    return ["--port", "0", "--store", "memory:", *(str(file) if option == "FILE" else option for option in options)]


async def test_a_port_in_use_stops_the_start_with_one_line() -> None:
    """It names the port."""
    async with running_gateway() as gateway:
        port = gateway.url.rpartition(":")[2]
        status, errors = await refused_start("--store", "memory:", "--port", port)
        assert status == 2
        assert len(errors.splitlines()) == 1 and port in errors, errors


@pytest.mark.parametrize("stream", [False, True])
async def test_sigterm_lets_running_turns_end(client: httpx.AsyncClient, tmp_path: Any, stream: bool) -> None:
    """Running turns finish, the record is settled, and the exit status is 0."""
    store = f"sqlite:{tmp_path / 'heddle.sqlite3'}"
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=1)) as engine,
        gateway_process("--store", store, "--engine", engine) as gateway,
    ):
        running = [
            asyncio.create_task(
                ask(client, gateway.url, "chat", body_of("chat", stream, 60), {"x-trajectory-id": f"t{number}"})
            )
            for number in range(4)
        ]
        await eventually(lambda: num_legs(client, gateway.url, 4))
        stopped = asyncio.create_task(gateway.terminate())
        assert all(one.is_finished("chat") for one in await asyncio.gather(*running))
        assert await stopped == 0
        assert await gateway.output() == ""
        await gateway.start()
        for number in range(4):
            trajectory = (await client.get(f"{gateway.url}/v1/trajectories/t{number}")).json()
            assert [turn["outcome"] for turn in trajectory["turns"]] == ["finished"]


async def test_sigterm_ends_a_start_that_waits_for_its_store() -> None:
    """At once, with status 0. It used to take effect only after `store_start_timeout_s`, and supervisors send SIGKILL
    before that."""
    away = f"redis://127.0.0.1:{free_port()}/0"
    gateway = GatewayProcess("--store", away, HEDDLE_STORE_START_TIMEOUT_S="3600")
    await gateway.begin()
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await eventually(lambda: listens(gateway.port))
            assert await gateway.terminate() == 0
        assert await gateway.output() == ""
    finally:
        await gateway.kill()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_outlasts_the_shutdown_gets_shutting_down(
    client: httpx.AsyncClient, tmp_path: Any, stream: bool
) -> None:
    """503, or an error event in a stream that had begun. The shutdown ends on time, and the record has the turn as
    stopped."""
    store = f"sqlite:{tmp_path / 'heddle.sqlite3'}"
    async with serve_engine(SimulatedEngineSettings(speed_up=1)) as engine:
        options = ("--store", store, "--engine", engine)
        async with gateway_process(*options, HEDDLE_SHUTDOWN_TIMEOUT_S="1") as gateway:
            body = body_of("chat", stream, 4000)
            running = asyncio.create_task(ask(client, gateway.url, "chat", body, {"x-trajectory-id": "long"}))
            await eventually(lambda: num_legs(client, gateway.url, 1))
            began_at = time.perf_counter()
            assert await gateway.terminate() == 0
            assert time.perf_counter() - began_at < 5
            reply = await running
            assert reply.status == (200 if stream else 503)
            assert reply.error("chat")["code"] == "shutting_down"
            output = await gateway.output()
            assert "Traceback" not in output, output
            await gateway.start()
            trajectory = (await client.get(f"{gateway.url}/v1/trajectories/long")).json()
            assert [turn["outcome"] for turn in trajectory["turns"]] == ["stopped"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_ctrl_c_ends_the_wait_for_running_turns(client: httpx.AsyncClient, stream: bool) -> None:
    """As the end of `shutdown_timeout_s` does. The log promised that it would, and nothing happened."""
    async with serve_engine(SimulatedEngineSettings(speed_up=1)) as engine:
        options = ("--store", "memory:", "--engine", engine, "--log-level", "info")
        async with gateway_process(*options, HEDDLE_SHUTDOWN_TIMEOUT_S="3600") as gateway:
            running = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat", stream, 4000)))
            await eventually(lambda: num_legs(client, gateway.url, 1))
            gateway.tell(signal.SIGINT)
            await eventually(lambda: listens_no_more(gateway.port))
            gateway.tell(signal.SIGINT)
            async with asyncio.timeout(START_TIMEOUT_S):
                assert await gateway.ended() == 0
            reply = await running
            assert reply.status == (200 if stream else 503)
            assert reply.error("chat")["code"] == "shutting_down"
            output = await gateway.output()
            assert "Traceback" not in output, output


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_joined_a_turn_gets_shutting_down_too(client: httpx.AsyncClient, stream: bool) -> None:
    """If the turn outlasts the shutdown, it gets what the first client gets; it used to get nothing at all."""
    async with serve_engine(SimulatedEngineSettings(speed_up=1)) as engine:
        options = ("--store", "memory:", "--engine", engine)
        async with gateway_process(*options, HEDDLE_SHUTDOWN_TIMEOUT_S="1") as gateway:
            body, headers = body_of("chat", stream, 4000), {"x-trajectory-id": "long"}
            first = asyncio.create_task(ask(client, gateway.url, "chat", body, headers))
            await eventually(lambda: num_legs(client, gateway.url, 1))
            second = asyncio.create_task(ask(client, gateway.url, "chat", body, headers))
            await eventually(lambda: has_joined(client, gateway.url))
            assert await gateway.terminate() == 0
            for reply in (await first, await second):
                assert reply.status == (200 if stream else 503)
                assert reply.error("chat")["code"] == "shutting_down"
            output = await gateway.output()
            assert "Traceback" not in output, output


async def test_a_turn_that_still_reads_the_store_gets_shutting_down(
    client: httpx.AsyncClient, redis_server: RedisServer
) -> None:
    """If the store outlasts the shutdown; so does a client that joined the turn."""
    headers, settings = {"x-trajectory-id": "mine"}, {"HEDDLE_TOKEN_LEGS": "auto", "HEDDLE_SHUTDOWN_TIMEOUT_S": "0"}
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50)) as engine,
        gateway_process("--store", redis_server.url(11), "--engine", engine, **settings) as gateway,
    ):
        assert (await ask(client, gateway.url, "chat", body_of("chat"), headers)).is_finished("chat")
        assert await gateway.terminate() == 0
        await gateway.start()
        with redis_server.paused():
            body = body_of("chat", text="and then?")
            both = [asyncio.create_task(ask(client, gateway.url, "chat", body, headers)) for _ in range(2)]
            await eventually(lambda: has_joined(client, gateway.url))
            assert await gateway.terminate() == 0
            for reply in both:
                assert (await reply).error("chat")["code"] == "shutting_down"
        output = await gateway.output()
        assert "Traceback" not in output, output


async def test_a_request_without_a_trajectory_gets_shutting_down(
    client: httpx.AsyncClient,
) -> None:
    """If it outlasts the shutdown: 503 and no traceback, where it used to be a plain 500."""
    async with raw_engine(hangs) as engine, stopping_gateway(engine.url) as gateway:
        asked = {"model": "simulated", "input": "x"}
        answer = asyncio.create_task(client.post(gateway.url + "/v1/embeddings", json=asked, timeout=60))
        await eventually(lambda: engine.num_open == 1)
        assert await gateway.terminate() == 0
        check_error("other", await answer, 503, "shutting_down")


async def test_shutdown_timeout_may_be_a_fraction_of_a_second(client: httpx.AsyncClient) -> None:
    """It used to be truncated to whole seconds, here to zero."""
    async with (
        raw_engine(hangs) as engine,
        gateway_process("--store", "memory:", "--engine", engine.url, HEDDLE_SHUTDOWN_TIMEOUT_S="0.9") as gateway,
    ):
        turn = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat")))
        await eventually(lambda: engine.num_open == 1)
        began_at = time.perf_counter()
        assert await gateway.terminate() == 0
        assert time.perf_counter() - began_at > 0.8
        assert (await turn).error("chat")["code"] == "shutting_down"


async def test_a_drain_that_outlasts_the_shutdown_gets_shutting_down(client: httpx.AsyncClient) -> None:
    """So does the turn that it waits for."""
    async with raw_engine(hangs) as engine, stopping_gateway(engine.url) as gateway:
        turn = asyncio.create_task(ask(client, gateway.url, "chat", body_of("chat")))
        await eventually(lambda: engine.num_open == 1)
        engine_id, key = engine.url.removeprefix("http://"), {"authorization": "Bearer k"}
        drain = f"{gateway.url}/v1/engines/{engine_id}/drain?timeout_s=600"
        answer = asyncio.create_task(client.post(drain, headers=key, timeout=60))

        async def is_draining() -> bool:
            (shown,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
            return bool(shown["is_cordoned"])

        await eventually(is_draining)
        assert await gateway.terminate() == 0
        check_error("other", await answer, 503, "shutting_down")
        assert (await turn).error("chat")["code"] == "shutting_down"


async def test_a_body_still_arriving_at_the_end_of_a_shutdown_gets_503() -> None:
    """It is read until then, and refused in the form of its API."""
    async with stopping_gateway("http://127.0.0.1:9") as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\nexpect: 100-continue\r\n\r\n")
        async with asyncio.timeout(60):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b'{"model"')
            assert await gateway.terminate() == 0
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ") and b'{"type":"error","error":{"type":' in answer
        writer.close()


@pytest.mark.parametrize("is_together", [True, False], ids=["hot", "cold"])
async def test_a_finished_turn_is_answered_if_the_store_outlasts_the_shutdown(
    client: httpx.AsyncClient, redis_server: RedisServer, is_together: bool
) -> None:
    """It is logged once, and its client gets the engine's answer instead of an error."""
    settings = {"HEDDLE_SETTLE_TIMEOUT_S": "60", "HEDDLE_SHUTDOWN_TIMEOUT_S": "0"}
    async with (
        raw_engine(writes(whole(ANSWER))) as engine,
        gateway_process(
            "--store", redis_server.url(), "--engine", engine.url, "--log-level", "info", **settings
        ) as gateway,
    ):
        with redis_server.paused():
            body = orjson.dumps(body_of("chat"))
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            head = b"POST /t/late/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.writelines([head + body] if is_together else [head])
            if not is_together:
                await client.get(gateway.url + "/healthz")
                writer.write(body)

            async def has_finished() -> bool:
                shown = await client.get(gateway.url + "/v1/trajectories/late")
                return shown.status_code == 200 and len(shown.json()["turns"]) == 1

            await eventually(has_finished)
            assert await gateway.terminate() == 0
            answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(ANSWER)
        output = await gateway.output()
        assert output.count('"message":"turn"') == 1 and "Traceback" not in output, output


async def test_a_client_that_reads_nothing_ends_with_the_shutdown(client: httpx.AsyncClient) -> None:
    """Its answer was still being sent, and the end of that was logged as a traceback."""
    answer = writes(whole(ANSWER.replace(b'"x"', b'"%b"' % (b"y" * 2**25))))
    async with raw_engine(answer) as engine, stopping_gateway(engine.url) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as suspended:
            body = orjson.dumps(body_of("chat"))
            suspended.send(b"POST /t/t/v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            suspended.send(b"content-length: %d\r\n\r\n%b" % (len(body), body))

            async def has_ended() -> bool:
                return bool((await client.get(f"{gateway.url}/v1/trajectories/t")).json().get("turns"))

            await eventually(has_ended)
            assert await gateway.terminate() == 0


@asynccontextmanager
async def stopping_gateway(engine: str) -> AsyncIterator[GatewayProcess]:
    """A gateway with a short shutdown; it must not have logged a traceback on exit."""
    options = ("--store", "memory:", "--engine", engine, "--log-level", "error")
    async with gateway_process(*options, HEDDLE_SHUTDOWN_TIMEOUT_S="1", HEDDLE_ADMIN_KEY="k") as gateway:
        yield gateway
        output = await gateway.output()
        assert "Traceback" not in output, output


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def listens_no_more(port: int) -> bool:
    return not await listens(port)


async def has_joined(client: httpx.AsyncClient, url: str) -> bool:
    return "heddle_joined_turns_total 1.0" in (await client.get(url + "/metrics")).text


async def num_legs(client: httpx.AsyncClient, url: str, num: int) -> bool:
    engines = (await client.get(url + "/v1/engines")).json()["data"]
    return sum(engine["num_legs"] for engine in engines) == num


async def test_sigterm_does_not_wait_for_event_streams(client: httpx.AsyncClient) -> None:
    """They have no end of their own, so the shutdown ends them."""
    async with gateway_process("--store", "memory:") as gateway:
        async with client.stream("GET", gateway.url + "/v1/events") as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": watching"
            began_at = time.perf_counter()
            stopped = asyncio.create_task(gateway.terminate())
            assert [line async for line in lines if line.startswith("data")] == []
            assert await stopped == 0
        assert time.perf_counter() - began_at < 5
        assert await gateway.output() == ""
