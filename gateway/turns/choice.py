"""One of the choices that a client asked for: its tokens, and the writer that tells the client of them."""

from collections.abc import Mapping
from typing import Any

from gateway.messages.transcripts import History
from gateway.turns.answer_writers import ParsedWriter, TextWriter
from gateway.turns.chain import Chain


class Choice:
    """A choice of a turn at token level, kept from leg to leg.

    Attributes:
        history: the conversation that it answers, so that a later turn can continue from it; None if none can.
        num_counted: how many of its tokens are in the turn's count.
        num_saved: how many are written down, in case this process ends.
        has_ended: `last` or `whole` is ready.
        last: the events that end it in a stream, until they are sent.
        whole: its part of a whole answer.
    """

    def __init__(self, index: int, chain: Chain, writer: TextWriter | ParsedWriter, history: History | None) -> None:
        self.index = index
        self.history = history
        self.chain = chain
        self.writer = writer
        self.num_counted = 0
        self.num_saved = 0
        self.has_ended = False
        self.last = b""
        self.whole: Mapping[str, Any] | None = None

    @property
    def finish_reason(self) -> str:
        """Why it ended, as its client is told, in a chat's words."""
        return self.writer.finish_reason(self.chain)

    def content(self) -> Any:
        """The answer as the client will send it back with its next turn."""
        return self.writer.content(self.chain)
