"""Takes a token leg's events as they come from the engine, into the chain, and what is text at once to the client."""

from collections.abc import Callable

import orjson

from engines.http import BadResponse
from engines.tokens import Event, Piece
from gateway.http.errors import ApiError, engine_error
from gateway.http.outlet import Outlet
from gateway.http.sse import EventSplitter, data_of, split_events
from gateway.messages.answers import fault_of
from gateway.turns.choice import Choice
from gateway.turns.voices import ParsedVoice


class TokenRelay:
    """One leg's stream of tokens; the events that end the choice are held back in it.

    Args:
        read: the dialect's reader.
        version: of the engine's weights, now.
        outlet: where to tell the client as it comes; None for an answer that is told whole.

    Attributes:
        has_begun: a first event has come.
        has_finished: the answer is complete; only its usage may follow.
        is_over: the stream has ended, or need not go on.
        error: why it ended badly.
    """

    def __init__(
        self,
        choice: Choice,
        read: Callable[[Event], Piece],
        version: Callable[[], str],
        outlet: Outlet | None,
        note: Callable[[], None],
    ) -> None:
        self.has_begun = False
        self.has_finished = False
        self.is_over = False
        self.error: ApiError | None = None
        self._choice = choice
        self._read = read
        self._version = version
        self._outlet = outlet
        self._note = note
        self._splitter = EventSplitter()
        self._told: list[bytes] = []
        self._is_due = False

    def take(self, piece: bytes) -> bool:
        """Take what comes.

        Returns: whether more may come at once, as `Relay.take` does.
        Raises: EventTooLarge, BadResponse, Diverged.
        """
        block = self._splitter.feed(piece)
        if not block:
            return True
        was_first = not self.has_begun
        try:
            for event in split_events(block):
                data = data_of(event)
                if data.startswith(b"[DONE]"):
                    self.is_over = True
                elif data:
                    self._event(data)
                if self.is_over:
                    break
        finally:  # what came before a fault is in the chain as told, so it must be
            told, self._told = b"".join(self._told), []
            if self.has_begun:
                self._note()
            if told:
                assert self._outlet is not None
                self._outlet.stream(told)
        is_full = self._outlet is not None and self._outlet.is_full
        is_first = was_first and self.has_begun
        return not (is_first or self._is_due or self.is_over or is_full)

    def _event(self, data: bytes) -> None:
        try:
            event = orjson.loads(data)
            if event.get("error"):
                self.error, self.is_over = engine_error(200, event), True
                return
            piece = self._read(event)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise BadResponse("it sent an event that is no token event") from None
        self.has_begun = True
        chain, voice = self._choice.chain, self._choice.voice
        self.error = fault_of(piece.finish_reason)
        if self.error is not None:
            self.is_over = True
            piece = Piece(piece.ids, piece.text, piece.logprobs, None, None, piece.versions)
        said = chain.add(piece, self._version())
        if chain.finish_reason is not None and piece.finish_reason is None and not self.has_finished:
            self.is_over = True  # by a stop string that its engine cannot see
        is_new_end, self.has_finished = not self.has_finished, chain.finish_reason is not None
        if self._outlet is None:
            return
        if isinstance(voice, ParsedVoice):
            self._is_due = voice.hear(said.ids) or self._is_due
        elif not self.has_finished:
            self._told.append(voice.say(said.text, said.logprobs) if said.text or said.logprobs else b"")
        elif is_new_end:
            self._choice.last = voice.say(said.text, said.logprobs, chain.finish_reason, chain.stop_reason)

    def was_heard(self) -> None:
        """The voice has said what was due."""
        self._is_due = False
