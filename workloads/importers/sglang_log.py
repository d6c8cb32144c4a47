"""SGLang's request log (`--log-requests`), as text or with `--log-requests-format json`.

    [2026-11-21 08:02:44 TP0] Finish: obj=GenerateReqInput(rid='r1', text='Hi', ...), out={'text': 'Hello', 'meta_info':
        {'id': 'r1', 'prompt_tokens': 50, 'completion_tokens': 15, 'e2e_latency': 0.18, ...}}
    {"timestamp": "2026-11-21T08:02:44.5", "event": "request.finished", "rid": "r1", "obj": {...}, "out": {...}}

Lengths are in every log. Which calls belong together is known only from prompts, which are complete with
`--log-requests-level 3`, or from the ids of SGLang's own sessions. Other calls become trajectories of one turn.
Requests that were aborted before they ran have no lengths, and are left out.

Source: SGLang, srt/utils/request_logger.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from workloads.importers.calls import Call, blocks_of, workload_by_prefix, workload_of_sessions
from workloads.importers.records import Record, read_at, read_lines, seconds_of
from workloads.traces import TraceError
from workloads.trajectories import Workload

_FINISHED = "Finish: obj="
_AT = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_QUOTED = r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
# The text after the value tells a whole value from one that was cut in the middle (`'...' ... '...'`).
_TEXT = re.compile(rf"[(, ]text={_QUOTED}[,)]")
_INPUT_IDS = re.compile(r"[(, ]input_ids=\[([\d, ]*)\][,)]")
_SESSION = re.compile(rf"session_params=\{{[^}}]*'id': {_QUOTED}")
_RID = re.compile(rf"rid={_QUOTED}")
_META = re.compile(r"'(prompt_tokens|completion_tokens|e2e_latency|response_sent_to_client_ts)': ([\d.]+)")
_ABORTED = re.compile(r"'finish_reason': \{'type': 'abort'")
_BLOCK_TOKENS = 16
_BLOCK_CHARACTERS = 64
# At level 2, JSON values longer than twice this keep this much of either end, with dots between.
_CUT_LENGTH = 1024

# Text lines end at whole seconds, and so begin up to this much too early.
_CUT_S = 1.0

_Finished = tuple[str | None, Call | None]
"""The session of a request, if any, and its call; no call if it was aborted before it ran."""


def is_sglang_line(line: str) -> bool:
    """Whether a line of a log is about a request that arrived or ended."""
    return any(mark in line for mark in (_FINISHED, "Receive: obj=", '"request.finished"', '"request.received"'))


def read_sglang_log(path: Path) -> Workload:
    """The workload of a log.

    Raises:
        TraceError: If a line about a finished request is malformed or has no lengths; the message names the line. If
            all requests were aborted before they ran.
        OSError: If the file cannot be read.
    """
    calls: list[Call] = []
    sessions: dict[str, list[Call]] = {}
    num_aborted = 0
    for where, line in read_lines(path):
        with read_at(where):
            finished = _finished(line, where)
        if finished is None:
            continue
        session_id, call = finished
        if call is None:
            num_aborted += 1
        else:
            (calls if session_id is None else sessions.setdefault(session_id, [])).append(call)
    for group in (calls, *sessions.values()):
        group.sort(key=_place)
    if num_aborted and not calls and not sessions:
        raise TraceError(f"{path}: all requests in it were aborted before they ran")
    name = path.name.split(".")[0]
    by_session = workload_of_sessions(name, sessions.items()).trajectories
    left_out = f"requests that were aborted before they ran: {num_aborted:,}" if num_aborted else ""
    return Workload(name, by_session + workload_by_prefix(name, calls).trajectories, left_out)


def _place(call: Call) -> float:
    """In the order of starts, or of ends: those of a conversation are in order even if they are whole seconds."""
    return (call.ended_at_s if call.early_s else call.started_at_s) or 0.0


def _finished(line: str, where: str) -> _Finished | None:
    """None if the line is about something else."""
    if line.startswith("{"):
        return _from_json(Record.parse(line, where))
    if _FINISHED in line:
        return _from_text(line, where)
    return None


def _from_json(record: Record) -> _Finished | None:
    if record.fields.get("event") != "request.finished" or _is_health_check(str(record.fields.get("rid"))):
        return None
    asked = Record(record.fields.get("obj"), f"{record.where}, obj")
    answer = Record(record.fields.get("out"), f"{record.where}, out")
    meta = Record(answer.fields.get("meta_info"), f"{answer.where}, meta_info")
    if _never_ran(meta, _is_abort(meta.fields.get("finish_reason"))):
        return None, None
    timestamp = record.text("timestamp")
    try:
        ended_at_s = seconds_of(datetime.fromisoformat(timestamp))
    except ValueError as error:
        raise record.error("timestamp", "must be a time in ISO 8601") from error
    session = asked.fields.get("session_params")
    has_session = isinstance(session, dict) and session.get("id") is not None
    session_id = Record(session, f"{asked.where}, session_params").name("id") if has_session else None
    return session_id, _call(meta, _content(asked), ended_at_s)


def _content(asked: Record) -> Sequence[int] | str:
    """Token ids or text; nothing if it was cut."""
    ids = asked.fields.get("input_ids")
    if ids:
        return () if isinstance(ids, list) and "..." in ids else asked.counts("input_ids")
    if not asked.has("text"):
        return ""
    text = asked.fields["text"]
    if not isinstance(text, str):
        raise asked.error("text", "must be a string")
    is_cut = len(text) == 2 * _CUT_LENGTH + 3 and text[_CUT_LENGTH:-_CUT_LENGTH] == "..."
    return "" if is_cut else text


def _from_text(line: str, where: str) -> _Finished | None:
    asked, _, answer = line.partition(_FINISHED)[2].rpartition(", out={")
    rid = _RID.search(asked)
    if rid is not None and _is_health_check(rid[1]):
        return None
    told = answer.rpartition("'meta_info': ")[2]
    found = dict(_META.findall(told))
    numbers = {name: float(value) if "." in value else int(value) for name, value in found.items()}
    meta = Record(numbers, f"{where}, out, meta_info")
    if _never_ran(meta, _ABORTED.search(told) is not None):
        return None, None
    at = _AT.search(line.partition(_FINISHED)[0])
    if at is not None:
        ended_at_s: float | None = seconds_of(datetime.strptime(at[1], "%Y-%m-%d %H:%M:%S"))
    else:
        ended_at_s = meta.fields.get("response_sent_to_client_ts")
    ids, text, session = _INPUT_IDS.search(asked), _TEXT.search(asked), _SESSION.search(asked)
    content: list[int] | str = ""
    if ids is not None:
        content = [int(number) for number in ids[1].split(",") if number.strip()]
    elif text is not None:
        content = _unquoted(text[1], where)
    call = _call(meta, content, ended_at_s)
    if at is not None:
        call = replace(call, early_s=_CUT_S)
    return None if session is None else _unquoted(session[1], where), call


def _is_abort(finish_reason: object) -> bool:
    return isinstance(finish_reason, dict) and finish_reason.get("type") == "abort"


def _never_ran(meta: Record, is_aborted: bool) -> bool:
    return is_aborted and not meta.has("prompt_tokens")


def _is_health_check(rid: str) -> bool:
    return "HEALTH_CHECK" in rid


def _unquoted(literal: str, where: str) -> str:
    try:
        return str(ast.literal_eval(literal))
    except (SyntaxError, ValueError) as error:
        raise TraceError(f"{where}: not a quoted text: {literal[:60]}") from error


def _call(meta: Record, content: Sequence[int] | str, ended_at_s: float | None) -> Call:
    latency_s = meta.number("e2e_latency") if meta.has("e2e_latency") else None
    started_at_s = None if ended_at_s is None or latency_s is None else ended_at_s - latency_s
    return Call(
        prompt_tokens=meta.count("prompt_tokens"),
        output_tokens=meta.count("completion_tokens"),
        blocks=blocks_of(content, _BLOCK_CHARACTERS if isinstance(content, str) else _BLOCK_TOKENS),
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
    )
