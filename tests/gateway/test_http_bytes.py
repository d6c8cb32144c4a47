"""HTTP/1.1 byte by byte: however requests are cut and pipelined, each is answered once and in order. Requests that two
servers could read differently are refused."""

import asyncio
import random
from collections.abc import AsyncIterator

import orjson
import pytest
import pytest_asyncio

from gateway.server import Listening
from tests.faults.asking import body_of
from tests.faults.raw_engine import RawEngine, raw_engine, whole
from tests.gateway.test_exchange import HEAD, connected, head_of
from tests.support.gateway import PATIENT, eventually, running_gateway


@pytest_asyncio.fixture
async def site() -> AsyncIterator[tuple[RawEngine, Listening]]:
    """A gateway whose engine answers with the user's message."""

    async def echo(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        content = orjson.loads(engine.posts[-1].partition(b"\r\n\r\n")[2])["messages"][0]["content"]
        message = {"role": "assistant", "content": content}
        writer.write(whole(orjson.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})))
        await writer.drain()

    async with (
        raw_engine(echo, keeps_open=True) as engine,
        running_gateway(engine.url, body_timeout_s=2, **PATIENT) as gateway,
    ):
        yield engine, gateway


# Java's own client and `curl --http2` send this with each request until they know the server.
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


def request(text: str, dice: random.Random, headers: bytes = b"") -> bytes:
    """A turn with this text, with a length or in chunks; some ask to upgrade to HTTP/2."""
    body = orjson.dumps(body_of("chat", text=text))
    headers += UPGRADE if dice.random() < 0.3 else b""
    if dice.random() < 0.5:
        return HEAD + headers + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    chunks = b""
    while body:
        size = dice.randint(1, len(body))
        chunks += b"%x\r\n%s\r\n" % (size, body[:size])
        body = body[size:]
    return HEAD + headers + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@pytest.mark.parametrize("upgrade", [UPGRADE, b"Upgrade: websocket\r\nConnection: close, upgrade\r\n"])
@pytest.mark.parametrize("cut", [None, 40, -5])
async def test_a_request_to_upgrade_is_answered_in_http_1_1(
    site: tuple[RawEngine, Listening], upgrade: bytes, cut: int | None
) -> None:
    """RFC 9110, 7.8. Its body used to be taken for the other protocol's, so the request had none."""
    body = orjson.dumps(body_of("chat", text="hello"))
    sent = HEAD + upgrade + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    async with asyncio.timeout(60):
        reader, writer = await connected(site[1])
        writer.write(sent[:cut])
        if cut is not None:
            await writer.drain()
            writer.write(sent[cut:])
        status, headers = await head_of(reader)
        assert status == b"HTTP/1.1 200 OK" and headers.get(b"connection") == (
            b"close" if b"close" in upgrade else None
        )
        writer.close()


async def test_a_connect_request_is_refused(site: tuple[RawEngine, Listening]) -> None:
    """Whatever its target."""
    async with asyncio.timeout(60):
        for target in (b"/v1/models", b"engine:8000"):
            reader, writer = await connected(site[1])
            writer.write(b"CONNECT %s HTTP/1.1\r\nhost: x\r\n\r\n" % target)
            assert (await head_of(reader))[0].startswith(b"HTTP/1.1 40")
            writer.close()


