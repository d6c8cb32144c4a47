"""What clients may give the API: ids like those of turns, and JSON that a store can hold."""

from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, Field

# What a client sent is shown within lists and records: JSON nested to the encoder's limit broke all of them.
_LEVELS_ABOVE = 50


def printable(text: str) -> str:
    """An id in the form that turns may have. Raises ValueError."""
    if not (text.isascii() and text.isprintable()) or text != text.strip():
        raise ValueError(f"must be printable ASCII, without spaces at its ends, not {text[:100]!r}")
    return text


Id = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(printable)]
"""An id that a client gives."""


def storable(given: dict[str, Any]) -> dict[str, Any]:
    """Accept JSON that a store can hold; FastAPI also reads numbers, strings and depths that none can. Raises
    ValueError.
    """
    shown: Any = given
    for _ in range(_LEVELS_ABOVE):
        shown = [shown]
    try:
        written = orjson.dumps(shown)
    except orjson.JSONEncodeError as error:
        raise ValueError(str(error)) from None
    if orjson.loads(written) != shown:  # they are written as null
        raise ValueError("must hold neither NaN nor Infinity, which JSON does not have")
    return given
