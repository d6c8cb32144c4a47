"""Serves the ordinary turn by callbacks, with no task, future or wake-up between its request and its answer.

Most turns are dispatched as soon as they arrive, to an engine with an idle connection, and get a plain answer. Two
callbacks serve such a turn: the client's bytes trigger the request to the engine, and the engine's bytes trigger the
answer to the client. All decisions are made by the same code that the coroutines of running.py and legs.py use.

Rules:

1. Everything else is handed over to these coroutines, at the point where they would be awaiting the same answer: a
   fault, an error, a client that leaves or is slow, an abort, a long silence, a shutdown. Only a plain end is handled
   here.
2. Nothing here raises into a transport's callback.
3. A turn that is not dispatched at once, has no idle connection, or is served at token level is not taken here.
"""

import asyncio

from engines.http import ResponseTimeout
from gateway.clock import Clock
from gateway.config import Settings
from gateway.http.exchange import Exchange
from gateway.metrics import Metrics
from gateway.turns.endings import Endings
from gateway.turns.legs import Begun, Legs, is_stream
from gateway.turns.lending import Lent
from gateway.turns.outcome import LegFailed, Outcome
from gateway.turns.relay import Relay
from gateway.turns.running import RunningTurns
from gateway.turns.turn import Turn
from store.port import Store

# How often turns are checked for silent engines; timeouts are minutes.
_LOOK_S = 1.0


