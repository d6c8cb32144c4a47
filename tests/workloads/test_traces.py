"""Traces: read as written, refused with the line number, cut and scaled as asked."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.traces import TraceError, load_trace
from workloads.trajectories import TEMPLATE_TOKENS_PER_TURN, Trajectory, Turn, Workload


def record(name: str = "a-0", group: str = "a", num_turns: int = 2, output: int = 100) -> dict[str, Any]:
    turns = [
        {"new_tokens": 50 if index else 0, "output_tokens": output, "tool_s": 2.0, "llm_s": 1.0}
        for index in range(num_turns)
    ]
    return {"trajectory_id": name, "group_id": group, "context_tokens": 1_000, "turns": turns}


def write(path: Path, *records: Any) -> Path:
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["agents.jsonl", "agents.jsonl.gz"])
def test_a_trace_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    """Plain and gzipped files give the same trajectories, in order, named after the file. Blank lines do not count."""
    workload = load_trace(write(tmp_path / name, record("a-0"), "", record("a-1", num_turns=1)))
    assert workload == Workload(
        "agents",
        (
            Trajectory("a-0", "a", 1_000, (Turn(0, 100, 2.0), Turn(50, 100, 2.0))),
            Trajectory("a-1", "a", 1_000, (Turn(0, 100, 2.0),)),
        ),
    )
    assert (workload.num_turns, workload.output_tokens, workload.total_tokens) == (3, 300, 2_350)
    assert workload.max_context_tokens == 1_250


def test_a_turn_without_output_counts_as_one_token(tmp_path: Path) -> None:
    """An engine cannot generate less than one token, so neither can a trajectory."""
    [trajectory] = load_trace(write(tmp_path / "t.jsonl", record(output=0))).trajectories
    assert [turn.output_tokens for turn in trajectory.turns] == [1, 1]


def test_new_tokens_of_the_first_turn_are_part_of_the_first_prompt(tmp_path: Path) -> None:
    """Some traces count a trajectory's own question there, or all of its prompt. Workloads have one first prompt."""
    turns = [{"new_tokens": 40, "output_tokens": 7, "tool_s": 0}, {"new_tokens": 5, "output_tokens": 7, "tool_s": 0}]
    path = write(
        tmp_path / "t.jsonl", record("a") | {"turns": turns}, record("b") | {"context_tokens": 0, "turns": turns}
    )
    first, second = load_trace(path).trajectories
    assert (first.context_tokens, second.context_tokens) == (1_040, 40)
    assert [turn.new_tokens for turn in first.turns] == [turn.new_tokens for turn in second.turns] == [0, 5]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes: column 2$"),
        (
            record() | {"context_tokens": "9" * 10**6},
            r"context_tokens: must be a whole number .{,50}, not '9{56}\.\.\.$",
        ),
        (
            record() | {"trajectory_id": ["9" * 10**6]},
            r"trajectory_id: must be a non-empty string, not \['9{55}\.\.\.$",
        ),
        ([], "not a JSON object"),
        (record() | {"turns": []}, "turns: must be a list of at least one turn"),
        (record() | {"trajectory_id": 7}, "trajectory_id: must be a non-empty string, not 7"),
        (record() | {"group_id": ""}, "group_id: must be a non-empty string"),
        (record() | {"context_tokens": -1}, r"context_tokens: must be a whole number from 0 to .*, not -1"),
        (record() | {"context_tokens": True}, "context_tokens: must be a whole number"),
        (record() | {"turns": [3]}, r"turns\[0\]: not a JSON object"),
        (record() | {"turns": [{"new_tokens": 0, "output_tokens": 1}]}, r"turns\[0\]\.tool_s: must be seconds from 0"),
        (record() | {"turns": [{"new_tokens": 0, "output_tokens": 1.5, "tool_s": 0}]}, "not 1.5"),
        (record() | {"turns": [{"new_tokens": 0, "output_tokens": 1, "tool_s": float("inf")}]}, "not inf"),
        (record("a-0"), "'a-0' was already there"),
        (record() | {"preamble_tokens": 10**8}, "preamble_tokens: more than the first prompt has"),
        (record() | {"preamble_tokens": "x"}, "preamble_tokens: must be a whole number"),
        ("[" * 100_000, "nested too deeply"),
        (record() | {"trajectory_id": "\ud800"}, "not Unicode"),
        (record() | {"context_tokens": 10**30}, "context_tokens: must be a whole number from 0 to 1,000,000,000"),
        (record() | {"turns": [{"new_tokens": 0, "output_tokens": 1, "tool_s": 10**400}]}, "seconds from 0 to"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(tmp_path: Path, wrong: Any, message: str) -> None:
    """The error names file, line and field, so that a trace with a million lines can be fixed."""
    path = write(tmp_path / "t.jsonl", record("a-0"), record("a-1"), wrong)
    with pytest.raises(TraceError, match=rf"t\.jsonl, line 3: .*{message}"):
        load_trace(path)


def test_a_preamble_is_read_and_scaled_with_its_prompt(tmp_path: Path) -> None:
    """It is a part of the first prompt, never longer than that."""
    path = write(tmp_path / "t.jsonl", record("a-0") | {"context_tokens": 1_000, "preamble_tokens": 900}, record("b-0"))
    first, second = load_trace(path, scale=0.5).trajectories
    assert (first.context_tokens, first.preamble_tokens, second.preamble_tokens) == (500, 450, 0)
    assert load_trace(path, scale=0.0001).trajectories[0].preamble_tokens <= 1


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    """A replay without trajectories would always succeed."""
    with pytest.raises(TraceError, match="no trajectory"):
        load_trace(write(tmp_path / "t.jsonl", ""))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """Files are read twice, so `<(zstd -dc t.jsonl.zst)` lost its beginning, and looked empty."""
    readable, writable = os.pipe()
    os.write(writable, write(tmp_path / "t.jsonl", record()).read_bytes())
    os.close(writable)
    with pytest.raises(
        TraceError, match=rf"/dev/fd/{readable}: a pipe, which can be read only once: write it to a file"
    ):
        load_trace(f"/dev/fd/{readable}")
    os.close(readable)


def test_a_sample_keeps_siblings_together_and_follows_its_seed(tmp_path: Path) -> None:
    """A limit takes whole groups, in the file's order; the same seed takes the same ones."""
    path = write(tmp_path / "t.jsonl", *(record(f"{g}-{m}", f"{g}") for g in range(20) for m in range(4)))
    sample = load_trace(path, limit=12, seed=1)
    assert [len(siblings) for siblings in sample.groups.values()] == [4, 4, 4]
    assert sample == load_trace(path, limit=12, seed=1)
    assert set(sample.groups) != set(load_trace(path, limit=12, seed=2).groups)
    everything = load_trace(path).trajectories
    assert list(sample.trajectories) == [t for t in everything if t in sample.trajectories]


def test_turns_tools_and_lengths_are_cut_and_scaled(tmp_path: Path) -> None:
    """Later turns go; tool times are multiplied and then capped, without changing lengths; `scale` applies to both."""
    path = write(tmp_path / "t.jsonl", record(num_turns=5))
    [cut] = load_trace(path, tool_scale=0.5).within(max_turns=2).trajectories
    assert cut.turns == (Turn(0, 100, 1.0), Turn(50, 100, 1.0))
    [capped] = load_trace(path, tool_scale=0.5).within(max_tool_s=0.25).trajectories
    assert {turn.tool_s for turn in capped.turns} == {0.25}
    [scaled] = load_trace(path, scale=0.1).trajectories
    assert (scaled.context_tokens, scaled.turns[1]) == (100, Turn(5, 10, 0.2))


def test_a_trace_that_is_not_scaled_is_not_copied() -> None:
    """The copy of a large trace doubled the memory that it takes."""
    turn = Turn(0, 100, 2.0)
    workload = Workload("w", (Trajectory("a", "a", 1_000, (turn,)),))
    assert workload.scaled() is workload


def test_too_many_turns_for_a_context_is_an_error(tmp_path: Path) -> None:
    """If the template alone fills the context, scaling does not help. The message says what does: also a context that
    is just long enough for all trajectories, because not every command can cut turns."""
    path = write(tmp_path / "t.jsonl", record("b-0", num_turns=49), record(num_turns=50))
    with pytest.raises(ValueError, match=r"a-0: 50 turns do not fit .* allow at least 1,101, or set max_turns"):
        load_trace(path).within(max_context_tokens=1_000)
    with pytest.raises(ValueError, match="do not fit"):
        load_trace(path).within(max_context_tokens=1_100)
    assert load_trace(path).within(max_context_tokens=1_101).num_turns == 99


turns = st.builds(Turn, st.integers(0, 50_000), st.integers(1, 5_000), st.floats(0, 100))
contexts = st.integers(1, 200_000)
turn_lists = st.lists(turns, min_size=1, max_size=12)


@given(st.lists(st.tuples(contexts, turn_lists), min_size=1, max_size=8), st.integers(12 * 22 + 1, 20_000))
def test_a_fitted_workload_fits_and_keeps_its_order(drawn: list[Any], max_context_tokens: int) -> None:
    """Whatever the lengths, every trajectory fits with its template, none grows, and the order of contexts is kept."""
    workload = Workload("w", tuple(Trajectory(f"{i}", "g", c, tuple(ts)) for i, (c, ts) in enumerate(drawn)))
    fitted = workload.fitted(max_context_tokens)
    pairs = list(zip(workload.trajectories, fitted.trajectories, strict=True))
    for before, after in pairs:
        assert after.total_tokens + TEMPLATE_TOKENS_PER_TURN * len(after.turns) <= max_context_tokens
        assert len(after.turns) == len(before.turns)
        assert after.output_tokens <= before.output_tokens
        assert after.context_tokens <= before.context_tokens
    for before, after in pairs:
        for other_before, other_after in pairs:
            if before.context_tokens <= other_before.context_tokens:
                assert after.context_tokens <= other_after.context_tokens
    if workload.max_context_tokens + TEMPLATE_TOKENS_PER_TURN * 12 <= max_context_tokens // 2:
        assert fitted == workload


@pytest.mark.parametrize("name", ["zipped.jsonl", "plain.jsonl.gz"])
def test_gzip_is_detected_by_content_not_by_name(tmp_path: Path, name: str) -> None:
    """A browser unpacks a `.gz` and keeps its name; a pipe may pack a file without renaming it."""
    content = json.dumps(record()).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.startswith("zipped") else content)
    assert len(load_trace(tmp_path / name).trajectories) == 1


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    """Some editors put one before the first line."""
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(record()).encode())
    assert len(load_trace(tmp_path / "t.jsonl").trajectories) == 1


