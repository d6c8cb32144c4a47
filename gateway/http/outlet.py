"""The client's side of one request: its answer on the way out, whole or as a stream.

What is sent is kept while the turn may be joined, so that a repeated request gets the same answer from its first byte.
"""

import asyncio
from collections.abc import Callable

from gateway.http.client import Client, Headers, header_lines
from gateway.http.errors import Api, error_body, error_event
from gateway.http.exchange import Exchange
from gateway.http.refusals import Refused

_JSON: Headers = b"content-type: application/json\r\n"
# Proxies buffer and compress streams unless told not to.
_STREAM: Headers = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)
HEARTBEAT = b": waiting\n\n"


class Outlet:
    """Sends one answer. Whatever is sent is accepted at once; a sender of much drains while `is_full`.

    Args:
        client: the receiver; None for an answer that was sent before.
        max_kept_bytes: others may follow, until the answer is longer than this; None if none may.

    Attributes:
        has_begun: some of the answer is out, so the turn cannot start over.
        num_events: events of the answer that are out; numbers the one that ends a broken stream.
        num_bytes: of the answer's body so far.
        kept: its pieces; None if not all are kept.
        engine_id, queued_ms: which engine answers, and how long the turn waited for it; "" until that is known.
        recall: asks the byte worker that passes the answer on to return it; None while none does.
    """

    def __init__(self, client: Client | None, api: Api, request_id: str, max_kept_bytes: int | None = None) -> None:
        self.headers: Headers = b"x-request-id: %b\r\n" % request_id.encode()
        self.has_begun = False
        self.num_events = 0
        self.num_bytes = 0
        self.recall: Callable[[], None] | None = None
        self.engine_id = ""
        self.queued_ms = 0
        self._client = client
        self._api = api
        self._request_id = request_id
        self._head: tuple[int, Headers, int | None] | None = None
        self.kept: list[bytes] | None = None if max_kept_bytes is None else []
        self._max_kept_bytes = max_kept_bytes or 0
        self._has_ended = False
        self._followers: list[asyncio.Future[None]] = []
        self._num_following = 0

    @property
    def is_full(self) -> bool:
        """Whether to drain before sending more."""
        return self._client is not None and self._client.is_full

    def about(self, engine_id: str, queued_s: float) -> None:
        """Report in the headers which engine answers and how long the turn waited for it."""
        if self._head is None:
            self.engine_id, self.queued_ms = engine_id, round(queued_s * 1000)

    def whole(self, status: int, body: bytes, headers: Headers = b"", form: Headers = _JSON) -> None:
        """Send a whole answer; `form` is the headers that tell how to read its body."""
        self.has_begun = True
        self._start(status, form + headers, len(body))
        self.go_on(body, more=False)

    def stream(self, data: bytes, more: bool = True) -> bool:
        """Send events of a stream, with the head before the first; the last events come with `more` false.

        Returns: `is_full`, now.
        """
        if self._head is None:
            self._start(200, _STREAM, None)
        self.has_begun = True
        return self.go_on(data, more)

    def go_on(self, data: bytes, more: bool) -> bool:
        """Send more of an answer that has begun; returns `is_full`."""
        self._has_ended = not more
        self.num_bytes += len(data)
        if self.kept is not None:
            self._keep(self.kept, data)
        return self._client is not None and self._client.write(data, more)

    def lend(self) -> int | None:
        """The descriptor of the client's connection, to which a byte worker may write until `take_back`; None if
        impossible now.
        """
        if self._num_following or not self.has_begun or not isinstance(self._client, Exchange):
            return None
        return self._client.lend()

    def take_back(self, passed: bytes, unsent: bytes) -> None:
        """Continue the answer.

        Args:
            passed: what the byte worker took of it.
            unsent: the end of `passed`, in chunks, which is still to be sent.
        """
        self.recall = None
        self.num_bytes += len(passed)
        if passed and self.kept is not None:
            self._keep(self.kept, passed)
        if isinstance(self._client, Exchange):
            self._client.take_back(unsent)

    def cut(self) -> None:
        """Close the client's connection: it is unknown how much of the answer it has."""
        self.recall = None
        if isinstance(self._client, Exchange):
            self._client.cut()

    def heartbeat(self) -> None:
        """Send a comment into a stream that has not begun."""
        if not self.has_begun:
            if self._head is None:
                self._start(200, _STREAM, None)
            self.go_on(HEARTBEAT, more=True)

    def refuse(self, refused: Refused) -> None:
        """Send an error: as the answer if nothing is out yet, else as the stream's last event."""
        if self._head is not None:
            self.stream(error_event(self._api, refused.error, self._request_id, self.num_events), more=False)
        else:
            body = error_body(self._api, refused.error, self._request_id)
            self.whole(refused.error.status, body, header_lines(refused.headers()))

    def keep_no_longer(self) -> bool:
        """Free what is kept, so that nobody can follow any more; False, with nothing done, while somebody does."""
        if self._num_following:
            return False
        self.kept = None
        return True

    async def drain(self) -> None:
        """Wait until the client takes more."""
        if self._client is not None:
            await self._client.drain()

    def expect_follower(self) -> None:
        """Keep all of the answer, however long it gets, until `lose_follower`: another client will follow."""
        self._num_following += 1
        if self.recall is not None:
            self.recall()

    def lose_follower(self) -> None:
        """It follows no longer."""
        self._num_following -= 1

    async def follow(self, client: Client) -> None:
        """Send another client, expected already unless the answer has ended, all that was and will be sent here."""
        assert self.kept is not None
        kept, index = self.kept, 0
        while True:
            if self._head is not None and index == 0:
                client.start(*self._head)
            while index < len(kept):
                index += 1
                client.write(kept[index - 1], more=not (self._has_ended and index == len(kept)))
                if client.is_full:
                    await client.drain()
            if self._has_ended:
                return
            news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._followers.append(news)
            await news

    def _keep(self, kept: list[bytes], data: bytes) -> None:
        if self.num_bytes > self._max_kept_bytes and not self._num_following:
            self.kept = None
        else:
            kept.append(data)
            if self._followers:
                self._tell_followers()

    def _start(self, status: int, headers: Headers, length: int | None) -> None:
        headers += self.headers
        if self.engine_id:
            about = self.engine_id.encode(), self.queued_ms
            headers += b"x-heddle-engine: %b\r\nx-heddle-queued-ms: %d\r\n" % about
        self._head = (status, headers, length)
        if self._client is not None:
            self._client.start(*self._head)

    def _tell_followers(self) -> None:
        for news in self._followers:
            if not news.done():
                news.set_result(None)
        self._followers.clear()


def sent_outlet(
    api: Api, request_id: str, trajectory_id: str, engine_id: str, queued_ms: int, body: bytes, is_stream: bool
) -> Outlet:
    """An answer that was sent before, for others to follow.

    Args:
        engine_id: "" if it is unknown, as for an answer that an earlier process sent.
    """
    outlet = Outlet(None, api, request_id, max_kept_bytes=len(body))
    outlet.headers += b"x-trajectory-id: %b\r\n" % trajectory_id.encode()
    outlet.engine_id, outlet.queued_ms = engine_id, queued_ms
    if is_stream:
        outlet.stream(body, more=False)
    else:
        outlet.whole(200, body)
    return outlet
