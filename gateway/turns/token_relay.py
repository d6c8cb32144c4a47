"""Takes a token leg's events as they come from the engine into the chain, and sends plain text to the client at
once.
"""

from collections.abc import Callable

from engines.http import BadResponse
from engines.tokens import ErrorEvent, Piece
from gateway.http.errors import ApiError, engine_error
from gateway.http.outlet import Outlet
from gateway.http.sse import EventSplitter, data_of, split_events
from gateway.messages.answers import fault_of
from gateway.turns.answer_writers import ParsedWriter, TextWriter
from gateway.turns.chain import NewText
from gateway.turns.choice import Choice

_DATA, _BETWEEN = b"data: ", b"\n\ndata: "


class TokenRelay:
    """One leg's stream of tokens; the choice holds back the events that end it.

    Args:
        read: the dialect's reader.
        version: gives the current version of the engine's weights.
        outlet: where to tell the client as tokens come; None for an answer that is told whole.
        note: called when tokens have come, with whether some are told now.
        now: gives the time in seconds, by which a parsed answer's parts are due.

    Attributes:
        has_begun: a first event has come.
        is_over: the stream has ended, or need not go on.
        error: why it ended badly.
    """

    def __init__(
        self,
        choice: Choice,
        read: Callable[[bytes], Piece],
        version: Callable[[], str],
        outlet: Outlet | None,
        note: Callable[[bool], None],
        now: Callable[[], float],
    ) -> None:
        self.has_begun = False
        self.is_over = False
        self.error: ApiError | None = None
        self._choice = choice
        self._chain = choice.chain
        writer = choice.writer if outlet is not None else None
        self._text = writer if isinstance(writer, TextWriter) else None
        self._parsed = writer if isinstance(writer, ParsedWriter) else None
        self._read = read
        self._version = version
        self._outlet = outlet
        self._note = note
        self._now = now
        self._splitter = EventSplitter()
        self._told: list[bytes] = []

    def take(self, piece: bytes) -> bool:
        """Take a piece of the stream.

        Returns: whether more may come at once, as `Relay.take` does.
        Raises: EventTooLarge, BadResponse, Diverged.
        """
        block = self._splitter.feed(piece)
        if not block:
            return True
        was_first, is_full, version = not self.has_begun, False, self._version()
        try:
            for data in data_of_each(block):
                if data.startswith(b"[DONE]"):
                    self.is_over = True
                elif data:
                    self._event(data, version)
                if self.is_over:
                    break
        finally:  # the chain counts what came before a fault as told, so it must be told
            told, self._told = b"".join(self._told), []
            if self.has_begun:
                self._note(bool(told))
            if told:
                assert self._outlet is not None
                is_full = self._outlet.stream(told)
        is_first = was_first and self.has_begun
        is_due = self._parsed is not None and self._parsed.is_due(self._now())
        return not (is_first or is_due or self.is_over or is_full)

    def _event(self, data: bytes, version: str) -> None:
        try:
            piece = self._read(data)
        except ErrorEvent as told:
            self.error, self.is_over = engine_error(200, dict(told.event)), True
            return
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise BadResponse("it sent an event that is no token event") from None
        self.has_begun = True
        if piece.finish_reason is not None and (error := fault_of(piece.finish_reason)) is not None:
            self.error, self.is_over = error, True
            piece = Piece(piece.ids, piece.text, piece.logprobs, None, None, piece.versions)
        chain = self._chain
        was_finished = chain.finish_reason is not None  # only the answer's usage may follow then
        new = chain.add(piece, version)
        if self._parsed is not None:
            self._parsed.add(new.ids)
        elif self._text is not None and chain.finish_reason is None and (new.text or new.logprobs):
            self._told.append(self._text.tell(new.text, new.logprobs))
        if chain.finish_reason is not None and not was_finished:
            self._finish(new, piece.finish_reason is not None)

    def _finish(self, new: NewText, is_known: bool) -> None:
        self.is_over = self.is_over or not is_known  # ended by a stop string that its engine cannot see
        if self._text is not None:
            chain = self._chain
            self._choice.last = self._text.tell(new.text, new.logprobs, chain.finish_reason, chain.stop_reason)


def data_of_each(block: bytes) -> list[bytes]:
    """The data of each event of a block."""
    # Engines write an event as one line; anything else that the standard allows takes the slow path.
    if block.startswith(_DATA) and block.find(b"\r") < 0:
        end = block.find(b"\n")
        lines = [block[len(_DATA) : end]]
        while end < len(block) - 2 and block[end : end + len(_BETWEEN)] == _BETWEEN:
            start = end + len(_BETWEEN)
            end = block.find(b"\n", start)
            lines.append(block[start:end])
        if block[end:] == b"\n\n":
            return lines
    return [data_of(event) for event in split_events(block)]
