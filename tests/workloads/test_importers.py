"""What holds for every importer: formats are told apart, errors are located, and what is written can be read again."""

import argparse
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle import importing
from tests.workloads.forms import (
    ANSWER,
    PROMPT,
    VLLM_MESSAGES,
    arrived,
    conversation,
    dynamo,
    dynamo_request,
    lines,
    mooncake,
    sglang_json,
    sglang_text,
    vllm_json,
    vllm_text,
    without,
)
from workloads.importers import READERS, detect_format, import_trace
from workloads.importers.calls import Call, blocks_of, workload_by_prefix
from workloads.importers.native import write_trace
from workloads.laws import CODING, draw
from workloads.traces import TraceError, load_trace
from workloads.trajectories import Trajectory, Turn, Workload


def test_ids_may_be_numbers_and_lengths_may_be_floats(tmp_path: Path) -> None:
    """Some number their requests, sessions and conversations. A table with gaps writes its whole numbers as 52.0."""
    row = {"request_id": 1, "session_id": 7, "input_length": 100.0, "max_output_tokens": 5}
    path = lines(tmp_path / "t.jsonl", row, row | {"request_id": 2, "input_length": 200, "wait_for": [1]})
    [trajectory] = import_trace(path).trajectories
    assert (trajectory.trajectory_id, trajectory.context_tokens, len(trajectory.turns)) == ("7-0", 100, 2)
    [trajectory] = import_trace(lines(tmp_path / "t.jsonl", mooncake(0, 9, 5, session_id=7))).trajectories
    assert trajectory.group_id == "7"
    assert len(import_trace(lines(tmp_path / "t.jsonl", conversation(id=3))).groups) == 1


