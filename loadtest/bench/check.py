"""Checks that an answer is the backend's, whole and in order."""

from __future__ import annotations

import orjson

from loadtest.bench.answers import TEXT


class Checker:
    """Checks each answer; one with the body of an earlier one is known, because parsing costs as much as asking."""

    def __init__(self, stream: bool) -> None:
        self._stream = stream
        self._known: set[bytes] = set()

    def check(self, answer: bytes) -> None:
        """Raise ValueError unless this is the backend's answer."""
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"not an answer: {answer[:300]!r}")
        if body in self._known:
            return
        text = _streamed_text(body) if self._stream else orjson.loads(body)["choices"][0]["message"]["content"]
        if text != TEXT:
            raise ValueError(f"another answer: {text[:300]!r}")
        if len(self._known) < _MAX_KNOWN:
            self._known.add(body)


# Chunks that were merged on their way give that many different bodies; those with an id of their own are never known.
_MAX_KNOWN = 256


def _streamed_text(body: bytes) -> str:
    events = unchunked(body).split(b"\n\n")
    if events[-2:] != [b"data: [DONE]", b""]:
        raise ValueError(f"a stream without its end: {body[-300:]!r}")
    # The only string of an event with that name; parsing everything would cost the client more than the server.
    return b"".join(event.partition(b'"content":"')[2].partition(b'"')[0] for event in events).decode()


def unchunked(body: bytes) -> bytes:
    """A body without its chunk framing. Raises ValueError if it ends too early."""
    parts: list[bytes] = []
    start = 0
    while True:
        line_end = body.index(b"\r\n", start)
        size = int(body[start:line_end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[line_end + 2 : line_end + 2 + size])
        start = line_end + size + 4
