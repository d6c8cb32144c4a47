"""Workloads read from recorded traces: JSON lines, gzipped or not, one trajectory a line.

    {"trajectory_id": "a-0", "group_id": "a", "context_tokens": 900,
     "turns": [{"new_tokens": 0, "output_tokens": 154, "tool_s": 3.0}, ...]}

Other fields are ignored, except `preamble_tokens`: how much of the first prompt is the same in all groups (system
prompt and tools). A trajectory without `group_id` is a group of its own. Tokens that join before the first turn are
part of the first prompt. A recorded call without output counts as one token: an engine cannot write fewer. Recorded
agents are mostly larger than the engine at hand, so a trace can be cut and scaled, each time by the same factors for
every trajectory. Another format needs only a function from a line to a `Trajectory`.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TextIO, cast

import orjson

from workloads.trajectories import Trajectory, Turn, Workload

LineParser = Callable[[str], Trajectory]

# A context of a million tokens is long, and so is a tool call of a year; anything far above is a slip, not a workload.
_MAX_TOKENS = 10**9
_MAX_TOOL_S = 1e9
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTANDARD_MAGIC = b"\x28\xb5\x2f\xfd"


class TraceError(ValueError):
    """A trace that cannot be read: the message names the file, the line and the fault."""


def load_trace(
    path: str | Path,
    limit: int | None = None,
    seed: int = 0,
    scale: float = 1.0,
    *,
    tool_scale: float | None = None,
) -> Workload:
    """A recorded workload, which `Workload.within` can cut.

    Args:
        limit: Most trajectories to take, in whole groups drawn with `seed`. None: all.
        scale: Multiplies every length.
        tool_scale: Multiplies every tool time. None: `scale`.

    Raises:
        TraceError: If a line is malformed or the file is empty.
        OSError: If the file cannot be read.
    """
    path = Path(path)
    workload = Workload(path.name.split(".")[0], tuple(read_trajectories(path, parse_line)))
    if not workload.trajectories:
        raise TraceError(f"{path}: no trajectory in it")
    if limit is not None:
        workload = workload.sampled(limit, seed)
    return workload.scaled(prompts=scale, outputs=scale, tools=scale if tool_scale is None else tool_scale)


def read_trajectories(path: Path, parse: LineParser) -> Iterator[Trajectory]:
    """The trajectories of a file, in its order. Empty lines are skipped.

    Raises:
        TraceError: At the first line that `parse` refuses or whose id is repeated, and if the file is damaged.
    """
    seen: set[str] = set()
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                trajectory = parse(line)
            except ValueError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
            if trajectory.trajectory_id in seen:
                raise TraceError(f"{path}, line {number}: {shown(trajectory.trajectory_id)} was already there")
            seen.add(trajectory.trajectory_id)
            yield trajectory


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The lines of a file, gzipped or not, whatever its name.

    Raises:
        TraceError: While it is read, if it is not text or is damaged.
        OSError: If the file cannot be read.
    """
    with open_bytes(path) as content:
        try:
            # Some editors begin a file with a byte order mark, which JSON forbids.
            yield io.TextIOWrapper(content, encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}, line {_line_that_is_no_text(path)}: not text in UTF-8") from error


