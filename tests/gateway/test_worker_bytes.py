"""A byte worker passes on plain events only, however a stream is cut, and gives the rest back unread."""

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.errors import Api
from gateway.messages.plain import plain_events
from gateway.messages.streams import StreamReader
from gateway.workers.wire import Kind, Order, Report, Why, order, read_reports, report
from gateway.workers.worker import Worker

CHAT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
END = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
SAID = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"%b"}}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n'
ENDS = {"messages": [STOP], "responses": [COMPLETED]}
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PATIENCE_S = 60.0


def chunked(body: bytes, cuts: list[int]) -> bytes:
    """The body in chunks that end at these places."""
    bounds = [0, *sorted(set(cuts) - {0, len(body)}), len(body)]
    pieces = [body[begin:end] for begin, end in pairwise(bounds)]
    return b"".join([b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece])


def unchunked(data: bytes) -> bytes:
    """The body of these chunks."""
    pieces: list[bytes] = []

    class Body:
        on_body = pieces.append

    parser = httptools.HttpResponseParser(Body())
    parser.feed_data(HEAD + data)
    return b"".join(pieces)


@dataclass
class Loan:
    """A lent stream: the engine's end, whose packets are read one by one, and the client's."""

    engine: socket.socket
    client: socket.socket
    orders: socket.socket
    reports: socket.socket

    def back(self) -> Report:
        """The report of the stream's return."""
        buffer = bytearray()
        while True:
            for found in read_reports(buffer):
                if found.kind is Kind.BACK:
                    return found
            piece = self.reports.recv(65_536)
            assert piece, "the worker died"
            buffer += piece

    def read(self) -> bytes:
        """What the client has received so far."""
        self.client.setblocking(False)
        data = b""
        while True:
            try:
                piece = self.client.recv(1 << 20)
            except BlockingIOError:
                return data
            if not piece:
                return data
            data += piece


@contextmanager
def lent(api: Api = "chat", limit_bytes: int = 1 << 20) -> Iterator[Loan]:
    """Lends a stream to a worker that runs in a thread."""
    orders, their_orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reports, their_reports = socket.socketpair()
    engine, their_engine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client, their_client = socket.socketpair()
    for each in (engine, client):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    worker = threading.Thread(target=lambda: Worker(their_orders, their_reports).run(), daemon=True)
    try:
        worker.start()
        reports.settimeout(PATIENCE_S)
        their_engine.setblocking(False)
        their_client.setblocking(False)
        lend = order(Order.LEND, 7, api, limit_bytes)
        socket.send_fds(orders, [lend], [their_client.fileno(), their_engine.fileno()])
        yield Loan(engine, client, orders, reports)
    finally:
        orders.close()
        worker.join(PATIENCE_S)
        for each in (reports, engine, client, their_orders, their_reports, their_engine, their_client):
            each.close()
    assert not worker.is_alive()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["chat", "completions", "messages", "responses"]),
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.sampled_from(["event", "chunk", "byte", "any"]),
    st.sampled_from(["whole", "cut"]),
)
def test_no_byte_is_lost_however_a_stream_is_cut(api: Api, seed: int, num_events: int, chunks: str, ends: str) -> None:
    """What the client received and what is left unread are together what the engine sent; each begins with a chunk."""
    rng = random.Random(seed)
    event = SAID if api in ("messages", "responses") else CHAT
    events = [event % bytes(rng.choices(b"abc \\{}:", k=rng.randrange(40))) for _ in range(num_events)]
    rest = rng.choice([*ENDS.get(api, [END + DONE, DONE]), b": x\n\n", b""])
    body = b"".join(events) + rest
    if ends == "cut":
        body = body[: rng.randrange(1, len(body))]
    bounds = [sum(map(len, events[: n + 1])) for n in range(len(events))]
    cuts = {
        "event": bounds,
        "chunk": sorted(rng.sample(bounds, rng.randrange(len(bounds) + 1))),
        "byte": list(range(len(body))),
        "any": [rng.randrange(len(body)) for _ in range(rng.randrange(8))],
    }[chunks]
    sent = chunked(body, cuts) + rng.choice([b"0\r\n\r\n", b""])
    with lent(api) as loan:
        at = 0
        while at < len(sent):
            end = min(len(sent), at + rng.choice([1, 2, 3, 7, 60, 200, 5_000]))
            loan.engine.send(sent[at:end])
            at = end
        loan.engine.close()  # so the stream is given back, at the latest when all of it was read
        back = loan.back()
        got = loan.read()
    # What was not read before the stream was given back is still in the engine's socket.
    assert sent.startswith(got_as_sent := sent[: len(sent) - len(not_passed(sent, back))])
    assert unchunked(got + back.unsent) == back.passed
    assert unchunked(got_as_sent) == back.passed
    assert back.passed == b"".join(events)[: len(back.passed)], "only plain events are passed on"
    assert back.passed in {b"".join(events[:n]) for n in range(len(events) + 1)}
    assert back.num_events == back.passed.count(b"\n\n")


