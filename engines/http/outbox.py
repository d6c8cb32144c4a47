"""Requests that are about to be sent, to whatever engine: on a busy gateway, those of one round of the event loop leave
together.

A write to a socket wakes its reader. An engine that is woken for each request falls asleep between them, and on one
machine to wake a process takes longer than to write. The requests of one round are those whose bytes came while the
last ones were served: one if the gateway has little to do, and more the busier it is. So after a round of one, the next
request leaves at once: what the gateway has to do after it then takes no time of the turn's.
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
        self._num_in_last_round = 1
        self._num_in_round = 0

    def put(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, data: tuple[bytes, ...]) -> None:
        """Send this soon, in pieces; nothing if the transport is closed by then.

        Args:
            loop: the one that this outbox is of. It is not kept, so that it can end.
        """
        self._num_in_round += 1
        if self._num_in_round == 1:
            loop.call_soon(self._round_ended)
            if self._num_in_last_round == 1:
                _write(transport, data)
                return
        self._waiting.append((transport, data))
        if len(self._waiting) >= MOST_WAITING:
            self._send()

    def has_for(self, transport: asyncio.Transport | None) -> bool:
        """Whether something is still to be sent there."""
        return transport in [waiting for waiting, _ in self._waiting]

    def _round_ended(self) -> None:
        self._num_in_last_round, self._num_in_round = self._num_in_round, 0
        if self._waiting:
            self._send()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            _write(transport, data)


def outbox_of(loop: asyncio.AbstractEventLoop) -> Outbox:
    """The one of this event loop."""
    outbox = _outboxes.get(loop)
    if outbox is None:
        outbox = _outboxes[loop] = Outbox()
    return outbox


def _write(transport: asyncio.Transport, data: tuple[bytes, ...]) -> None:
    if transport.is_closing():
        return
    if len(data) == 1:
        transport.write(data[0])
    else:
        transport.writelines(data)
