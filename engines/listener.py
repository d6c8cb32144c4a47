"""A server's own address: the one place that knows how a listening socket must be made."""

import socket

from engines.keepalive import probe_when_idle


def bound(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A socket bound to that address; no connection is answered yet. Raises OSError.

    Args:
        port: 0 takes any free one.
        backlog: how many connections queue from now on. None refuses them until the socket listens.
    """
    # asyncio disables Nagle's algorithm only if the protocol is given; with it each answer waits 40 ms for an ACK.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe_when_idle(found)  # every connection that it accepts
    try:
        found.bind((host, port))
        if backlog is not None:
            found.listen(backlog)
    except OSError:
        found.close()
        raise
    return found
