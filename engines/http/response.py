"""The answer to one request, as its reader sees it.

A reader awaits (`begun`, `piece`, `pour`, `body`), or is called back (`watch`, `take`); it may switch to awaiting the
same response at any time. Rules:

1. Reading stops while the reader is slow, so an answer never piles up in memory.
2. Leaving a response before its end closes its connection; that tells the engine to stop.
3. After the last event of a stream comes an empty chunk. A released response lets it arrive, so that the connection can
   be reused, but nothing waits for it.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from engines.http.faults import AnswerTooLarge, ResponseTimeout, StaleConnection

HIGH_WATER_BYTES = 256 * 1024
# Engines send the empty chunk within a millisecond of the last event.
TRAILER_TIMEOUT_S = 1.0


class Lender(Protocol):
    """A connection that a byte worker may read from for a while."""

    def lend(self) -> int | None:
        """The descriptor of its socket, which is not read here until `give_back`; None if impossible now."""

    def give_back(self, unread: bytes) -> None:
        """Continue reading; these bytes came meanwhile, and begin with a chunk."""


class Response:
    """An answer in progress: status and headers are there once it has begun, and the body is read piece by piece.

    Attributes:
        has_answered: some of it came, even if only part of its head.
        has_begun: its head came.
        is_complete: all of it has come.
        ends_at_eof: its length is not told, and it ends with its connection: a server that dies ends it, too.
    """

    __slots__ = (
        "_buffered",
        "_deadline",
        "_error",
        "_lender",
        "_loop",
        "_on_news",
        "_pieces",
        "_released",
        "_take",
        "_tells_head",
        "_timeout_s",
        "_timer",
        "_transport",
        "_waiter",
        "ends_at_eof",
        "has_answered",
        "has_begun",
        "headers",
        "is_complete",
        "status",
    )

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, lender: Lender) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.has_begun = False
        self.has_answered = False
        self.ends_at_eof = False
        self._transport = transport
        self._loop = loop
        self._lender = lender
        self._pieces: list[bytes] = []
        self._buffered = 0
        self.is_complete = False
        self._released = False
        self._error: Exception | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_news: Callable[[], None] | None = None
        self._tells_head = False
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_s = self._deadline = 0.0

    # --- for a reader that is called back ---------------------------------------------------------------------

    def watch(self, on_news: Callable[[], None], tells_head: bool) -> None:
        """Call this when an untaken body piles up, when the end came, and, if `tells_head`, when the head came.

        A reader calls `let_go` before it begins to await.
        """
        self._on_news, self._tells_head = on_news, tells_head

    def take(self, take: Callable[[bytes], bool]) -> None:
        """Give the body's bytes to this as they come, until it returns False."""
        self._take = take

    def let_go(self) -> None:
        """Make no more calls, neither with news nor with bytes."""
        self._on_news = self._take = None

    def is_stuck(self) -> bool:
        """Whether nothing more comes unless the response is awaited: either it broke, and awaiting it raises the
        reason, or reading has stopped until the untaken bytes are taken.
        """
        return self._error is not None or self._buffered > HIGH_WATER_BYTES

    @property
    def was_stale(self) -> bool:
        """Whether the request was sent on a connection that had been closed meanwhile: safe to repeat."""
        return isinstance(self._error, StaleConnection)

    def so_far(self) -> bytes:
        """The untaken bytes of the body; they stay here."""
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def lend(self) -> int | None:
        """The descriptor of its connection, for a byte worker to continue reading from here; None if impossible now.

        Nothing comes until it is given back. Closing the response meanwhile would not end it.
        """
        if self._pieces or self.is_complete or self._error is not None:
            return None
        return self._lender.lend()

    def give_back(self, unread: bytes) -> None:
        """Continue with these bytes of the connection, which the byte worker read but did not pass on."""
        self._lender.give_back(unread)

    def break_off(self, error: Exception) -> None:
        """Fail the response with this error."""
        self.finish(error)
        self._transport.abort()

    # --- for one that awaits ----------------------------------------------------------------------------------

    async def begun(self, timeout_s: float | None) -> None:
        """Wait for status and headers; None waits as long as the engine lives.

        Raises:
            ConnectionBroken, BadResponse, ResponseTimeout: no usable answer.
        """
        while not self.has_begun and self._error is None:
            await self._wait(timeout_s)
        if not self.has_begun and self._error is not None:
            raise self._error

    async def piece(self, timeout_s: float) -> bytes:
        """The next bytes of the body, all that are there; b"" at its end.

        Raises:
            ConnectionBroken, BadResponse, ResponseTimeout: the answer is not complete.
        """
        if not await self._has_more(timeout_s):
            return b""
        data = self.so_far()
        self._taken()
        return data

    async def pour(self, take: Callable[[bytes], bool], timeout_s: float) -> bool:
        """Give the body's bytes to `take` as they come, within the callback that brings them, until it returns False.

        A reader that awaits `piece` is woken for each piece, which costs more than most do with it.

        Returns: False at the body's end, else True.
        Raises: as `piece` does, and what `take` raises.
        """
        while self._pieces or not (self.is_complete or self._error):
            if self._pieces:
                if not take(await self.piece(timeout_s)):
                    return True
                continue
            self._take = take
            try:
                await self._wait(timeout_s)
            finally:
                wants_more, self._take = self._take is not None, None
            if not wants_more:
                return True
        if self._error is not None:
            raise self._error
        return False

    async def body(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole body. Raises as `piece` does, and AnswerTooLarge above the limit; if it raises, or its reader is
        cancelled, nobody gets the rest, so the response is closed.
        """
        if self.is_complete and self._buffered <= min(limit_bytes, HIGH_WATER_BYTES):  # most non-streamed answers
            return self.so_far()
        pieces: list[bytes] = []
        size = 0
        try:
            while await self._has_more(timeout_s):
                pieces += self._pieces
                size += self._buffered
                self._taken()
                if size > limit_bytes:
                    raise AnswerTooLarge(f"the engine's answer is larger than {limit_bytes} bytes")
        except BaseException:
            self.close()
            raise
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Leave it. Unless it is complete or released, its connection is closed, and the engine stops."""
        if not self.is_complete and not self._released:
            self._transport.abort()

    def release(self) -> None:
        """Leave it after everything that matters has come."""
        if not self.is_complete:
            self._released = True
            self._loop.call_later(TRAILER_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if not self.is_complete:
            self._transport.abort()

    # --- called by the connection ---------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        take = self._take
        if take is None:
            self._pile_up(data)
            return
        if self._waiter is not None:
            self._deadline = self._loop.time() + self._timeout_s
        try:
            if take(data):
                return
        except Exception as error:  # the reader's; raised where it waits
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
            elif self._on_news is not None:
                self.break_off(error)
        self._take = None
        self._wake()

    def _pile_up(self, data: bytes) -> None:
        if self.is_complete or self._error is not None:
            return  # part of a second answer to one request
        self._pieces.append(data)
        self._buffered += len(data)
        is_piled_up = self._buffered > HIGH_WATER_BYTES
        if is_piled_up:
            self._read_no_more()
        if is_piled_up or self._waiter is not None:
            self._wake()

    def finish(self, error: Exception | None) -> None:
        if self.is_complete or self._error is not None:
            return
        if error is None:
            self.is_complete = True
            if self._buffered > HIGH_WATER_BYTES:
                self._read_on()  # all of it is here, and the next answer on this connection must be read
        else:
            self._error = error
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def begin(self) -> None:
        self.has_begun = True
        if self._waiter is not None or self._tells_head:
            self._wake()

    async def _has_more(self, timeout_s: float) -> bool:
        """Wait for more of the body; False at its end. Raises as `piece` does."""
        if not self._pieces and not self.is_complete and self._error is None:
            await self._wait(timeout_s)
        if not self._pieces and self._error is not None:
            raise self._error
        return bool(self._pieces)

    def _taken(self) -> None:
        """Everything that is here was taken."""
        self._pieces.clear()
        if self._buffered > HIGH_WATER_BYTES and not self.is_complete:  # else another response has the connection
            self._read_on()
        self._buffered = 0

    def _read_no_more(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self._on_news is not None:
            self._on_news()

    async def _wait(self, timeout_s: float | None) -> None:
        waiter = self._waiter = self._loop.create_future()
        if timeout_s is not None:
            self._timeout_s, self._deadline = timeout_s, self._loop.time() + timeout_s
            # A timer that fires too early checks again; setting one for each chunk would cost more.
            if self._timer is None or self._timer.when() > self._deadline:
                self._set_timer()
        try:
            await waiter
        finally:
            self._waiter = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._deadline:
            self._set_timer()
            return
        self._transport.abort()
        silence = "no byte for" if self.has_begun else "no answer within"
        self._waiter.set_exception(ResponseTimeout(f"{silence} {self._timeout_s:g} s"))
