"""One of the choices that a client asked for: its tokens, and who tells the client of them."""

from collections.abc import Mapping
from typing import Any

from gateway.messages.transcripts import History
from gateway.turns.chain import Chain
from gateway.turns.voices import ParsedVoice, TextVoice


class Choice:
    """A choice of a turn at token level, kept from leg to leg.

    Attributes:
        history: what it answers, for the turn that goes on from it; None where none can.
        num_counted: so many of its tokens are in the turn's count.
        num_saved: so many are written down, against the end of this process.
        has_ended: the two below are made.
        last: the events that end it in a stream, unless they are out.
        whole: what it is in a whole answer.
    """

    def __init__(self, index: int, chain: Chain, voice: TextVoice | ParsedVoice, history: History | None) -> None:
        self.index = index
        self.history = history
        self.chain = chain
        self.voice = voice
        self.num_counted = 0
        self.num_saved = 0
        self.has_ended = False
        self.last = b""
        self.whole: Mapping[str, Any] | None = None

    def content(self) -> Any:
        """The answer as the client will send it back with its next turn."""
        return self.voice.content(self.chain)
