"""Explains what is wrong with a setting, in one line."""

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


def in_words(error: ValidationError, settings: Iterable[str], of_engines: Iterable[str]) -> str:
    """Which setting, what is wrong with it, and its value.

    Args:
        settings, of_engines: the known names.
    """
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    where = f"setting {'.'.join(place)}"
    if first["type"] == "extra_forbidden":
        near = meant(place[-1], of_engines if len(place) > 1 else settings)
        return f"{where}: unknown{near}; `heddle serve --settings` lists all"
    said = first["msg"].removeprefix("Value error, ")
    # Our own checks already quote their input, and keys must not be shown.
    is_told = first["type"] in ("value_error", "missing") or any("key" in part for part in place)
    return f"{where}: {said}" if is_told else f"{where}: {said}, not {first['input']!r}"


def meant(name: str, known: Iterable[str]) -> str:
    """A suggestion after an unknown name; "" if no known name is close."""
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]}?" if near else ""
