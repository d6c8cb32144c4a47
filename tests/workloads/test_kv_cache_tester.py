"""kv-cache-tester's conversations become trajectories: an agent, its side calls and its subagents."""

import gzip
import json
from pathlib import Path

from tests.workloads.forms import conversation, lines, shapes
from workloads.importers import import_trace
from workloads.trajectories import Turn


def test_a_conversation_gives_the_agent_side_calls_and_subagents(tmp_path: Path) -> None:
    """Three contexts of one group. A turn that comes twice counts once; think time is tool time."""
    path = tmp_path / "c1.json"
    path.write_text(json.dumps(conversation(), indent=2))
    workload = import_trace(path)
    assert shapes(workload) == [
        (300, (Turn(0, 25, 6.5), Turn(75, 30, 0.0))),
        (70, (Turn(0, 7, 0.0),)),
        (90, (Turn(0, 9, 0.0),)),
    ]
    assert [t.trajectory_id for t in workload.trajectories] == ["c1-0", "c1-1", "c1-2"]
    assert list(workload.groups) == ["c1"]


def test_a_compacted_conversation_begins_another_trajectory(tmp_path: Path) -> None:
    """If less than half of the blocks are kept: our trajectories only grow."""
    requests = [
        {"t": 0.0, "type": "n", "in": 640, "out": 20, "hash_ids": list(range(10))},
        {"t": 5.0, "type": "n", "in": 256, "out": 20, "hash_ids": [0, 1, 50, 51]},
        {"t": 9.0, "type": "n", "in": 320, "out": 20, "hash_ids": [0, 1, 50, 52, 53]},
    ]
    path = tmp_path / "c1.json"
    path.write_text(json.dumps(conversation(requests=requests)))
    assert [len(t.turns) for t in import_trace(path).trajectories] == [1, 2]


def test_a_call_does_not_continue_one_that_still_ran(tmp_path: Path) -> None:
    """Times are rounded, so a call may seem to begin a little before the end of the one that it continues."""
    requests = [
        {"t": 0.0, "type": "n", "in": 640, "out": 20, "hash_ids": list(range(11)), "api_time": 9.07},
        {"t": 9.0, "type": "n", "in": 700, "out": 20, "hash_ids": list(range(12)), "api_time": 5.0},
        {"t": 10.0, "type": "n", "in": 700, "out": 30, "hash_ids": list(range(12)), "api_time": 8.0},
    ]
    path = tmp_path / "c1.json"
    path.write_text(json.dumps(conversation(requests=requests)))
    assert shapes(import_trace(path)) == [
        (640, (Turn(0, 20, 0.0), Turn(40, 20, 0.0))),
        (700, (Turn(0, 30, 0.0),)),
    ]


def test_a_folder_and_a_file_of_conversations_read_the_same(tmp_path: Path) -> None:
    """Many files, as published, or one with a conversation per line."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in ("c1", "c2"):
        (folder / f"{name}.json").write_text(json.dumps(conversation(id=name)))
    one = lines(tmp_path / "all.jsonl", conversation(id="c1"), conversation(id="c2"))
    assert import_trace(folder).trajectories == import_trace(one).trajectories
    assert len(import_trace(folder).groups) == 2
    (folder / "c3.json.gz").write_bytes(gzip.compress(json.dumps(conversation(id="c3")).encode()))
    lines(folder / "more.jsonl", conversation(id="c4"), conversation(id="c5"))
    (folder / "LICENSE").write_text("no conversation")
    assert set(import_trace(folder).groups) == {"c1", "c2", "c3", "c4", "c5"}


def test_folders_within_a_folder_are_left_out(tmp_path: Path) -> None:
    """They were left out unsaid, and one with a file's ending was opened as a file."""
    (tmp_path / "c1.json").write_text(json.dumps(conversation(id="c1")))
    for inner in ("more", "more.json"):
        (tmp_path / inner).mkdir()
        (tmp_path / inner / "c2.json").write_text(json.dumps(conversation(id="c2")))
    workload = import_trace(tmp_path)
    assert list(workload.groups) == ["c1"] and workload.left_out == "folders within it: 2"


def test_a_wait_is_no_longer_than_the_time_since_the_call_before_it_began(tmp_path: Path) -> None:
    """Published traces count `think_time` from the last request with an `api_time`, over requests without one."""
    requests = [
        {"t": 0.0, "type": "s", "in": 640, "out": 20, "hash_ids": list(range(10)), "api_time": 5.0, "think_time": 0.0},
        {"t": 190.0, "type": "s", "in": 700, "out": 20, "hash_ids": list(range(11)), "think_time": 185.0},
        {"t": 198.0, "type": "s", "in": 760, "out": 20, "hash_ids": list(range(12)), "think_time": 193.0},
    ]
    path = tmp_path / "c1.json"
    path.write_text(json.dumps(conversation(requests=requests)))
    [trajectory] = import_trace(path).trajectories
    assert [turn.tool_s for turn in trajectory.turns] == [185.0, 8.0, 0.0]