@pytest.mark.parametrize(
    ("format_name", "bad", "message"),
    [
        ("mooncake", mooncake(0, 10, 5) | {"input_length": -1}, "line 2, input_length: must be a whole number from 0"),
        (
            "mooncake",
            mooncake(0, 10, 5) | {"timestamp": "0"},
            r"line 2, timestamp: must be a number from 0 to 10\^20, not '0'",
        ),
        ("mooncake", mooncake(0, 10, 5) | {"hash_ids": ["a"]}, "line 2, hash_ids: must be a list of whole numbers"),
        ("mooncake", "{", "line 2: not JSON"),
        ("mooncake", [1], "line 2: must be a JSON object"),
        ("dynamo", dynamo("r", 10, 5, wait_for=["nobody"]), "line 2, wait_for: 'nobody' is no turn"),
        ("dynamo", dynamo("ok", 10, 5), "line 2, request_id: 'ok' was already there"),
        (
            "dynamo",
            without(dynamo("r", 10, 5), "max_output_tokens"),
            "line 2, max_output_tokens: must be a whole number",
        ),
        (
            "dynamo",
            dynamo("r", 10, 5, delay_after_dependencies_ms="1"),
            "line 2, delay_after_dependencies_ms: must be a number",
        ),
        ("kv-cache-tester", conversation(id="ok", requests=[]), "line 2, id: 'ok' was already there"),
        ("sglang-log", sglang_json("r", 2, 1.0, 10, 5, text=5), "line 2, obj, text: must be a string, not 5"),
        (
            "sglang-log",
            sglang_json("r", 2, 1.0, 10, 5, input_ids=[[1]] * 20),
            "line 2, obj, input_ids: must be a list of whole",
        ),
        (
            "kv-cache-tester",
            conversation(requests=[{"t": 0, "in": 5}]),
            r"line 2, requests\[0\], out: must be a whole number",
        ),
        ("kv-cache-tester", conversation(requests=3), "line 2, requests: must be a list, not 3"),
        ("sglang-log", without(sglang_json("r", 1, 1.0, 2, 3), "timestamp"), "line 2, timestamp: must be a string"),
        (
            "sglang-log",
            sglang_json("r", 1, 1.0, 2, 3) | {"timestamp": "now"},
            "line 2, timestamp: must be a time in ISO 8601",
        ),
        ("dynamo-requests", without(dynamo_request("r", 1, 1, 2, 3), "request"), "line 2, request: must be a JSON obj"),
        ("dynamo-requests", dynamo_request("r", 1, 1, -2, 3), "line 2, request, replay, input_length: must be a whole"),
        ("dynamo-requests", dynamo_request("r", 1, -1, 2, 3), "line 2, request, total_time_ms: must be a number"),
        ("dynamo-requests", dynamo_request("r", 1, 1, 2, 3, session=""), "line 2, agent_context, session_id: must be"),
        ("dynamo-requests", {"event": 5}, "line 2, event: must be a JSON object"),
        ("sglang-log", without(sglang_json("r", 1, 1.0, 2, 3), "out"), "line 2, out: must be a JSON object"),
        (
            "sglang-log",
            sglang_json("r", 1, 1.0, -2, 3),
            "line 2, out, meta_info, prompt_tokens: must be a whole number",
        ),
        ("sglang-log", "Finish: obj=GenerateReqInput(rid='r'), out={}", "line 2, out, meta_info, prompt_tokens: .*"),
        ("sglang-log", sglang_text("r", 1, 1.0, 2, 3).replace("11-21", "13-41"), "line 2: time data '2026-13-41"),
        ("sglang-log", sglang_text("r", 1, 1.0, 2, 3).replace("1.0", "1.0.0"), "line 2: could not convert .*'1.0.0'"),
        ("event-log", arrived(3) | {"at": None}, r"line 2, at: must be a number from 0 to 10\^20, not None"),
        ("event-log", arrived(10**21), r"line 2, at: must be a number from 0 to 10\^20, not 1e\+21"),
        ("event-log", arrived(10**400), "line 2: not JSON: number is infinity"),
        ("mooncake", mooncake(10**400, 9, 5), r"line 2, timestamp: must be a number from 0 to 10\^20, not 1000"),
        ("dynamo", dynamo("r", 10**400, 5), r"line 2, input_length: must be a whole number from 0 to 10\^20, not 1000"),
        ("event-log", arrived(3) | {"group_id": 7}, "line 2, group_id: must be a string, not 7"),
        ("event-log", {"kind": "event", "type": "TurnFinished"}, "line 2, turn_id: must be a string, not None"),
        ("event-log", {"kind": "action", "type": "Save"}, "line 2, record: must be a JSON object"),
        ("vllm-log", vllm_text(0, VLLM_MESSAGES[1][1]).replace("11-21", "13-41"), "line 2: time data '2024-13-41"),
        (
            "vllm-log",
            "DEBUG 11-21 05:00:30 [l:1] Request r details: prompt_token_ids: [1 3], x",
            "line 2: invalid .*'1 3'",
        ),
    ],
)
def test_a_malformed_record_is_refused_with_its_line_and_field(
    tmp_path: Path, format_name: str, bad: Any, message: str
) -> None:
    """The first line is valid, the second is named."""
    good = {
        "mooncake": mooncake(0, 10, 5),
        "dynamo": dynamo("ok", 10, 5),
        "dynamo-requests": dynamo_request("ok", 0, 1, 10, 5),
        "kv-cache-tester": conversation(id="ok"),
        "sglang-log": sglang_json("ok", 1, 1.0, 10, 5),
        "vllm-log": vllm_text(0, VLLM_MESSAGES[0][1]),
        "event-log": arrived(0),
    }
    path = lines(tmp_path / "t.jsonl", good[format_name], bad)
    with pytest.raises(TraceError, match=message):
        import_trace(path, format_name)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([mooncake(0, 2 * 10**9, 5)], "'t-0': context_tokens: must be a whole number from 0 to 1,000,000,000"),
        ([dynamo("r", 10, 5, session_id="\ud800")], "-0': trajectory_id: not Unicode"),
        (
            [mooncake(0, 10, 5, 1, 2), mooncake(int(1.7e12), 20, 5, 1, 2, 3)],
            r"'t-0': turns\[0\].tool_s: must be seconds from 0 to 1,000,000,000, not 16999",
        ),
    ],
)
def test_values_that_no_trace_may_hold_are_refused_at_import(tmp_path: Path, records: list[Any], message: str) -> None:
    """Not only when the written trace is read: absurd lengths and times, and names that no encoding can write."""
    with pytest.raises(TraceError, match=message):
        import_trace(lines(tmp_path / "t.jsonl", *records))


@pytest.mark.parametrize(
    ("first", "format_name"),
    [
        (mooncake(0, 10, 5), "mooncake"),
        (mooncake(0, 10, 5, session_id="s"), "mooncake"),
        (dynamo("r", 10, 5), "dynamo"),
        (mooncake(0, 10, 5, request_id="r", wait_for=["q"]), "dynamo"),
        (mooncake(0, 10, 5, request_id="r"), "mooncake"),
        (dynamo_request("r", 0, 1, 10, 5), "dynamo-requests"),
        ({"timestamp": 1, "event": dynamo_request("r", 0, 1, 10, 5)}, "dynamo-requests"),
        (conversation(), "kv-cache-tester"),
        (vllm_text(0, VLLM_MESSAGES[1][1]), "vllm-log"),
        (vllm_json(0, VLLM_MESSAGES[1][1]), "vllm-log"),
        (sglang_json("r", 1, 1.0, 2, 3) | {"event": "request.received"}, "sglang-log"),
        ("[2026-11-21 05:00:01] Receive: obj=GenerateReqInput(rid='r')", "sglang-log"),
        ({"at": 0.0, "kind": "start", "policy": "heddle", "can_preempt": True}, "event-log"),
        ({"kind": "continued"}, "event-log"),
        (arrived(0), "event-log"),
    ],
)
def test_formats_are_detected_by_their_first_telling_line(tmp_path: Path, first: Any, format_name: str) -> None:
    """Server noise before it is skipped."""
    assert format_name in READERS
    assert detect_format(lines(tmp_path / "f", first)) == format_name
    assert detect_format(lines(tmp_path / "f", "Loading weights...", first)) == format_name


