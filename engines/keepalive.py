"""Connections on which nothing is said for long: a whole answer may take hours.

Firewalls, NAT and load balancers silently forget a connection that is idle for some minutes (Azure four, AWS six).
A machine that loses its power or its network says no farewell. Without probes, both ends would wait on.
"""

import socket

# A peer that is gone is noticed after two minutes, and no one between forgets the connection.
_IDLE_S = 60
_INTERVAL_S = 15
_NUM_PROBES = 4
_IDLE: int = getattr(socket, "TCP_KEEPALIVE", None) or socket.TCP_KEEPIDLE  # macOS has its own name for it


def probe_when_idle(connection: socket.socket) -> None:
    """Have the system probe the other end of a TCP connection, or of those that a listening socket accepts."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _IDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
