"""Streams read in transit: ends, usage, faults, and bytes that stay unchanged."""

import gc
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.sse import EventSplitter
from gateway.messages.answers import ABORTED, Usage, read_answer
from gateway.messages.stream_contents import content_of_stream
from gateway.messages.streams import StreamReader

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 7, "total_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}


def event(data: dict, name: str = "") -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(data) + b"\n\n"


def chunk(text: str = "a", reason: str | None = None, index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
    return event({"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more})


USAGE_EVENT = event({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
CHAT = [chunk(""), chunk("a"), chunk("b"), chunk("", "stop"), USAGE_EVENT, DONE]

INPUT_USAGE = {"input_tokens": 2, "cache_read_input_tokens": 5, "output_tokens": 0}
ANTHROPIC = [
    event(data, data["type"])
    for data in (
        {"type": "message_start", "message": {"id": "m", "role": "assistant", "content": [], "usage": INPUT_USAGE}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "t", "name": "bash", "input": {}},
        },
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"cmd":'}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '"ls"}'}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    )
]
OUTPUT = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}]
RESPONSE = {"id": "r", "status": "completed", "error": None, "output": OUTPUT, "tools": [{"name": "usage"}]}
RESPONSE_USAGE = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 3}
RESPONSES = [
    event(data, data["type"])
    for data in (
        {"type": "response.created", "response": {"id": "r", "status": "in_progress", "error": None}},
        {"type": "response.output_text.delta", "delta": "hi"},
        {"type": "response.completed", "response": RESPONSE | {"usage": RESPONSE_USAGE}},
    )
]
STREAMS: dict[Any, list[bytes]] = {"chat": CHAT, "messages": ANTHROPIC, "responses": RESPONSES}


@pytest.mark.parametrize("api", STREAMS)
@given(places=st.lists(st.integers(0, 10_000), max_size=10))
def test_any_split_of_a_stream_reads_the_same(api: Any, places: list[int]) -> None:
    """However a stream is cut, it passes byte for byte, and its reader reports the same."""
    stream = b": keep-alive\n\n" + b"".join(STREAMS[api])
    ends = [0, *sorted(place % len(stream) for place in places), len(stream)]
    splitter, reader = EventSplitter(), StreamReader(api, keep=True)
    passed = b"".join([reader.read(splitter.feed(stream[start:end])) for start, end in pairwise(ends)])
    assert passed == stream == b"".join(reader.kept)
    assert (reader.done, reader.end(), reader.usage) == (True, None, Usage(7, 3, 5))
    assert reader.num_chunks == len(STREAMS[api]) - (api == "chat")
    assert reader.finish_reason == {"chat": "stop", "messages": "tool_use", "responses": "completed"}[api]


@pytest.mark.parametrize("api", STREAMS)
def test_an_ordinary_block_is_not_copied(api: Any) -> None:
    """Nearly every chunk is passed on as the object that arrived."""
    block = STREAMS[api][1] * 3
    assert StreamReader(api).read(block) is block


@pytest.mark.parametrize("api", STREAMS)
def test_a_stream_without_its_end_is_broken(api: Any) -> None:
    """An SDK accepts any end, so a stream that stops before its terminal event must be reported."""
    reader = StreamReader(api)
    for block in STREAMS[api][:-1]:
        reader.read(block)
    error = reader.end()
    assert error is not None
    assert error.status == 502


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_done_does_not_end_messages_or_responses(api: Any) -> None:
    """[DONE] ends only chats and completions; the others are broken off without their own last event."""
    reader = StreamReader(api)
    reader.read(b"".join(STREAMS[api][:-1]) + DONE)
    assert reader.end() is not None


@pytest.mark.parametrize("num_before", [0, 2])
def test_an_error_event_is_removed_and_ends_the_stream(num_before: int) -> None:
    """vLLM answers 200, then sends an error event and [DONE]. First or later, the client must not take it for an
    answer."""
    fault = event({"error": {"message": "paused", "type": "ServiceUnavailableError", "param": None, "code": 503}})
    reader = StreamReader("chat")
    passed = reader.read(b"".join(CHAT[:num_before]) + fault + DONE) + reader.read(chunk("late"))
    assert passed == b"".join(CHAT[:num_before])
    assert reader.error is not None
    assert (reader.error.status, reader.error.message, reader.num_chunks) == (503, "paused", num_before + 1)
    assert reader.end() is reader.error


def test_a_flat_error_event_is_an_error_too() -> None:
    """SGLang's flat form may come in a stream too."""
    reader = StreamReader("chat")
    assert reader.read(event({"object": "error", "message": "full", "type": "x", "code": 503})) == b""
    assert reader.error is not None
    assert reader.error.status == 503


@pytest.mark.parametrize(
    "text", ["error", '"error"', "[DONE]", "data: [DONE]\n\n", 'finish_reason":"abort"', "message_stop"]
)
def test_markers_in_a_text_are_not_events(text: str) -> None:
    """A model may write any of the words that are searched for."""
    for api, block in (
        ("chat", chunk(text)),
        ("messages", event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})),
        ("responses", event({"type": "response.output_text.delta", "delta": text})),
    ):
        reader = StreamReader(api)  # type: ignore[arg-type]
        assert reader.read(block) == block
        assert (reader.error, reader.done, reader.finish_reason, reader.num_chunks) == (None, False, None, 1)