def not_passed(sent: bytes, back: Report) -> bytes:
    """What was given back or never read: all after the chunks whose bodies were passed on."""
    for at in range(len(sent) + 1):
        try:
            if unchunked(sent[:at]) == back.passed and sent[at:].startswith(back.unread):
                return sent[at:]
        except httptools.HttpParserError:
            continue
    raise AssertionError((sent, back))


@pytest.mark.parametrize(
    ("event", "api"),
    [
        (END, "chat"),
        (DONE, "chat"),
        (b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n', "chat"),
        (b'data: {"error":{"message":"no"}}\n\n', "chat"),
        (b"data: nonsense\n\n", "chat"),
        (b": ping\n\n", "chat"),
        (STOP, "messages"),
        (b'event: error\ndata: {"type":"error","error":{"message":"no"}}\n\n', "messages"),
        (COMPLETED, "responses"),
    ],
)
def test_anything_but_text_is_given_back_unread(event: bytes, api: Api) -> None:
    """An end, usage, an error, invalid data, a comment: the client gets no byte of it."""
    plain = (CHAT if api == "chat" else SAID) % b"x"
    with lent(api) as loan:
        loan.engine.send(chunked(plain, []))
        loan.engine.send(chunked(event, []))
        back = loan.back()
        assert (back.why, back.passed, back.num_events) == (Why.TOLD, plain, 1)
        assert back.unread == chunked(event, [])
        assert unchunked(loan.read()) == plain


def test_a_stream_with_a_slow_client_is_given_back_with_unsent_bytes() -> None:
    """The cut is within a chunk: the unsent bytes continue exactly there."""
    events = [CHAT % (b"%d" % n * 2_000) for n in range(2_000)]
    with lent() as loan:
        loan.engine.settimeout(2.0)  # if nobody reads for so long, the stream was given back
        for event in events:
            try:
                loan.engine.send(chunked(event, []))
            except OSError:
                break
        back = loan.back()
        got = loan.read()
    assert back.why is Why.CLIENT
    assert back.unsent
    assert unchunked(got + back.unsent) == back.passed == b"".join(events[: back.num_events])


def test_a_recalled_or_long_stream_is_given_back() -> None:
    """Recalled: with the received part of an event. Long: with all that the worker kept."""
    with lent() as loan:
        half = chunked(CHAT % b"x", [])[:30]
        loan.engine.send(half)
        loan.orders.send(order(Order.RECALL, 7))
        back = loan.back()
        assert (back.why, back.passed) == (Why.RECALLED, b"")
        assert back.unread in (half, b"")  # it may have been recalled before the half was read
        loan.orders.send(order(Order.RECALL, 7))  # a second recall does nothing
        loan.orders.send(order(Order.RECALL, 8))  # nor does the recall of another loan
    with lent(limit_bytes=500) as loan:
        for _ in range(20):
            loan.engine.send(chunked(CHAT % b"x", []))
        back = loan.back()
        assert back.why is Why.FULL
        assert 500 < len(back.passed) <= 500 + len(CHAT)


def test_a_loan_without_descriptors_is_given_back() -> None:
    """The worker continues with its other streams."""
    with lent() as loan:
        loan.orders.send(order(Order.LEND, 9, "chat", 1 << 20))
        back = loan.back()
        assert (back.loan, back.why, back.passed, back.unread) == (9, Why.FULL, b"", b"")
        loan.engine.send(chunked(CHAT % b"x", []) + chunked(DONE, []))
        assert loan.back().passed == CHAT % b"x"


@pytest.mark.parametrize("data", [b"xyz\r\n", b"-5\r\nhello\r\n", b"5;\r\nhellooooo\r\n"])
def test_invalid_http_is_given_back_unchanged(data: bytes) -> None:
    """The gateway finds the same fault in it."""
    with lent() as loan:
        loan.engine.send(data)
        loan.engine.close()
        back = loan.back()
        assert back.unread == data
        assert not back.passed


@given(st.lists(st.sampled_from([CHAT % b"x", SAID % b"y", END, DONE, STOP, b": c\n\n", b"data: {}\n\n"]), max_size=5))
def test_a_reader_that_skips_plain_events_knows_the_same(events: list[bytes]) -> None:
    """A reader that is told of them has the same counts and events as one that read them all."""
    first = CHAT % b"first"
    for api in ("chat", "messages"):
        full, skip = StreamReader(api, keep=True), StreamReader(api, keep=True)
        assert full.read(first) == skip.read(first)
        block = b"".join(events)
        plain = plain_events(api)(block)
        if plain:
            assert full.read(block) == block
            skip.passed(block, plain)
            assert (full.num_chunks, full.kept, full.done, full.error) == (skip.num_chunks, skip.kept, False, None)


def test_reports_are_reassembled_from_single_bytes() -> None:
    """They equal those that were written."""
    written = [report(Kind.BACK, 5, 3, Why.TOLD, b"passed", b"", b"unread"), report(Kind.COUNT, 6, 9)]
    buffer, seen = bytearray(), []
    for byte in b"".join(written):
        buffer.append(byte)
        seen += read_reports(buffer)
    assert [(found.kind, found.loan, found.num_events, found.passed, found.unread) for found in seen] == [
        (Kind.BACK, 5, 3, b"passed", b"unread"),
        (Kind.COUNT, 6, 9, b"", b""),
    ]