@pytest.mark.parametrize("damage", ["cut", "changed", "not text"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    """An interrupted download, a flipped bit, a binary file: one error, and it names the file."""
    lines = "\n".join(json.dumps(record(f"a-{number}")) for number in range(400))
    whole = bytearray(gzip.compress(lines.encode()))
    if damage == "cut":
        del whole[len(whole) // 2 :]
    elif damage == "changed":
        whole[40] ^= 0xFF
    (tmp_path / "t.jsonl.gz").write_bytes(b"\xff\xfe\xfd\n" if damage == "not text" else bytes(whole))
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz"):
        load_trace(tmp_path / "t.jsonl.gz")


def test_a_file_compressed_with_zstandard_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Its bytes are not text, so an error about text would say nothing."""
    (tmp_path / "t.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x04\x00")
    with pytest.raises(TraceError, match=r"t\.jsonl\.zst: compressed with Zstandard: decompress it first"):
        load_trace(tmp_path / "t.jsonl.zst")


def test_a_trajectory_without_a_group_is_a_group_of_its_own(tmp_path: Path) -> None:
    """Recordings of single agents have no groups."""
    alone = {name: value for name, value in record("a-0").items() if name != "group_id"}
    workload = load_trace(write(tmp_path / "t.jsonl", alone, record("a-1") | {"group_id": None}))
    assert [trajectory.group_id for trajectory in workload.trajectories] == ["a-0", "a-1"]


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}',
        '{"id": "c", "block_size": 64, "requests": []}',
        '{"request_id": "r", "input_length": 10, "max_output_tokens": 5}',
    ],
)
def test_a_trace_of_another_program_is_refused_with_the_importer(tmp_path: Path, line: str) -> None:
    """The message names `heddle import`, so that its user need not search for it."""
    (tmp_path / "t.jsonl").write_text(line + "\n")
    with pytest.raises(
        TraceError,
        match=r"line 1: turns: must be a list of at least one turn; "
        r"`heddle import` reads event logs, engines' logs and other programs' traces",
    ):
        load_trace(tmp_path / "t.jsonl")
