"""How vLLM's events of tokens are read (the numbers of log-probabilities alone say what their entries say), and how the
end of a stream is."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.token_ids import TokenIds
from engines.tokens import Delta, ErrorEvent, Piece, Rendered, Whole
from engines.upstream import Upstream
from engines.vllm_messages import chat_of_chat, chat_of_messages
from engines.vllm_tokens import VllmTokens

RENDERED = Rendered("vllm", TokenIds.of([1]), {}, 100, 0, (), False, False, False, {})
TOOL = {"name": "run", "description": "Runs.", "input_schema": {"properties": {}}}
# Texts that look like what is sought in an event.
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(['"logprob":1', ']},"', "]}}]}", '"top_logprobs":[', '"logprobs":{"content":[']),
)
NUMBERS = st.floats(-100, 0)


@st.composite
def entries(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Of a few tokens, each with so many rivals, of which the first is the token itself."""
    num_rivals = draw(st.sampled_from([0, 1, 1, 2]))
    made = []
    for _ in range(draw(st.integers(0, 4))):
        own = {"token": draw(TEXTS), "logprob": draw(NUMBERS), "bytes": draw(st.lists(st.integers(0, 255), max_size=3))}
        others = [{"token": draw(TEXTS), "logprob": draw(NUMBERS), "bytes": None} for _ in range(num_rivals - 1)]
        made.append(own | {"top_logprobs": [own, *others] if num_rivals else []})
    return made


def read(data: bytes, only_numbers: bool) -> Piece:
    return VllmTokens().reader(RENDERED, only_numbers)(data)


@given(entries(), TEXTS, st.sampled_from(["last", "first"]), st.booleans())
def test_numbers_alone_are_those_of_the_entries(
    content: list[dict[str, Any]], text: str, place: str, is_told: bool
) -> None:
    """Wherever the entries stand, and whatever the texts of event and tokens are; all else of the event is the same."""
    logprobs = {"logprobs": {"content": content} if is_told else None}
    about = {"index": 0, "finish_reason": None, "stop_reason": None, "token_ids": [5] * len(content), "text": text}
    choice = about | logprobs if place == "last" else logprobs | about
    data = orjson.dumps({"request_id": "r", "choices": [choice]})
    whole, numbers = read(data, False), read(data, True)
    chosen = [entry["logprob"] for entry in content]
    assert [entry["logprob"] for entry in whole.logprobs or []] == (chosen if is_told else [])
    said = [entry["logprob"] if isinstance(entry, dict) else entry for entry in numbers.logprobs or []]
    assert said == (chosen if is_told else [])
    assert (numbers.ids, numbers.text, numbers.finish_reason) == (whole.ids, whole.text, whole.finish_reason)


def test_the_rivals_of_a_real_event_are_not_read() -> None:
    """Of two tokens, each of which is its own first rival: vLLM 0.32 tells one where none is asked for."""
    own = {"token": " a", "logprob": -0.5, "bytes": [32, 97]}
    choice = {"index": 0, "token_ids": [5, 6], "text": " a a", "finish_reason": None}
    content = [own | {"top_logprobs": [own]}, own | {"logprob": -1.5, "top_logprobs": [own | {"logprob": -1.5}]}]
    data = orjson.dumps({"request_id": "r", "choices": [choice | {"logprobs": {"content": content}}]})
    assert read(data, True).logprobs == [-0.5, -1.5]


