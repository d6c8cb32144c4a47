"""Passes a stream's events on to the client, within the very callback that brings their bytes from the engine."""

from collections.abc import Callable

from gateway.http.sse import EventSplitter
from gateway.messages.streams import StreamReader
from gateway.turns.turn import Turn

# The scheduler's view of a context may lag by this many tokens; a word per chunk would cost more than it tells.
_PROGRESS_CHUNKS = 64


class Relay:
    """One leg's stream.

    Args:
        note_first_byte: called before the first of the answer goes out.
        note_progress: called now and then, once `turn.num_chunks` has grown.

    Attributes:
        is_over: the stream has ended, well or by the reader's error; what is still to be sent of it is `last`.
    """

    def __init__(self, turn: Turn, note_first_byte: Callable[[Turn], None], note_progress: Callable[[Turn], None]):
        self.reader = StreamReader(turn.ask.api, turn.ask.wants_usage, keep=turn.ask.is_inferred)
        self.is_over = False
        self.last = b""
        self._turn = turn
        self._note_first_byte = note_first_byte
        self._note_progress = note_progress
        self._report_at = _PROGRESS_CHUNKS
        self._splitter = EventSplitter()
        self._is_at_start = True

    def take(self, piece: bytes) -> bool:
        """Pass on the events that end in this piece.

        Returns: whether more may come at once; not after the first, since from then on the engine must not be silent,
            nor when the client has to be waited for, nor at the end.
        Raises: EventTooLarge.
        """
        reader = self.reader
        if self._is_at_start and reader.passes(piece):
            block = piece
        else:
            block = self._splitter.feed(piece)
            self._is_at_start = self._splitter.is_at_start
            if not block:
                return True
            block = reader.read(block)
            if reader.done or reader.error is not None:
                self.is_over, self.last = True, block
                return False
            if not reader.num_chunks:
                return True  # comments that keep a waiting stream open: nothing of an answer, so it can start over
        turn = self._turn
        outlet = turn.outlet
        is_first = turn.first_byte_at is None
        if is_first:
            self._note_first_byte(turn)
        if block:
            is_full = outlet.go_on(block, True) if outlet.has_begun else outlet.stream(block)
        else:
            is_full = outlet.is_full
        turn.num_chunks = outlet.num_events = reader.num_chunks
        if reader.num_chunks >= self._report_at:
            self._report_at = reader.num_chunks + _PROGRESS_CHUNKS
            self._note_progress(turn)
        return not (is_first or is_full)
