"""The gateway's side of its byte workers: starts them, lends them streams, and tracks their progress."""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from gateway.http.errors import Api
from gateway.turnlog import LOGGER
from gateway.workers.wire import Kind, Order, Report, order, read_reports

# A worker passes on some 50,000 chunks a second; scheduling and whole answers fill a core long before 5 workers are
# busy.
_MOST_BY_ITSELF = 4


@dataclass(frozen=True, slots=True)
class LoanLimits:
    """Limits of a loan.

    Args:
        max_bytes: how much of a stream a worker passes on, and keeps, before it gives the stream back.
        answer_timeout_s: a worker that is asked and silent for this long is killed, also while it starts; and the pause
            between two attempts to start one.
    """

    max_bytes: int
    answer_timeout_s: float


class Borrower(Protocol):
    """The owner of a lent stream."""

    def counted(self, num_events: int) -> None:
        """This many events were passed on since it was lent."""

    def is_back(self, report: Report) -> None:
        """It was given back."""

    def is_lost(self) -> None:
        """Its worker died: how much of it the client has is unknown."""


class Loan:
    """A stream that a worker has."""

    __slots__ = ("_is_recalled", "_link", "_number", "of")

    def __init__(self, link: "_WorkerLink", number: int, of: Borrower) -> None:
        self._link = link
        self._number = number
        self._is_recalled = False
        self.of = of

    def recall(self) -> None:
        """Ask for it back, soon."""
        if not self._is_recalled:
            self._is_recalled = True
            self._link.recall(self._number)


class WorkerPool:
    """All byte workers of this process. They start when first needed.

    Args:
        num_workers: the most there may be; 0 lends nothing, None means one for each core but the first, up to 4. There
            are none without Linux.
        above: with fewer concurrent turns than this, nothing is lent.
        num_live: gives the number of turns now.
    """

    def __init__(self, num_workers: int | None, above: int, num_live: Callable[[], int], limits: LoanLimits) -> None:
        self._limits = limits
        self._num_workers = _most_workers(num_workers)
        self._above = above
        self._num_live = num_live
        self._links: list[_WorkerLink] = []
        self._starts_at = 0.0
        self._is_closed = False

    @property
    def num_lent(self) -> list[int]:
        """How many streams each ready worker has."""
        return [len(link.loans) for link in self._links if link.is_ready]

    def worker(self) -> "_WorkerLink | None":
        """The worker with the fewest streams; None if a stream stays here."""
        if not self._num_workers or self._num_live() < self._above or self._is_closed:
            return None
        if len(self._links) < self._num_workers and time.monotonic() >= self._starts_at:
            try:
                self._links.append(_WorkerLink(self._limits, self._lost))
            except OSError:  # no more processes, descriptors or memory
                self._not_started()
        ready = [link for link in self._links if link.is_ready]
        return min(ready, key=lambda link: len(link.loans), default=None)

    def _lost(self, link: "_WorkerLink") -> None:
        self._links.remove(link)
        if not link.was_ready and not self._is_closed:
            self._not_started()

    def _not_started(self) -> None:
        self._starts_at = time.monotonic() + self._limits.answer_timeout_s
        LOGGER.error("byte worker did not start: streams stay in the gateway's own process")

    async def close(self) -> None:
        """End all workers. Streams that they still have are lost."""
        self._is_closed = True
        for link in list(self._links):
            await link.close()


class _WorkerLink(asyncio.Protocol):
    """One worker, and all streams that it has."""

    def __init__(self, limits: LoanLimits, on_lost: Callable[["_WorkerLink"], None]) -> None:
        self._limits = limits
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        reports, theirs_too = socket.socketpair()
        descriptors = (theirs.fileno(), theirs_too.fileno())
        with theirs, theirs_too:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway.workers", *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=descriptors,
            )
        self._unread = bytearray()
        self._unsent: deque[bytes] = deque()
        self._transport: asyncio.Transport | None = None
        self._opening = self._loop.create_task(self._loop.create_connection(lambda: self, sock=reports))
        self._num_unheard = 0
        self._timer: asyncio.TimerHandle | None = None
        self.loans: dict[int, Loan] = {}
        self.is_ready = self.was_ready = False
        self._look()

    def lend(self, client: int, engine: int, api: Api, of: Borrower) -> Loan | None:
        """Have it pass on what comes from one socket to the other; None if it takes no more now."""
        number = next(self._numbers)
        if self._unsent:
            return None
        try:
            socket.send_fds(self._orders, [order(Order.LEND, number, api, self._limits.max_bytes)], [client, engine])
        except OSError:
            return None
        loan = self.loans[number] = Loan(self, number, of)
        return loan

    def recall(self, number: int) -> None:
        """Have it give this stream back, or end it."""
        self._order(order(Order.RECALL, number))

    def _order(self, packet: bytes) -> None:
        self._unsent.append(packet)
        if len(self._unsent) == 1:
            self._order_on()

    def _look(self) -> None:
        """Ask whether it responds: a worker that was asked twice and has said nothing since is killed.

        Twice, because if this process stood still, the worker's messages of that time are read before the next look.
        """
        if self._num_unheard == 2:
            self._process.kill()
            return
        self._num_unheard += 1
        self._order(order(Order.ASK, 0))
        self._timer = self._loop.call_later(self._limits.answer_timeout_s / 2, self._look)

    async def close(self) -> None:
        """End the worker."""
        await asyncio.wait((self._opening,))
        if self._transport is not None:
            self._transport.abort()
        self._end()
        await self._loop.run_in_executor(None, self._process.wait)

    def _end(self) -> None:
        """Without its sockets it ends by itself; it is killed in case it cannot."""
        self.is_ready = False
        self._process.kill()
        if self._timer is not None:
            self._timer.cancel()
        if self._orders.fileno() >= 0:
            self._loop.remove_writer(self._orders)
            self._orders.close()

    def _order_on(self) -> None:
        try:
            while self._unsent:
                self._orders.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._orders, self._order_on)
            return
        except OSError:
            self._unsent.clear()  # it died, and its reports will show it
        if self._orders.fileno() >= 0:
            self._loop.remove_writer(self._orders)

    # --- asyncio.Protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._num_unheard = 0
        self._unread += data
        for report in read_reports(self._unread):
            if report.kind is Kind.READY:
                self.is_ready = self.was_ready = True
            elif report.kind is Kind.COUNT:
                self.loans[report.loan].of.counted(report.num_events)
            else:
                self.loans.pop(report.loan).of.is_back(report)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._loop.run_in_executor(None, self._process.wait)  # its parent must wait for an ended process
        self._on_lost(self)
        loans = list(self.loans.values())
        self.loans.clear()
        if loans:
            LOGGER.error("byte worker died", extra={"fields": {"streams": len(loans)}})
        for loan in loans:
            loan.of.is_lost()


def _most_workers(wanted: int | None) -> int:
    if sys.platform != "linux":
        return 0  # they wait with epoll
    return min(len(os.sched_getaffinity(0)) - 1, _MOST_BY_ITSELF) if wanted is None else wanted