@pytest.mark.parametrize("seed", range(12))
async def test_requests_cut_anywhere_are_answered_in_order(site: tuple[RawEngine, Listening], seed: int) -> None:
    """Each answer is to the request in its place, and the engine gets each request once."""
    engine, gateway = site
    dice = random.Random(seed)
    texts = [f"{seed}-{number} " + "x" * dice.choice([0, 10, 3_000, 70_000]) for number in range(dice.randint(1, 6))]
    sent = b"".join(request(text, dice) for text in texts)
    cuts = sorted(dice.randrange(len(sent)) for _ in range(dice.choice([0, 1, 5, 40])))
    pieces = [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    async with asyncio.timeout(110):
        reader, writer = await connected(gateway)

        async def send() -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        for text in texts:
            status, headers = await head_of(reader)
            body = await reader.readexactly(int(headers[b"content-length"]))
            assert status == b"HTTP/1.1 200 OK", body
            assert orjson.loads(body)["choices"][0]["message"]["content"] == text
        await sending
        writer.close()
    assert len(engine.posts) == len(texts)


BODY = orjson.dumps(body_of("chat"))
HIDDEN = HEAD + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
LENGTH = b"content-length: %d\r\n" % len(BODY)
AMBIGUOUS = {
    "a length beside chunks": HEAD + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks beside a length": HEAD + b"transfer-encoding: chunked\r\n" + LENGTH + b"\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": HEAD + b"content-length: 0\r\n" + LENGTH + b"\r\n" + BODY + HIDDEN,
    "a length that is a list": HEAD + b"content-length: %d, 0\r\n\r\n%s" % (len(BODY), BODY) + HIDDEN,
    "a length below zero": HEAD + b"content-length: -1\r\n\r\n" + HIDDEN,
    "a length with a sign": HEAD + b"content-length: +%d\r\n\r\n%s" % (len(BODY), BODY) + HIDDEN,
    "a length beyond all bounds": HEAD + b"content-length: 99999999999999999999999\r\n\r\n" + HIDDEN,
    "an unknown coding": HEAD + b"transfer-encoding: chunky\r\n\r\n" + HIDDEN,
    "chunks not last": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a space before the colon": HEAD + b"transfer-encoding : chunked\r\n" + LENGTH + b"\r\n" + BODY + HIDDEN,
    "a name with a control character": HEAD + b"x\x01: y\r\n" + LENGTH + b"\r\n" + BODY,
    "a value with a NUL": HEAD + b"x: \x00\r\n" + LENGTH + b"\r\n" + BODY,
    "a chunk without a size": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + HIDDEN,
    "a chunk beyond all bounds": HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + HIDDEN,
    "a chunk longer than its size": HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n" + HIDDEN,
}


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS)
async def test_an_ambiguous_request_reaches_no_engine(site: tuple[RawEngine, Listening], sent: bytes) -> None:
    """Neither does a request hidden behind it: the connection is closed, with a 400 if with anything."""
    engine, gateway = site
    async with asyncio.timeout(110):
        reader, writer = await connected(gateway)
        writer.write(sent)
        answer = await reader.read()
        writer.close()
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1)
    assert engine.posts == []


@pytest.mark.parametrize(
    "start", [b"", HEAD, HEAD + LENGTH, HEAD + b"x: y"], ids=["no byte", "a line", "a length", "half"]
)
async def test_an_incomplete_head_times_out(site: tuple[RawEngine, Listening], start: bytes) -> None:
    """The connection is closed without an answer."""
    _, gateway = site
    async with asyncio.timeout(110):
        reader, writer = await connected(gateway)
        writer.write(start)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "does not come"])
async def test_a_head_that_waits_for_earlier_answers_times_out_only_after_them(comes: bool) -> None:
    """The gateway does not read it until then, so its client is not to blame."""
    may_answer = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        message = {"role": "assistant", "content": "hi"}
        writer.write(whole(orjson.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})))
        await writer.drain()

    async with (
        raw_engine(answer, keeps_open=True) as engine,
        running_gateway(engine.url, body_timeout_s=1, **PATIENT) as gateway,
        asyncio.timeout(110),
    ):
        reader, writer = await connected(gateway)
        writer.write(HIDDEN)
        await eventually(lambda: len(engine.posts) == 1)
        writer.write(HIDDEN + HIDDEN[:30])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 2)  # at the connection's end it would return
        may_answer.set()
        writer.write(HIDDEN[30:] if comes else b"")
        for _ in range(3 if comes else 2):
            status, headers = await head_of(reader)
            assert status == b"HTTP/1.1 200 OK"
            await reader.readexactly(int(headers[b"content-length"]))
        assert comes or await reader.read() == b""
        writer.close()


async def test_an_incomplete_body_times_out(site: tuple[RawEngine, Listening]) -> None:
    """The client gets a 408, and the engine gets nothing."""
    engine, gateway = site
    async with asyncio.timeout(110):
        reader, writer = await connected(gateway)
        writer.write(HEAD + LENGTH + b"\r\n" + BODY[:-1])
        status, _ = await head_of(reader)
        assert status.startswith(b"HTTP/1.1 408")
        writer.close()
    assert engine.posts == []


