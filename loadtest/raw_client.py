"""A client for load tests only: HTTP/1.1 and server-sent events by hand, for cases in which the SDK's own work would be
the limit.

It has the same requests, retries and results as `loadtest.sdk_client.SdkClient`, at a small part of its CPU time
(`python -m loadtest.client_cost` measures both). It handles only what chat servers send: a body with a
length or in chunks.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson

from loadtest.agent import Address
from loadtest.answers import NONSENSE, Assembly, StreamBroken, add_completion, add_event
from loadtest.clients import (
    Reply,
    RequestFailed,
    backoff_s,
    if_known,
    queued_s_of,
    root_of,
)

# Engines close a connection that is idle for 5 s (uvicorn's default, also vLLM's and SGLang's).
MAX_IDLE_S = 4.0
# As the SDK: a timeout, a conflict, too many requests, and every server error.
ASK_AGAIN = (408, 409, 429)
# As the SDK: a server that wants to be left alone for longer is not asked again.
MAX_RETRY_AFTER_S = 120.0
MAX_LINE_BYTES = 8 * 1024 * 1024

Asked = TypeVar("Asked")


@dataclass(slots=True)
class Connection:
    """One TCP connection, used by one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0


@dataclass(frozen=True, slots=True)
class Response:
    """A response's head, with its body still on the wire."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            EOFError: If the connection ends before the body does.
        """
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self.reader.readexactly(int(self.headers.get("content-length", "0")))
            return
        while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        # No chat server sends trailers.
        await self.reader.readuntil(b"\r\n")

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


class _Refused(RequestFailed):
    """An answer whose status is not 2xx."""

    def __init__(self, response: Response, body: bytes) -> None:
        super().__init__(f"HTTP {response.status}: {_said(body)}", response.status)
        self._headers = response.headers

    def retry_after_s(self, attempt: int) -> float | None:
        """How long to wait before the next attempt; None if there should be none."""
        asked_s = _retry_after_s(self._headers)
        if asked_s > MAX_RETRY_AFTER_S or not self._asks_again():
            return None
        return asked_s if asked_s > 0 else backoff_s(attempt)

    def _asks_again(self) -> bool:
        assert self.status is not None, "it is an answer's"
        match self._headers.get("x-should-retry"):
            case "true" | "false" as told:
                return told == "true"
            case _:
                return self.status in ASK_AGAIN or self.status >= 500


class RawClient:
    """The replayer's client without the SDK. Arguments as `SdkClient`'s."""

    def __init__(self, base_url: str, api_key: str, max_retries: int, timeout_s: float) -> None:
        url = urlsplit(root_of(base_url))
        assert url.hostname is not None, f"no host in {base_url!r}"
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._root_path = url.path
        self._head = f"Host: {url.netloc}\r\nAuthorization: Bearer {api_key}\r\nContent-Type: application/json\r\n"
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []

    async def chat(self, body: dict[str, Any], address: Address) -> Reply:
        payload = orjson.dumps(body | dict(address.body))
        path = f"{address.path_prefix}/v1/chat/completions"

        async def ask(attempt: int) -> Reply:
            async with self._request("POST", path, payload, address.headers) as response:
                assembly = Assembly()
                if body["stream"]:
                    await _read_stream(response, assembly)
                else:
                    add_completion(orjson.loads(await response.body()), assembly)
                return Reply(
                    assembly.answer(),
                    assembly.first_token_at,
                    attempt,
                    queued_s_of(response.headers),
                    response.headers.get("x-trajectory-id"),
                )

        return await self._tried(ask)

    async def get(self, path: str) -> dict[str, Any]:
        return await self._json("GET", path, b"")

    async def post(self, path: str) -> dict[str, Any] | None:
        return await if_known(self._json("POST", path, b"{}"))

    async def delete(self, path: str) -> dict[str, Any] | None:
        return await if_known(self._json("DELETE", path, b""))

    async def aclose(self) -> None:
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def _json(self, method: str, path: str, payload: bytes) -> dict[str, Any]:
        async def ask(_: int) -> dict[str, Any]:
            async with self._request(method, f"/v1{path}", payload, {}) as response:
                return dict(orjson.loads(await response.body() or b"{}"))

        return await self._tried(ask)

    async def _tried(self, ask: Callable[[int], Awaitable[Asked]]) -> Asked:
        """What `ask`, which is given the number of earlier attempts, gives in time. Raises RequestFailed after all
        retries.
        """
        for attempt in range(self._max_retries + 1):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await ask(attempt)
            except (OSError, EOFError, StreamBroken, _Refused) as error:
                await self._before_retry(attempt, error)
            except (asyncio.LimitOverrunError, *NONSENSE) as error:
                raise RequestFailed(f"not an answer of this API: {error!r}", num_retries=attempt) from error
        raise AssertionError("the last attempt returns or raises")

    async def _before_retry(self, attempt: int, error: Exception) -> None:
        """Wait if another attempt is allowed and useful, else raise the turn's failure."""
        wait_s = error.retry_after_s(attempt) if isinstance(error, _Refused) else backoff_s(attempt)
        if wait_s is None or attempt == self._max_retries:
            status = error.status if isinstance(error, _Refused) else None
            raise RequestFailed(self._reason(error), status, num_retries=attempt) from error
        await asyncio.sleep(wait_s)

    def _reason(self, error: Exception) -> str:
        match error:
            case _Refused():
                return str(error)
            case StreamBroken():
                return f"stream broke: {error}"
            case EOFError():
                return "no whole answer: the server closed the connection"
            case _:
                return f"no answer: {str(error) or f'none within {self._timeout_s:,g} s'}"

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, payload: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Response]:
        """A response with status 2xx. Its connection is kept if its body was read to the end, else closed.

        Raises:
            _Refused: On any other status.
        """
        connection = await self._connect()
        try:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            length = f"Content-Length: {len(payload)}\r\n"
            head = f"{method} {self._root_path}{path} HTTP/1.1\r\n{self._head}{lines}{length}\r\n"
            connection.writer.write(head.encode() + payload)
            response = await _read_head(connection.reader)
            if not 200 <= response.status < 300:
                raise _Refused(response, await response.body())
            yield response
        except BaseException:
            connection.writer.close()
            raise
        if response.headers.get("connection") == "close":
            connection.writer.close()
        else:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since < MAX_IDLE_S and not connection.reader.at_eof():
                return connection
            connection.writer.close()
        streams = await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=MAX_LINE_BYTES)
        return Connection(*streams)


async def _read_head(reader: asyncio.StreamReader) -> Response:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in head[1:] if line)
    headers = {name.lower(): value.strip() for name, value in pairs}
    return Response(int(head[0].split(" ", 2)[1]), headers, reader)


def _said(body: bytes) -> str:
    """The message of an error's body; its beginning if it has another form."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except NONSENSE:
        return body.decode(errors="replace")[:300]


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """0 if there is no number in it."""
    try:
        return float(headers.get("retry-after", "0"))
    except ValueError:
        return 0.0


async def _read_stream(response: Response, assembly: Assembly) -> None:
    rest = b""
    async for piece in response.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                add_event(orjson.loads(line[6:]), assembly)
