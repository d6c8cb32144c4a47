"""Types of command-line options: a parser that reports errors in one line, and the ranges that numbers may have."""

import argparse
import difflib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Number = TypeVar("Number", int, float)


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows epilogs as they are written, and each option's default that its text does not mention."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help is None or "default" in action.help or action.default in (None, [], argparse.SUPPRESS):
            return action.help
        return action.help if isinstance(action.default, bool) else f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Wrong arguments end the program with status 2 and one line. Only --help shows the usage, which is a page for some
    verbs.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.register("type", int, _integer)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, with a suggestion."""
        if action.choices is not None and value not in action.choices:
            near = difflib.get_close_matches(str(value), map(str, action.choices), n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise argparse.ArgumentError(
                action, f"{value!r} is not one of {', '.join(map(str, action.choices))}{meant}"
            )


def why(error: Exception) -> str:
    """An error in words; one of a file names the file first."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot open {error.filename}: {error.strerror}"
    return str(error)


def count(text: str) -> int:
    """A whole number, at least 1."""
    return _checked(text, int, lambda value: value >= 1, "a whole number from 1")


def whole(text: str) -> int:
    """A whole number, at least 0."""
    return _checked(text, int, lambda value: value >= 0, "a whole number from 0")


def seed(text: str) -> int:
    """A whole number from 0 that JSON results can contain. Python's generators draw the same from -1 as from 1."""
    return _checked(text, int, lambda value: 0 <= value < 2**63, "a whole number from 0 to 2^63 - 1")


def port(text: str) -> int:
    """A TCP port; 0 is any free one."""
    return _checked(text, int, lambda value: 0 <= value <= 65_535, "a port from 0 to 65535")


def positive(text: str) -> float:
    """A finite number above 0."""
    return _checked(text, float, lambda value: 0 < value < math.inf, "a number above 0")


def seconds(text: str) -> float:
    """A finite number, at least 0."""
    return _checked(text, float, lambda value: 0 <= value < math.inf, "a number of seconds from 0")


def share(text: str) -> float:
    """From 0 to 1."""
    return _checked(text, float, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _integer(text: str) -> int:
    return _checked(text, int, lambda _: True, "a whole number")


def _number(text: str) -> float:
    return _checked(text, float, math.isfinite, "a finite number")


def out_file(text: str) -> Path:
    """A file that can be written: checked before the work, not after it."""
    path = Path(text)
    # Unlike those of Path, these functions do not raise where a folder may not be entered.
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder, not {text!r}")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK, effective_ids=True):
        raise argparse.ArgumentTypeError(f"no permission to write {text!r}")
    return path


def _checked(text: str, kind: Callable[[str], Number], is_allowed: Callable[[Number], bool], wish: str) -> Number:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_allowed(value):
        raise argparse.ArgumentTypeError(f"must be {wish}, not {text!r}")
    return value