@pytest.mark.parametrize("choice", [None, {}, {"token_ids": [1]}, {"token_ids": [1], "finish_reason": None}])
@pytest.mark.parametrize("error", [None, {"message": "no", "code": 500}])
def test_an_event_is_the_same_to_either_reader(choice: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
    """Whatever is missing of it, and whatever it says went wrong."""
    event = {"error": error} if choice is None else {"choices": [choice], "error": error}
    told: list[Any] = []
    for only_numbers in (False, True):
        try:
            told.append(read(orjson.dumps(event), only_numbers))
        except (ErrorEvent, KeyError) as fault:
            told.append((type(fault), fault.args))
    assert told[0] == told[1]


class Parser:
    """Plays an engine's derender, with a call in the first part that it is told; says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, upstream: Upstream) -> bytes:
        call = orjson.loads(upstream.body)
        self.asked.append(call)
        if "generate_response" in call:
            return orjson.dumps({"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]})
        calls = [{"index": 0, "function": {"name": "run"}}] if len(self.asked) == 1 else []
        delta = {"content": "ab"[len(self.asked) - 1], "tool_calls": calls}
        reason = call["generate_chunk"]["choices"][0]["finish_reason"]
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return orjson.dumps({"chunk": {"choices": [choice]}, "stream_state": {"asked": len(self.asked)}})

    @property
    def parts(self) -> list[tuple[list[int], str | None]]:
        """The tokens that it was told, and the finish reason with them."""
        chunks = [call.get("generate_chunk") or call["generate_response"] for call in self.asked]
        return [(chunk["choices"][0]["token_ids"], chunk["choices"][0]["finish_reason"]) for chunk in chunks]


@pytest.mark.parametrize(
    ("reason", "stop", "parts"),
    [
        ("length", None, [([7, 8], None), ([9], "length")]),
        ("stop", None, [([7, 8], None), ([], "stop")]),
        ("stop", 9, [([7, 8], None), ([], "stop")]),
        ("stop", "x", [([7, 8], None), ([9], "stop")]),
    ],
)
async def test_the_end_of_a_stream_is_read_by_itself(reason: str, stop: Any, parts: list[Any]) -> None:
    """A parser that gets the name of a call and the end of the answer at once adds arguments that were not made; and
    the token that ends an answer is no part of its text."""
    parser = Parser()
    end = Delta([7, 8, 9], reason, stop, {"asked": 0})
    choice, state = await VllmTokens().derender(parser, RENDERED, TokenIds.of([1]), end)
    assert parser.parts == parts
    assert [call["stream_state"] for call in parser.asked] == [{"asked": 0}, {"asked": 1}]
    assert state == {"asked": 2}
    told = {"content": "ab", "tool_calls": [{"index": 0, "function": {"name": "run"}}]}
    assert choice == {"index": 0, "delta": told, "finish_reason": reason}


@pytest.mark.parametrize(
    ("chat", "ids", "told"), [({}, [7, 9], [7]), ({"include_stop_str_in_output": True}, [7, 9], [7, 9]), ({}, [9], [])]
)
async def test_the_token_that_ends_a_whole_answer_is_no_part_of_its_text(
    chat: dict[str, Any], ids: list[int], told: list[int]
) -> None:
    """But where that is asked for; an answer of nothing else is read as a stream, for a whole one must have tokens."""
    parser = Parser()
    choice, _ = await VllmTokens().derender(
        parser, replace(RENDERED, chat=chat), TokenIds.of([1]), Whole(ids, None, "stop", None)
    )
    assert parser.parts == [(told, "stop")]
    assert choice["message"]["content"] == ("ab" if told else "a")


@pytest.mark.parametrize("end", [Delta([7], None, None, None), Whole([7], None, "length", None)])
@pytest.mark.parametrize(("call", "is_whole"), [({}, False), ({"reasoning_parser_kwargs": {}}, True)])
async def test_a_prompt_is_sent_whole_only_where_it_may_have_left_reasoning_open(
    call: dict[str, Any], is_whole: bool, end: Delta | Whole
) -> None:
    """For else its last tokens are all that is read of it, and each part of an answer would take all along."""
    parser, prompt = Parser(), list(range(2_000))
    await VllmTokens().derender(parser, replace(RENDERED, call=call), TokenIds.of(prompt), end)
    [asked] = parser.asked
    asked |= asked.get("generate_response", {})
    sent = asked["prompt_token_ids"]
    assert sent == prompt if is_whole else (512 <= len(sent) < 1_024 and sent == prompt[-len(sent) :])


@pytest.mark.parametrize(
    ("chat", "reason", "num_calls", "wanted"),
    [
        ({}, "stop", 2, ("tool_calls", 2)),
        ({"tool_choice": "auto"}, "length", 1, ("tool_calls", 1)),
        ({"tool_choice": "auto"}, "stop", 0, ("stop", 0)),
        ({"tool_choice": "required"}, "stop", 0, ("tool_calls", 0)),
        ({"tool_choice": "required"}, "length", 1, ("length", 1)),
        ({"tool_choice": {"type": "function"}}, "stop", 1, ("stop", 1)),
        ({"parallel_tool_calls": False}, "stop", 2, ("tool_calls", 1)),
    ],
)
async def test_a_whole_answer_ends_with_calls_as_the_chat_route_says(
    chat: dict[str, Any], reason: str, num_calls: int, wanted: tuple[str, int]
) -> None:
    """Which of them are told, and whether they are why it ended: derender says neither."""

    async def ask(_: Upstream) -> bytes:
        calls = [{"id": str(number), "function": {"name": "run"}} for number in range(num_calls)]
        choice = {"index": 0, "message": {"content": None, "tool_calls": calls}, "finish_reason": reason}
        return orjson.dumps({"choices": [choice]})

    choice, _ = await VllmTokens().derender(
        ask, replace(RENDERED, chat=chat), TokenIds.of([1]), Whole([7, 9], None, reason, None)
    )
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == wanted


@pytest.mark.parametrize(
    "request_", [{"thinking": {"type": "disabled"}}, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "jump"}}]
)
def test_messages_whose_answers_only_the_engine_reads_as_it_would_pass_through(request_: dict[str, Any]) -> None:
    """What `derender` would be told of them is not what the engine's own route goes by."""
    assert chat_of_messages({"model": "m", "messages": [], **request_}) is None


def test_a_parser_is_told_of_a_request_what_it_reads_and_nothing_that_was_said() -> None:
    """Tools as a chat has them, which of them is to be called, and how many calls there were before."""
    answered = [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "1", "name": "run", "input": {}}]
    said = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": answered}]
    request = {"model": "m", "max_tokens": 9, "messages": said, "tools": [TOOL], "tool_choice": {"type": "any"}}
    chat = chat_of_messages(request)
    function = {"name": "run", "parameters": {"type": "object", "properties": {}}, "description": "Runs."}
    assert chat is not None and "Look" not in str(chat)
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", True)
    assert sum(len(message.get("tool_calls", ())) for message in chat["messages"]) == 1
    same = chat_of_chat({**chat, "messages": [{"role": "assistant", "content": "Look", "tool_calls": [{}]}]})
    assert same == chat


@pytest.mark.parametrize(
    "junk", [{"thinking": "x"}, {"tools": [1]}, {"tools": [TOOL], "tool_choice": "any"}, {"messages": ["x"]}]
)
def test_a_malformed_message_passes_through(junk: dict[str, Any]) -> None:
    """Even if an engine rendered it, whatever it then makes of it."""
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **junk}
    assert VllmTokens().rendered("/v1/messages", request, b"{}") is None
