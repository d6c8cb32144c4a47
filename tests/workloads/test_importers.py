"""Importers: what public traces and engines' logs say becomes trajectories, and what is wrong is named."""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from heddle import importing
from workloads.importers import READERS, detect_format, import_trace
from workloads.importers.calls import ASSUMED_TOKENS_PER_S, Call, blocks_of, workload_by_prefix
from workloads.importers.native import write_trace
from workloads.laws import CODING, draw
from workloads.traces import TraceError, load_trace
from workloads.trajectories import Trajectory, Turn, Workload


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def shapes(workload: Workload) -> list[tuple[int, tuple[Turn, ...]]]:
    return [(t.context_tokens, t.turns) for t in workload.trajectories]


def mooncake(at_ms: int, prompt: int, output: int, *hash_ids: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": prompt, "output_length": output, "hash_ids": list(hash_ids)} | more


def test_mooncake_calls_that_repeat_a_prompt_and_its_answer_are_one_trajectory(tmp_path: Path) -> None:
    """The second call holds the first's whole blocks and its answer; the time the answer did not take is the tool's."""
    path = lines(
        tmp_path / "agents.jsonl",
        mooncake(0, 1_100, 100, 1, 2, 3),
        mooncake(10, 1_050, 40, 1, 7, 8),
        mooncake(9_000, 1_300, 50, 1, 2, 4),
    )
    first, other = import_trace(path).trajectories
    gap_s = 9.0 - 100 / ASSUMED_TOKENS_PER_S
    assert (first.context_tokens, first.turns) == (1_100, (Turn(0, 100, pytest.approx(gap_s)), Turn(100, 50, 0.0)))
    assert (other.context_tokens, other.turns) == (1_050, (Turn(0, 40, 0.0),))


def test_a_mooncake_call_too_short_to_hold_the_answer_is_another_trajectory(tmp_path: Path) -> None:
    """A shared system prompt alone makes no conversation."""
    path = lines(tmp_path / "t.jsonl", mooncake(0, 1_100, 400, 1, 2, 3), mooncake(5, 1_200, 10, 1, 2, 4))
    assert len(import_trace(path).trajectories) == 2


def test_mooncake_siblings_share_a_group_and_each_goes_on_once(tmp_path: Path) -> None:
    """Two equal prompts are a group; of two continuations each takes one of them."""
    path = lines(
        tmp_path / "t.jsonl",
        *(mooncake(0, 1_100, 20, 1, 2, 3) for _ in range(2)),
        *(mooncake(1_000, 1_200, 20, 1, 2, 4) for _ in range(2)),
        mooncake(2_000, 1_100, 20, 9, 8, 7),
    )
    workload = import_trace(path)
    assert [len(t.turns) for t in workload.trajectories] == [2, 2, 1]
    assert [len(siblings) for siblings in workload.groups.values()] == [2, 1]


def test_mooncake_rows_with_sessions_and_delays_are_taken_at_their_word(tmp_path: Path) -> None:
    """The session joins calls even where no block does, and the delay is the tool's time."""
    path = lines(
        tmp_path / "t.jsonl",
        mooncake(0, 500, 20, session_id="s"),
        mooncake(0, 600, 30, session_id="s", delay=2_500),
    )
    assert shapes(import_trace(path)) == [(500, (Turn(0, 20, 2.5), Turn(80, 30, 0.0)))]


@pytest.mark.parametrize("with_blocks", [True, False])
def test_mooncake_rows_of_a_session_may_be_what_joined_its_prompt(tmp_path: Path, with_blocks: bool) -> None:
    """Rows that share nothing with the row before, or are as often shorter as longer, are no whole prompts."""
    blocks = [[1, 2, 3], [4, 5], [6], [7, 8, 9], [10, 11, 12]] if with_blocks else [[]] * 5
    lengths = [(900, 20), (300, 30), (40, 10), (700, 5), (650, 60)]
    path = lines(
        tmp_path / "t.jsonl",
        *(
            mooncake(0, prompt, output, *hash_ids, session_id="s", delay=1_000)
            for (prompt, output), hash_ids in zip(lengths, blocks, strict=True)
        ),
    )
    turns = (Turn(0, 20, 1.0), Turn(300, 30, 1.0), Turn(40, 10, 1.0), Turn(700, 5, 1.0), Turn(650, 60, 0.0))
    assert shapes(import_trace(path)) == [(900, turns)]


def test_mooncake_rows_of_a_session_are_whole_prompts_where_nearly_all_go_on(tmp_path: Path) -> None:
    """One context that was cut down among many that grow makes a strand of its own, and no prompt longer."""
    path = lines(
        tmp_path / "t.jsonl",
        *(mooncake(at, 500 + 100 * at, 10, session_id="s") for at in range(9)),
        mooncake(9, 200, 10, session_id="s"),
        mooncake(10, 300, 10, session_id="s"),
    )
    assert [(t.context_tokens, t.total_tokens) for t in import_trace(path).trajectories] == [(500, 1_310), (200, 310)]


def test_mooncake_rows_of_a_session_need_not_be_sorted(tmp_path: Path) -> None:
    """Where every row has its time; a row that says only how long it waits stands where it is."""
    rows = [mooncake(at_ms, 100 + at_ms // 10, 20, session_id="s") for at_ms in (9_000, 0, 4_000)]
    [trajectory] = import_trace(lines(tmp_path / "t.jsonl", *rows)).trajectories
    assert (trajectory.context_tokens, [turn.new_tokens for turn in trajectory.turns]) == (100, [0, 380, 480])
    later = [without(row, "timestamp") | {"delay": 500.0} for row in rows[1:]]
    [trajectory] = import_trace(lines(tmp_path / "t.jsonl", rows[0], *later), "mooncake").trajectories
    assert trajectory.context_tokens == 1_000


def test_thousands_of_requests_with_one_prompt_are_no_quadratic_work(tmp_path: Path) -> None:
    """A load generator sends the same prompt again and again; none continues another, and each is looked at once."""
    looked_at = 0

    class Prompt(int):
        def __add__(self, other: int) -> int:
            nonlocal looked_at
            looked_at += 1
            return int(self) + other

    calls = [Call(Prompt(1_100), 20, (1, 2), started_at_s=float(number)) for number in range(1_000)]
    workload = workload_by_prefix("load", calls)
    assert (len(workload.trajectories), len(workload.groups)) == (1_000, 1)
    assert looked_at <= 3 * len(calls)


def test_numbers_may_name_what_texts_name_and_lengths_may_have_a_point(tmp_path: Path) -> None:
    """Some number their requests, sessions and conversations; a table with gaps makes its whole numbers 52.0."""
    row = {"request_id": 1, "session_id": 7, "input_length": 100.0, "max_output_tokens": 5}
    path = lines(tmp_path / "t.jsonl", row, row | {"request_id": 2, "input_length": 200, "wait_for": [1]})
    [trajectory] = import_trace(path).trajectories
    assert (trajectory.trajectory_id, trajectory.context_tokens, len(trajectory.turns)) == ("7-0", 100, 2)
    [trajectory] = import_trace(lines(tmp_path / "t.jsonl", mooncake(0, 9, 5, session_id=7))).trajectories
    assert trajectory.group_id == "7"
    assert len(import_trace(lines(tmp_path / "t.jsonl", conversation(id=3))).groups) == 1


def test_mooncake_sessions_may_name_or_number_their_group(tmp_path: Path) -> None:
    """A generator's first row of a session says whose prompt it shares; a session that says nothing is alone."""
    path = lines(
        tmp_path / "t.jsonl",
        mooncake(0, 500, 20, session_id="a", group_id=46),
        mooncake(0, 600, 20, session_id="a"),
        mooncake(0, 500, 20, session_id="b", group_id=46),
        mooncake(0, 500, 20, session_id="c", group_id="x"),
        mooncake(0, 500, 20, session_id="d"),
    )
    assert [t.group_id for t in import_trace(path).trajectories] == ["46", "46", "x", "d"]


def dynamo(name: str, prompt: int, output: int, **more: Any) -> dict[str, Any]:
    return {"request_id": name, "input_length": prompt, "max_output_tokens": output} | more


def test_dynamo_turns_of_a_session_follow_each_other_after_their_delay(tmp_path: Path) -> None:
    """The delay after what a turn waits for is the tool call before it; sessions stay apart."""
    path = lines(
        tmp_path / "t.jsonl",
        dynamo("r1", 100, 10, session_id="a", delay_after_dependencies_ms=0),
        dynamo("x1", 70, 5, session_id="b", wait_for=["r1"]),
        dynamo("r2", 150, 20, session_id="a", delay_after_dependencies_ms=1_500, wait_for=["r1", "x1"], priority=3),
    )
    workload = import_trace(path)
    assert shapes(workload) == [(100, (Turn(0, 10, 1.5), Turn(40, 20, 0.0))), (70, (Turn(0, 5, 0.0),))]
    assert [t.group_id for t in workload.trajectories] == ["a", "b"]


def test_dynamo_turns_come_after_what_they_wait_for_wherever_they_stand(tmp_path: Path) -> None:
    """A file need not be sorted: the turns of a chain in any order are one trajectory."""
    turns = [
        dynamo(f"r{n}", 100 + 50 * n, 10, wait_for=[f"r{n - 1}"] if n else [], delay=100.0 * n) for n in range(2_000)
    ]
    assert import_trace(lines(tmp_path / "t.jsonl", *turns[::-1])).trajectories == (
        import_trace(lines(tmp_path / "u.jsonl", *turns)).trajectories[0],
    )


def test_dynamo_turns_that_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    """None of them could begin; the message names a line."""
    path = lines(
        tmp_path / "t.jsonl", dynamo("a", 9, 1), dynamo("b", 9, 1, wait_for=["c"]), dynamo("c", 9, 1, wait_for=["b"])
    )
    with pytest.raises(TraceError, match=r"line [23], wait_for: '[bc]' waits for itself in the end"):
        import_trace(path)


def test_dynamo_rows_of_both_later_forms_say_the_same(tmp_path: Path) -> None:
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


def conversation(**more: Any) -> dict[str, Any]:
    return {
        "id": "c1",
        "block_size": 64,
        "requests": [
            {"t": 0.0, "type": "s", "in": 300, "out": 20, "hash_ids": [1, 2, 3, 4, 5], "api_time": 2.0},
            {"t": 0.1, "type": "n", "in": 300, "out": 25, "hash_ids": [1, 2, 3, 4, 5], "api_time": 2.0},
            {
                "t": 4.0,
                "type": "subagent",
                "agent_id": "agent_001",
                "requests": [{"t": 0.0, "type": "n", "in": 90, "out": 9, "hash_ids": [90, 91]}],
            },
            {"t": 5.0, "type": "n", "in": 70, "out": 7, "hash_ids": [70, 71], "think_time": 0.0},
            {"t": 9.0, "type": "n", "in": 400, "out": 30, "hash_ids": [1, 2, 3, 4, 6, 7, 8], "think_time": 6.5},
        ],
    } | more


def test_a_conversation_gives_the_agent_its_side_calls_and_its_helpers(tmp_path: Path) -> None:
    """Three contexts of one group; the turn that is there twice counts once; think time is the tool's."""
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


def test_a_conversation_whose_context_is_cut_down_begins_anew(tmp_path: Path) -> None:
    """After a compaction less than half of the blocks are kept: another trajectory, since ours only grow."""
    requests = [
        {"t": 0.0, "type": "n", "in": 640, "out": 20, "hash_ids": list(range(10))},
        {"t": 5.0, "type": "n", "in": 256, "out": 20, "hash_ids": [0, 1, 50, 51]},
        {"t": 9.0, "type": "n", "in": 320, "out": 20, "hash_ids": [0, 1, 50, 52, 53]},
    ]
    path = tmp_path / "c1.json"
    path.write_text(json.dumps(conversation(requests=requests)))
    assert [len(t.turns) for t in import_trace(path).trajectories] == [1, 2]


def test_a_folder_and_lines_of_conversations_are_read_alike(tmp_path: Path) -> None:
    """Many files, as they are published, or one with a conversation a line."""
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


PROMPT = list(range(100, 164))
ANSWER = [7, 8, 9]
VLLM_MESSAGES = (
    (0, f"Request r1 details: prompt: 'prompt_token_ids: [1]', prompt_token_ids: {PROMPT}, prompt_embeds shape: None."),
    (0, "Received request r1: params: SamplingParams(n=1), lora_request: None."),
    (2, f"Generated response r1 details: output_token_ids: {ANSWER}"),
    (2, r"Generated response r1: output: 'a\nb', finish_reason: stop"),
    (5, f"Request r2 details: prompt: '', prompt_token_ids: {PROMPT + ANSWER + [1, 2]}, prompt_embeds shape: None."),
    (6, "Generated response r2 (streaming delta) details: output_token_ids: [1, 2]"),
    (7, "Generated response r2 (streaming delta) details: output_token_ids: (3,)"),
    (7, "Generated response r2 (streaming complete) details: output_token_ids: None"),
    (7, "Generated response r2 (streaming complete): output: 'c', finish_reason: streaming_complete"),
    (8, f"Request r3 details: prompt: '', prompt_token_ids: {PROMPT}, prompt_embeds shape: None."),
)


def vllm_text(at_s: int, message: str) -> str:
    return f"(APIServer pid=7) DEBUG 11-21 05:00:{at_s:02d} [serve/.../utils/request_logger.py:55] {message}"


def vllm_json(at_s: int, message: str) -> dict[str, Any]:
    return {"asctime": f"2026-11-21 05:00:{at_s:02d},000", "levelname": "DEBUG", "message": message}


@pytest.mark.parametrize("form", [vllm_text, vllm_json])
def test_vllm_log_tells_lengths_times_and_which_call_follows_which(tmp_path: Path, form: Any) -> None:
    """Token ids join calls, deltas of a stream add up, and a request without an answer is left out."""
    noise = "INFO 11-21 04:59:00 [api_server.py:10] Starting vLLM server on http://0.0.0.0:8000"
    path = lines(tmp_path / "server.log", noise, *(form(at_s, message) for at_s, message in VLLM_MESSAGES))
    assert detect_format(path) == "vllm-log"
    assert shapes(import_trace(path)) == [(64, (Turn(0, 3, 3.0), Turn(2, 3, 0.0)))]


def test_vllm_log_of_older_versions_has_everything_in_one_line(tmp_path: Path) -> None:
    """Prompt ids stand in the line of the arrival, output ids in that of the answer."""
    path = lines(
        tmp_path / "server.log",
        f"INFO 06-14 12:00:00 [logger.py:43] Received request r1: prompt: 'x', params: SamplingParams(n=1), "
        f"prompt_token_ids: {PROMPT}, prompt_embeds shape: None, lora_request: None.",
        f"INFO 06-14 12:00:04 [logger.py:71] Generated response r1: output: 'y', output_token_ids: {ANSWER}, "
        "finish_reason: stop",
    )
    assert shapes(import_trace(path)) == [(64, (Turn(0, 3, 0.0),))]


def test_vllm_log_without_token_ids_says_how_to_get_them(tmp_path: Path) -> None:
    """The line and the flags are named, for prompts and for answers."""
    arrival, answer = VLLM_MESSAGES[1][1], VLLM_MESSAGES[3][1]
    path = lines(tmp_path / "server.log", vllm_text(0, arrival), vllm_text(2, answer))
    with pytest.raises(TraceError, match=r"line 2, prompt_token_ids: none for request r1.*--log-level DEBUG"):
        import_trace(path)
    path = lines(tmp_path / "server.log", vllm_text(0, VLLM_MESSAGES[0][1]), vllm_text(2, answer))
    with pytest.raises(TraceError, match=r"line 2, output_token_ids: none.*--enable-log-outputs"):
        import_trace(path)


SYSTEM = "You are a coding agent. " * 8


def sglang_json(rid: str, second: int, latency_s: float, prompt: int, output: int, **asked: Any) -> dict[str, Any]:
    meta = {"id": rid, "prompt_tokens": prompt, "completion_tokens": output, "e2e_latency": latency_s}
    return {
        "timestamp": f"2026-11-21T05:00:{second:02d}.500000",
        "event": "request.finished",
        "rid": rid,
        "obj": {"rid": rid} | asked,
        "out": {"text": "it's", "meta_info": meta},
    }


def sglang_text(rid: str, second: int, latency_s: float, prompt: int, output: int, **asked: Any) -> str:
    fields = "".join(f", {name}={value!r}" for name, value in asked.items())
    meta = {"id": rid, "finish_reason": {"type": "stop", "matched": 9}, "prompt_tokens": prompt, "cached_tokens": 1}
    meta |= {"completion_tokens": output, "e2e_latency": latency_s}
    return (
        f"[2026-11-21 05:00:{second:02d} TP0] Finish: obj=GenerateReqInput(rid={rid!r}, http_worker_ipc=None{fields}, "
        f"stream=False), out={{'text': \"it's\", 'meta_info': {meta}}}"
    )


@pytest.mark.parametrize("form", [sglang_json, sglang_text])
def test_sglang_log_tells_lengths_times_and_which_call_follows_which(tmp_path: Path, form: Any) -> None:
    """The end and the latency give the start; a prompt that holds the one before it continues it."""
    path = lines(
        tmp_path / "server.log",
        form("HEALTH_CHECK_1", 1, 0.1, 1, 1),
        form("b", 30, 10.0, 130, 8, text=SYSTEM + "it's\nthe tool's answer, text=1"),
        form("a", 12, 2.0, 100, 10, text=SYSTEM),
    )
    assert detect_format(path) == "sglang-log"
    assert shapes(import_trace(path)) == [(100, (Turn(0, 10, 8.0), Turn(20, 8, 0.0)))]


@pytest.mark.parametrize("form", [sglang_json, sglang_text])
def test_sglang_log_joins_calls_by_token_ids_and_by_its_own_sessions(tmp_path: Path, form: Any) -> None:
    """Input ids are content as text is; a session needs no content at all."""
    path = lines(
        tmp_path / "server.log",
        form("a", 10, 1.0, 64, 3, input_ids=PROMPT),
        form("b", 20, 1.0, 69, 3, input_ids=[*PROMPT, *ANSWER, 1, 2]),
        form("c", 10, 1.0, 50, 5, session_params={"id": "s", "rid": None}),
        form("d", 14, 1.0, 60, 5, session_params={"id": "s", "rid": None}),
    )
    assert [len(t.turns) for t in import_trace(path).trajectories] == [2, 2]


def test_sglang_prompts_that_were_cut_join_nothing(tmp_path: Path) -> None:
    """At level 2 long prompts lose their middle: what is left of two of them does not show that they are one."""
    cut_text = "a" * 1_024 + "..." + "b" * 1_024
    cut_ids = [*range(1_024), "...", *range(1_024)]
    path = lines(
        tmp_path / "server.log",
        *(sglang_json(f"t{n}", 10 * n, 1.0, 3_000 + 500 * n, 3, text=cut_text) for n in (1, 2)),
        *(sglang_json(f"i{n}", 10 * n, 1.0, 3_000 + 500 * n, 3, input_ids=cut_ids) for n in (1, 2)),
    )
    assert [len(t.turns) for t in import_trace(path).trajectories] == [1, 1, 1, 1]


def without(record: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != field}


@pytest.mark.parametrize(
    ("format_name", "bad", "complaint"),
    [
        ("mooncake", mooncake(0, 10, 5) | {"input_length": -1}, "line 2, input_length: a whole number from 0"),
        ("mooncake", without(mooncake(0, 10, 5), "timestamp"), "line 2, timestamp: a number from 0 .* not None"),
        ("mooncake", mooncake(0, 10, 5) | {"hash_ids": ["a"]}, "line 2, hash_ids: a list of whole numbers"),
        ("mooncake", "{", "line 2: not JSON"),
        ("mooncake", [1], "line 2: a JSON object is wanted"),
        ("dynamo", dynamo("r", 10, 5, wait_for=["nobody"]), "line 2, wait_for: 'nobody' is no turn"),
        ("dynamo", dynamo("ok", 10, 5), "line 2, request_id: 'ok' was already there"),
        ("dynamo", without(dynamo("r", 10, 5), "max_output_tokens"), "line 2, max_output_tokens: a whole number"),
        (
            "dynamo",
            dynamo("r", 10, 5, delay_after_dependencies_ms="1"),
            "line 2, delay_after_dependencies_ms: a number",
        ),
        ("kv-cache-tester", conversation(id="ok", requests=[]), "line 2, id: 'ok' was already there"),
        ("sglang-log", sglang_json("r", 2, 1.0, 10, 5, text=5), "line 2, obj, text: a text is wanted, not 5"),
        (
            "sglang-log",
            sglang_json("r", 2, 1.0, 10, 5, input_ids=[[1]] * 20),
            "line 2, obj, input_ids: a list of whole",
        ),
        ("kv-cache-tester", conversation(requests=[{"t": 0, "in": 5}]), r"line 2, requests\[0\], out: a whole number"),
        ("kv-cache-tester", conversation(requests=3), "line 2, requests: a list is wanted, not 3"),
        ("sglang-log", without(sglang_json("r", 1, 1.0, 2, 3), "timestamp"), "line 2, timestamp: a text is wanted"),
        ("sglang-log", sglang_json("r", 1, 1.0, 2, 3) | {"timestamp": "now"}, "line 2, timestamp: a time in ISO 8601"),
        ("sglang-log", without(sglang_json("r", 1, 1.0, 2, 3), "out"), "line 2, out: a JSON object is wanted"),
        ("sglang-log", sglang_json("r", 1, 1.0, -2, 3), "line 2, out, meta_info, prompt_tokens: a whole number"),
        ("sglang-log", "Finish: obj=GenerateReqInput(rid='r'), out={}", "line 2, out, meta_info, prompt_tokens: .*"),
        ("sglang-log", sglang_text("r", 1, 1.0, 2, 3).replace("11-21", "13-41"), "line 2: time data '2026-13-41"),
        ("sglang-log", sglang_text("r", 1, 1.0, 2, 3).replace("1.0", "1.0.0"), "line 2: could not convert .*'1.0.0'"),
        ("vllm-log", vllm_text(0, VLLM_MESSAGES[1][1]).replace("11-21", "13-41"), "line 2: time data '2024-13-41"),
        (
            "vllm-log",
            "DEBUG 11-21 05:00:30 [l:1] Request r details: prompt_token_ids: [1 3], x",
            "line 2: invalid .*'1 3'",
        ),
    ],
)
def test_what_is_malformed_is_refused_with_its_line_and_field(
    tmp_path: Path, format_name: str, bad: Any, complaint: str
) -> None:
    """The first line is good, the second is named."""
    good = {
        "mooncake": mooncake(0, 10, 5),
        "dynamo": dynamo("ok", 10, 5),
        "kv-cache-tester": conversation(id="ok"),
        "sglang-log": sglang_json("ok", 1, 1.0, 10, 5),
        "vllm-log": vllm_text(0, VLLM_MESSAGES[0][1]),
    }
    path = lines(tmp_path / "t.jsonl", good[format_name], bad)
    with pytest.raises(TraceError, match=complaint):
        import_trace(path, format_name)


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([mooncake(0, 2 * 10**9, 5)], "'t-0': context_tokens: a whole number from 0 to 1,000,000,000 is wanted"),
        ([dynamo("r", 10, 5, session_id="\ud800")], "-0': trajectory_id: not Unicode"),
        (
            [mooncake(0, 10, 5, 1, 2), mooncake(int(1.7e12), 20, 5, 1, 2, 3)],
            r"'t-0': turns\[0\].tool_s: seconds from 0 to 1,000,000,000 are wanted, not 16999",
        ),
    ],
)
def test_what_no_trace_may_hold_is_refused_when_it_is_imported(
    tmp_path: Path, records: list[Any], complaint: str
) -> None:
    """And not when what was written is read: lengths and times that are slips, names that no encoding can write."""
    with pytest.raises(TraceError, match=complaint):
        import_trace(lines(tmp_path / "t.jsonl", *records))


@pytest.mark.parametrize(
    ("first", "format_name"),
    [
        (mooncake(0, 10, 5), "mooncake"),
        (mooncake(0, 10, 5, session_id="s"), "mooncake"),
        (dynamo("r", 10, 5), "dynamo"),
        (conversation(), "kv-cache-tester"),
        (vllm_text(0, VLLM_MESSAGES[1][1]), "vllm-log"),
        (vllm_json(0, VLLM_MESSAGES[1][1]), "vllm-log"),
        (sglang_json("r", 1, 1.0, 2, 3) | {"event": "request.received"}, "sglang-log"),
        ("[2026-11-21 05:00:01] Receive: obj=GenerateReqInput(rid='r')", "sglang-log"),
    ],
)
def test_forms_are_told_apart_by_their_first_line_that_says_it(tmp_path: Path, first: Any, format_name: str) -> None:
    """Server noise before it is passed over."""
    assert format_name in READERS
    assert detect_format(lines(tmp_path / "f", first)) == format_name
    assert detect_format(lines(tmp_path / "f", "Loading weights...", first)) == format_name


@pytest.mark.parametrize("day", ["02-30", "13-01"])
def test_a_line_with_no_time_is_named_while_the_form_is_found_out(tmp_path: Path, day: str) -> None:
    """A garbled line is refused as it is once the form is known."""
    path = lines(tmp_path / "t.log", "started", vllm_text(0, VLLM_MESSAGES[0][1]).replace("11-21", day))
    with pytest.raises(TraceError, match=r"t\.log, line 2: "):
        detect_format(path)


def test_a_line_that_is_no_text_is_named(tmp_path: Path) -> None:
    """Of a log of some gigabytes nobody looks for it."""
    (tmp_path / "t.log").write_bytes(b"one\ntwo\nthr\xe9\n")
    with pytest.raises(TraceError, match=r"t\.log, line 3: not text in UTF-8"):
        detect_format(tmp_path / "t.log")


def test_sglang_sessions_may_have_numbers(tmp_path: Path) -> None:
    """A client may number its sessions; the group has that for a name."""
    calls = [sglang_json(f"r{n}", 10 * n, 1.0, 10 * n, 5, session_params={"id": 7}) for n in (1, 2)]
    (trajectory,) = import_trace(lines(tmp_path / "t.log", *calls)).trajectories
    assert (trajectory.group_id, len(trajectory.turns)) == ("7", 2)


def test_a_file_with_nothing_in_it_says_so(tmp_path: Path) -> None:
    """Not that it has no known form."""
    with pytest.raises(TraceError, match="nothing is in it"):
        detect_format(lines(tmp_path / "t.jsonl", "", " "))


def test_what_is_no_trace_is_refused_with_the_forms_there_are(tmp_path: Path) -> None:
    """Text without a request, our own form, bytes, and a trace of nothing."""
    with pytest.raises(TraceError, match=r"not one of mooncake, kv-cache-tester, dynamo, vllm-log, sglang-log"):
        detect_format(lines(tmp_path / "f", "hello", [1], {"a": 1}))
    write_trace(draw(CODING, 1, seed=1), tmp_path / "own.jsonl")
    with pytest.raises(TraceError, match=r"own form already"):
        detect_format(tmp_path / "own.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"not text in UTF-8"):
        detect_format(tmp_path / "bytes")
    with pytest.raises(TraceError, match=r"no trajectory in it"):
        import_trace(lines(tmp_path / "f", "hello"), "vllm-log")


def test_content_tells_a_calls_successor_from_a_later_stranger() -> None:
    """A call that begins before the other's end cannot follow it, whatever it says."""
    prompt = blocks_of(PROMPT, 16)
    longer = blocks_of(PROMPT + ANSWER + PROMPT, 16)
    first = Call(64, 3, prompt, started_at_s=0.0, ended_at_s=5.0)
    for started_at_s, num_trajectories in ((4.0, 2), (5.0, 1)):
        later = Call(131, 3, longer, started_at_s=started_at_s)
        assert len(workload_by_prefix("t", [first, later]).trajectories) == num_trajectories


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_what_is_written_is_read_again_and_is_the_same_bytes_each_time(tmp_path: Path, name: str) -> None:
    """Nothing is lost on the way through the native form."""
    workload = draw(CODING, 20, seed=3)
    write_trace(workload, tmp_path / name)
    written = (tmp_path / name).read_bytes()
    assert load_trace(tmp_path / name).trajectories == workload.trajectories
    write_trace(workload, tmp_path / name)
    assert (tmp_path / name).read_bytes() == written


def heddle_import(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    importing.add_arguments(parser)
    return importing.run(parser.parse_args([str(argument) for argument in arguments]))


def test_the_command_writes_a_trace_and_says_what_was_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gzipped trace in, a gzipped trace out; a wrong one leaves nothing behind and is told on stderr."""
    source, out = tmp_path / "t.jsonl.gz", tmp_path / "out.jsonl.gz"
    source.write_bytes(gzip.compress(json.dumps(mooncake(0, 1_100, 100, 1, 2, 3)).encode()))
    assert heddle_import(source, "--out", out) == 0
    assert "1 trajectories in 1 groups, 1 turns, 100 output tokens, from mooncake" in capsys.readouterr().out
    assert load_trace(out).trajectories == (Trajectory("t-0", "t-prompt-0", 1_100, (Turn(0, 100, 0.0),)),)
    bad = tmp_path / "bad.jsonl.gz"
    assert heddle_import(tmp_path / "missing", "--out", bad) == 2
    assert heddle_import(source, "--out", bad, "--format", "dynamo") == 2
    assert "line 1, request_id: a text is wanted" in capsys.readouterr().err
    assert not bad.exists()
