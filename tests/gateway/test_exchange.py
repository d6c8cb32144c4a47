"""What HTTP/1.1 requires of a server, for turns that are served below ASGI: tested with raw bytes on a socket."""

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest
import pytest_asyncio

from engines.simulated.server import serve_engine
from engines.simulated.settings import Fault, SimulatedEngineSettings
from gateway.server import Listening
from tests.faults.asking import body_of
from tests.support.gateway import eventually, running_gateway

BODY = orjson.dumps(body_of("chat"))
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
SIZED = HEAD + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
PIECES = [BODY[start : start + 7] for start in range(0, len(BODY), 7)]
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
CHUNKED += b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in PIECES) + b"0\r\n\r\n"


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[Listening]:
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50)) as engine,
        running_gateway(engine) as gateway,
    ):
        yield gateway


async def connected(gateway: Listening) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def head_of(reader: asyncio.StreamReader) -> tuple[bytes, dict[bytes, bytes]]:
    """Status line and headers of the next answer."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    return status, {name: value for name, _, value in (line.partition(b": ") for line in lines)}


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """The text of the next answer, which has a content length."""
    status, headers = await head_of(reader)
    body = await reader.readexactly(int(headers[b"content-length"]))
    assert status == b"HTTP/1.1 200 OK", body
    text: str = orjson.loads(body)["choices"][0]["message"]["content"]
    return text.encode()


@pytest.mark.parametrize("request_bytes", [SIZED, CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("step", [1, 50, 10_000])
async def test_a_request_may_arrive_in_pieces_of_any_size(gateway: Listening, request_bytes: bytes, step: int) -> None:
    """A byte at a time or three requests in one piece: each is answered, on the same connection."""
    async with asyncio.timeout(30):
        reader, writer = await connected(gateway)
        sent = request_bytes * (1 if step == 1 else 3)
        for start in range(0, len(sent), step):
            writer.write(sent[start : start + step])
            await writer.drain()
            await asyncio.sleep(0)
        assert all([await answer_of(reader) for _ in range(1 if step == 1 else 3)])
        writer.close()


async def test_a_client_that_waits_for_100_continue_gets_it(gateway: Listening) -> None:
    """It sends its body only afterwards."""
    async with asyncio.timeout(30):
        reader, writer = await connected(gateway)
        writer.write(HEAD + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(BODY))
        assert (await head_of(reader))[0] == b"HTTP/1.1 100 Continue"
        writer.write(BODY)
        assert await answer_of(reader)
        writer.close()


@pytest.mark.parametrize("head", [HEAD + b"connection: close\r\n", HEAD.replace(b"1.1", b"1.0")], ids=["close", "1.0"])
async def test_a_connection_without_keep_alive_closes_after_its_answer(gateway: Listening, head: bytes) -> None:
    """The answer's `connection` header announces it."""
    async with asyncio.timeout(30):
        reader, writer = await connected(gateway)
        writer.write(head + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY))
        status, headers = await head_of(reader)
        assert (status, headers[b"connection"]) == (b"HTTP/1.1 200 OK", b"close")
        assert len(await reader.read()) == int(headers[b"content-length"])
        writer.close()


async def test_a_stream_to_an_http_1_0_client_is_not_chunked(gateway: Listening) -> None:
    """HTTP/1.0 has no chunks: the stream ends with its connection (RFC 9112, 6.1), also if the client would keep it."""
    body = orjson.dumps(body_of("chat", True))
    async with asyncio.timeout(30):
        reader, writer = await connected(gateway)
        head = HEAD.replace(b"1.1", b"1.0") + b"connection: keep-alive\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        _, headers = await head_of(reader)
        assert headers[b"connection"] == b"close" and b"transfer-encoding" not in headers
        events = await reader.read()
        assert events.startswith(b"data: {") and events.endswith(b"}\n\ndata: [DONE]\n\n")
        writer.close()


async def test_an_answer_to_head_has_no_body(gateway: Listening) -> None:
    """The next bytes on the connection are the next answer."""
    async with asyncio.timeout(30):
        reader, writer = await connected(gateway)
        writer.write(HEAD.replace(b"POST", b"HEAD") + b"\r\n" + SIZED)
        status, headers = await head_of(reader)
        assert status.startswith(b"HTTP/1.1 405") and int(headers[b"content-length"]) > 0
        assert await answer_of(reader)
        writer.close()


async def test_a_client_that_leaves_while_pipelining_stops_its_running_turn(gateway: Listening) -> None:
    """The running turn is the first request's, and the connection's last bytes were the second's."""
    long = orjson.dumps(body_of("chat", tokens=100_000))
    async with asyncio.timeout(30):
        metrics_reader, metrics_writer = await connected(gateway)

        async def num_running() -> int:
            metrics_writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
            _, headers = await head_of(metrics_reader)
            page = await metrics_reader.readexactly(int(headers[b"content-length"]))
            return int(float(page.partition(b"\nheddle_running_turns ")[2].split(b"\n")[0]))

        async def is_running(num: int) -> bool:
            return await num_running() == num

        _, writer = await connected(gateway)
        writer.write(HEAD + b"content-length: %d\r\n\r\n%s" % (len(long), long) + SIZED)
        await eventually(lambda: is_running(1))
        writer.transport.abort()
        await eventually(lambda: is_running(0))
        metrics_writer.close()


async def test_an_idle_connection_is_closed_after_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not between two turns of an agent, nor during one that takes longer, but some time after the last one."""
    monkeypatch.setattr("gateway.server._KEEP_ALIVE_S", 1)
    faults = [Fault("slow", delay_s=delay_s, count=1, path="/v1/chat") for delay_s in (0.0, 0.0, 1.5)]
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50, faults=tuple(faults))) as engine,
        running_gateway(engine) as gateway,
        asyncio.timeout(60),
    ):
        reader, writer = await connected(gateway)
        for _ in faults:
            writer.write(SIZED)
            assert await answer_of(reader)
        assert await reader.read() == b""
        writer.close()