@pytest.mark.parametrize("day", ["02-30", "13-01"])
def test_a_line_with_an_invalid_time_is_named_during_detection(tmp_path: Path, day: str) -> None:
    """It is refused as it would be once the format is known."""
    path = lines(tmp_path / "t.log", "started", vllm_text(0, VLLM_MESSAGES[0][1]).replace("11-21", day))
    with pytest.raises(TraceError, match=r"t\.log, line 2: "):
        detect_format(path)


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    """Nobody would find it in a log of several gigabytes."""
    (tmp_path / "t.log").write_bytes(b"one\ntwo\nthr\xe9\n")
    with pytest.raises(TraceError, match=r"t\.log, line 3: not text in UTF-8"):
        detect_format(tmp_path / "t.log")


def test_an_empty_file_is_reported_as_empty(tmp_path: Path) -> None:
    """Not as a file of unknown format."""
    with pytest.raises(TraceError, match="is empty"):
        detect_format(lines(tmp_path / "t.jsonl", "", " "))


def test_a_file_that_is_no_trace_is_refused_with_the_known_formats(tmp_path: Path) -> None:
    """Text without a request, our own format, bytes, and a trace without trajectories."""
    with pytest.raises(
        TraceError,
        match=r"unknown format; "
        r"if it is one of mooncake, kv-cache-tester, dynamo, dynamo-requests, vllm-log, sglang-log, event-log, name",
    ):
        detect_format(lines(tmp_path / "f", "hello", [1], {"a": 1}))
    write_trace(draw(CODING, 1, seed=1), tmp_path / "own.jsonl")
    with pytest.raises(TraceError, match=r"own format already"):
        detect_format(tmp_path / "own.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"not text in UTF-8"):
        detect_format(tmp_path / "bytes")
    with pytest.raises(TraceError, match=r"f: holds no trajectory"):
        import_trace(lines(tmp_path / "f", "hello"), "vllm-log")


def test_a_call_that_begins_before_the_end_of_another_cannot_follow_it() -> None:
    """Even if its prompt contains the other's prompt and answer."""
    prompt = blocks_of(PROMPT, 16)
    longer = blocks_of(PROMPT + ANSWER + PROMPT, 16)
    first = Call(64, 3, prompt, started_at_s=0.0, ended_at_s=5.0)
    for started_at_s, num_trajectories in ((4.0, 2), (5.0, 1)):
        later = Call(131, 3, longer, started_at_s=started_at_s)
        assert len(workload_by_prefix("t", [first, later]).trajectories) == num_trajectories


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_written_trace_reads_back_and_is_deterministic(tmp_path: Path, name: str) -> None:
    """Nothing that an import knows is lost in the native form, and writing again gives the same bytes."""
    drawn = draw(CODING, 20, seed=3)
    workload = Workload(drawn.name, tuple(replace(t, prompt_id="") for t in drawn.trajectories))
    write_trace(workload, tmp_path / name)
    written = (tmp_path / name).read_bytes()
    assert load_trace(tmp_path / name).trajectories == workload.trajectories
    write_trace(workload, tmp_path / name)
    assert (tmp_path / name).read_bytes() == written


def heddle_import(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    importing.add_arguments(parser)
    return importing.run(parser.parse_args([str(argument) for argument in arguments]))


def test_the_command_writes_a_trace_and_prints_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gzipped trace in, a gzipped trace out. An invalid one leaves no file and is reported on stderr."""
    source, out = tmp_path / "t.jsonl.gz", tmp_path / "out.jsonl.gz"
    source.write_bytes(gzip.compress(json.dumps(mooncake(0, 1_100, 100, 1, 2, 3)).encode()))
    assert heddle_import(source, "--out", out) == 0
    assert "1 trajectories in 1 groups, 1 turns, 100 output tokens, from mooncake" in capsys.readouterr().out
    assert load_trace(out).trajectories == (Trajectory("t-0", "t-prompt-0", 1_100, (Turn(0, 100, 0.0),)),)
    bad = tmp_path / "bad.jsonl.gz"
    assert heddle_import(tmp_path / "missing", "--out", bad) == 2
    assert heddle_import(source, "--out", bad, "--format", "dynamo") == 2
    assert "line 1, request_id: must be a string" in capsys.readouterr().err
    assert not bad.exists()
