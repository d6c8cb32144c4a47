"""An address of a server's own: the one place that knows how a listening socket must be made."""

import socket


def bound(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A socket at that address, at which nobody is answered yet. Raises OSError.

    Args:
        port: 0: any free one.
        backlog: so many connections queue up from now on. None: they are refused until somebody listens.
    """
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it each answer waits 40 ms for an ACK.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        if backlog is not None:
            found.listen(backlog)
    except OSError:
        found.close()
        raise
    return found