def test_the_end_of_a_choice_is_told_although_another_one_fails() -> None:
    """It was dropped: a choice that had finished looked cut off. At token level, it is told at once."""
    finished = chunk("b", "stop")
    reader = StreamReader("chat")
    assert reader.read(chunk("a") + chunk("x", index=1) + finished) == chunk("a") + chunk("x", index=1)
    assert reader.read(chunk("", "abort", index=1) + DONE) == finished
    assert reader.error is ABORTED and not reader.done

    def output(index: int, reason: str | None) -> bytes:
        meta = {"finish_reason": reason and {"type": reason}, "prompt_tokens": 3, "completion_tokens": 1}
        return event({"text": "a", "output_ids": [5], "meta_info": meta, "index": index})

    reader = StreamReader("generate")
    assert reader.read(output(0, None) + output(1, None) + output(0, "stop")) == output(0, None) + output(1, None)
    assert reader.read(output(1, "abort") + DONE) == output(0, "stop")
    assert reader.error is ABORTED and not reader.done


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_stream_is_not_finished(reason: str) -> None:
    """vLLM ends an aborted stream with an ordinary chunk and [DONE]; the turn must continue on another engine."""
    reader = StreamReader("chat")
    assert reader.read(chunk("a") + chunk("b", reason) + DONE) == chunk("a")
    assert reader.error is not None
    assert not reader.error.is_clients_fault
    assert not reader.done


def test_the_tokens_of_all_outputs_of_a_stream_are_counted() -> None:
    """On SGLang's own route each event belongs to one output, and counts that output's tokens so far."""
    reader = StreamReader("generate")
    for num_made, index in ((1, 0), (1, 1), (6, 1), (1, 2), (5, 0), (7, 2)):
        reason = {"type": "length", "length": num_made} if num_made > 1 else None
        meta = {"finish_reason": reason, "prompt_tokens": 3, "completion_tokens": num_made, "cached_tokens": 2}
        reader.read(event({"text": "a", "output_ids": [5], "meta_info": meta, "index": index}))
    reader.read(DONE)
    assert (reader.usage, reader.finish_reason, reader.end()) == (Usage(3, 18, 2), "length", None)


