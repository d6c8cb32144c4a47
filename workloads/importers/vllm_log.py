"""vLLM's request log, as text or as JSON lines.

    (APIServer pid=7) DEBUG 11-21 05:00:30 [logger.py:55] Request r1 details: prompt: 'Hi', prompt_token_ids: [1], ...
    (APIServer pid=7) DEBUG 11-21 05:00:31 [logger.py:101] Generated response r1 details: output_token_ids: [4, 5]

Lengths need token ids, which are logged with `--enable-log-requests --enable-log-outputs --log-level DEBUG`, without
`--max-log-len`, and for streams with `--enable-log-deltas`. Older versions print them in `Received request`. Text lines
have no year and only whole seconds: tool times are as coarse, and a log must not be silent for half a year. Requests
without an answer in the log are left out, as are answers to requests of an older log. Each choice of a whole answer
(`n`) is a call of its own.

Source: vLLM 0.32, entrypoints/serve/utils/request_logger.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from workloads.importers.calls import Call, blocks_of, workload_by_prefix
from workloads.importers.records import read_at, read_lines, seconds_of
from workloads.traces import TraceError
from workloads.trajectories import Workload

# The server's first lines show its options; the token ids of such a log are no lengths.
_CUT_IDS = re.compile(r"non-default args: .*'max_log_len': (\d+)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_TEXT_LINE = re.compile(r"(?:DEBUG|INFO) (\d\d-\d\d \d\d:\d\d:\d\d) (?:\S+\]) (.*)", re.DOTALL)
_MESSAGE = re.compile(
    r"(Received request|Request|Generated response) (\S+?)(?: \(streaming (delta|complete)\))?(?: details)?: (.*)",
    re.DOTALL,
)
_PROMPT_IDS = re.compile(r"prompt_token_ids: \[([\d, ]*)\]")
_OUTPUT_IDS = re.compile(r"output_token_ids: [\[(]([\d, ]*)[\])]")
# `/v1/responses` makes a request of each call of a built-in tool; the answer has the id without the number.
_NUMBERED = re.compile(r"(.+)_\d+")
_STREAM_LENGTH = re.compile(r"<streaming_complete: (\d+) tokens>")
_HOW_TO_LOG_ANSWERS = "log answers with --enable-log-outputs --enable-log-deltas --log-level DEBUG"
_LEAP_YEAR = 2024  # `strptime` must know 29 February
_DAY_S = 86_400.0
_YEAR_S = 365 * _DAY_S
_BLOCK_TOKENS = 16


@dataclass(slots=True)
class _Request:
    """`prompt`: its tokens and blocks. Token ids take five times as much memory as their text, and logs are large."""

    started_at_s: float
    has_arrived: bool = False
    ended_at_s: float | None = None
    prompt: tuple[int, tuple[int, ...]] | None = None
    output_tokens: int | None = None
    earlier_choices: list[int] = field(default_factory=list)
    answered_in: str = ""


@dataclass(slots=True)
class _Calendar:
    """Puts times without a year, line by line, into the year in which they are nearest to the latest one so far.

    Several processes write one log, so lines of the old year may come after some of the new one. A year has a 29
    February if the log has a line of that day.
    """

    latest_s: float | None = None
    leap_years: set[int] = field(default_factory=set)

    def at_s(self, time: str) -> float:
        """Seconds since the first line's year began, of a time such as `11-21 05:00:30`. Raises ValueError."""
        found = datetime.strptime(f"{_LEAP_YEAR}-{time}", "%Y-%m-%d %H:%M:%S")
        in_year_s = (found - datetime(_LEAP_YEAR, 1, 1)).total_seconds() - _DAY_S * (found.month > 2)
        year = round((self.latest_s - in_year_s) / _YEAR_S) if self.latest_s is not None else 0
        if (found.month, found.day) == (2, 29):
            self.leap_years.add(year)
        num_leap_days = sum(leap < year or (leap == year and found.month > 2) for leap in self.leap_years)
        at_s = in_year_s + year * _YEAR_S + num_leap_days * _DAY_S
        self.latest_s = at_s if self.latest_s is None else max(self.latest_s, at_s)
        return at_s


@dataclass(slots=True)
class _Log:
    """What was read: requests with their ids, which clients may choose (`X-Request-Id`) and repeat.

    Args:
        latest: of each id, the request that came last.
        last_numbered: of each id without its number, the id of the request that came last.
    """

    requests: list[tuple[str, _Request]] = field(default_factory=list)
    latest: dict[str, _Request] = field(default_factory=dict)
    last_numbered: dict[str, str] = field(default_factory=dict)
    calendar: _Calendar = field(default_factory=_Calendar)

    def begin(self, request_id: str, at_s: float) -> _Request:
        request = self.latest[request_id] = _Request(at_s)
        self.requests.append((request_id, request))
        return request


