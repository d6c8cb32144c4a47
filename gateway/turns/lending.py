"""Lends streams to byte workers: when one gets a stream, and what continues it once it is back (`gateway/workers/`)."""

import asyncio
from collections.abc import Callable

from engines.http import Response, ResponseTimeout
from gateway.http.errors import api_error
from gateway.metrics import Metrics
from gateway.turns.outcome import LegFailed
from gateway.turns.relay import Relay
from gateway.turns.turn import Turn
from gateway.workers.pool import Loan, WorkerPool
from gateway.workers.wire import Report
from scheduling.types import Fault

# A loan takes some 100 us, so a stream whose engine keeps sending more than plain text costs less here.
_MAX_USELESS = 8
_LOST = api_error(502, "The byte worker that passed the stream on has died.", "stream_broken")


class Lending:
    """Lends streams to the byte workers."""

    def __init__(self, pool: WorkerPool, metrics: Metrics) -> None:
        self._pool = pool
        self._metrics = metrics

    @property
    def is_wanted(self) -> bool:
        """Whether a worker can take another stream."""
        return self._pool.worker() is not None

    def lend(self, turn: Turn, response: Response, relay: Relay, on_back: Callable[[], None]) -> "Lent | None":
        """Have a worker pass this stream on from here; None, with nothing changed, if that is impossible.

        Not to be called within the callback that brings bytes of the stream: all that came must have been passed on.

        Args:
            on_back: called when the stream is to be continued here, before any more of it comes.
        """
        worker = self._pool.worker()
        if worker is None or not relay.is_lendable or relay.num_loans >= _MAX_USELESS:
            return None
        client = turn.outlet.lend()
        engine = response.lend() if client is not None else None
        if client is None or engine is None:
            return None
        lent = Lent(turn, response, relay, on_back, self._metrics)
        loan = worker.lend(client, engine, turn.ask.api, lent)
        if loan is None:
            response.give_back(b"")
            return None
        lent.loan = loan
        turn.outlet.recall = loan.recall
        return lent

    async def until_back(self, turn: Turn, response: Response, relay: Relay, silence_timeout_s: float) -> None:
        """Lend a stream, and wait until it is back; return at once if it cannot be lent.

        Raises: ResponseTimeout.
        """
        back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lent = self.lend(turn, response, relay, lambda: back.set_result(None))
        if lent is None:
            return
        try:
            while not back.done():
                num_chunks = turn.num_chunks
                await asyncio.wait((back,), timeout=silence_timeout_s)
                if not back.done() and turn.num_chunks == num_chunks:
                    lent.recall()
                    await asyncio.wait((back,))
                    if turn.num_chunks == num_chunks:
                        raise ResponseTimeout(f"no byte for {silence_timeout_s:g} s")
        except asyncio.CancelledError:
            lent.recall()
            while not back.done():
                # Its worker writes to the client, so nothing else may; it answers within one pass of its event loop, or
                # dies.
                try:
                    await asyncio.wait((back,))
                except asyncio.CancelledError:
                    continue
            raise


class Lent:
    """A stream that a worker has."""

    __slots__ = ("_begins_at", "_metrics", "_on_back", "_relay", "_response", "_turn", "loan")

    loan: Loan

    def __init__(
        self, turn: Turn, response: Response, relay: Relay, on_back: Callable[[], None], metrics: Metrics
    ) -> None:
        self._turn = turn
        self._response = response
        self._relay = relay
        self._on_back = on_back
        self._metrics = metrics
        self._begins_at = relay.reader.num_chunks

    def recall(self) -> None:
        """Ask for it back, soon."""
        self.loan.recall()

    # --- Borrower -------------------------------------------------------------------------------------------

    def counted(self, num_events: int) -> None:
        self._relay.came(self._begins_at + num_events)

    def is_back(self, report: Report) -> None:
        relay = self._relay
        relay.num_loans = relay.num_loans + 1 if report.num_events < _MAX_USELESS else 0
        self._metrics.lent_streams.counts[report.why.name.lower(),] += 1
        relay.take_back(report.passed, report.num_events, report.unsent)
        self._on_back()
        self._response.give_back(report.unread)

    def is_lost(self) -> None:
        self._metrics.lent_streams.counts["lost",] += 1
        self._on_back()
        self._turn.outlet.cut()
        self._response.break_off(LegFailed(Fault.REQUEST, _LOST))  # it is not the engine's fault