def _line_that_is_no_text(path: Path) -> int:
    with open_bytes(path) as lines:
        return next((number for number, line in enumerate(lines, start=1) if not _is_text(line)), 1)


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file, gzipped or not, whatever its name.

    Raises:
        TraceError: If it is a pipe, or compressed in another way, or, while it is read, damaged.
        OSError: If the file cannot be read.
    """
    if path.is_fifo():
        raise TraceError(f"{path}: a pipe, which can be read only once: write it to a file first")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == _ZSTANDARD_MAGIC:
        raise TraceError(f"{path}: compressed with Zstandard: decompress it first, for example with zstd -d")
    opener = gzip.open if magic.startswith(_GZIP_MAGIC) else open
    try:
        with opener(path, "rb") as content:
            yield cast(IO[bytes], content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: a damaged gzip file, perhaps not all of it: {error}") from error


def json_lines(
    path: Path, on_cut: Callable[[int], object] | None = None
) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """The lines of a file of JSON objects: number, bytes with this project's line end, and the object. Empty lines are
    skipped. Objects may have come as server-sent events, as `curl` saves those of `/v1/events`.

    Args:
        on_cut: Called with the number of a last line that has no line end and is no JSON, as in a log that was copied
            while it was written. None: that is an error.

    Raises:
        TraceError: While it is read, if a line is no JSON object, or the file is damaged; the message names the file.
        OSError: If it cannot be read.
    """
    with open_bytes(path) as lines:
        for number, line in enumerate(lines, start=1):
            content = (line.removeprefix(BOM_UTF8) if number == 1 else line).rstrip(b"\r\n")
            if not content.strip() or content.startswith(b":"):  # a comment among events
                continue
            content = content.removeprefix(b"data: ")
            try:
                said = orjson.loads(content)
            except orjson.JSONDecodeError as error:
                if on_cut is not None and not line.endswith(b"\n"):
                    on_cut(number)
                    return
                raise TraceError(f"{path}, line {number}: not JSON: {error.msg}: column {error.colno}") from error
            if not isinstance(said, dict):
                raise TraceError(f"{path}, line {number}: not a JSON object")
            yield number, content + b"\n", said


def parse_line(line: str) -> Trajectory:
    """The trajectory that a line of this project's trace form describes.

    Raises:
        ValueError: The message states which field is missing or wrong.
    """
    record = parse_json(line)
    _expect(isinstance(record, dict), "not a JSON object")
    turns = record.get("turns")
    hint = (
        ""
        if "trajectory_id" in record
        else "; `heddle import` reads event logs, engines' logs and other programs' traces"
    )
    _expect(isinstance(turns, list) and len(turns) > 0, f"turns: must be a list of at least one turn{hint}")
    first, *others = (_turn(turn, f"turns[{index}].") for index, turn in enumerate(turns))
    context_tokens = max(1, _count(record, "context_tokens") + first.new_tokens)
    preamble_tokens = _count(record, "preamble_tokens") if record.get("preamble_tokens") is not None else 0
    _expect(preamble_tokens <= context_tokens, "preamble_tokens: more than the first prompt has")
    return Trajectory(
        trajectory_id=_text(record, "trajectory_id"),
        group_id=_text(record, "group_id" if record.get("group_id") is not None else "trajectory_id"),
        context_tokens=context_tokens,
        turns=(replace(first, new_tokens=0), *others),
        preamble_tokens=preamble_tokens,
    )


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is not JSON; the message states the place.
    """
    text = text.rstrip()  # else an error at a line's end would be in the next line
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise ValueError(f"not JSON: {error.msg}: {place}") from error
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None


def shown(value: object) -> str:
    """A value for an error message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _turn(record: Any, where: str) -> Turn:
    _expect(isinstance(record, dict), f"{where[:-1]}: not a JSON object")
    return Turn(
        new_tokens=_count(record, "new_tokens", where),
        output_tokens=max(1, _count(record, "output_tokens", where)),
        tool_s=_seconds(record, "tool_s", where),
    )


def _text(record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    _expect(isinstance(value, str) and value != "", f"{field}: must be a non-empty string, not {shown(value)}")
    # JSON can escape half of a surrogate pair, which no encoding can write.
    text = str(value)
    _expect(not any("\ud800" <= letter <= "\udfff" for letter in text), f"{field}: not Unicode: {shown(text)}")
    return text


def _count(record: dict[str, Any], field: str, where: str = "") -> int:
    value = record.get(field)
    # JSON's true is an int to Python.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_TOKENS:
        raise ValueError(f"{where}{field}: must be a whole number from 0 to {_MAX_TOKENS:,}, not {shown(value)}")
    return value


def _seconds(record: dict[str, Any], field: str, where: str) -> float:
    value = record.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_TOOL_S:
        raise ValueError(f"{where}{field}: must be seconds from 0 to {_MAX_TOOL_S:,.0f}, not {shown(value)}")
    return float(value)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
