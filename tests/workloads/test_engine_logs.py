"""Logs of vLLM and SGLang become trajectories: token ids, sessions and times link their calls."""

import json
import re
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.workloads.forms import (
    ANSWER,
    PROMPT,
    SYSTEM,
    VLLM_MESSAGES,
    lines,
    sglang_json,
    sglang_text,
    shapes,
    vllm_coloured,
    vllm_json,
    vllm_text,
)
from workloads.importers import detect_format, import_trace
from workloads.traces import TraceError
from workloads.trajectories import Turn


@pytest.mark.parametrize("form", [vllm_text, vllm_coloured, vllm_json])
def test_vllm_log_gives_lengths_times_and_the_order_of_calls(tmp_path: Path, form: Any) -> None:
    """Token ids link calls, deltas of a stream add up, and a request without an answer is left out."""
    noise = "INFO 11-21 04:59:00 [api_server.py:10] Starting vLLM server on http://0.0.0.0:8000"
    path = lines(tmp_path / "server.log", noise, *(form(at_s, message) for at_s, message in VLLM_MESSAGES))
    assert detect_format(path) == "vllm-log"
    workload = import_trace(path)
    assert shapes(workload) == [(64, (Turn(0, 3, 3.0), Turn(2, 3, 0.0)))]
    assert workload.left_out == "requests of which it has only the arrival or only the answer: 1"


@pytest.mark.parametrize("order", [range(10), [0, 4, *range(1, 4), *range(5, 10)]], ids=["in order", "mixed"])
@pytest.mark.parametrize("days", ["12-31 01-01", "02-28 03-01", "02-28 02-29", "02-29 03-01"])
def test_a_vllm_log_may_pass_midnight(tmp_path: Path, days: str, order: Sequence[int]) -> None:
    """Its lines have no year. Those after new year were sorted before the others, which tore conversations apart, and
    every year had a 29 February. If two processes write one log, a line of the old day may come after one of the new.
    """
    before, after = days.split()
    written = [
        f"DEBUG {f'{before} 23:59:{57 + at_s}' if at_s < 3 else f'{after} 00:00:0{at_s - 3}'} [logger.py:55] {message}"
        for at_s, message in VLLM_MESSAGES
    ]
    path = lines(tmp_path / "server.log", *(written[number] for number in order))
    assert shapes(import_trace(path)) == [(64, (Turn(0, 3, 3.0), Turn(2, 3, 0.0)))]


def in_spring(line: Any) -> str:
    """A line with its seconds before 2 o'clock in the first half of a minute, and after 3 o'clock in the second."""
    text = line if isinstance(line, str) else json.dumps(line)
    text = text.replace("11-21", "03-31").replace("2026-", "2024-")
    return re.sub(
        r"([ T])05:00:(\d\d)", lambda at: f"{at[1]}{'01:59' if int(at[2]) < 5 else '03:00'}:{at[2]}", text, count=1
    )


