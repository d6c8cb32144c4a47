"""Dynamo's agentic turns become trajectories, in the order of their dependencies."""

from pathlib import Path
from typing import Any

import pytest

from tests.workloads.forms import dynamo, dynamo_request, lines, shapes
from workloads.importers import import_trace
from workloads.traces import TraceError
from workloads.trajectories import Turn


def test_dynamo_turns_of_a_session_follow_each_other_after_their_delay(tmp_path: Path) -> None:
    """The delay after a turn's dependencies is the tool call before it. Sessions stay apart."""
    path = lines(
        tmp_path / "t.jsonl",
        dynamo("r1", 100, 10, session_id="a", delay_after_dependencies_ms=0),
        dynamo("x1", 70, 5, session_id="b", wait_for=["r1"]),
        dynamo("r2", 150, 20, session_id="a", delay_after_dependencies_ms=1_500, wait_for=["r1", "x1"], priority=3),
    )
    workload = import_trace(path)
    assert shapes(workload) == [(100, (Turn(0, 10, 1.5), Turn(40, 20, 0.0))), (70, (Turn(0, 5, 0.0),))]
    assert [t.group_id for t in workload.trajectories] == ["a", "b"]


@pytest.mark.parametrize("session", [{}, {"session_id": "s"}], ids=["no session", "session"])
def test_dynamo_turns_that_wait_for_the_same_turn_run_at_once(tmp_path: Path, session: dict[str, Any]) -> None:
    """None continues the other. A turn that waits for a side call still continues the turn before that."""
    path = lines(
        tmp_path / "t.jsonl",
        dynamo("r1", 1_000, 10, hash_ids=[1, 2, 3], **session),
        dynamo("side", 50, 5, hash_ids=[8, 9], wait_for=["r1"], **session),
        dynamo("r2", 1_200, 100, hash_ids=[1, 2, 4, 5], wait_for=["side"], delay=500, **session),
        dynamo("r3", 1_300, 100, hash_ids=[1, 2, 4, 6], wait_for=["side"], delay=700, **session),
    )
    assert shapes(import_trace(path)) == [
        (1_000, (Turn(0, 10, 0.5), Turn(190, 100, 0.0))),
        (50, (Turn(0, 5, 0.0),)),
        (1_300, (Turn(0, 100, 0.0),)),
    ]


def test_dynamo_turns_follow_their_dependencies_in_any_file_order(tmp_path: Path) -> None:
    """The turns of a chain are one trajectory even if the file is not sorted."""
    turns = [
        dynamo(f"r{n}", 100 + 50 * n, 10, wait_for=[f"r{n - 1}"] if n else [], delay=100.0 * n) for n in range(2_000)
    ]
    assert import_trace(lines(tmp_path / "t.jsonl", *turns[::-1])).trajectories == (
        import_trace(lines(tmp_path / "u.jsonl", *turns)).trajectories[0],
    )


@pytest.mark.parametrize(("b", "c"), [("b", "c"), (2, 3)])
def test_dynamo_turns_that_wait_for_each_other_are_refused(tmp_path: Path, b: Any, c: Any) -> None:
    """Neither could begin. The message names a line."""
    path = lines(tmp_path / "t.jsonl", dynamo("a", 9, 1), dynamo(b, 9, 1, wait_for=[c]), dynamo(c, 9, 1, wait_for=[b]))
    with pytest.raises(TraceError, match=rf"line [23], wait_for: '[{b}{c}]' waits for itself in the end"):
        import_trace(path)


