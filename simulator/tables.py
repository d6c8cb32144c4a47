"""Turns tables of TOML and JSON into dataclasses; an unknown key, a missing one or a wrong type is reported in one
line."""

import difflib
import types
from collections.abc import Hashable, Set
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


def from_table(kind: type[Kind], table: object, where: str = "") -> Kind:
    """A dataclass of that kind whose fields are the table's keys; nested tables become nested dataclasses.

    Args:
        where: the table's name followed by a dot, for messages.

    Raises:
        ValueError: the message names the wrong key and what is wrong with it.
    """
    if not isinstance(table, dict):
        raise ValueError(f"{where.rstrip('.')}: must be a table, not {table!r}")
    hints = _hints(cast(Hashable, kind))
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise ValueError(
                f"{where}{key}: unknown; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
            )
    for name, field in known.items():
        if name not in table and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}{name}: missing")
    try:
        return kind(**{name: _value(hints[name], value, f"{where}{name}") for name, value in table.items()})
    except AssertionError as error:
        raise ValueError(f"{where.rstrip('.')}: {error}" if where else str(error)) from error


def _value(hint: Any, value: object, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        return _value(next(choice for choice in get_args(hint) if choice is not type(None)), value, where)
    if is_dataclass(hint):
        return from_table(hint, value, f"{where}.")  # type: ignore[arg-type]
    if origin is tuple and Ellipsis not in get_args(hint):
        hints = get_args(hint)
        if not isinstance(value, list) or len(value) != len(hints):
            raise ValueError(f"{where}: must be a list of {len(hints)} values, not {value!r}")
        pairs = enumerate(zip(hints, value, strict=True))
        return tuple(_value(hint, item, f"{where}[{index}]") for index, (hint, item) in pairs)
    if origin is tuple or origin is Set:
        items = value if isinstance(value, list) else [value]
        made = [_value(get_args(hint)[0], item, f"{where}[{index}]") for index, item in enumerate(items)]
        return tuple(made) if origin is tuple else frozenset(made)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        if value not in [choice.value for choice in hint]:
            raise ValueError(f"{where}: {_choices(hint)}, not {value!r}")
        return hint(str(value))
    if origin is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{where}: {_choices(get_args(hint))}, not {value!r}")
        return value
    wanted = (int, float) if hint is float else hint
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        name = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(hint, str(hint))
        raise ValueError(f"{where}: must be {name}, not {value!r}")
    return float(value) if hint is float and isinstance(value, int) else value


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def _choices(names: Any) -> str:
    return f"must be one of {', '.join(map(str, names))}"
