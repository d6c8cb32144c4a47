"""vLLM's token events, decoded only as far as needed: no objects are made for the data beside a log-probability.

The fields have vLLM's names and types (vLLM 0.32, entrypoints/scale_out/token_in_token_out/protocol.py).
"""

from msgspec import Struct
from msgspec.json import Decoder

from engines.tokens import Piece, parsed


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


_numbers_of = Decoder(TokenEvent).decode


def piece_of_numbers(data: bytes) -> Piece:
    """A piece with only the numbers of the log-probabilities: creating objects for everything that an event says of
    them takes as long as the rest of the event, or twice as long.
    """
    try:
        event = _numbers_of(data)
    except ValueError:
        return whole_piece(data)  # whatever else it is
    if event.error or not event.choices:
        return whole_piece(data)
    choice = event.choices[0]
    entries, versions = choice.logprobs and choice.logprobs.content, choice.weight_versions
    return Piece(
        choice.token_ids or [],
        choice.text or "",
        [entry.logprob for entry in entries] if entries else None,
        choice.finish_reason,
        choice.stop_reason,
        tuple([(span.version, span.start, span.end) for span in versions]) if versions else (),
    )


def whole_piece(data: bytes) -> Piece:
    """A piece with the whole entries of the log-probabilities. Raises ErrorEvent, ValueError, KeyError or TypeError."""
    event = parsed(data)
    choices = event["choices"]
    if not choices:
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        return Piece([], cached_tokens=details.get("cached_tokens"))
    choice = choices[0]
    logprobs, versions = choice.get("logprobs"), choice.get("weight_versions")
    return Piece(
        choice["token_ids"] or [],
        choice.get("text") or "",
        logprobs["content"] if logprobs else None,
        choice["finish_reason"],
        choice.get("stop_reason"),
        tuple((span["version"], span["start"], span["end"]) for span in versions) if versions else (),
    )


def completion_piece(num_likeliest: int, data: bytes) -> Piece:
    """A piece whose entries list what a completion's do: the token, then the likeliest without it."""
    piece = whole_piece(data)
    for entry in piece.logprobs or ():
        token, *others = entry["top_logprobs"]
        num_better = sum(other["logprob"] > token["logprob"] for other in others[:num_likeliest])
        entry["top_logprobs"] = [token, *others[: max(num_better, num_likeliest - 1)]]
    return piece
