"""One HTTP request and its answer over bare ASGI, including the ways in which a fault can spoil it."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Literal
from urllib.parse import parse_qs

import orjson

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_JSON = (b"content-type", b"application/json")
_NONSENSE = b'data: {"id": "chatcmpl-, "choices": <html>\n\n'
_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def named_event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event that is named after its content's `type`."""
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), orjson.dumps(content))


class ApiError(Exception):
    """An error answer; the dialect writes its body."""

    def __init__(self, status: int, message: str, type: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param


class InvalidField(ApiError):
    """A body that does not validate: a field is missing, or of the wrong type."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(400, f"{field}: {problem}", "Bad Request", field)
        self.problem = problem


class AnswerSpoiled(Exception):
    """A fault has handled the answer; nothing more is to be sent."""


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.scope = scope
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._receive = receive
        self._send = send
        self._watch: asyncio.Future[Message] | None = None
        self.has_started = False
        self.further_headers: list[tuple[bytes, bytes]] = []  # of a whole answer
        # Set by faults: what replaces the chunk of this number.
        self.break_at_chunk: int | None = None
        self.break_with: Literal["close", "reset", "nonsense"] = "close"
        self._num_chunks = 0

    def header(self, name: bytes) -> str | None:
        """A request header, by its lower-case name."""
        for key, value in self._headers:
            if key == name:
                return value.decode("latin-1")
        return None

    def query_value(self, name: str, default: str) -> str:
        """A query parameter of its URL."""
        return parse_qs(str(self.scope["query_string"], "latin-1")).get(name, [default])[0]

    async def body(self) -> bytes:
        message = await self._receive()
        body: bytes = message.get("body", b"")
        while message.get("more_body"):
            message = await self._receive()
            body += message.get("body", b"")
        return body

    def unread(self, body: bytes) -> None:
        """Puts the body back: whoever asks next reads it again."""
        receive = self._receive

        async def receive_body() -> Message:
            self._receive = receive
            return {"type": "http.request", "body": body}

        self._receive = receive_body

    async def json(self) -> dict[str, Any]:
        """The body's JSON object.

        Raises:
            ApiError: it is not one.
        """
        raw = await self.body()
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"JSON decode error: {error}", "Bad Request", "body") from error
        if not isinstance(value, dict):
            raise ApiError(400, "Input should be a valid dictionary", "Bad Request", "body")
        return value

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        """Calls back when the client leaves; also, harmlessly, after the answer is complete."""
        self._watch = asyncio.ensure_future(self._receive())
        self._watch.add_done_callback(lambda done: None if done.cancelled() else callback())

    async def respond_json(self, value: Any, status: int = 200) -> None:
        await self.respond(orjson.dumps(value), status)

    async def respond(self, body: bytes, status: int = 200, content_type: tuple[bytes, bytes] = _JSON) -> None:
        """A whole answer."""
        headers = [content_type, (b"content-length", str(len(body)).encode()), *self.further_headers]
        self.has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        if self.break_at_chunk is not None and self.break_with == "nonsense":
            body = b"<" + body[:-1]
        elif self.break_at_chunk is not None:
            await self._send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
            self.close_connection(reset=self.break_with == "reset")
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self) -> None:
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})

    async def write(self, events: list[bytes]) -> None:
        """Sends server-sent events, all in one chunk on the wire."""
        if self.break_at_chunk is not None and self._num_chunks + len(events) > self.break_at_chunk:
            before = self.break_at_chunk - self._num_chunks
            if self.break_with == "nonsense":
                events = [*events[:before], _NONSENSE, *events[before:]]
                self.break_at_chunk = None
            else:
                await self._send({"type": "http.response.body", "body": b"".join(events[:before]), "more_body": True})
                self.close_connection(reset=self.break_with == "reset")
        self._num_chunks += len(events)
        await self._send({"type": "http.response.body", "body": b"".join(events), "more_body": True})

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def wait_for_disconnect(self) -> None:
        """Returns when the client leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close_connection(self, *, reset: bool) -> None:
        """Closes the connection in the middle of the answer.

        ASGI has no means for this, so it uses the transport behind uvicorn's `send`.

        Raises:
            AnswerSpoiled: always.
        """
        transport = self._send.__self__.transport  # type: ignore[attr-defined]
        if reset:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            transport.close()
        raise AnswerSpoiled