def is_vllm_line(line: str) -> bool:
    """Whether a line of a log is about a request."""
    return _message(line, _Calendar()) is not None


def read_vllm_log(path: Path) -> Workload:
    """The workload of a log; calls are joined by their token ids.

    Raises:
        TraceError: If there is no answer, or one or its prompt lacks token ids; the message says how to log them.
        OSError: If the file cannot be read.
    """
    log = _Log()
    for where, line in read_lines(path):
        with read_at(where):
            _take(line, where, log)
    answered = [(name, request) for name, request in log.requests if request.ended_at_s is not None]
    if any(request.prompt is not None for _, request in answered):
        answered = [(name, request) for name, request in answered if request.has_arrived]
    if log.requests and not answered:
        raise TraceError(f"{path}: no request in it has an answer: {_HOW_TO_LOG_ANSWERS}")
    calls = [call for name, request in answered for call in _calls(name, request)]
    calls.sort(key=lambda call: call.started_at_s or 0.0)
    num_halves = len(log.requests) - len(answered)
    left_out = f"requests of which it has only the arrival or only the answer: {num_halves:,}" if num_halves else ""
    return replace(workload_by_prefix(path.name.split(".")[0], calls), left_out=left_out)


def _take(line: str, where: str, log: _Log) -> None:
    """Record what a line contains about a request, if it is about one."""
    message = _message(line, log.calendar)
    if message is None:
        if cut := _CUT_IDS.search(line):
            raise TraceError(f"{where}: --max-log-len {cut[1]} cuts the token ids: log without it")
        return
    at_s, kind, request_id, part, text = message
    if kind == "Generated response":
        asked_id = request_id if request_id in log.latest else log.last_numbered.get(request_id, request_id)
        _note_answer(log.latest.get(asked_id) or log.begin(asked_id, at_s), at_s, part, text, where)
        return
    request = log.latest.get(request_id)
    if request is None or request.ended_at_s is not None:
        request = log.begin(request_id, at_s)
    request.has_arrived = True
    if ids := _ids(_PROMPT_IDS, text):
        request.prompt = len(ids), blocks_of(ids, _BLOCK_TOKENS)
    numbered = _NUMBERED.fullmatch(request_id)
    if numbered is not None:
        log.last_numbered[numbered[1]] = request_id


def _message(line: str, calendar: _Calendar) -> tuple[float, str, str, str | None, str] | None:
    """Time, kind, request, part of a stream, and the rest; None if the line is about something else."""
    if line.startswith("{"):
        try:
            record = json.loads(line)
            at_s = seconds_of(datetime.strptime(record["asctime"], "%Y-%m-%d %H:%M:%S,%f"))
            text = str(record["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
    else:
        parts = _TEXT_LINE.search(_COLOUR.sub("", line))
        if parts is None:
            return None
        at_s = calendar.at_s(parts[1])
        text = parts[2].rstrip("\n")
    message = _MESSAGE.match(text)
    return None if message is None else (at_s, message[1], message[2], message[3], message[4])


def _note_answer(request: _Request, at_s: float, part: str | None, text: str, where: str) -> None:
    """Deltas add up; the line that completes a stream has ids of its own only if there were no deltas. Each choice of a
    whole answer has a line."""
    ids = _ids(_OUTPUT_IDS, text)
    length = _STREAM_LENGTH.search(text)
    if ids is not None:
        if part is None and request.output_tokens is not None:
            request.earlier_choices.append(request.output_tokens)
        request.output_tokens = len(ids) + (request.output_tokens or 0 if part == "delta" else 0)
    elif length is not None and request.output_tokens is None:
        request.output_tokens = int(length[1])
    request.ended_at_s, request.answered_in = at_s, where


def _ids(pattern: re.Pattern[str], text: str) -> list[int] | None:
    # The last match: a quote in a prompt comes before it.
    matches = pattern.findall(text)
    return [int(number) for number in matches[-1].split(",") if number.strip()] if matches else None


def _calls(name: str, request: _Request) -> list[Call]:
    """One for each choice of its answer."""
    if request.prompt is None:
        wish = "log requests with --enable-log-requests --log-level DEBUG"
        raise TraceError(f"{request.answered_in}, prompt_token_ids: none for request {name}: {wish}")
    if request.output_tokens is None:
        raise TraceError(f"{request.answered_in}, output_token_ids: none for request {name}: {_HOW_TO_LOG_ANSWERS}")
    prompt_tokens, blocks = request.prompt
    return [
        Call(prompt_tokens, output_tokens, blocks, request.started_at_s, request.ended_at_s)
        for output_tokens in (*request.earlier_choices, request.output_tokens)
    ]
