"""The connections to one engine: those in use, and those that wait to be reused.

A connection idles for less than the engines' keep-alive (5 s), so a request hardly ever meets a closed socket.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from engines.http.addresses import Addresses
from engines.http.connection import Connection
from engines.http.faults import EngineUnreachable, NoMoreConnections, NothingListens
from engines.http.kept import KeptConnection
from engines.http.tape import Tape


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the client.

    Args:
        connect_timeout_s: an engine on the same network accepts in milliseconds; one that takes 5 s is dead. Several
            addresses of its host share this time.
        max_idle_s: below the 5 s after which vLLM's and SGLang's uvicorn close an idle connection.
        may_be_stale_s: a reused connection that ends without a byte within this time had been closed before; the news
            takes a round trip, and as long as our event loop may be busy. Later, an engine has begun to serve.
        max_connections: per engine; twice the largest `max_num_seqs` in use, and few enough for 64 engines under the
            usual limit of a million file descriptors.
    """

    connect_timeout_s: float = 5.0
    max_idle_s: float = 3.0
    may_be_stale_s: float = 1.0
    max_connections: int = 4096


class Pool:
    """Keeps the connections.

    Args:
        tls: None for plain HTTP.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, limits: HttpLimits) -> None:
        self._host = host
        self._port = port
        self._addresses = Addresses(host, port)
        self._tls = tls
        self.is_plain = tls is None
        self._limits = limits
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._reaper: asyncio.TimerHandle | None = None

    def take(self) -> Connection | None:
        """An idle connection; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            now = connection.loop.time()
            if not connection.closed and now - connection.idle_since < self._limits.max_idle_s:
                connection.may_be_stale_until = now + self._limits.may_be_stale_s
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """A new connection. Raises EngineUnreachable (NothingListens if refused), NoMoreConnections."""
        loop = asyncio.get_running_loop()
        connection = Connection(loop, self._keep, self._all.discard)
        await self._open(connection, lambda: connection, None)
        return connection

    async def connect_kept(self, found: tuple[socket.socket, Tape] | None = None) -> KeptConnection:
        """A new connection for one request whose response outlives this process, or one found from an earlier process.
        Raises as above.

        Args:
            found: from an earlier process, which sent its request; the connection has its response.
        """
        connection = Connection(asyncio.get_running_loop(), Connection.abort, self._all.discard)
        kept = KeptConnection(connection, found[1] if found else None)
        try:
            await self._open(connection, lambda: kept, found[0] if found else None)
        except BaseException:  # above all a cancellation, of which uvloop does not tell its protocol
            kept.give_up()
            raise
        if kept.socket is None:
            connection.abort()
            raise NoMoreConnections("no more file descriptors")
        kept.read_found()
        return kept

    async def _open(
        self, connection: Connection, protocol: Callable[[], asyncio.BaseProtocol], of: socket.socket | None
    ) -> None:
        if len(self._all) >= self._limits.max_connections:
            raise NoMoreConnections(f"all {self._limits.max_connections} connections to the engine are in use")
        self._all.add(connection)  # now: others are asked for while it is being opened
        is_open = False
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                if of is not None:
                    await connection.loop.create_connection(protocol, sock=of)
                else:
                    await self._connect(connection.loop, protocol)
            is_open = True
        except OSError as error:  # a TimeoutError, too
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoMoreConnections(f"no more file descriptors: {error.strerror}") from None
            fault = NothingListens if error.errno == errno.ECONNREFUSED else EngineUnreachable
            raise fault(f"no connection: {str(error) or 'timed out'}") from None
        finally:
            if not is_open:
                self._all.discard(connection)

    async def _connect(self, loop: asyncio.AbstractEventLoop, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """Try the host's addresses one after the other. Raises OSError: that of the last one."""
        addresses = await self._addresses.now()
        share_s = self._limits.connect_timeout_s / len(addresses)
        server = self._host if self._tls is not None else None
        for address in addresses:
            try:
                async with asyncio.timeout(share_s):
                    await loop.create_connection(protocol, address, self._port, ssl=self._tls, server_hostname=server)
            except OSError:
                if address == addresses[-1]:
                    raise
            else:
                self._addresses.worked(address)
                return

    def close(self) -> None:
        """Close every connection; responses under way break."""
        if self._reaper is not None:
            self._reaper.cancel()
        for connection in list(self._all):
            connection.abort()

    def _keep(self, connection: Connection) -> None:
        connection.idle_since = connection.loop.time()
        self._idle.append(connection)
        if self._reaper is None:
            self._reaper = connection.loop.call_later(self._limits.max_idle_s, self._reap)

    def _reap(self) -> None:
        """Close connections before the engine does; the idle list is ordered by age."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._limits.max_idle_s
        for connection in self._idle:
            if connection.idle_since <= oldest:
                connection.abort()
        self._idle = [connection for connection in self._idle if connection.idle_since > oldest]
        self._reaper = loop.call_later(self._limits.max_idle_s / 2, self._reap) if self._idle else None
