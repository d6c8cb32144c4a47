"""Dynamo's agentic turns: one turn per line, with the turns it waits for.

    {"request_id": "r2", "session_id": "s1", "input_length": 800, "max_output_tokens": 40, "hash_ids": [11, 22],
     "delay_after_dependencies_ms": 200, "wait_for": ["r1"], "priority": 0}

The fields are those of `AgenticTurnTrace` (dynamo_mocker::loadgen) or of `AgenticMooncakeRow` (dynamo-data-gen): its
older rows have `delay` and `tool_wait_ms` beside `wait_for`, its newer ones `dependencies` and a header line. A turn
without a session belongs to the session of the first turn it waits for. A session's wait for another one (a helper's
answer) is lost, because trajectories of a workload do not wait for each other. So are priorities. Turns of a session
that wait for the same turn run at once, so none continues the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from pathlib import Path

from workloads.importers.calls import ASSUMED_TOKENS_PER_S, Call, whole_blocks, workload_of_sessions
from workloads.importers.records import Record, read_records
from workloads.traces import TraceError
from workloads.trajectories import Workload


def read_dynamo(path: Path) -> Workload:
    """The workload of a trace of agentic turns.

    Raises:
        TraceError: If a line is malformed, or waits for a turn that is not in the file; the message names both.
        OSError: If the file cannot be read.
    """
    records = [record for record in read_records(path) if not record.has("schema")]
    session_of: dict[str, str] = {}
    sessions: dict[str, list[Call]] = {}
    ended_at_s: dict[str, float] = {}
    for record in _in_order(records):
        request_id, waits_for = record.name("request_id"), _waits_for(record)
        session_id = session_of[request_id] = _session_id(record, waits_for, session_of)
        call = _call(record, session_id, session_of)
        # The trace has no times; turns end as soon as those that they wait for allow.
        started_at_s = max((ended_at_s[other] for other in waits_for), default=0.0) + (call.waited_s or 0.0)
        ended_at_s[request_id] = started_at_s + call.output_tokens / ASSUMED_TOKENS_PER_S
        if any(session_of[other] == session_id for other in waits_for):
            call = replace(call, started_at_s=started_at_s)
        sessions.setdefault(session_id, []).append(replace(call, ended_at_s=ended_at_s[request_id]))
    return workload_of_sessions(path.name.split(".")[0], sessions.items())


def _in_order(records: Sequence[Record]) -> Iterator[Record]:
    """In the file's order, except that each turn comes after those that it waits for."""
    index_of: dict[str, int] = {}
    for index, record in enumerate(records):
        request_id = record.name("request_id")
        if index_of.setdefault(request_id, index) != index:
            raise TraceError(f"{record.where}, request_id: {request_id!r} was already there")
    turns: TopologicalSorter[int] = TopologicalSorter()
    for index, record in enumerate(records):
        for other in (waits_for := _waits_for(record)):
            if other not in index_of:
                raise TraceError(f"{record.where}, wait_for: {other!r} is no turn of this trace")
        turns.add(index, *(index_of[other] for other in waits_for))
    try:
        turns.prepare()
    except CycleError as error:
        record = records[error.args[1][0]]
        raise TraceError(
            f"{record.where}, wait_for: {record.name('request_id')!r} waits for itself in the end"
        ) from error
    ready = sorted(turns.get_ready())
    while ready:
        index = heappop(ready)
        yield records[index]
        turns.done(index)
        for freed in turns.get_ready():
            heappush(ready, freed)


def _waits_for(record: Record) -> tuple[str, ...]:
    return record.names("wait_for") + tuple(other.name("request_id") for other in record.records("dependencies"))


def _session_id(record: Record, waits_for: tuple[str, ...], session_of: dict[str, str]) -> str:
    if record.has("session_id"):
        return record.name("session_id")
    known = (session_of[other] for other in waits_for if other in session_of)
    return next(known, record.name("request_id"))


def _call(record: Record, session_id: str, session_of: dict[str, str]) -> Call:
    return Call(
        prompt_tokens=record.count(record.first_of("input_length", "input_tokens")),
        output_tokens=record.count(record.first_of("max_output_tokens", "output_length", "output_tokens")),
        blocks=whole_blocks(record.counts("hash_ids")),
        waited_s=_delay_ms(record, session_id, session_of) / 1000,
    )


def _delay_ms(record: Record, session_id: str, session_of: dict[str, str]) -> float:
    """The wait of a turn after its dependencies: the tool's time, whichever fields hold it.

    The wait after the session's own previous turn counts: a helper may have ended while that turn still ran.
    """
    names = ("delay_after_dependencies_ms", "delay", "delay_ms", "tool_wait_ms")
    delays = [record.number(name) for name in names if record.has(name)]
    after = [(other.name("request_id"), other.number("delay_ms")) for other in record.records("dependencies")]
    own = [delay_ms for request_id, delay_ms in after if session_of[request_id] == session_id]
    return sum(delays) + max(own or [delay_ms for _, delay_ms in after], default=0.0)
