"""Dynamo's request trace (`DYN_REQUEST_TRACE=1`): a line for each request that ended.

    {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 2100,
     "agent_context": {"session_id": "s1"},
     "request": {"request_id": "r1", "output_tokens": 40, "request_received_ms": 1000, "total_time_ms": 1100.0,
       "replay": {"trace_block_size": 16, "input_length": 800, "input_sequence_hashes": [11, 22]}}}

Each line may be within an `event`. Requests of a session are divided into strands; those without one are joined by
content. The end of an answer is where its time ends, as the record is written a little later. Requests without lengths,
which were refused or whose client left, are left out; so are tool events, since the time between two requests holds
their tools. Dynamo rotates its files, which are one trace when concatenated: `cat trace.*.jsonl.gz`.

Source: Dynamo, request trace reference and dynamo-llm, `request_trace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workloads.importers.calls import Call, whole_blocks, workload_by_prefix, workload_of_sessions
from workloads.importers.records import Record, read_records
from workloads.trajectories import Workload

_SCHEMA = "dynamo.request.trace.v1"


def is_dynamo_request(fields: Mapping[str, Any]) -> bool:
    """Whether an object is a line of a request trace."""
    event = fields.get("event")
    return (event if isinstance(event, dict) else fields).get("schema") == _SCHEMA


def read_dynamo_requests(path: Path) -> Workload:
    """The workload of a request trace.

    Raises:
        TraceError: If a line is malformed; the message names the line and the field.
        OSError: If the file cannot be read.
    """
    calls: list[Call] = []
    sessions: dict[str, list[Call]] = {}
    num_without = 0
    for line in read_records(path):
        record = Record(line.fields["event"], f"{line.where}, event") if line.has("event") else line
        if record.fields.get("event_type") != "request_end":
            continue
        call = _call(record)
        if call is None:
            num_without += 1
        elif record.has("agent_context"):
            context = Record(record.fields["agent_context"], f"{record.where}, agent_context")
            sessions.setdefault(context.name("session_id"), []).append(call)
        else:
            calls.append(call)
    for group in (calls, *sessions.values()):  # they are written when they end
        group.sort(key=lambda call: call.started_at_s or 0.0)
    name = path.name.split(".")[0]
    by_session = workload_of_sessions(name, sessions.items()).trajectories
    left_out = f"requests without lengths: {num_without:,}" if num_without else ""
    return Workload(name, by_session + workload_by_prefix(name, calls).trajectories, left_out)


def _call(record: Record) -> Call | None:
    request = Record(record.fields.get("request"), f"{record.where}, request")
    replay = Record(request.fields["replay"] if request.has("replay") else {}, f"{request.where}, replay")
    prompt, length = (replay, "input_length") if replay.has("input_length") else (request, "input_tokens")
    if not prompt.has(length) or not request.has("output_tokens"):
        return None
    ended_at_ms = record.number("event_time_unix_ms")
    started_at_ms = request.number("request_received_ms") if request.has("request_received_ms") else None
    if request.has("total_time_ms"):
        took_ms = request.number("total_time_ms")
        if started_at_ms is None:
            started_at_ms = ended_at_ms - took_ms
        ended_at_ms = started_at_ms + took_ms
    return Call(
        prompt_tokens=prompt.count(length),
        output_tokens=request.count("output_tokens"),
        blocks=whole_blocks(replay.counts("input_sequence_hashes")),
        started_at_s=None if started_at_ms is None else started_at_ms / 1000,
        ended_at_s=ended_at_ms / 1000,
        early_s=0.001,  # arrivals are whole milliseconds
    )