def test_dynamo_rows_of_both_later_forms_give_the_same_turns(tmp_path: Path) -> None:
    """`wait_for` with `delay` and `tool_wait_ms`, and `dependencies` under a header, without a session."""
    older = lines(
        tmp_path / "older.jsonl",
        {"request_id": "r1", "input_tokens": 100, "output_tokens": 10},
        {
            "request_id": "r2",
            "input_tokens": 150,
            "output_tokens": 20,
            "delay": 500,
            "tool_wait_ms": 1_000,
            "wait_for": ["r1"],
        },
    )
    dependency = {"request_id": "r1", "trigger": "completion", "delay_ms": 1_500, "relation": "sequence"}
    newer = lines(
        tmp_path / "newer.jsonl",
        {"schema": "agentic", "version": 1, "block_size": 64},
        {"request_id": "r1", "input_length": 100, "output_length": 10, "not_before_ms": 0},
        {"request_id": "r2", "input_length": 150, "output_length": 20, "dependencies": [dependency]},
    )
    expected = [(100, (Turn(0, 10, 1.5), Turn(40, 20, 0.0)))]
    assert shapes(import_trace(older, "dynamo")) == shapes(import_trace(newer, "dynamo")) == expected


def test_a_dynamo_turn_waits_after_the_turn_before_it_not_after_its_helper(tmp_path: Path) -> None:
    """A helper may end while its parent's turn still runs. The time since then was taken for the tool's."""
    after = [
        {"request_id": "a", "trigger": "completion", "delay_ms": 1_000, "relation": "sequence"},
        {"request_id": "helper", "trigger": "completion", "delay_ms": 9_000, "relation": "join"},
    ]
    path = lines(
        tmp_path / "t.jsonl",
        {"request_id": "a", "session_id": "s", "input_length": 100, "output_length": 10, "not_before_ms": 0},
        {"request_id": "helper", "session_id": "h", "input_length": 50, "output_length": 5, "not_before_ms": 0},
        {"request_id": "b", "session_id": "s", "input_length": 150, "output_length": 20, "dependencies": after},
    )
    assert (100, (Turn(0, 10, 1.0), Turn(40, 20, 0.0))) in shapes(import_trace(path))


@pytest.mark.parametrize("session", ["s", None], ids=["session", "content"])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_dynamo_request_trace_is_read_by_session_or_by_content(
    tmp_path: Path, session: str | None, is_wrapped: bool
) -> None:
    """A record is written when its request ends, some time after the answer; other records are skipped, and requests
    without lengths counted."""
    records: list[dict[str, Any]] = [
        dynamo_request("other", 1_000, 9_000.0, 300, 7, 7, 8, 9, session=session and "t"),
        dynamo_request("b", 12_000, 2_000.0, 270, 20, 1, 2, 3, 4, 5, session=session),
        dynamo_request("a", 5_000, 3_000.0, 200, 10, 1, 2, 3, 6, session=session),
        dynamo_request("left", 6_000, 10.0, 200, None, 1, 2, 3, 6, session=session),
        {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": 9_000, "tool": {}},
        {"schema": "dynamo.request.trace.v1", "event_type": "request_payload", "event_time_unix_ms": 1, "payload": {}},
    ]
    written = [{"timestamp": 1, "event": record} for record in records] if is_wrapped else records
    workload = import_trace(lines(tmp_path / "t.jsonl", *written))
    assert sorted(shapes(workload)) == [
        (200, (Turn(0, 10, 4.0), Turn(60, 20, 0.0))),
        (300, (Turn(0, 7, 0.0),)),
    ]
    assert workload.left_out == "requests without lengths: 1"


def test_a_dynamo_request_without_its_arrival_or_its_hashes_is_read(tmp_path: Path) -> None:
    """All measurements are optional in Dynamo."""
    records = [
        {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": ended_ms}
        | {"agent_context": {"session_id": "s"}, "request": {"request_id": "r", "model": "m"} | request}
        for ended_ms, request in (
            (3_000, {"input_tokens": 100, "output_tokens": 10, "total_time_ms": 1_000.0}),
            (9_000, {"input_tokens": 150, "output_tokens": 20, "total_time_ms": 2_000.0}),
        )
    ]
    assert shapes(import_trace(lines(tmp_path / "t.jsonl", *records))) == [(100, (Turn(0, 10, 4.0), Turn(40, 20, 0.0)))]
