"""Opens many streams and holds them: how late a client sees each chunk, and how much a server holds for them.

    python -m loadtest.bench.open_streams --port 8080 --streams 2000

Prints a JSON line when all are open. Then, for each line `SECONDS` on its input, it listens for that long and prints
the delays from a chunk's stamp to its being read, in microseconds. Ends with its input. The backend needs `--endless`.
Sockets are read by hand: at 100,000 chunks a second an event loop's own work would dominate the measurement.
"""

from __future__ import annotations

import argparse
import re
import select
import socket
import sys
import time
from typing import Any

import orjson

from loadtest.bench.requests import bodies, head
from loadtest.results import percentile

_STAMPS = re.compile(rb"@(\d{15})")
_BODY_BYTES = 5_500
_OPENING = 64  # requested but not begun, so that the queue of a listening socket holds them
_STALL_S = 20.0  # if no further stream begins for this long, the server has its own limit
_READ_BYTES = 2**16


class OpenStreams:
    """All streams of this process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}

    def open(self, number: int, seed: int, has_tools: bool) -> None:
        """Open this many; returns when each has sent its first chunk. Raises TimeoutError, ConnectionError."""
        payloads = bodies(seed, True, _BODY_BYTES, has_tools)
        waiting: set[int] = set()
        began_at = time.monotonic()
        while len(self._sockets) < number or waiting:
            while len(self._sockets) < number and len(waiting) < _OPENING:
                waiting.add(self._ask(payloads[len(self._sockets) % len(payloads)]))
            for descriptor, data in self._read(1.0):
                if descriptor in waiting and _STAMPS.search(data):
                    waiting.remove(descriptor)
                    began_at = time.monotonic()
                elif b"HTTP/1.1 " in data and b"HTTP/1.1 200" not in data:
                    raise ConnectionError(f"not a stream: {data[:300]!r}")
            if time.monotonic() > began_at + _STALL_S:
                raise TimeoutError(f"{len(self._sockets) - len(waiting)} of {number} streams began, and no more")

    def _ask(self, payload: bytes) -> int:
        connection = socket.create_connection(("127.0.0.1", self._port), _STALL_S)
        connection.sendall(head(self._port, f"open-{len(self._sockets)}", len(payload)) + payload)
        connection.setblocking(False)
        self._sockets[connection.fileno()] = connection
        self._poll.register(connection.fileno(), select.EPOLLIN)
        return connection.fileno()

    def _read(self, timeout_s: float) -> list[tuple[int, bytes]]:
        read = []
        for descriptor, _ in self._poll.poll(timeout_s, 1024):
            data = self._sockets[descriptor].recv(_READ_BYTES)
            if not data:
                raise ConnectionError("the server closed a stream")
            read.append((descriptor, data))
        return read

    def listen(self, seconds: float) -> dict[str, Any]:
        """The rate of chunks, and how late they come."""
        delays: list[int] = []
        sockets, poll, now_ns, stamps_of = self._sockets, self._poll.poll, time.monotonic_ns, _STAMPS.findall
        began_at = time.monotonic()
        until = began_at + seconds
        while time.monotonic() < until:
            for descriptor, _ in poll(0.01, 1024):
                data = sockets[descriptor].recv(_READ_BYTES)
                if not data:
                    raise ConnectionError("the server closed a stream")
                now_us = now_ns() // 1000
                delays += [now_us - int(stamp) for stamp in stamps_of(data)]
        return {
            "num_chunks": len(delays),
            "chunks_per_s": len(delays) / (time.monotonic() - began_at),
            "p50_us": percentile(delays, 50) if delays else 0,
            "p99_us": percentile(delays, 99) if delays else 0,
        }


def main() -> None:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--no-tools", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args()
    streams = OpenStreams(parsed.port)
    streams.open(parsed.streams, parsed.seed, not parsed.no_tools)
    _tell({"num_open": parsed.streams})
    for line in sys.stdin:
        _tell(streams.listen(float(line)))


def _tell(result: dict[str, Any]) -> None:
    print(orjson.dumps(result).decode(), flush=True)


if __name__ == "__main__":
    main()
