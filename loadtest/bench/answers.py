"""What the backend answers, made once: pages, whole answers, and the events of a stream, in vLLM's form."""

from __future__ import annotations

from typing import Any

import orjson

MODEL = "bench"
NUM_CHUNKS = 64
WORDS = [f" word{number}" for number in range(NUM_CHUNKS)]
TEXT = "".join(WORDS)
FIRST_ID = 1_000  # the first word's token; the others follow

Json = dict[str, Any]
ABOUT: Json = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "created": 1_700_000_000, "model": MODEL}
_USAGE = {
    "prompt_tokens": 1400,
    "total_tokens": 1400 + NUM_CHUNKS,
    "completion_tokens": NUM_CHUNKS,
    "prompt_tokens_details": {"cached_tokens": 1024},
}
# Far more KV than a run's trajectories claim, so that turns are scheduled but never wait for memory.
_METRICS = b"""# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
vllm:num_requests_running{engine="0",model_name="bench"} 4.0
vllm:num_requests_waiting{engine="0",model_name="bench"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="bench"} 0.25
vllm:generation_tokens_total{engine="0",model_name="bench"} %d.0
vllm:prompt_tokens_total{engine="0",model_name="bench"} 1000.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="62500000",cache_dtype="auto",engine="0"} 1.0
"""


def whole(content: Json, status: str = "200 OK") -> bytes:
    """A JSON answer."""
    return written(orjson.dumps(content), status)


def metrics(work: int) -> bytes:
    """The metrics page of an engine that has made this many tokens, so that it never looks hung."""
    return written(_METRICS % work, kind="text/plain; version=0.0.4")


def chunk(data: bytes) -> bytes:
    """A chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(content: Json) -> bytes:
    """A chunk with one event of a stream."""
    return chunk(b"data: " + orjson.dumps(content) + b"\n\n")


def word_event(word: str, is_first: bool = False, is_last: bool = False) -> bytes:
    """A chunk of a chat's stream."""
    delta = {"role": "assistant", "content": word} if is_first else {"content": word}
    reason = "stop" if is_last else None
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "token_ids": None}
    return event(ABOUT | {"object": "chat.completion.chunk", "choices": [choice]})


def written(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """An answer with this body."""
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\ncontent-type: {kind}\r\n\r\n".encode() + body


MESSAGE: Json = {"role": "assistant", "content": TEXT, "refusal": None, "tool_calls": [], "reasoning": None}
CHOICE = {"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
_CHAT: Json = ABOUT | {"object": "chat.completion", "usage": _USAGE}
CHAT = whole(_CHAT | {"choices": [CHOICE]})

# A coding agent offers this tool, and each answer calls it.
TOOL = "run"
CALL: Json = {"id": "call_1", "type": "function", "function": {"name": TOOL, "arguments": '{"command": "make test"}'}}
CALLING_CHOICE = CHOICE | {"message": MESSAGE | {"tool_calls": [CALL]}, "finish_reason": "tool_calls"}
CALLING_CHAT = whole(_CHAT | {"choices": [CALLING_CHOICE]})
_OFFERED = b'"name":"%b"' % TOOL.encode()
_START = 4_096  # only there is it searched for: other requests may have a megabyte


def offers_tool(request: bytes) -> bool:
    """Whether a request offers `TOOL`, in front of its messages."""
    return request.find(_OFFERED, 0, _START) >= 0


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = [word_event(word, number == 0, number == NUM_CHUNKS - 1) for number, word in enumerate(WORDS)]
USAGE_EVENT = event(ABOUT | {"object": "chat.completion.chunk", "choices": [], "usage": _USAGE})
STREAM_END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

# 16,384 concurrent turns on each: no measurement is of a full engine.
_SERVER_INFO = {"vllm_config": {"scheduler_config": {"max_num_seqs": 16_384}}}
_CARD = {"id": MODEL, "object": "model", "owned_by": "vllm", "created": 1_700_000_000, "max_model_len": 1_048_576}
PAGES = {
    b"/v1/models": whole({"object": "list", "data": [_CARD]}),
    b"/version": whole({"version": "0.33.0"}),
    b"/server_info": whole(_SERVER_INFO),
    b"/health": whole({}),
}
EMPTY = whole({})
