"""Passes a stream's events on to the client, within the callback that brings their bytes from the engine."""

from collections.abc import Callable

from gateway.http.sse import EventSplitter
from gateway.messages.streams import StreamReader
from gateway.turns.turn import Turn

# The scheduler's view of a context may lag by this many tokens; reporting every chunk would cost more than it tells.
PROGRESS_TOKENS = 64


class Relay:
    """One leg's stream.

    Args:
        note_first_byte: called before the answer's first bytes go out.
        note_progress: called now and then, once `turn.num_chunks` has grown.

    Attributes:
        is_over: the stream has ended, well or with the reader's error; its unsent rest is in `last`.
        num_loans: how many loans in a row brought too few events to be worth it.
        num_others: pieces that came and are not one plain event, such as a comment or part of an event.
    """

    def __init__(self, turn: Turn, note_first_byte: Callable[[Turn], None], note_progress: Callable[[Turn], None]):
        self.reader = StreamReader(turn.ask.api, turn.ask.wants_usage, keep=turn.ask.history is not None)
        self.is_over = False
        self.last = b""
        self.num_loans = 0
        self.num_others = 0
        self._turn = turn
        self._note_first_byte = note_first_byte
        self._note_progress = note_progress
        self._report_at = PROGRESS_TOKENS
        self._offer_at = 0
        self._splitter = EventSplitter()
        self._opening = b""  # the events before the first that has some of the answer
        self._is_at_start = True

    def take(self, piece: bytes) -> bool:
        """Pass on the events that end in this piece.

        Returns: whether more may come at once. It may not once the answer has begun, because silence is timed from then
        on; when the client must be waited for; at the end; or when a byte worker might pass on the rest.
        Raises: EventTooLarge.
        """
        reader, turn = self.reader, self._turn
        outlet = turn.outlet
        if self._is_at_start and outlet.has_begun and reader.passes(piece):
            is_full = outlet.go_on(piece, True)
        else:
            self.num_others += 1
            block = self._splitter.feed(piece)
            self._is_at_start = self._splitter.is_at_start
            if not block:
                return True
            block = self._opening + reader.read(block)
            if reader.done or reader.error is not None:
                self.is_over, self.last = True, block
                return False
            if not reader.has_begun:
                # The turn can still start over; comments that keep a waiting stream open are not part of an answer.
                self._opening = block if reader.num_chunks else b""
                return True
            self._opening = b""
            if turn.first_byte_at is None:
                self._note_first_byte(turn)
            is_full = outlet.stream(block) if block else outlet.is_full
        num_chunks = outlet.num_events = turn.num_chunks = reader.num_chunks
        if num_chunks >= self._report_at:
            self.came(num_chunks)
        if num_chunks >= self._offer_at:
            self._offer_at = num_chunks + PROGRESS_TOKENS
            return False
        return not is_full

    @property
    def is_lendable(self) -> bool:
        """Whether a byte worker may pass on what comes next, as long as it is plain."""
        return self._is_at_start and not self.is_over and self.reader.is_plain_so_far

    def take_back(self, passed: bytes, num_events: int, unsent: bytes) -> None:
        """Continue after these events, which a byte worker passed on; `unsent` are those bytes of them still to be
        sent.
        """
        self._offer_at = 0
        self.reader.passed(passed, num_events)
        outlet = self._turn.outlet
        outlet.take_back(passed, unsent)
        outlet.num_events = self.reader.num_chunks
        self.came(self.reader.num_chunks)

    def came(self, num_chunks: int) -> None:
        """This many chunks came so far."""
        self._turn.num_chunks = num_chunks
        if num_chunks >= self._report_at:
            self._report_at = num_chunks + PROGRESS_TOKENS
            self._note_progress(self._turn)
