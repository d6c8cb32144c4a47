"""What the backend answers on vLLM's token routes: render, generate, derender, with the same 64 words as tokens."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import orjson

from loadtest.bench.answers import (
    CALLING_CHOICE,
    CHOICE,
    FIRST_ID,
    NUM_CHUNKS,
    STREAM_END,
    WORDS,
    Json,
    event,
    offers_tool,
    whole,
    written,
)

_BYTES_PER_TOKEN = 4
_MESSAGE = re.compile(rb'\{"role":"(\w+)"')
WHOLE_EVENT_TOKENS = 32
"""What the gateway requests if its client has no stream."""
_EVENT_TOKENS = re.compile(rb'"stream_interval":(\d+)')
_IDS = list(range(FIRST_ID, FIRST_ID + NUM_CHUNKS))
_OPENING = 77
_ANSWER = b",".join(b"%d" % number for number in (_OPENING, *_IDS))
_FIVE_DIGITS = b"".join(b"%d," % number for number in range(10_000, 60_000))
_LONG = _FIVE_DIGITS * 21  # over a million
_SAMPLING: Json = {"n": 1, "max_tokens": 512, "min_tokens": 0, "stop": [], "temperature": 1.0, "logprobs": None}
_RENDERED_HEAD = b'{"request_id":"chatcmpl-0123456789abcdef","token_ids":['
_RENDERED_TAIL = b'],"sampling_params":%b}' % orjson.dumps(_SAMPLING)
_ABOUT = {"id": "generate-tokens-0123456789abcdef", "object": "chat.completion", "created": 1_700_000_000}
_USAGE = {"prompt_tokens": 1400, "total_tokens": 1400 + NUM_CHUNKS, "completion_tokens": NUM_CHUNKS}
REFUSED = whole({"error": {"message": "a field is missing", "code": 400}}, "400 Bad Request")


def rendered(body: bytes) -> bytes:
    """The prompt ids of a chat, as its template would have them: each message opens with one token and ends with the
    token that ends an answer; an answer has the tokens that were generated, other text a token for four bytes.
    """
    found = [(match.start(), match[1]) for match in _MESSAGE.finditer(body)] or [(0, b"user")]
    ends = [start - 1 for start, _ in found[1:]] + [len(body) - 2]  # before the comma, or what closes list and request
    ids = b",".join(
        _ANSWER if role == b"assistant" else _text((end - start) // _BYTES_PER_TOKEN)
        for (start, role), end in zip(found, ends, strict=True)
    )
    return written(b"%b%b,%d%b" % (_RENDERED_HEAD, ids, _OPENING, _RENDERED_TAIL))


def _text(num_tokens: int) -> bytes:
    """A message of this many tokens of five digits."""
    return b"%d,%b%d" % (_OPENING, _LONG[: 6 * num_tokens], _IDS[-1])


def generated(body: bytes) -> list[bytes]:
    """The chunks of a token stream."""
    with_text = b'"output_mode":"text"' in body
    with_logprobs = b'"logprobs":0' in body
    return _generated(with_text, event_tokens(body), with_logprobs)


def event_tokens(body: bytes) -> int:
    """How many tokens an event must have."""
    asked = _EVENT_TOKENS.search(body)
    return int(asked[1]) if asked else 1


def said(text: str) -> bytes:
    """The chunk of a token stream whose one token has this text."""
    own: Json = {"token": text, "bytes": list(text.encode()), "logprob": -0.25, "top_logprobs": []}
    choice: Json = {"index": 0, "token_ids": [FIRST_ID], "finish_reason": None, "stop_reason": None, "text": text}
    return event({"request_id": _ABOUT["id"], "choices": [choice | {"logprobs": {"content": [own]}}]})


@cache
def _generated(with_text: bool, num_tokens: int, with_logprobs: bool) -> list[bytes]:
    starts = [0, *range(1, NUM_CHUNKS, num_tokens)]
    ends = [*starts[1:], NUM_CHUNKS]
    chunks = [_tokens(*span, with_text, with_logprobs) for span in zip(starts, ends, strict=True)]
    chunks[-1] += event({"request_id": _ABOUT["id"], "choices": [], "usage": _USAGE}) + STREAM_END
    return chunks


def _tokens(begin: int, end: int, with_text: bool, with_logprobs: bool) -> bytes:
    choice: Json = {"index": 0, "token_ids": _IDS[begin:end], "finish_reason": None, "stop_reason": None}
    if with_text:
        choice["text"] = "".join(WORDS[begin:end])
    if end == NUM_CHUNKS:
        choice["finish_reason"] = "stop"
    entries = [_logprob(number, with_text) for number in range(begin, end)]
    choice["logprobs"] = {"content": entries} if with_logprobs else None
    return event({"request_id": _ABOUT["id"], "choices": [choice]})


def _logprob(number: int, with_text: bool) -> Json:
    word = WORDS[number]
    own = {"token": word, "bytes": list(word.encode())} if with_text else {"token_id": _IDS[number], "rank": None}
    return own | {"logprob": -0.25, "top_logprobs": []}


def derendered(body: bytes) -> bytes:
    """The message that tokens form: for a whole answer, or for one part of a stream."""
    asked = orjson.loads(body)
    if not asked.get("stream"):
        choice: Json = CALLING_CHOICE if offers_tool(body) else CHOICE
        return whole(_ABOUT | {"model": "bench", "choices": [choice], "usage": _USAGE})
    part: dict[str, Any] = asked["generate_chunk"]["choices"][0]
    before = (asked.get("stream_state") or {}).get("output_token_ids") or []
    # Its last word stands for the token that ended the answer, which nobody reads here.
    end = len(before) + len(part["token_ids"]) if part["finish_reason"] is None else NUM_CHUNKS
    delta: Json = {"content": "".join(WORDS[len(before) : end]) or None}
    if not before:
        delta["role"] = "assistant"
    choice = {"index": 0, "delta": delta, "finish_reason": part["finish_reason"], "stop_reason": None}
    state = {"output_token_ids": before + part["token_ids"], "role_sent": True}
    return whole({"chunk": _ABOUT | {"model": "bench", "choices": [choice]}, "stream_state": state})
