"""Reads the files that importers are given; errors name the line and the field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workloads.traces import TraceError, open_text, parse_json, shown

# Nanoseconds since 1970 have 19 digits. A whole number of 309 has no quotient, and is no float.
_MOST = 10**20


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not empty, with a text that states its place. Files may be gzipped.

    Raises:
        TraceError: If it is not text, or damaged.
        OSError: If the file cannot be read.
    """
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}, line {number}", line


def read_records(path: Path) -> Iterator[Record]:
    """The JSON object of each line.

    Raises:
        TraceError: At the first line that holds none.
    """
    for where, line in read_lines(path):
        yield Record.parse(line, where)


def seconds_of(time: datetime) -> float:
    """Since 1970. A time without an offset is read as UTC: the server's zone is unknown, and need not be ours."""
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


@contextmanager
def read_at(where: str) -> Iterator[None]:
    """Adds the place of a line to errors about its numbers or times: logs are cut, and lines of many processes are
    mixed.

    Raises:
        TraceError: In place of any other ValueError.
    """
    try:
        yield
    except TraceError:
        raise
    except ValueError as error:
        raise TraceError(f"{where}: {error}") from error


class Record:
    """A JSON object and its place. A missing or wrong field raises `TraceError` with its name."""

    def __init__(self, fields: Any, where: str) -> None:
        if not isinstance(fields, dict):
            raise TraceError(f"{where}: must be a JSON object")
        self.fields: dict[str, Any] = fields
        self.where = where

    @classmethod
    def parse(cls, text: str, where: str) -> Record:
        """The object that a text describes."""
        try:
            fields = parse_json(text)
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from error
        return cls(fields, where)

    def has(self, name: str) -> bool:
        """Whether the field is there; null counts as missing, as in these formats."""
        return self.fields.get(name) is not None

    def first_of(self, *names: str) -> str:
        """The name that this record uses, of several with the same meaning; the first if it uses none."""
        return next((name for name in names if self.has(name)), names[0])

    def count(self, name: str) -> int:
        value = self.fields.get(name)
        # Tables with gaps write their whole numbers as 52.0.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        # In Python, JSON's true is an int.
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
            raise self.error(name, "must be a whole number from 0 to 10^20")
        return value

    def number(self, name: str) -> float:
        value = self.fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MOST:
            raise self.error(name, "must be a number from 0 to 10^20")
        return float(value)

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, "must be a string")
        return value

    def name(self, field: str) -> str:
        """A text, or a whole number as a text: some programs number what others name."""
        value = self.fields.get(field)
        return str(value) if type(value) is int else self.text(field)

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty if the field is missing."""
        values = self.fields[name] if self.has(name) else []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.error(name, "must be a list of whole numbers")
        return tuple(values)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of texts, or of whole numbers as texts; empty if the field is missing."""
        values = self.fields[name] if self.has(name) else []
        if not isinstance(values, list) or not all(isinstance(value, str) or type(value) is int for value in values):
            raise self.error(name, "must be a list of strings")
        return tuple(map(str, values))

    def records(self, name: str) -> list[Record]:
        """A list of objects; empty if the field is missing."""
        values = self.fields[name] if self.has(name) else []
        if not isinstance(values, list):
            raise self.error(name, "must be a list")
        return [Record(value, f"{self.where}, {name}[{index}]") for index, value in enumerate(values)]

    def error(self, name: str, wish: str) -> TraceError:
        """The error about a field."""
        return TraceError(f"{self.where}, {name}: {wish}, not {shown(self.fields.get(name))}")
