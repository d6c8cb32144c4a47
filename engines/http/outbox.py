"""Requests that are about to be sent, to whatever engine: those of one round of the event loop leave together.

A write to a socket wakes its reader. An engine that is woken for each request falls asleep between them, and on one
machine to wake a process takes longer than to write. The requests of one round are those whose bytes came while the
last ones were served: one if the gateway is idle, so that nothing waits, and more the busier it is.
"""

import asyncio
from weakref import WeakKeyDictionary

# The first of a round waits until the others have been read and scheduled, 0.1 ms each. Eight save most of the wakings.
MOST_WAITING = 8

_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, "Outbox"] = WeakKeyDictionary()


class Outbox:
    """What an event loop will send when its round ends, or when there are `MOST_WAITING`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.Transport, tuple[bytes, ...]]] = []
        self._will_send = False

    def put(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, data: tuple[bytes, ...]) -> None:
        """Send this soon, in pieces; nothing if the transport is closed by then.

        Args:
            loop: the one that this outbox is of. It is not kept, so that it can end.
        """
        self._waiting.append((transport, data))
        if len(self._waiting) >= MOST_WAITING:
            self._send()
        elif not self._will_send:
            self._will_send = True
            loop.call_soon(self._round_ended)

    def _round_ended(self) -> None:
        self._will_send = False
        self._send()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if transport.is_closing():
                continue
            if len(data) == 1:
                transport.write(data[0])
            else:
                transport.writelines(data)


def outbox_of(loop: asyncio.AbstractEventLoop) -> Outbox:
    """The one of this event loop."""
    outbox = _outboxes.get(loop)
    if outbox is None:
        outbox = _outboxes[loop] = Outbox()
    return outbox
