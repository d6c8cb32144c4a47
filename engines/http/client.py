"""Requests to one engine: written, sent on a pooled connection, and sent once more if that had been closed.

The engine may have closed a reused connection meanwhile. If it ends at once, before a byte of the answer came, nothing
was served, and the request is sent once more, on a new one.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from engines.http.faults import NoMoreConnections, StaleConnection
from engines.http.kept import Keep
from engines.http.pool import HttpLimits, Pool
from engines.http.response import Response
from engines.http.tape import Tape

# Request heads that are cached: there are some ten targets without a query.
_MAX_STARTS = 64
# A longer body is sent separately after its head: copying it costs more than sending it in pieces.
_COPIED_BYTES = 16 * 1024

Body = bytes | tuple[bytes, ...]
"""A request's body; in pieces if that saves its sender from joining them."""


def can_be_asked(url: str) -> bool:
    """Whether a base URL names a server and nothing else, in characters that a request's head may have."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna"), parts.port  # as a resolver reads a host
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and " " not in url
    is_whole = parts.scheme in ("http", "https") and bool(host) and port != 0
    return is_plain and is_whole and not (parts.query or parts.fragment or "@" in parts.netloc)


class HttpClient:
    """Requests to one engine.

    Args:
        base_url: scheme, host and port; its path is put before every target.
        limits: of connections and time.
        headers: sent with every request, such as the engine's own API key.
    """

    def __init__(
        self, base_url: str, limits: HttpLimits | None = None, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        parts = urlsplit(base_url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        self._pool = Pool(parts.hostname or "localhost", port, tls, limits or HttpLimits())
        self._prefix = parts.path.rstrip("/").encode()
        common = f"host: {parts.netloc.rpartition('@')[2]}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers)
        self._common = common.encode("latin-1")
        self._starts: dict[tuple[str, str], bytes] = {}
        self._is_closed = False

    async def request(
        self,
        method: str,
        target: str,
        body: Body = b"",
        headers: bytes = b"",
        timeout_s: float | None = None,
        reuses: bool = True,
    ) -> Response:
        """Send a request and return its response as soon as its head has arrived.

        Args:
            target: path and query.
            headers: further header lines, each ending in CRLF.
            timeout_s: longest wait for the head; None waits as long as the engine lives.
            reuses: whether an idle connection may be used; others may be closed, too, if one was.

        Raises:
            EngineUnreachable, NoMoreConnections: nothing was sent.
            ConnectionBroken, BadResponse, ResponseTimeout: no usable answer.
        """
        data = self._request(method, target, body, headers)
        connection = self._pool.take() if reuses else None
        if connection is not None:
            try:
                return await _begun(connection.send(data), timeout_s)
            except StaleConnection:
                if self._is_closed:
                    raise
        connection = await self._pool.connect()
        return await _begun(connection.send(data), timeout_s)

    def post_now(self, target: str, body: Body, headers: bytes) -> Response | None:
        """Send a POST on an idle connection; None if there is none. Nothing of its response has come yet."""
        connection = self._pool.take()
        return None if connection is None else connection.send(self._request("POST", target, body, headers))

    async def post_kept(
        self, target: str, body: Body, headers: bytes, timeout_s: float, keep: Keep, on_full: Callable[[], None]
    ) -> Response:
        """As `request`, on a separate connection, whose response outlives this process if `keep` takes it.

        A TLS connection cannot be kept: the socket alone does not suffice to read it. If no more connections can be
        opened, one that is idle is used, and the response is not kept.

        Args:
            keep: is also given the number of bytes to be sent.
            on_full: called if the response grew too long to be kept.
        """
        if not self._pool.is_plain:
            return await self.request("POST", target, body, headers, timeout_s)
        data = self._request("POST", target, body, headers)
        try:
            kept = await self._pool.connect_kept()
        except NoMoreConnections:
            return await self.request("POST", target, body, headers, timeout_s)
        assert kept.socket is not None
        try:
            kept.tape = await keep(kept.socket, sum(map(len, data)))
        except BaseException:
            kept.connection.abort()
            raise
        kept.on_full = on_full
        return await _begun(kept.connection.send(data), timeout_s)

    async def take_up(
        self, found: socket.socket, tape: Tape, timeout_s: float, on_full: Callable[[], None]
    ) -> Response:
        """The response to a request that another process sent, from its beginning. Raises as `request` does."""
        kept = await self._pool.connect_kept((found, tape))
        kept.on_full = on_full
        assert kept.response is not None
        return await _begun(kept.response, timeout_s)

    async def get(self, target: str, timeout_s: float, limit_bytes: int = 16 * 1024 * 1024) -> tuple[int, bytes]:
        """Status and whole body of a GET."""
        response = await self.request("GET", target, timeout_s=timeout_s)
        return response.status, await response.body(limit_bytes, timeout_s)

    async def post(
        self, target: str, body: Body, timeout_s: float, limit_bytes: int = 16 * 1024 * 1024
    ) -> tuple[int, bytes]:
        """Status and whole body of a POST."""
        response = await self.request("POST", target, body, timeout_s=timeout_s)
        return response.status, await response.body(limit_bytes, timeout_s)

    def close(self) -> None:
        """Close every connection; responses under way break."""
        self._is_closed = True
        self._pool.close()

    def _request(self, method: str, target: str, body: Body, headers: bytes) -> tuple[bytes, ...]:
        """The bytes of a request, in pieces."""
        start = self._starts.get((method, target))
        if start is None:
            start = f"{method} ".encode() + self._prefix + target.encode() + b" HTTP/1.1\r\n" + self._common
            if len(self._starts) < _MAX_STARTS:
                self._starts[method, target] = start
        if not body:
            return (b"%b%b%b\r\n" % (start, b"content-length: 0\r\n" if method == "POST" else b"", headers),)
        pieces = body if isinstance(body, tuple) else (body,)
        length = sum(map(len, pieces))
        head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n" % (start, length, headers)
        return (b"".join((head, *pieces)),) if length <= _COPIED_BYTES else (head, *pieces)


async def _begun(response: Response, timeout_s: float | None) -> Response:
    try:
        await response.begun(timeout_s)
    except asyncio.CancelledError:
        response.close()
        raise
    return response