@pytest.mark.parametrize("status", [400, 500, 503, None])
def test_the_status_of_an_abort_tells_whose_fault_it_is(status: int | None) -> None:
    """SGLang ends a stream so if the request is wrong (400), if it failed (500), or if it is full (503); without a
    status, somebody aborted the request."""
    reason = {"type": "abort", "message": "why", "status_code": status, "err_type": None}
    data = {"text": "", "output_ids": [], "meta_info": {"finish_reason": reason, "prompt_tokens": 3}}
    reader = StreamReader("generate")
    assert reader.read(event(data) + DONE) == b""
    whole = read_answer("generate", orjson.dumps(data)).error
    assert reader.error == whole and whole is not None
    assert (whole.status, whole.message == "why") == (status or 503, status is not None)


@pytest.mark.parametrize(
    "choices",
    [[], [chunk("")], [chunk("a")], [chunk("", index=1), chunk("a", "stop")]],
    ids=["no choice", "none that has content", "one", "one of two"],
)
def test_a_stream_whose_choices_have_not_finished_was_aborted(choices: list[bytes]) -> None:
    """vLLM 0.32 ends a request that it aborts before its first token without a finish reason."""
    reader = StreamReader("chat")
    assert reader.read(b"".join(choices) + USAGE_EVENT + DONE) == b"".join(choices) + USAGE_EVENT
    assert reader.end() is reader.error is ABORTED and not reader.done


def test_a_message_without_a_stop_reason_was_aborted() -> None:
    """vLLM has no word for it there: null in a stream, and nothing in a whole message."""
    null = event({"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": 3}})
    reader = StreamReader("messages")
    reader.read(b"".join(ANTHROPIC[:3]) + null + ANTHROPIC[-1])
    assert reader.end() is reader.error is ABORTED and not reader.done
    assert read_answer("messages", b'{"type":"message","content":[],"usage":{}}').error is ABORTED


def test_an_answer_begins_with_its_first_content() -> None:
    """Or after many events without any, because an engine that sends these is at work."""
    reader = StreamReader("chat")
    for block in (b": keep-alive\n\n", chunk(""), chunk("", index=1), USAGE_EVENT):
        assert reader.read(block) == block
        assert not reader.has_begun and not reader.is_plain_so_far and not reader.passes(chunk("a"))
    reader.read(chunk("", index=1) * 200)
    assert not reader.has_begun
    reader.read(chunk("", index=1) * 200)
    assert reader.has_begun
    for api, events in STREAMS.items():
        reader = StreamReader(api)
        assert [reader.read(block) and reader.has_begun for block in events[:3]] == [False, *[True] * 2]


def test_only_the_finish_reason_unknown_to_openai_is_rewritten() -> None:
    """vLLM's `repetition` becomes `stop` in place."""
    reader = StreamReader("chat")
    assert reader.read(chunk("a") + chunk("b", "repetition", system_fingerprint="f") + DONE) == (
        chunk("a") + chunk("b", "stop", system_fingerprint="f") + DONE
    )
    assert reader.finish_reason == "stop"


@pytest.mark.parametrize("wants_usage", [True, False])
def test_a_finish_reason_comes_with_the_end(wants_usage: bool) -> None:
    """Many clients stop reading at the finish reason, so it must be among the bytes held until the turn is recorded."""
    reader = StreamReader("chat", wants_usage=wants_usage)
    finish, usage, done = CHAT[-3:]
    assert [reader.read(block) for block in CHAT[-4:]] == [
        CHAT[-4],
        b"",
        b"",
        finish + (usage if wants_usage else b"") + done,
    ]


def test_the_reason_to_stop_a_message_comes_with_its_end() -> None:
    """A client that stops reading there, as one that translates it into a chat may, has a finished turn."""
    reader = StreamReader("messages")
    reader.read(b"".join(ANTHROPIC[:-2]))
    assert [reader.read(block) for block in ANTHROPIC[-2:]] == [b"", ANTHROPIC[-2] + ANTHROPIC[-1]]


