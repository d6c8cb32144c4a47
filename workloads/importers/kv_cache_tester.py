"""kv-cache-tester's trace form: one JSON file for each conversation of a coding agent.

    {"id": "conversation", "block_size": 64, "requests": [
      {"t": 0.0, "type": "s", "in": 25259, "out": 86, "hash_ids": [1, 2, 3], "api_time": 5.8, "think_time": 0.0},
      {"t": 9.1, "type": "subagent", "agent_id": "agent_001", "requests": [...]}]}

Times are in seconds. `think_time` is the time before the request (its tool's), counted from the last request that has
an `api_time`; older traces have only start times.
Requests of a helper agent (`subagent`) are nested and become trajectories of the same group. Older traces hold each
turn twice, streamed and not: the second is the complete one.

Source: kv-cache-tester, docs/trace_replay_tester.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from workloads.importers.calls import Call, whole_blocks, workload_of_sessions
from workloads.importers.records import Record, read_lines
from workloads.traces import TraceError, parse_json
from workloads.trajectories import Trajectory, Workload

# Endings of the files in a folder that are read.
_ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
# Times are in tenths of a second, durations in hundredths; this is ample.
_ROUNDED_S = 1.0


def read_kv_cache_tester(path: Path) -> Workload:
    """The workload of one conversation, of JSON lines of conversations, or of a folder of such files, gzipped or not.
    Folders within the folder are left out.

    Raises:
        TraceError: If a file is malformed or an id is repeated; the message names the request and the field.
        OSError: If the file cannot be read.
    """
    trajectories: list[Trajectory] = []
    seen: set[str] = set()
    for conversation in _conversations(path):
        group_id = conversation.name("id")
        if group_id in seen:
            raise TraceError(f"{conversation.where}, id: {group_id!r} was already there")
        seen.add(group_id)
        strands = workload_of_sessions(group_id, _sessions(group_id, conversation)).trajectories
        trajectories += [
            replace(strand, trajectory_id=f"{group_id}-{number}", group_id=group_id)
            for number, strand in enumerate(strands)
        ]
    num_folders = sum(inner.is_dir() for inner in path.iterdir()) if path.is_dir() else 0
    left_out = f"folders within it: {num_folders:,}" if num_folders else ""
    return Workload(path.name.split(".")[0], tuple(trajectories), left_out)


def _conversations(path: Path) -> Iterator[Record]:
    """One from each file that is a JSON document, one from each line of the other files."""
    for file in _files(path):
        lines = list(read_lines(file))
        if lines and _is_document(lines[0][1]):
            yield from (Record.parse(line, where) for where, line in lines)
        else:
            yield Record.parse("".join(line for _, line in lines), str(file))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.name.endswith(_ENDINGS) and not file.is_dir())


def _is_document(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _sessions(session_id: str, conversation: Record) -> Iterator[tuple[str, list[Call]]]:
    """The agent's own calls, then those of each of its helpers."""
    requests = conversation.records("requests")
    own = [request for request in requests if request.fields.get("type") != "subagent"]
    calls = [_call(request) for request in _without_repeats(own)]
    if calls:
        yield session_id, calls
    for number, request in enumerate(requests):
        if request.fields.get("type") == "subagent":
            yield from _sessions(f"{session_id}/{number}", request)


def _without_repeats(requests: list[Record]) -> list[Record]:
    kept: list[Record] = []
    for request in requests:
        if kept and _is_repeat(kept[-1], request):
            kept.pop()
        kept.append(request)
    return kept


def _is_repeat(streamed: Record, request: Record) -> bool:
    types = (streamed.fields.get("type"), request.fields.get("type"))
    return types == ("s", "n") and streamed.counts("hash_ids") == request.counts("hash_ids") != ()


def _call(request: Record) -> Call:
    started_at_s = request.number("t")
    return Call(
        prompt_tokens=request.count("in"),
        output_tokens=request.count("out"),
        blocks=whole_blocks(request.counts("hash_ids")),
        started_at_s=started_at_s,
        ended_at_s=started_at_s + request.number("api_time") if request.has("api_time") else None,
        waited_s=request.number("think_time") if request.has("think_time") else None,
        early_s=_ROUNDED_S,
    )
