"""Mooncake's trace form: one request a line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}

Times are in milliseconds. There is one hash id per 512 tokens of the prompt; ids are equal if prompts are equal up to
there. A trace with `session_id` and `delay`, with which load generators extend the form, is read by session; else calls
are joined by content. Rows without a time keep their order, and their tools take no time. A row of a session holds its
whole prompt, or only what joined since the previous answer: generators write both, and no field distinguishes them. If
more than a quarter of the later rows do not continue the row before, all rows are read as what joined. `group_id`
groups sessions.

Bailian's traces have the same fields, but times in seconds, and each row holds its whole prompt. A `chat_id` marks
them, and `parent_chat_id` links the requests of a session; -1 stands for none.

Source: Mooncake (FAST 2025), its published traces; AIPerf, trace replay; Dynamo, `TraceFileFormat`; Qwen-Bailian usage
traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from workloads.importers.calls import Call, whole_blocks, workload_by_prefix, workload_of_sessions
from workloads.importers.records import Record, read_records
from workloads.trajectories import Workload

_LEAST_SHARE_THAT_GOES_ON = 0.75


def read_mooncake(path: Path) -> Workload:
    """The workload of a Mooncake trace.

    Raises:
        TraceError: If a line is malformed; the message names the line and the field.
        OSError: If the file cannot be read.
    """
    sessions: dict[str, list[Call]] = {}
    groups: dict[str, str] = {}
    calls: list[Call] = []
    chats: list[tuple[str, Call]] = []
    parent_of: dict[str, str] = {}
    for record in read_records(path):
        if record.has("session_id"):
            session_id = record.name("session_id")
            sessions.setdefault(session_id, []).append(_call(record))
            if record.has("group_id"):
                groups[session_id] = record.name("group_id")
        elif record.has("chat_id"):
            chat_id = record.name("chat_id")
            chats.append((chat_id, _call(record)))
            parent_of.setdefault(chat_id, record.name("parent_chat_id") if record.has("parent_chat_id") else "")
        else:
            calls.append(_call(record))
    of_chats: dict[str, list[Call]] = {}
    roots = _roots(parent_of)
    for chat_id, call in chats:
        of_chats.setdefault(roots[chat_id], []).append(call)
    # Not every trace is sorted. Sorting is stable, so calls at the same instant keep their order. Rows that give their
    # wait after the previous row need no time, and keep their order.
    for one in (calls, *sessions.values(), *of_chats.values()):
        if all(call.started_at_s is not None for call in one):
            one.sort(key=lambda call: call.started_at_s or 0.0)
    name = path.name.split(".")[0]
    if _are_additions(sessions.values()):
        sessions = {session_id: _whole_prompts(additions) for session_id, additions in sessions.items()}
    group_ids = (groups.get(session_id, "") for session_id in (*sessions, *of_chats))
    by_session = workload_of_sessions(name, [*sessions.items(), *of_chats.items()], group_ids)
    return Workload(name, by_session.trajectories + workload_by_prefix(name, calls).trajectories)


def _roots(parent_of: Mapping[str, str]) -> dict[str, str]:
    """The first chat of each chat's session: the furthest ancestor in the file, which need not be sorted."""
    roots: dict[str, str] = {}
    for chat_id in parent_of:
        path: dict[str, None] = {}
        ancestor = chat_id
        while ancestor in parent_of and ancestor not in path and ancestor not in roots:
            path[ancestor] = None
            ancestor = parent_of[ancestor]
        if path:
            roots |= dict.fromkeys(path, roots.get(ancestor, next(reversed(path))))
    return roots


def _are_additions(sessions: Iterable[Sequence[Call]]) -> bool:
    """Whether too many rows do not continue the row before, so rows cannot be whole prompts.

    Prompts that only grow continue in nearly all rows; a context that was cut down keeps at least its beginning.
    Lengths of additions are as often smaller than the one before as larger.
    """
    goes_on = [_goes_on(last, call) for calls in sessions for last, call in pairwise(calls)]
    return sum(goes_on) < _LEAST_SHARE_THAT_GOES_ON * len(goes_on)


def _goes_on(last: Call, call: Call) -> bool:
    if last.blocks and call.blocks:
        return last.blocks[0] == call.blocks[0]
    return call.prompt_tokens >= last.prompt_tokens


def _whole_prompts(additions: Sequence[Call]) -> list[Call]:
    """Each row's prompt with everything before it. Blocks of later rows tell nothing of what is before them."""
    calls = [additions[0]]
    for addition in additions[1:]:
        last = calls[-1]
        prompt_tokens = last.prompt_tokens + last.output_tokens + addition.prompt_tokens
        calls.append(replace(addition, prompt_tokens=prompt_tokens, blocks=()))
    return calls


def _call(record: Record) -> Call:
    delay = record.first_of("delay", "delay_ms")
    waited_s = record.number(delay) / 1000 if record.has(delay) else None
    timestamp = record.first_of("timestamp", "created_time")
    started_at_s = None
    if record.has(timestamp):
        started_at_s = record.number(timestamp) / (1 if record.has("chat_id") else 1000)
    return Call(
        prompt_tokens=record.count(record.first_of("input_length", "input_tokens")),
        output_tokens=record.count(record.first_of("output_length", "output_tokens")),
        blocks=whole_blocks(record.counts("hash_ids")),
        started_at_s=started_at_s,
        waited_s=waited_s,
    )