class HotTurns:
    """The turns that callbacks serve now."""

    def __init__(
        self,
        running: RunningTurns,
        endings: Endings,
        legs: Legs,
        store: Store,
        clock: Clock,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self.running = running
        self.endings = endings
        self.legs = legs
        self.store = store
        self.clock = clock
        self.settings = settings
        self.max_answer_bytes = settings.max_answer_bytes
        self.metrics = metrics
        self.loop = asyncio.get_running_loop()
        self.taken: set[_HotTurn] = set()
        self._timer: asyncio.TimerHandle | None = None

    def take(self, turn: Turn, client: Exchange) -> bool:
        """Run the first leg of an arrived turn; False, with nothing done, if the leg must be awaited."""
        dispatch = turn.dispatch
        if dispatch is None or turn.is_held or client.disconnected:
            return False
        turn.first_dispatch_at = self.clock()
        try:
            begun = self.legs.begin(turn, dispatch)
        except Exception:  # a defect, which the coroutine will meet and report
            return False
        if begun is None:
            return False
        turn.dispatch = None
        hot = _HotTurn(self, turn, client, begun)
        self.taken.add(hot)
        if self._timer is None:
            self._timer = self.loop.call_later(_LOOK_S, self._look)
        return True

    def _look(self) -> None:
        self._timer = None
        now = self.clock()
        for hot in list(self.taken):
            hot.look(now)
        if self.taken:
            self._timer = self.loop.call_later(_LOOK_S, self._look)


class _HotTurn:
    """One such turn, from its request to the engine until its answer has come."""

    __slots__ = (
        "_begun",
        "_client",
        "_hot",
        "_is_released",
        "_is_wanted",
        "_lent",
        "_num_pieces",
        "_outcome",
        "_response",
        "_since",
        "_turn",
    )

    def __init__(self, hot: HotTurns, turn: Turn, client: Exchange, begun: Begun) -> None:
        assert begun.response is not None
        self._hot = hot
        self._turn = turn
        self._client = client
        self._begun = begun
        self._response = begun.response
        self._since = turn.first_dispatch_at or 0.0
        self._num_pieces = 0
        self._outcome: Outcome | None = None
        self._lent: Lent | None = None
        self._is_released = False
        self._is_wanted = False  # by a coroutine, as soon as the stream is back
        turn.on_stop = client.hand_over = self.hand_over
        self._response.watch(self._note, turn.ask.wants_stream)

    def hand_over(self) -> None:
        """Continue as a coroutine from here; if a byte worker has the stream, once it is back."""
        if self._lent is not None:
            self._is_wanted = True
            self._lent.recall()
            return
        self._release()
        self._hot.metrics.hot_turns.counts["handed_over",] += 1
        turn = self._turn
        rest = self._hot.running.run(turn, self._client, self._begun)
        self._client.spawn(self._hot.endings.serving(rest, self._client, turn.outlet, turn.turn_id))

    def look(self, now: float) -> None:
        """Have a coroutine handle an engine that is silent for too long."""
        settings, turn, relay = self._hot.settings, self._turn, self._begun.relay
        num_pieces = turn.num_chunks + (relay.num_others if relay is not None else 0)
        if num_pieces != self._num_pieces:
            self._num_pieces, self._since = num_pieces, now
        limit_s = settings.turn_timeout_s if turn.first_byte_at is None else settings.silence_timeout_s
        if now - self._since <= limit_s:
            if self._response.has_begun and not turn.ask.wants_stream:
                self.hand_over()  # it comes in pieces with pauses between them, which have a timeout of their own
        elif self._lent is not None:
            self._lent.recall()
        else:
            what = "no answer within" if turn.first_byte_at is None else "no byte for"
            self._response.break_off(ResponseTimeout(f"{what} {limit_s:g} s"))

    def _release(self) -> None:
        self._is_released = True
        self._turn.on_stop = self._client.hand_over = None
        self._response.let_go()
        self._hot.taken.discard(self)

    def _note(self) -> None:
        try:
            self._look_at_answer()
        except Exception:  # a defect, which the coroutine will meet and report
            self.hand_over()

    def _look_at_answer(self) -> None:
        """Part of the answer came, or the connection broke."""
        response = self._response
        if response.is_stuck():
            self.hand_over()
        elif response.is_complete:
            self._whole()
        elif self._begun.relay is None and self._turn.ask.wants_stream and response.status == 200:
            if not is_stream(response):
                self.hand_over()
                return
            self._begun.relay = self._hot.legs.relay(self._turn)
            response.take(self._begun.relay.take)
        elif self._begun.relay is not None:
            self._relayed(self._begun.relay)

    def _whole(self) -> None:
        turn, response = self._turn, self._response
        body = response.so_far()
        # A stream that is complete has ended before its end mark, or an error has come in its place.
        if turn.ask.wants_stream or len(body) > self._hot.max_answer_bytes:
            self.hand_over()
            return
        try:
            outcome = self._hot.legs.whole(turn, response, body)
        except LegFailed:
            self.hand_over()
            return
        self._finish(outcome)

    def _relayed(self, relay: Relay) -> None:
        """The relay took an event and cannot take more at once."""
        if relay.is_over and relay.reader.error is None:
            self._finish(self._hot.legs.streamed(self._turn, self._response, relay))
        elif relay.is_over or self._turn.outlet.is_full:
            self.hand_over()
        else:
            self._response.take(relay.take)
            if self._hot.legs.lending.is_wanted:  # not lent here: more may have come together with this event
                self._hot.loop.call_soon(self._lend)

    def _lend(self) -> None:
        """Have a byte worker pass the stream on, if one is free for it."""
        relay = self._begun.relay
        if self._lent is None and relay is not None and not self._is_released:
            self._lent = self._hot.legs.lending.lend(self._turn, self._response, relay, self._back)

    def _back(self) -> None:
        """A byte worker has returned the stream; the rest of it follows."""
        self._lent = None
        if self._is_wanted:
            self.hand_over()

    def _finish(self, outcome: Outcome) -> None:
        turn, running, endings = self._turn, self._hot.running, self._hot.endings
        self._release()
        self._hot.metrics.hot_turns.counts["answer",] += 1
        self._outcome = outcome
        self._hot.legs.ended(turn, self._begun)
        try:
            endings.finished(turn, self._begun.dispatch, outcome)
            is_soon = self._hot.store.when_settled(self._end)
        except Exception as error:
            endings.broken(turn, self._begun.dispatch, error)
            running.over(turn, self._client)
            endings.tell(error, turn.outlet, turn.turn_id)
            return
        if not is_soon:
            rest = running.settled(turn, self._client, outcome)
            self._client.spawn(endings.serving(rest, self._client, turn.outlet, turn.turn_id))

    def _end(self) -> None:
        turn, endings = self._turn, self._hot.endings
        assert self._outcome is not None
        try:
            endings.send(turn, self._outcome)
        except Exception as error:
            endings.tell(error, turn.outlet, turn.turn_id)
        finally:
            self._hot.running.over(turn, self._client)
