"""vLLM's token events, decoded only as far as needed: no objects are made for the data beside a log-probability.

The fields have vLLM's names and types (vLLM 0.32, entrypoints/scale_out/token_in_token_out/protocol.py).
"""

from msgspec import Struct
from msgspec.json import Decoder


class Entry(Struct, gc=False):
    """One token's entry."""

    logprob: float


class Logprobs(Struct, gc=False):
    """The log-probabilities of an event's tokens."""

    content: list[Entry] | None


class Span(Struct, gc=False):
    """The version of the weights that made the tokens at [start, end)."""

    version: str
    start: int
    end: int


class Choice(Struct, gc=False):
    """The new tokens of a choice."""

    token_ids: list[int] | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    text: str | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[Span] | None = None


class TokenEvent(Struct, gc=False):
    """One event of a stream."""

    choices: list[Choice]
    error: object = None


numbers_of = Decoder(TokenEvent).decode
"""Decodes an event's data. Raises ValueError if it is not an event."""