def test_the_ends_of_sglangs_outputs_come_with_the_end() -> None:
    """And an output that has not ended is not held up by one that has."""

    def output(index: int, reason: str | None) -> bytes:
        meta = {"finish_reason": reason and {"type": reason}, "prompt_tokens": 3, "completion_tokens": 1}
        return event({"text": "a", "output_ids": [5], "meta_info": meta, "index": index})

    reader = StreamReader("generate")
    blocks = [output(0, None), output(0, "stop"), output(1, None), output(1, "length"), DONE]
    assert [reader.read(block) for block in blocks] == [
        blocks[0],
        b"",
        blocks[2],
        b"",
        blocks[1] + blocks[3] + DONE,
    ]
    assert reader.done


@pytest.mark.parametrize("wants_usage", [True, False])
def test_usage_that_was_not_requested_is_removed(wants_usage: bool) -> None:
    """The gateway always asks for usage; a client that did not must not get a chunk without choices."""
    reader = StreamReader("chat", wants_usage=wants_usage)
    passed = reader.read(b"".join(CHAT))
    assert passed == b"".join(part for part in CHAT if wants_usage or part is not USAGE_EVENT)
    assert reader.usage == Usage(7, 3, 5)


def test_the_fingerprint_of_a_removed_usage_event_is_kept() -> None:
    """vLLM moves the system fingerprint from the finishing event into the usage event; the gateway moves it back."""
    reader = StreamReader("chat", wants_usage=False)
    usage_event = event({"choices": [], "usage": USAGE, "system_fingerprint": "vllm-tp1"})
    blocks = [chunk("a"), chunk("b", "stop"), usage_event + DONE]
    assert [reader.read(block) for block in blocks] == [
        chunk("a"),
        b"",
        chunk("b", "stop", system_fingerprint="vllm-tp1") + DONE,
    ]
    assert reader.usage is not None


def test_a_finished_choice_is_not_held_past_the_end() -> None:
    """If an engine sends no usage, or no fingerprint, its events pass as they came."""
    for last in (DONE, event({"choices": [], "usage": USAGE}) + DONE):
        reader = StreamReader("chat", wants_usage=False)
        assert reader.read(chunk("a", "stop", index=1) + chunk("b", "stop")) == b""
        assert reader.read(last) == chunk("a", "stop", index=1) + chunk("b", "stop") + DONE


def test_null_usage_and_continuous_usage_pass() -> None:
    """`usage: null` is kept, and usage in every chunk leaves the chunks in place."""
    reader = StreamReader("chat", wants_usage=False)
    blocks = [chunk("a", usage=None), chunk("b", usage=USAGE)]
    assert [reader.read(block) for block in blocks] == blocks
    assert reader.usage == Usage(7, 3, 5)


def test_spacing_and_line_ends_make_no_difference() -> None:
    """`"finish_reason": "abort"` with a blank, CRLF, and no blank after `data:` are understood too."""
    spaced = b'data:{"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}\r\n\r\n'
    reader = StreamReader("chat")
    assert reader.read(spaced) == b""
    assert reader.error is not None
    ended = StreamReader("chat")
    ended.read(chunk("a", "stop") + b"data:[DONE]\r\n\r\n: bye\r\n\r\n")
    assert ended.done


def test_an_event_that_is_not_json_ends_the_stream() -> None:
    """If it contains a word that is searched for, it is an error."""
    reader = StreamReader("chat")
    assert reader.read(b'data: {"error" oops\n\n') == b""
    assert reader.error is not None


def test_several_choices_finish_one_by_one() -> None:
    """With n > 1, a finished choice does not end the stream, nor hold up the others; [DONE] ends it."""
    reader = StreamReader("chat")
    rest = chunk("b", index=0) + chunk("c", index=0, usage=USAGE)
    assert reader.read(chunk("a", "stop", index=1) + rest) == rest
    assert not reader.done
    reader.read(chunk("", "length", index=0) + DONE)
    assert reader.done


