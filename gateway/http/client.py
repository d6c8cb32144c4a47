"""One client's request and the path of its answer, as turns see them: here over ASGI, in `exchange.py` below it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from typing import Any, Protocol, TypeVar

from gateway.http.refusals import body_too_large, body_too_slow

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = bytes
"""The header lines of an answer, names in lower case, each ending in CRLF: made in one piece, they take a third of the
time of names and values that are joined.
"""

_Done = TypeVar("_Done")


def header_lines(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    """ASGI's pairs as header lines."""
    return b"".join([b"%b: %b\r\n" % pair for pair in pairs])


class ClientLeft(Exception):
    """The client is gone: there is nobody to answer."""


class Client(Protocol):
    """A request, and where its answer goes.

    Whatever is written is accepted at once. A writer of more than a little checks `is_full` and drains.
    """

    @property
    def scope(self) -> Mapping[str, Any]:
        """ASGI's: method, path, headers."""

    @property
    def is_full(self) -> bool:
        """Whether to drain before writing more."""

    async def read(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole body of the request; once. Raises Refused (413, 408), or ClientLeft."""

    def when_left(self, call: Callable[[], object]) -> None:
        """Call this if the client leaves before its answer has ended and before `unwatch`; at once if it has already
        left.
        """

    def unwatch(self) -> None:
        """Do not call anything if it leaves."""

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """Begin the answer, whose body has this many bytes; None if its length is unknown."""

    def write(self, data: bytes, more: bool) -> bool:
        """Write part of the body; `more` if more may follow. Does nothing if the client has left.

        Returns: `is_full`, now.
        """

    async def drain(self) -> None:
        """Wait until there is room for more."""


async def unless_left(client: Client, doing: Coroutine[Any, Any, _Done]) -> _Done:
    """What comes of it. Raises ClientLeft if the client leaves first, which cancels it."""
    task = asyncio.create_task(doing)
    client.when_left(task.cancel)
    try:
        await asyncio.wait((task,))
    finally:
        client.unwatch()
        task.cancel()
    if task.cancelled():
        raise ClientLeft
    return task.result()


class AsgiClient:
    """The client of any ASGI server."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.scope = scope
        self.is_full = False
        self._receive = receive
        self._send = send
        self._unsent: list[Message] = []
        self._watch: asyncio.Task[None] | None = None

    async def read(self, limit_bytes: int, timeout_s: float) -> bytes:
        for name, value in self.scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit_bytes:
                raise body_too_large(limit_bytes)
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._received(timeout_s)
            if message["type"] == "http.disconnect":
                raise ClientLeft
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit_bytes:
                raise body_too_large(limit_bytes)
            pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _received(self, timeout_s: float) -> Message:
        """The next message. `asyncio.timeout` would do the same at several times the cost. Raises Refused (408)."""
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(timeout_s, task.cancel, self)
        try:
            return await self._receive()
        except asyncio.CancelledError as cancelled:
            if cancelled.args != (self,) or task.uncancel() > 0:
                raise
            raise body_too_slow(timeout_s) from None
        finally:
            timer.cancel()

    def when_left(self, call: Callable[[], object]) -> None:
        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            call()

        self._watch = asyncio.create_task(watch())

    def unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        if length is not None:
            headers += b"content-length: %d\r\n" % length
        pairs = [line.split(b": ", 1) for line in headers.splitlines()]
        self._unsent.append({"type": "http.response.start", "status": status, "headers": pairs})

    def write(self, data: bytes, more: bool) -> bool:
        self._unsent.append({"type": "http.response.body", "body": data, "more_body": more})
        self.is_full = True
        return True

    async def drain(self) -> None:
        while self._unsent:
            await self._send(self._unsent.pop(0))
        self.is_full = False