@pytest.mark.parametrize(
    "written",
    [
        *([form(at_s, message) for at_s, message in VLLM_MESSAGES] for form in (vllm_text, vllm_json)),
        *(
            [form("a", 3, 0.5, 64, 3, input_ids=PROMPT), form("b", 9, 0.5, 69, 3, input_ids=[*PROMPT, *ANSWER, 1, 2])]
            for form in (sglang_text, sglang_json)
        ),
    ],
    ids=["vLLM's text", "vLLM's JSON", "SGLang's text", "SGLang's JSON"],
)
def test_an_import_does_not_depend_on_this_machines_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[Any]
) -> None:
    """Times have no offset. A tool call over the hour that clocks here skip in spring was an hour shorter."""
    path = lines(tmp_path / "server.log", *map(in_spring, written))
    found = []
    try:
        for zone in ("UTC", "Europe/Berlin"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            found.append(shapes(import_trace(path)))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found[0] == found[1]
    [(_, (first, _))] = found[0]
    assert first.tool_s > 3_600


def test_vllm_log_of_older_versions_has_everything_in_one_line(tmp_path: Path) -> None:
    """The line of the arrival has the prompt's ids, that of the answer its output's ids."""
    path = lines(
        tmp_path / "server.log",
        f"INFO 06-14 12:00:00 [logger.py:43] Received request r1: prompt: 'x', params: SamplingParams(n=1), "
        f"prompt_token_ids: {PROMPT}, prompt_embeds shape: None, lora_request: None.",
        f"INFO 06-14 12:00:04 [logger.py:71] Generated response r1: output: 'y', output_token_ids: {ANSWER}, "
        "finish_reason: stop",
    )
    assert shapes(import_trace(path)) == [(64, (Turn(0, 3, 0.0),))]


@pytest.mark.parametrize("form", [vllm_text, vllm_json])
def test_vllm_request_ids_may_be_repeated(tmp_path: Path, form: Any) -> None:
    """Clients choose them with `X-Request-Id`. All turns with one id counted as the last of them."""
    told = [(at_s, message.replace("r2", "r1")) for at_s, message in VLLM_MESSAGES]
    workload = import_trace(lines(tmp_path / "server.log", *(form(at_s, message) for at_s, message in told)))
    assert shapes(workload) == [(64, (Turn(0, 3, 3.0), Turn(2, 3, 0.0)))]


def test_a_vllm_log_with_cut_token_ids_is_refused(tmp_path: Path) -> None:
    """Every prompt would have as many tokens as --max-log-len."""
    start = "INFO 11-21 04:59:00 [api_utils.py:286] non-default args: {'enable_log_requests': True, 'max_log_len': 64}"
    written = [vllm_text(at_s, message) for at_s, message in VLLM_MESSAGES]
    with pytest.raises(TraceError, match="line 1: --max-log-len 64 cuts the token ids: log without it"):
        import_trace(lines(tmp_path / "server.log", start, *written))


def test_a_vllm_log_without_answers_names_the_flags_to_set(tmp_path: Path) -> None:
    """As with --enable-log-requests alone. It was said to hold no trajectory."""
    arrived = [vllm_text(at_s, text) for at_s, text in VLLM_MESSAGES if text.startswith(("Request", "Received"))]
    with pytest.raises(TraceError, match="has an answer: log answers with --enable-log-outputs"):
        import_trace(lines(tmp_path / "server.log", *arrived))


@pytest.mark.parametrize("form", [vllm_text, vllm_json])
def test_each_choice_of_a_vllm_answer_is_a_sibling(tmp_path: Path, form: Any) -> None:
    """A request for several choices (`n`) has a line for each. All but the last one were lost."""
    told = [(0, f"Request r1 details: prompt: 'x', prompt_token_ids: {PROMPT}, prompt_embeds shape: None.")]
    for ids in ([7, 8, 9], [7], [5, 6]):
        told.append((2, f"Generated response r1 details: output_token_ids: {ids}"))
        told.append((2, "Generated response r1: output: 'y', finish_reason: stop"))
    workload = import_trace(lines(tmp_path / "server.log", *(form(at_s, message) for at_s, message in told)))
    assert shapes(workload) == [(64, (Turn(0, tokens, 0.0),)) for tokens in (3, 1, 2)]
    assert len(workload.groups) == 1


def test_vllm_log_without_token_ids_names_the_flags_to_set(tmp_path: Path) -> None:
    """With the line, for prompts and for answers."""
    arrival, answer = VLLM_MESSAGES[1][1], VLLM_MESSAGES[3][1]
    path = lines(tmp_path / "server.log", vllm_text(0, arrival), vllm_text(2, answer))
    with pytest.raises(TraceError, match=r"line 2, prompt_token_ids: none for request r1.*--log-level DEBUG"):
        import_trace(path)
    path = lines(tmp_path / "server.log", vllm_text(0, VLLM_MESSAGES[0][1]), vllm_text(2, answer))
    with pytest.raises(TraceError, match=r"line 2, output_token_ids: none.*--enable-log-outputs"):
        import_trace(path)


def test_vllm_numbers_the_requests_of_a_response(tmp_path: Path) -> None:
    """`/v1/responses` logs a request for each call of a built-in tool, and one answer: that of the last request."""
    second = [*PROMPT, *ANSWER, 1, 2]
    path = lines(
        tmp_path / "server.log",
        vllm_text(0, f"Request resp_a_0 details: prompt: '', prompt_token_ids: {PROMPT}, prompt_embeds shape: None."),
        vllm_text(1, f"Generated response resp_a details: output_token_ids: {ANSWER}"),
        vllm_text(5, f"Request resp_b_0 details: prompt: '', prompt_token_ids: {second[:66]}, prompt_embeds shape: x."),
        vllm_text(6, f"Request resp_b_1 details: prompt: '', prompt_token_ids: {second}, prompt_embeds shape: None."),
        vllm_text(8, f"Generated response resp_b (streaming complete) details: output_token_ids: {ANSWER}"),
    )
    assert shapes(import_trace(path)) == [(64, (Turn(0, 3, 5.0), Turn(2, 3, 0.0)))]


def test_a_vllm_log_takes_less_memory_than_its_size(tmp_path: Path) -> None:
    """Token ids of all prompts took five times its size: a log of a few GB did not fit into memory."""
    messages = []
    for number in range(50):
        ids = list(range(100_000 + number, 105_000 + number))
        messages.append(f"Request r{number} details: prompt: '', prompt_token_ids: {ids}, prompt_embeds shape: None.")
        messages.append(f"Generated response r{number} details: output_token_ids: [7]")
    path = lines(tmp_path / "server.log", *(vllm_text(0, message) for message in messages))
    tracemalloc.start()
    try:
        assert import_trace(path, "vllm-log").num_turns == 50
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < path.stat().st_size


def test_answers_to_requests_of_an_older_vllm_log_are_left_out(tmp_path: Path) -> None:
    """A rotated log begins within some of them. They had their prompts logged, as the others have."""
    early = vllm_text(0, f"Generated response r0 details: output_token_ids: {ANSWER}")
    path = lines(tmp_path / "server.log", early, *(vllm_text(at_s, message) for at_s, message in VLLM_MESSAGES))
    assert shapes(import_trace(path)) == [(64, (Turn(0, 3, 3.0), Turn(2, 3, 0.0)))]
    with pytest.raises(TraceError, match=r"line 1, prompt_token_ids: none for request r0.*--enable-log-requests"):
        import_trace(lines(tmp_path / "server.log", early))


@pytest.mark.parametrize("form", [sglang_json, sglang_text])
def test_sglang_log_gives_lengths_times_and_the_order_of_calls(tmp_path: Path, form: Any) -> None:
    """The end and the latency give the start. A prompt that contains the one before it continues it."""
    path = lines(
        tmp_path / "server.log",
        form("HEALTH_CHECK_1", 1, 0.1, 1, 1),
        form("b", 30, 10.0, 130, 8, text=SYSTEM + "it's\nthe tool's answer, text=1"),
        form("a", 12, 2.0, 100, 10, text=SYSTEM),
    )
    assert detect_format(path) == "sglang-log"
    assert shapes(import_trace(path)) == [(100, (Turn(0, 10, 8.0), Turn(20, 8, 0.0)))]


@pytest.mark.parametrize("form", [sglang_json, sglang_text])
def test_sglang_log_links_calls_by_token_ids_and_sessions(tmp_path: Path, form: Any) -> None:
    """Input ids are content as text is. A session needs no content at all."""
    path = lines(
        tmp_path / "server.log",
        form("a", 10, 1.0, 64, 3, input_ids=PROMPT),
        form("b", 20, 1.0, 69, 3, input_ids=[*PROMPT, *ANSWER, 1, 2]),
        form("c", 10, 1.0, 50, 5, session_params={"id": "s", "rid": None}),
        form("d", 14, 1.0, 60, 5, session_params={"id": "s", "rid": None}),
    )
    assert [len(t.turns) for t in import_trace(path).trajectories] == [2, 2]


@pytest.mark.parametrize("asked", [{}, {"session_params": {"id": "s"}}], ids=["by content", "by session"])
def test_sglang_calls_within_a_second_are_one_conversation(tmp_path: Path, asked: dict[str, Any]) -> None:
    """A line of text has the whole second of the end, so the later call seems to begin first."""
    path = lines(
        tmp_path / "server.log",
        sglang_text("a", 10, 0.03, 64, 3, input_ids=PROMPT, **asked),
        sglang_text("b", 10, 0.5, 69, 3, input_ids=[*PROMPT, *ANSWER, 1, 2], **asked),
        sglang_text("c", 11, 0.8, 74, 3, input_ids=[*PROMPT, *ANSWER, 1, 2, *ANSWER, 3, 4], **asked),
    )
    [(context_tokens, turns)] = shapes(import_trace(path))
    assert context_tokens == 64 and [(turn.new_tokens, turn.output_tokens) for turn in turns] == [
        (0, 3),
        (2, 3),
        (2, 3),
    ]


def test_truncated_sglang_prompts_link_no_calls(tmp_path: Path) -> None:
    """At level 2 long prompts lose their middle, and the rest of two prompts does not show that one continues the
    other."""
    cut_text = "a" * 1_024 + "..." + "b" * 1_024
    cut_ids = [*range(1_024), "...", *range(1_024)]
    path = lines(
        tmp_path / "server.log",
        *(sglang_json(f"t{n}", 10 * n, 1.0, 3_000 + 500 * n, 3, text=cut_text) for n in (1, 2)),
        *(sglang_json(f"i{n}", 10 * n, 1.0, 3_000 + 500 * n, 3, input_ids=cut_ids) for n in (1, 2)),
    )
    assert [len(t.turns) for t in import_trace(path).trajectories] == [1, 1, 1, 1]


def test_sglang_requests_aborted_in_the_queue_are_left_out(tmp_path: Path) -> None:
    """And counted. They ran on no engine, and SGLang logs their ends without lengths: a client left, or the queue was
    full. An aborted request that ran has its lengths, and counts."""
    why = "'finish_reason': {'type': 'abort', 'message': 'The request queue is full.', 'status_code': 503}"
    queued = f"Finish: obj=GenerateReqInput(rid='q'), out={{'text': '', 'meta_info': {{'id': 'q', {why}}}}}"
    ran = sglang_json("ran", 4, 1.0, 50, 7)
    ran["out"]["meta_info"]["finish_reason"] = {"type": "abort", "message": "left"}
    queued_json = sglang_json("q", 2, 1.0, 1, 1)
    queued_json["out"]["meta_info"] = {"id": "q", "finish_reason": {"type": "abort"}, "e2e_latency": 1.0}
    path = lines(tmp_path / "server.log", f"[2026-11-21 05:00:01 TP0] {queued}", queued_json, ran)
    workload = import_trace(path)
    assert shapes(workload) == [(50, (Turn(0, 7, 0.0),))]
    assert workload.left_out == "requests that were aborted before they ran: 2"
    with pytest.raises(TraceError, match="all requests in it were aborted before they ran"):
        import_trace(lines(tmp_path / "server.log", queued_json))


def test_sglang_session_ids_may_be_numbers(tmp_path: Path) -> None:
    """The number becomes the name of the group."""
    calls = [sglang_json(f"r{n}", 10 * n, 1.0, 10 * n, 5, session_params={"id": 7}) for n in (1, 2)]
    (trajectory,) = import_trace(lines(tmp_path / "t.log", *calls)).trajectories
    assert (trajectory.group_id, len(trajectory.turns)) == ("7", 2)