@pytest.mark.parametrize(
    "last",
    [
        event({"type": "response.failed", "response": {"status": "failed", "error": {"code": "x", "message": "died"}}}),
        event({"type": "error", "code": "x", "message": "died", "param": None}),
        event({"type": "error", "error": {"message": "died", "code": 500}}),
    ],
)
def test_a_failed_response_is_a_fault(last: bytes) -> None:
    """A stream of responses has three ways to report a failure."""
    reader = StreamReader("responses")
    assert reader.read(RESPONSES[0] + last) == RESPONSES[0]
    assert reader.error is not None
    assert reader.error.message == "died"


def test_a_response_cut_by_its_token_limit_is_an_answer() -> None:
    """`response.incomplete` is an end, as `length` is."""
    reader = StreamReader("responses")
    reader.read(event({"type": "response.incomplete", "response": {"status": "incomplete", "error": None}}))
    assert (reader.done, reader.error) == (True, None)


def test_the_content_of_a_chat_stream_is_its_message() -> None:
    """Texts are joined, and tool calls are assembled from the pieces with their index."""
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "bash", "arguments": ""}}
    second = {"index": 1, "id": "c2", "type": "function", "function": {"name": "cat", "arguments": "{}"}}
    parts = [
        first,
        {"index": 0, "function": {"arguments": '{"cmd":'}},
        second,
        {"index": 0, "function": {"arguments": '"ls"}'}},
    ]
    calls = [event({"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]}) for part in parts]
    message = content_of_stream("chat", [*CHAT[:-1], *calls, chunk("other", index=1), DONE])
    assert message == {
        "role": "assistant",
        "content": "ab",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"cmd":"ls"}'}},
            {"id": "c2", "type": "function", "function": {"name": "cat", "arguments": "{}"}},
        ],
    }


def test_the_content_of_a_stream_has_the_thoughts() -> None:
    """By either name that engines have for them in chats, and in Anthropic's blocks."""
    for name in ("reasoning", "reasoning_content"):
        parts = [event({"choices": [{"index": 0, "delta": {name: text}}]}) for text in ("be", "cause")]
        assert content_of_stream("chat", [*parts, *CHAT]) == {
            "role": "assistant",
            "content": "ab",
            "reasoning": "because",
        }
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}
    deltas = [{"type": "thinking_delta", "thinking": text} for text in ("be", "cause")]
    parts = [event({"type": "content_block_delta", "index": 0, "delta": delta}) for delta in deltas]
    assert content_of_stream("messages", [event(block), *parts]) == {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "because"}],
    }


@pytest.mark.parametrize("ids", [5, "12", {"a": 1}])
def test_a_chat_with_broken_token_ids_keeps_its_message(ids: object) -> None:
    """Its conversation is still recognised by what was said."""
    broken = event({"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": ids}], "prompt_token_ids": [1]})
    assert content_of_stream("chat", [broken, DONE]) == {"role": "assistant", "content": "x"}


def test_streams_of_other_apis_have_their_content() -> None:
    """Anthropic's blocks with their input, a response's output with its id, a completion's text."""
    assert content_of_stream("messages", ANTHROPIC) == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "hi"},
            {"type": "tool_use", "id": "t", "name": "bash", "input": {"cmd": "ls"}},
        ],
    }
    assert content_of_stream("responses", RESPONSES) == {"id": "r", "output": OUTPUT}
    texts = [event({"choices": [{"index": 0, "text": text}]}) for text in ("a", "b")]
    assert content_of_stream("completions", [*texts, DONE]) == "ab"


@pytest.mark.parametrize("is_incremental", [False, True])
def test_the_content_of_sglangs_own_stream_is_that_of_its_first_output(is_incremental: bool) -> None:
    """Each event has everything so far, or only what is new."""
    events = []
    for end in (1, 2, 3):
        start = end - 1 if is_incremental else 0
        for index, text, ids in ((0, "abc", [5, 6, 7]), (1, "xyz", [8, 9, 10])):
            meta = {"completion_tokens": end}
            told = {"text": text[start:end], "output_ids": ids[start:end], "meta_info": meta, "index": index}
            events.append(event(told))
    assert content_of_stream("generate", [*events, DONE]) == {"text": "abc", "token_ids": [5, 6, 7]}


