"""Public trace forms, engines' logs and event logs: recognised, and read as workloads. Our own form is in
`workloads.traces`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from workloads.importers.dynamo import read_dynamo
from workloads.importers.dynamo_requests import is_dynamo_request, read_dynamo_requests
from workloads.importers.event_log import is_event, read_event_log
from workloads.importers.kv_cache_tester import read_kv_cache_tester
from workloads.importers.mooncake import read_mooncake
from workloads.importers.native import check_writable
from workloads.importers.records import read_at, read_lines
from workloads.importers.sglang_log import is_sglang_line, read_sglang_log
from workloads.importers.vllm_log import is_vllm_line, read_vllm_log
from workloads.traces import TraceError, parse_json
from workloads.trajectories import Workload

READERS: dict[str, Callable[[Path], Workload]] = {
    "mooncake": read_mooncake,
    "kv-cache-tester": read_kv_cache_tester,
    "dynamo": read_dynamo,
    "dynamo-requests": read_dynamo_requests,
    "vllm-log": read_vllm_log,
    "sglang-log": read_sglang_log,
    "event-log": read_event_log,
}
# A server writes some hundred lines before its first request; a trace shows its form at once.
_LINES_LOOKED_AT = 5_000
_OWN_FORM = "heddle"
# Dynamo names the rows of both its forms; the first rows of one need not have the fields that only it has.
_MOONCAKE_OR_DYNAMO = "mooncake or dynamo"
_ONLY_DYNAMO = frozenset({"wait_for", "dependencies", "max_output_tokens", "delay_after_dependencies_ms", "play_id"})


def import_trace(path: Path, format_name: str | None = None) -> Workload:
    """The workload of a file in one of the forms of `READERS`.

    Args:
        format_name: The name of the form. None: recognised from the content.

    Raises:
        TraceError: If the form is not known, a line is malformed, the file is empty, or its content cannot be written
            as a trace.
        OSError: If the file cannot be read.
    """
    workload = READERS[format_name or detect_format(path)](path)
    if not workload.trajectories:
        raise TraceError(f"{path}: holds no trajectory")
    check_writable(workload, path)
    return workload


def detect_format(path: Path) -> str:
    """The name of the form of a file, or of a folder of files.

    Raises:
        TraceError: If it is in none of the known forms; the message lists them.
        OSError: If the file cannot be read.
    """
    if path.is_dir():
        return "kv-cache-tester"
    head = []
    may_be_mooncake = False
    no_comments = ((where, line) for where, line in read_lines(path) if not line.startswith(":"))
    for number, (where, line) in enumerate(no_comments):
        if number == _LINES_LOOKED_AT:
            break
        head.append(line)
        # The order matters: a line of vLLM's JSON log is also a JSON object.
        with read_at(where):
            name = "vllm-log" if is_vllm_line(line) else "sglang-log" if is_sglang_line(line) else _form_of_object(line)
        if name == _OWN_FORM:
            raise TraceError(f"{path}: this is in Heddle's own format already; use it as it is")
        if name == _MOONCAKE_OR_DYNAMO:
            may_be_mooncake = True
        elif name is not None:
            return name
    if may_be_mooncake:
        return "mooncake"
    if not head:
        raise TraceError(f"{path}: is empty")
    if '"requests"' in "".join(head):
        return "kv-cache-tester"
    raise TraceError(f"{path}: unknown format; if it is one of {', '.join(READERS)}, name it with --format")


def _form_of_object(line: str) -> str | None:
    try:
        record: Any = parse_json(line.removeprefix("data: "))
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    if "trajectory_id" in record and "turns" in record:
        return _OWN_FORM
    if is_dynamo_request(record):
        return "dynamo-requests"
    if "requests" in record:
        return "kv-cache-tester"
    if record.keys() & _ONLY_DYNAMO:
        return "dynamo"
    if "input_length" in record or "input_tokens" in record:
        return _MOONCAKE_OR_DYNAMO if "request_id" in record else "mooncake"
    return "event-log" if is_event(record) else None
