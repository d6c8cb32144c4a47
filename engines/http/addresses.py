"""The addresses of an engine's host.

However many connections are being opened, one lookup is under way: the system does only a few at once, and with a slow
name server a thousand would outlast the connections' timeout. A name server that is away for a moment does not take the
engines along: their last addresses are used meanwhile.
"""

import asyncio
import ipaddress
import socket
from math import inf

# An engine that moves is found again this soon, and a burst of connections asks once.
_FRESH_S = 1.0
# With an address at hand, a connection waits no longer for news: a resolver that gets no answer takes 5 s or more.
_PATIENCE_S = 0.5
# The name is gone. Anything else is a fault of the name server, or of this process, which may have no more descriptors.
_GONE = (socket.EAI_NONAME, socket.EAI_NODATA)


class Addresses:
    """Looks up one host."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._known = [host] if _is_address(host) else []
        self._fresh_until = inf if self._known else -inf
        self._worked = ""
        self._error: OSError | None = None
        self._lookup: asyncio.Task[None] | None = None

    async def now(self) -> list[str]:
        """At least one address, the one that worked last first. Raises OSError."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._fresh_until:
            if self._lookup is None:
                self._lookup = loop.create_task(self._look_up())
            await asyncio.wait((self._lookup,), timeout=_PATIENCE_S if self._known else None)
        if not self._known:
            raise self._error or OSError(f"{self._host} has no address")
        return sorted(self._known, key=lambda address: address != self._worked)

    def worked(self, address: str) -> None:
        """A connection to it was made."""
        self._worked = address

    async def _look_up(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._known = list(dict.fromkeys(str(address[0]) for *_, address in found))
        except OSError as error:
            self._error = error
            if error.errno in _GONE:
                self._known = []
        finally:
            self._lookup = None
        self._fresh_until = loop.time() + _FRESH_S


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