@pytest.mark.parametrize("api", [*STREAMS, "completions", "other"])
@pytest.mark.parametrize(
    "block", [b"", DONE, b"data: {oops\n\n", b'data: {"choices":[{"delta":[1]}]}\n\n', b"data: [1]\n\n"]
)
def test_content_of_a_stream_without_content_is_none(api: Any, block: bytes) -> None:
    """Nothing to remember, and no crash on invalid data."""
    assert content_of_stream(api, [block]) is None


ODD_NAMES = ["choices", "finish_reason", "usage", "delta", "type", "message", "response", "error"]
ODD_NAMES += ["stop_reason", "status", "index", "input_tokens", "tool_calls"]
ODD_WORDS = ["error", "abort", "message_delta", "message_start", "response.completed"]
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 999) | st.sampled_from(ODD_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ODD_NAMES), inner),
    max_leaves=12,
)


@given(ODD, st.sampled_from([*STREAMS, "completions", "other"]))
def test_no_shape_of_event_raises(data: Any, api: Any) -> None:
    """Engines are not trusted to keep to types: an odd event passes or is a fault, never an exception."""
    reader = StreamReader(api, keep=True)
    reader.read(b"data: " + orjson.dumps(data) + b"\n\n")
    reader.end()
    content_of_stream(api, reader.kept)


@pytest.mark.parametrize("api", [*STREAMS, "completions", "generate"])
def test_a_reader_is_freed_without_a_garbage_collection(api: Any) -> None:
    """It may keep the whole stream; a reader in a reference cycle would keep that until a full collection."""
    gc.collect()
    gc.disable()
    try:
        num_before = sum(isinstance(one, StreamReader) for one in gc.get_objects())
        StreamReader(api, keep=True).read(b'data: {"choices": []}\n\n')
        num_left = sum(isinstance(one, StreamReader) for one in gc.get_objects())
    finally:
        gc.enable()
    assert num_left == num_before


MARKED = ['"error"', '"usage":{', '"usage": {', '"usage"', '"finish_reason":"stop"', '"finish_reason": "stop"']
PARTS = [*MARKED, '"finish_reason":null', '"message_', "x", "\n", "\r", "\n\n", "data:", "}", "{", " "]
TEXT = (b'data: {"choices":[{"index":0,"delta":{"content":"', b'"}}]}\n\n')
EXPOSED = ("error", "done", "finish_reason", "usage", "num_chunks", "kept")
# Each reader has its own; the long path compares nothing.
OF_READER = {"_is_plain": None, "_search": None, "_text_only": None}


def state(reader: StreamReader) -> Any:
    """The reader's whole state; for a compiled reader, which hides it, what it exposes."""
    return vars(reader) | OF_READER if hasattr(reader, "__dict__") else [getattr(reader, name) for name in EXPOSED]


@given(
    api=st.sampled_from(["chat", "completions", "messages", "responses"]),
    text=st.lists(st.sampled_from(PARTS)).map("".join),
    keep=st.booleans(),
    begin=st.sampled_from([b"data: ", TEXT[0]]),
    end=st.sampled_from([b"}\n\n", TEXT[1]]),
)
def test_events_that_pass_unread_would_be_unchanged_by_reading(
    api: Any, text: str, keep: bool, begin: bytes, end: bytes
) -> None:
    """The short path for plain events, and the one for text-only events, give and count the same as the long path."""
    short, long = StreamReader(api, keep=keep), StreamReader(api, keep=keep)
    assert short.read(b"a".join(TEXT)) == long.read(b"a".join(TEXT))
    assert short.passes(b"b".join(TEXT)) and long.read(b"b".join(TEXT))
    piece = begin + text.encode() + end
    if short.passes(piece):
        assert long.read(piece) == piece
        assert state(short) == state(long)
