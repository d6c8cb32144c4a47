"""Whether a tool succeeded, failed or timed out, read from its result.

A mention of an error is not an error: agents read files, logs and web pages full of that word. So, in this order:
1. statements in data: JSON fields (`error`, `exit_code`, `success`, ...), and the engine API's own error flag;
2. an exit code in the first or last lines, as tool wrappers write it; 0 is a success whatever else the text has;
3. words with which a failure begins or ends, at the start of a line: `Error: ...`, a traceback, `fatal: ...`.
Only the ends of a text are searched, so the cost of a long one is bounded.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import islice

import orjson

SUCCESS = "success"
FAILURE = "failure"
TIMEOUT = "timeout"

# Longer texts are files rather than a tool's own report; parsing them costs more than they tell.
_MAX_JSON = 65_536
_EDGE_LINES = 4
_EDGE_CHARACTERS = 600
# A traceback is longer than the last lines; its frames seldom exceed this.
_TAIL_CHARACTERS = 6_000
# The exit code of GNU coreutils' `timeout`.
_TIMEOUT_EXIT_CODE = 124

_EXIT_CODE = re.compile(
    r"^[^\w#]{0,4}(?:(?:(?:the|this|last) )?(?:command|process|program|script|execution|shell)\b[^\n]{0,60}?)?"
    r"(?:exit(?:ed with)?[ _-]?(?:code|status)|exited with|return[ _-]?code)\W{1,3}(-?\d{1,10})\b",
    re.IGNORECASE | re.MULTILINE,
)
# A `#` begins a heading or a comment, hence the text is a document.
_BEGINS = re.compile(
    r"[^\w#]{0,4}(?:"
    r"(?:[A-Za-z_][\w.]{0,80})?(?:Error|Exception)(?:\(|:|$)"
    r"|(?:error|fatal|failure|exception)(?:\(|:|>|$)"
    r"|(?:tool|function)[ _](?:use[ _])?(?:error|call failed|execution failed)\b"
    r"|(?:mcp |internal |an |http )?error (?:executing|calling|running|invoking|while|during|occurred|\W?-?\d{3,6}\b)"
    r"|failed to \w|unknown tool\b|invalid (?:tool|arguments)\b|traceback \(most recent call last\):"
    r"|[^\n:]{1,80}: (?:[^\n]{0,200}: )?(?:command not found|not found|no such file or directory|permission denied)\s*$"
    r")",
    re.IGNORECASE | re.MULTILINE,
)
_TRACEBACK = re.compile(r"^(?:Traceback \(most recent call last\):|thread '.{1,80}' panicked at )", re.MULTILINE)
# The last line of pytest with failures in it.
_TESTS_FAILED = re.compile(r"^=+ .{0,200}\b\d+ (?:failed|errors?)\b.{0,200} =+\s*$", re.MULTILINE)

_TIME_IS_UP = (
    r"(?:timed?[ -]?out\b|time limit (?:was )?(?:exceeded|reached)|deadline (?:was )?exceeded|took too long"
    r"|(?:exceeded|reached) (?:the |its )?(?:time ?limit|time ?out)|TimeLimitExceeded|TimeoutE\w+)"
)
_MENTIONS_TIMEOUT = re.compile(_TIME_IS_UP, re.IGNORECASE)
_SAYS_TIMEOUT = re.compile(
    r"^[^\w#]{0,4}(?:error\W{1,2})?"
    r"(?:(?:timeout|timed out)\b(?= (?:after|expired|exceeded|error)|[:!.]|$)|timeoute\w+\b"
    r"|(?:the |this |your |last ){0,2}(?:command|tool|request|process|execution|operation|call|script|function|query"
    r"|program)\b[^\n]{0,160}?\b" + _TIME_IS_UP + ")",
    re.IGNORECASE | re.MULTILINE,
)

_ERROR_KEYS = ("error", "exception", "traceback", "isError", "is_error")
_EXIT_KEYS = ("exit_code", "exitCode", "exitcode", "exit_status", "returncode", "return_code", "returnCode")
_GOOD_KEYS = ("success", "ok")
_TIMEOUT_KEYS = ("timed_out", "timedOut", "timeout", "is_timeout")
_NESTED_KEYS = ("metadata", "result", "run_result", "outcome", "output", "content")
_BAD_WORDS = ("error", "failed", "failure", "fail", "exception", "finished_with_error")


def status_of(result: object, is_error: bool = False) -> str:
    """`success`, `failure` or `timeout`.

    Args:
        result: its text, or the data itself if a client sends no text.
        is_error: the message's own flag. False means nothing: clients write it by default.
    """
    text = result if isinstance(result, str) else ""
    data = _parsed(text) if text else result
    told = _told_by(data)
    edges = _edges(text)
    if told is None:
        told = _told_by_exit_code(edges)
    if is_error and told != TIMEOUT:
        told = FAILURE
    if told is None and (_TRACEBACK.search(text, max(0, len(text) - _TAIL_CHARACTERS)) or _begins_badly(text, edges)):
        told = FAILURE
    if told == FAILURE and (_MENTIONS_TIMEOUT.search(edges) or _mentions_timeout(data)):
        return TIMEOUT
    if told is None and data is None and _SAYS_TIMEOUT.search(edges):
        return TIMEOUT
    return told or SUCCESS


def _parsed(text: str) -> object:
    """The JSON object or array that a text holds; None for any other text."""
    start = text[:64].lstrip()[:1]
    if start not in ("{", "[") or len(text) > _MAX_JSON:
        return None
    try:
        data: object = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return data


def _told_by(data: object, depth: int = 2) -> str | None:
    """What the fields of a report state; None if none of them is about success."""
    if isinstance(data, list):
        return _worst(_told_by(item, depth - 1) for item in islice(data, 8)) if depth else None
    if not isinstance(data, Mapping):
        return None
    if any(data.get(key) is True for key in _TIMEOUT_KEYS) or data.get("type") == "timeout":
        return TIMEOUT
    codes = [code for key in _EXIT_KEYS if type(code := data.get(key)) is int]
    told = [_of_exit_code(code) for code in codes]
    if any(_is_bad(data.get(key)) for key in _ERROR_KEYS) or any(data.get(key) is False for key in _GOOD_KEYS):
        told.append(FAILURE)
    status = data.get("status")
    if isinstance(status, str) and status.lower() in _BAD_WORDS:
        told.append(FAILURE)
    elif isinstance(status, str) and _MENTIONS_TIMEOUT.fullmatch(status):
        told.append(TIMEOUT)
    elif any(data.get(key) is True for key in _GOOD_KEYS):
        told.append(SUCCESS)
    nested = [_told_by(data.get(key), depth - 1) for key in _NESTED_KEYS] if depth else []
    return _worst([*told, *nested])


def _is_bad(value: object) -> bool:
    """Whether an `error` field has content; some tools write "none" or "null" for nothing."""
    return bool(value) and not (isinstance(value, str) and value.strip().lower() in ("", "none", "null", "false"))


def _worst(told: Iterable[str | None]) -> str | None:
    said = set(told)
    return next((status for status in (TIMEOUT, FAILURE, SUCCESS) if status in said), None)


def _of_exit_code(code: int) -> str:
    if code == _TIMEOUT_EXIT_CODE:
        return TIMEOUT
    return FAILURE if code else SUCCESS


def _told_by_exit_code(edges: str) -> str | None:
    return _worst(_of_exit_code(int(code)) for code in _EXIT_CODE.findall(edges))


def _edges(text: str) -> str:
    """The first and the last lines, each end bounded."""
    head = text[:_EDGE_CHARACTERS].lstrip().split("\n", _EDGE_LINES)[:_EDGE_LINES]
    if len(text) <= _EDGE_CHARACTERS:
        tail = text.rstrip().rsplit("\n", _EDGE_LINES)[-_EDGE_LINES:] if text.count("\n") >= _EDGE_LINES else []
    else:
        # A line cut off in the middle has no line start.
        tail = text[-_EDGE_CHARACTERS:].rstrip().split("\n")[1:][-_EDGE_LINES:]
    return "\n".join((*head, *tail))


def _begins_badly(text: str, edges: str) -> bool:
    return bool(_BEGINS.match(text[:_EDGE_CHARACTERS].lstrip()) or _TESTS_FAILED.search(edges))


def _mentions_timeout(data: object) -> bool:
    """Whether the error in a report is a timeout."""
    if not isinstance(data, Mapping):
        return False
    return any(_MENTIONS_TIMEOUT.search(str(data.get(key))[:_EDGE_CHARACTERS]) for key in _ERROR_KEYS)
