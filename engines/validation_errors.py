"""Explains what pydantic finds wrong with a value: which one, what it must be, and what it was.

pydantic reads settings, fleet files and request bodies. Its own messages ("Input should be greater than or equal to 1")
are for programmers.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails

_MAX_SHOWN = 100
_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda context: f"must be above {_bound(context['gt'])}",
    "greater_than_equal": lambda context: f"must be at least {_bound(context['ge'])}",
    "less_than": lambda context: f"must be below {_bound(context['lt'])}",
    "less_than_equal": lambda context: f"must be at most {_bound(context['le'])}",
    "finite_number": lambda _: "must be a finite number",
    "literal_error": lambda context: f"must be {context['expected']}",
    "enum": lambda context: f"must be {context['expected']}",
    "string_pattern_mismatch": lambda context: f"must match {context['pattern']}",
    "string_too_short": lambda context: _least(context["min_length"], "characters"),
    "string_too_long": lambda context: f"must have at most {context['max_length']} characters",
    "too_short": lambda context: _least(context["min_length"], "items"),
    "too_long": lambda context: f"must have at most {context['max_length']} items",
}
# By the prefix of pydantic's error types.
_KINDS = {
    "int_": "must be a whole number",
    "float_": "must be a number",
    "bool_": "must be true or false",
    "string_": "must be a string",
    "list_": "must be a list",
    "tuple_": "must be a list",
}
_TABLES = ("dict_", "model_", "mapping_")
# Values of these may hold a key or a password, so they are not shown.
_SECRETS = frozenset({"api_key", "api_keys", "agent_keys", "admin_key", "store", "redis"})


def first_mistake(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """The name of the first wrong value ("" for the whole) and what is wrong with it.

    Args:
        model: whose fields an unknown name may have meant.
    """
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), in_words(first, names_at(model, first["loc"]))


def numbers(model: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """A validator of all fields: to pydantic, true is the number 1. Raises ValueError."""
    if isinstance(value, bool):
        annotation = model.model_fields[info.field_name or ""].annotation
        kinds = {annotation, *get_args(annotation)}
        if bool not in kinds and not kinds.isdisjoint((int, float)):
            raise ValueError(f"must be a number, not {_shown(value)}")
    return value


def in_words(error: ErrorDetails, known: Iterable[str] = (), table: str = "a table") -> str:
    """What is wrong with a value, and what it was, unless it may be a secret.

    Args:
        known: the names that an unknown name may have meant.
        table: what the value's author calls a thing with named fields.
    """
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "missing"
    if kind == "extra_forbidden":
        return f"unknown{meant(str(error['loc'][-1]), known)}"
    if kind == "value_error":  # our own checks already quote their input
        return error["msg"].removeprefix("Value error, ")
    if kind in _WORDS:
        said = _WORDS[kind](context)
    elif kind.startswith(_TABLES):
        said = f"must be {table}"
    else:
        said = next((words for start, words in _KINDS.items() if kind.startswith(start)), error["msg"])
    return said if _SECRETS.intersection(error["loc"]) else f"{said}, not {_shown(error['input'])}"


def meant(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A suggestion after an unknown name; "" if no known name is close.

    Args:
        prefix: with which all of these names begin when they are used: without it they are compared.
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {prefix}{near[0]}?" if near else ""


def names_at(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The names of the fields beside one; none if any name is allowed there."""
    inner: type[BaseModel] | None = model
    for step in place[:-1]:
        if inner is not None and isinstance(step, str):
            field = inner.model_fields.get(step)
            inner = _model_in(field.annotation) if field is not None else None
    return list(inner.model_fields) if inner is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


def _least(number: int, what: str) -> str:
    return "must not be empty" if number == 1 else f"must have at least {number} {what}"


def _bound(number: object) -> str:
    return str(number).removesuffix(".0")


def _shown(value: object) -> str:
    text = {"True": "true", "False": "false", "None": "null"}.get(repr(value), repr(value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
