"""Finish reasons and usage of an engine's answer in OpenAI's form: nothing else of it is made into objects."""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.json import Decoder

MAX_COUNT = 2**40  # more than any context, and small enough that sums cannot overflow
_Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]


class Details(Struct, gc=False):
    """What is known of the prompt's tokens."""

    cached_tokens: _Count | None = None


class Counts(Struct, gc=False):
    """An answer's usage."""

    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: Details | None = None


class Choice(Struct, gc=False):
    """One of its choices."""

    finish_reason: str


class ShortAnswer(Struct, gc=False):
    """What is read of it."""

    choices: list[Choice]
    usage: Counts | None = None


_read = Decoder(ShortAnswer).decode


def read_short(body: bytes) -> ShortAnswer | None:
    """The answer; None if it has another form. Cost: 4 instructions for each byte, and 5,000."""
    try:
        return _read(body)
    except (ValueError, RecursionError):
        return None
