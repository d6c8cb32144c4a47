"""The API under requests that nobody would send: generated from its own OpenAPI schema, and malformed HTTP."""

import asyncio
import random
import socket
import threading
import time
from typing import Any

import hypothesis
import pytest
import requests
from hypothesis.errors import Unsatisfiable

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.support.gateway import ADMIN, running_gateway

REQUEST_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 0.2  # so that a client that stops in mid-request is dropped soon


class Served:
    """A gateway and its engine on a thread of their own, for blocking clients.

    Args:
        settings: of the gateway.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self.url = ""
        self.is_alive = False
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> "Served":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        settings: dict[str, Any] = {"max_body_bytes": 100_000, "queue_timeout_s": 5.0, **self._settings}
        async with (
            serve_engine(SimulatedEngineSettings(speed_up=10_000, mean_output_tokens=8)) as engine,
            running_gateway(engine, **settings) as gateway,
        ):
            self.url = gateway.url
            self._ready.set()
            await self._stop.wait()


@pytest.mark.timeout(600)
def test_every_operation_conforms_to_its_schema() -> None:
    """Whatever is sent: no 500, no hang, a documented status, and the documented type and form of the body."""
    with Served() as served:
        check_operations(served)


def check_operations(served: Served) -> None:
    import schemathesis
    from schemathesis.core.failures import FailureGroup
    from schemathesis.generation import GenerationMode

    schema = schemathesis.openapi.from_url(served.url + "/openapi.json")
    # The stream of events has no end.
    operations = [found.ok() for found in schema.exclude(path="/v1/events").get_all_operations()]
    assert len(operations) > 25
    failures = []
    for operation in operations:
        for mode in GenerationMode:
            try:
                fuzz(operation, mode)
            except Unsatisfiable:
                continue  # this operation allows every request
            except (AssertionError, FailureGroup, requests.RequestException) as failure:
                failures.append(f"{operation.label} ({mode.value}): {failure!r}")
    assert not failures, "\n\n".join(failures)


def fuzz(operation: Any, mode: Any) -> None:
    """Send requests that the schema allows, or does not; the same ones in every run."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]

    @hypothesis.settings(
        max_examples=40,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(headers=ADMIN, timeout=REQUEST_TIMEOUT_S)
        case.validate_response(response, checks=wanted)
        assert response.headers["x-request-id"]

    send()


SEEDS = range(300)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"model":"simulated","messages":[{"role":"user","content":"hi"}],"max_tokens":2}'
BROKEN: list[bytes] = [
    b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /%zz HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-trajectory-id: \xff\xfe\r\nauthorization: Bearer \xff\r\n\r\n",
    HEAD + b"content-length: -1\r\n\r\n",
    HEAD + b"content-length: 9" + b"9" * 40 + b"\r\n\r\n",
    HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    HEAD + b"transfer-encoding: gzip\r\n\r\nhello",
    HEAD + b"x-trajectory-id: \xff\xfe\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    HEAD + b" folded: yes\r\n\r\n",
    HEAD + b"no-colon\r\n\r\n",
    HEAD + b"nul: a\x00b\r\n\r\n",
    b"POST /t/%%ff%%fe/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    b"POST /t/" + b"x" * 5000 + b"/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
]


def test_malformed_http_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """No answer is a 5xx, no traceback is logged, and afterwards a good request is still served."""
    good = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    mutants = [mutant(good, random.Random(seed)) for seed in SEEDS]
    with Served(body_timeout_s=BODY_TIMEOUT_S) as served:
        for data in [*BROKEN, *mutants]:
            answer = first_bytes(served.url, data)
            assert not answer or answer.startswith(b"HTTP/1.1 "), (data, answer)
            assert not answer.startswith(b"HTTP/1.1 5"), (data, answer)
        assert answer_with_retries(served.url, good).startswith(b"HTTP/1.1 200 ")
    assert [record for record in caplog.records if record.exc_info] == []


def answer_with_retries(url: str, data: bytes) -> bytes:
    """The answer to these bytes. On a busy machine a client may be held up for longer than a body may take; it gets no
    answer and asks again."""
    for _ in range(100):
        began = time.monotonic()
        if (answer := first_bytes(url, data)) or time.monotonic() - began < BODY_TIMEOUT_S:
            break
    return answer


def mutant(data: bytes, dice: random.Random) -> bytes:
    """The bytes with some of them changed, cut out or doubled."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(changed))
        match dice.randrange(4):
            case 0:
                changed[at] = dice.randrange(256)
            case 1:
                del changed[at : at + dice.randint(1, 20)]
            case 2:
                changed[at:at] = changed[at : at + dice.randint(1, 20)]
            case _:
                changed[at:at] = dice.choice([b"\r\n", b"\n", b"\x00", b"\xff", b": ", b" ", b"%", b"\r\n\r\n"])
        if not changed:
            break
    return bytes(changed)


def first_bytes(url: str, data: bytes) -> bytes:
    """The first bytes of the answer; b"" if the connection is closed without one."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), REQUEST_TIMEOUT_S) as connection:
        connection.sendall(data)
        try:
            return connection.recv(65536)
        except ConnectionResetError:
            return b""