async def test_a_folded_header_does_not_name_a_trajectory(site: tuple[RawEngine, Listening]) -> None:
    """It is refused, or read as one value: never as a header of its own."""
    engine, gateway = site
    async with asyncio.timeout(110):
        reader, writer = await connected(gateway)
        folded = b"x-filler: a\r\n x-trajectory-id: stolen\r\nconnection: close\r\n"
        writer.write(HEAD + folded + LENGTH + b"\r\n" + BODY)
        answer = await reader.read()
        writer.close()
    assert b"x-trajectory-id: stolen" not in answer
    assert len(engine.posts) == answer.startswith(b"HTTP/1.1 200")


def in_one_chunk(body: bytes) -> bytes:
    """A request from its last header to its last chunk; trailers and an empty line follow."""
    return b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(body), body)


IN_CHUNKS = in_one_chunk(BODY)


async def test_a_trailer_is_no_header(site: tuple[RawEngine, Listening]) -> None:
    """RFC 9110, 6.5.1: it changes neither its own request's identity nor the next one's."""
    _, gateway = site
    async with asyncio.timeout(110):
        reader, writer = await connected(gateway)
        writer.write(HEAD + b"x-trajectory-id: mine\r\n" + IN_CHUNKS + b"x-trajectory-id: another\r\n\r\n" + HIDDEN)
        seen = []
        for _ in range(2):
            _, headers = await head_of(reader)
            await reader.readexactly(int(headers[b"content-length"]))
            seen.append(headers[b"x-trajectory-id"])
        writer.close()
    assert seen[0] == b"mine" and seen[1] not in (b"mine", b"another")


async def test_a_key_in_a_trailer_authorises_nothing() -> None:
    """Only one in a header does."""
    key = b"authorization: Bearer a-key-of-a-client\r\n"
    async with running_gateway(api_keys=("a-key-of-a-client",)) as gateway, asyncio.timeout(110):
        for sent, status in ((HEAD + key + IN_CHUNKS, b"503"), (HEAD + IN_CHUNKS + key, b"401")):
            reader, writer = await connected(gateway)
            writer.write(sent + b"\r\n")
            assert (await head_of(reader))[0].split()[1] == status
            writer.close()


@pytest.mark.parametrize("answered", [False, True], ids=["unanswered", "after a 401"])
@pytest.mark.parametrize(
    ("start", "endless"),
    [(b"0\r\n", b"x-more: %s\r\n" % (b"y" * 990)), (b"0\r\nx-more: ", b"y" * 1000), (b"5;", b"y" * 1000)],
    ids=["trailers", "a trailer", "a chunk's head"],
)
async def test_what_follows_a_piece_of_a_body_without_end_is_cut_off(
    start: bytes, endless: bytes, answered: bool
) -> None:
    """It does not pile up in memory, whether the request was answered already or waits for its end."""
    keys = ("a-key-of-a-client",) if answered else ()
    async with running_gateway(max_header_bytes=2000, api_keys=keys) as gateway, asyncio.timeout(110):
        reader, writer = await connected(gateway)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n" + start)
        if answered:
            _, headers = await head_of(reader)
            await reader.readexactly(int(headers[b"content-length"]))
        sent = 0
        try:
            while not reader.at_eof() and sent < 50_000_000:
                writer.write(endless)
                await writer.drain()
                await asyncio.sleep(0)
                sent += len(endless)
            more = await reader.read()
        except ConnectionError:
            more = b""
        assert sent < 10_000_000 and more == b""
        writer.close()


LONG = orjson.dumps(body_of("chat", text="x" * 8000))


@pytest.mark.parametrize(
    "first",
    [HEAD + b"content-length: %d\r\n\r\n%s" % (len(LONG), LONG), HEAD + in_one_chunk(LONG) + b"\r\n"],
    ids=["length", "chunked"],
)
async def test_a_body_does_not_count_toward_the_next_head(first: bytes) -> None:
    """Its end and the beginning of the next head come together, and are more than a head may have."""
    async with running_gateway(max_header_bytes=2000) as gateway, asyncio.timeout(110):
        reader, writer = await connected(gateway)
        writer.write(first + HIDDEN[:30])
        for rest in (HIDDEN[30:], b""):
            status, headers = await head_of(reader)
            assert status.startswith(b"HTTP/1.1 503")
            await reader.readexactly(int(headers[b"content-length"]))
            writer.write(rest)
        writer.close()
