"""Rows of public traces and lines of engine logs, in the form in which they are published."""

import json
from pathlib import Path
from typing import Any

from workloads.trajectories import Turn, Workload


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def shapes(workload: Workload) -> list[tuple[int, tuple[Turn, ...]]]:
    return [(t.context_tokens, t.turns) for t in workload.trajectories]


def mooncake(at_ms: int, prompt: int, output: int, *hash_ids: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": prompt, "output_length": output, "hash_ids": list(hash_ids)} | more


def dynamo(name: str, prompt: int, output: int, **more: Any) -> dict[str, Any]:
    return {"request_id": name, "input_length": prompt, "max_output_tokens": output} | more


def dynamo_request(
    name: str,
    received_ms: int,
    took_ms: float,
    prompt: int,
    output: int | None,
    *hashes: int,
    session: str | None = None,
) -> dict[str, Any]:
    """A record of Dynamo's request trace."""
    replay = {"trace_block_size": 64, "input_length": prompt, "input_sequence_hashes": list(hashes)}
    request = {"request_id": name, "request_received_ms": received_ms, "total_time_ms": took_ms, "replay": replay}
    record = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": received_ms + 9_000,
    }
    record["request"] = request if output is None else request | {"output_tokens": output}
    return record if session is None else record | {"agent_context": {"session_id": session}}


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


def vllm_coloured(at_s: int, message: str) -> str:
    """As with `VLLM_LOGGING_COLOR=1`."""
    head = f"\x1b[0;36m(APIServer pid=7)\x1b[0;0m \x1b[37mDEBUG\x1b[0m \x1b[90m11-21 05:00:{at_s:02d}\x1b[0m"
    return f"{head} \x1b[90m[request_logger.py:55]\x1b[0m {message}"


def vllm_json(at_s: int, message: str) -> dict[str, Any]:
    return {"asctime": f"2026-11-21 05:00:{at_s:02d},000", "levelname": "DEBUG", "message": message}


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


def without(record: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != field}


def arrived(at_s: float) -> dict[str, Any]:
    """An event of Heddle's own log."""
    turn = {"turn_id": "a", "trajectory_id": "t", "group_id": "g", "prompt_tokens": 100}
    return {"at": at_s, "kind": "event", "type": "TurnArrived"} | turn
