"""Mooncake's trace form: one request a line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}

Milliseconds; one hash id for each 512 tokens of the prompt, equal where the prompt is equal up to there. A trace with
`session_id` and `delay`, as load generators extend the form, is read by session; else calls are joined by content.
Source: Mooncake (FAST 2025), its published traces; AIPerf, trace replay.
"""

from __future__ import annotations

from pathlib import Path

from workloads.importers.calls import Call, whole_blocks, workload_by_prefix, workload_of_sessions
from workloads.importers.records import Record, read_records
from workloads.trajectories import Workload


def read_mooncake(path: Path) -> Workload:
    """The workload of a Mooncake trace.

    Raises:
        TraceError: If a line is malformed; the message names the line and the field.
        OSError: If the file cannot be read.
    """
    sessions: dict[str, list[Call]] = {}
    calls: list[Call] = []
    for record in read_records(path):
        if record.has("session_id"):
            sessions.setdefault(record.text("session_id"), []).append(_call(record))
        else:
            calls.append(_call(record))
    # Not every trace is sorted; sorting is stable, so calls of one instant keep their order.
    calls.sort(key=lambda call: call.started_at_s or 0.0)
    name = path.name.split(".")[0]
    by_prefix = workload_by_prefix(name, calls)
    by_session = workload_of_sessions(name, sessions.items())
    return Workload(name, by_session.trajectories + by_prefix.trajectories)


def _call(record: Record) -> Call:
    delay = record.first_of("delay", "delay_ms")
    waited_s = record.number(delay) / 1000 if record.has(delay) else None
    timestamp = record.first_of("timestamp", "created_time")
    if record.has(timestamp) or not record.has("session_id"):
        started_at_s = record.number(timestamp) / 1000
    else:
        started_at_s = None
    return Call(
        prompt_tokens=record.count(record.first_of("input_length", "input_tokens")),
        output_tokens=record.count(record.first_of("output_length", "output_tokens")),
        blocks=whole_blocks(record.counts("hash_ids")),
        started_at_s=started_at_s,
        waited_s=waited_s,
    )
