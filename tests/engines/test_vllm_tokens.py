"""How vLLM's token events are read, and the end of a stream. Numbers alone give the same log-probabilities as whole
entries."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.token_ids import TokenIds
from engines.tokens import Delta, ErrorEvent, Piece, Rendered, TokenLeg, Whole
from engines.upstream import Upstream
from engines.vllm_messages import chat_of_chat, chat_of_messages
from engines.vllm_tokens import VllmTokens

RENDERED = Rendered("vllm", TokenIds.of([1]), {"sampling_params": {}}, 100, 0, (), False, False, False, {})
TOOL = {"name": "run", "description": "Runs.", "input_schema": {"properties": {}}}
# Texts that look like the fields of an event.
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(['"logprob":1', ']},"', "]}}]}", '"top_logprobs":[', '"logprobs":{"content":[']),
)
NUMBERS = st.floats(-100, 0)


@st.composite
def entries(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Entries of a few tokens, each with this many alternatives, the first of which is the token itself."""
    num_alternatives = draw(st.sampled_from([0, 1, 1, 2]))
    made = []
    for _ in range(draw(st.integers(0, 4))):
        own = {"token": draw(TEXTS), "logprob": draw(NUMBERS), "bytes": draw(st.lists(st.integers(0, 255), max_size=3))}
        others = [{"token": draw(TEXTS), "logprob": draw(NUMBERS), "bytes": None} for _ in range(num_alternatives - 1)]
        made.append(own | {"top_logprobs": [own, *others] if num_alternatives else []})
    return made


def read(data: bytes, only_numbers: bool) -> Piece:
    return VllmTokens().reader(RENDERED, only_numbers)(data)


@given(entries(), TEXTS, st.sampled_from(["last", "first"]), st.booleans())
def test_numbers_alone_match_the_logprob_entries(
    content: list[dict[str, Any]], text: str, place: str, has_entries: bool
) -> None:
    """Wherever the entries stand, and whatever the texts of event and tokens. All other fields of the event are the
    same."""
    logprobs = {"logprobs": {"content": content} if has_entries else None}
    about = {"index": 0, "finish_reason": None, "stop_reason": None, "token_ids": [5] * len(content), "text": text}
    choice = about | logprobs if place == "last" else logprobs | about
    data = orjson.dumps({"request_id": "r", "choices": [choice]})
    whole, numbers = read(data, False), read(data, True)
    chosen = [entry["logprob"] for entry in content]
    assert [entry["logprob"] for entry in whole.logprobs or []] == (chosen if has_entries else [])
    values = [entry["logprob"] if isinstance(entry, dict) else entry for entry in numbers.logprobs or []]
    assert values == (chosen if has_entries else [])
    assert (numbers.ids, numbers.text, numbers.finish_reason) == (whole.ids, whole.text, whole.finish_reason)


def test_alternatives_in_a_real_event_are_not_read() -> None:
    """Two tokens, each with itself as the only alternative: vLLM 0.32 returns one when none is requested."""
    own = {"token": " a", "logprob": -0.5, "bytes": [32, 97]}
    choice = {"index": 0, "token_ids": [5, 6], "text": " a a", "finish_reason": None}
    content = [own | {"top_logprobs": [own]}, own | {"logprob": -1.5, "top_logprobs": [own | {"logprob": -1.5}]}]
    data = orjson.dumps({"request_id": "r", "choices": [choice | {"logprobs": {"content": content}}]})
    assert read(data, True).logprobs == [-0.5, -1.5]


@pytest.mark.parametrize("choice", [None, {}, {"token_ids": [1]}, {"token_ids": [1], "finish_reason": None}])
@pytest.mark.parametrize("error", [None, {"message": "no", "code": 500}])
def test_both_readers_treat_incomplete_events_alike(
    choice: dict[str, Any] | None, error: dict[str, Any] | None
) -> None:
    """Whatever field is missing, and whatever error it reports."""
    event = {"error": error} if choice is None else {"choices": [choice], "error": error}
    outcomes: list[Any] = []
    for only_numbers in (False, True):
        try:
            outcomes.append(read(orjson.dumps(event), only_numbers))
        except (ErrorEvent, KeyError) as fault:
            outcomes.append((type(fault), fault.args))
    assert outcomes[0] == outcomes[1]


class Parser:
    """Plays an engine's derender, with a call in the first part that it gets; records its requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, upstream: Upstream) -> bytes:
        call = orjson.loads(upstream.body)
        self.requests.append(call)
        if "generate_response" in call:
            return orjson.dumps({"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]})
        calls = [{"index": 0, "function": {"name": "run"}}] if len(self.requests) == 1 else []
        delta = {"content": "ab"[len(self.requests) - 1], "tool_calls": calls}
        reason = call["generate_chunk"]["choices"][0]["finish_reason"]
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return orjson.dumps({"chunk": {"choices": [choice]}, "stream_state": {"asked": len(self.requests)}})

    @property
    def parts(self) -> list[tuple[list[int], str | None]]:
        """The token ids that it got, each with the finish reason."""
        chunks = [call.get("generate_chunk") or call["generate_response"] for call in self.requests]
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
async def test_the_end_of_a_stream_is_parsed_separately(reason: str, stop: Any, parts: list[Any]) -> None:
    """A parser that gets the name of a call and the end of the answer together adds arguments that were not generated.
    The token that ends an answer is not part of its text."""
    parser = Parser()
    end = Delta([7, 8, 9], reason, stop, {"asked": 0})
    choice, state = await VllmTokens().derender(parser, RENDERED, TokenIds.of([1]), end)
    assert parser.parts == parts
    assert [call["stream_state"] for call in parser.requests] == [{"asked": 0}, {"asked": 1}]
    assert state == {"asked": 2}
    delta = {"content": "ab", "tool_calls": [{"index": 0, "function": {"name": "run"}}]}
    assert choice == {"index": 0, "delta": delta, "finish_reason": reason}


@pytest.mark.parametrize(
    ("chat", "ids", "parsed_ids"),
    [({}, [7, 9], [7]), ({"include_stop_str_in_output": True}, [7, 9], [7, 9]), ({}, [9], [])],
)
async def test_the_stop_token_of_a_whole_answer_is_not_part_of_its_text(
    chat: dict[str, Any], ids: list[int], parsed_ids: list[int]
) -> None:
    """Except if requested. An answer of nothing else is parsed as a stream, because a whole one must have tokens."""
    parser = Parser()
    choice, _ = await VllmTokens().derender(
        parser, replace(RENDERED, chat=chat), TokenIds.of([1]), Whole(ids, None, "stop", None)
    )
    assert parser.parts == [(parsed_ids, "stop")]
    assert choice["message"]["content"] == ("ab" if parsed_ids else "a")


@pytest.mark.parametrize("end", [Delta([7], None, None, None), Whole([7], None, "length", None)])
@pytest.mark.parametrize(("call", "is_whole"), [({}, False), ({"reasoning_parser_kwargs": {}}, True)])
async def test_the_whole_prompt_is_sent_only_if_reasoning_may_be_open(
    call: dict[str, Any], is_whole: bool, end: Delta | Whole
) -> None:
    """Otherwise the parser reads only its last tokens, and each part of an answer would carry the whole prompt."""
    parser, prompt = Parser(), list(range(2_000))
    await VllmTokens().derender(parser, replace(RENDERED, call=call), TokenIds.of(prompt), end)
    [requests] = parser.requests
    requests |= requests.get("generate_response", {})
    sent = requests["prompt_token_ids"]
    assert sent == prompt if is_whole else (512 <= len(sent) < 1_024 and sent == prompt[-len(sent) :])


@pytest.mark.parametrize(
    ("whole_ids", "streamed_ids", "told", "num_asked"),
    [
        (("b0b4c1a2d3e4f506", "b0b4c1a2d3e4f507"), ("functions.run:3", "functions.run:4"), "streamed", (3, 3)),
        (("b0b4c1a2d3e4f506", "b0b4c1a2d3e4f507"), ("chatcmpl-tool-a", "chatcmpl-tool-b"), "streamed", (3, 1)),
        (("functions.run:3", "functions.run:4"), (), "whole", (1, 1)),
    ],
)
async def test_calls_of_a_whole_answer_have_the_ids_that_they_have_in_a_stream(
    whole_ids: tuple[str, ...], streamed_ids: tuple[str, ...], told: str, num_asked: tuple[int, int]
) -> None:
    """Kimi K2 numbers its calls, and its template shows these ids; derender of vLLM 0.32 makes others up for a whole
    answer. If a stream has none of the model's own either, it is not asked again."""
    asked: list[Any] = []

    async def ask(upstream: Upstream) -> bytes:
        asked.append(orjson.loads(upstream.body))
        if "generate_response" in asked[-1]:
            calls = [{"id": id, "function": {"name": "run"}} for id in whole_ids]
            return orjson.dumps({"choices": [{"message": {"tool_calls": calls}, "finish_reason": "stop"}]})
        is_last = asked[-1]["generate_chunk"]["choices"][0]["finish_reason"] is not None
        made = [{"index": index, "id": id, "function": {}} for index, id in enumerate(streamed_ids)]
        choice = {"index": 0, "delta": {"tool_calls": [] if is_last else made}, "finish_reason": None}
        return orjson.dumps({"chunk": {"choices": [choice]}, "stream_state": {}})

    routes, ids, before = VllmTokens(), {"whole": whole_ids, "streamed": streamed_ids}, 0
    for number in num_asked:
        choice, _ = await routes.derender(ask, RENDERED, TokenIds.of([1]), Whole([7, 8, 9], None, "stop", None))
        assert (len(asked) - before, len(choice["message"]["tool_calls"])) == (number, 2)
        if number == num_asked[0]:
            assert tuple(call["id"] for call in choice["message"]["tool_calls"]) == ids[told]
        before = len(asked)


@pytest.mark.parametrize(("chat", "tells"), [({}, True), ({"include_reasoning": False}, False)])
async def test_hidden_thoughts_are_not_told_by_their_log_probabilities(chat: dict[str, Any], tells: bool) -> None:
    """Each names its token. The chat route tells none then, and derender of vLLM 0.32 those that it gets."""
    parser, entries = Parser(), [{"token_id": 7, "logprob": -0.5, "top_logprobs": []}]
    await VllmTokens().derender(
        parser, replace(RENDERED, chat=chat), TokenIds.of([1]), Whole([7], entries, "length", None)
    )
    [choice] = parser.requests[0]["generate_response"]["choices"]
    assert ("logprobs" in choice) is tells


@pytest.mark.parametrize(
    ("chat", "reason", "num_calls", "expected"),
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
async def test_finish_reason_and_calls_match_the_chat_route(
    chat: dict[str, Any], reason: str, num_calls: int, expected: tuple[str, int]
) -> None:
    """Derender decides neither which calls remain nor whether they are the finish reason."""

    async def ask(_: Upstream) -> bytes:
        calls = [{"id": str(number), "function": {"name": "run"}} for number in range(num_calls)]
        choice = {"index": 0, "message": {"content": None, "tool_calls": calls}, "finish_reason": reason}
        return orjson.dumps({"choices": [choice]})

    choice, _ = await VllmTokens().derender(
        ask, replace(RENDERED, chat=chat), TokenIds.of([1]), Whole([7, 9], None, reason, None)
    )
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == expected


@pytest.mark.parametrize(
    ("path", "further"), [("/v1/responses", {}), ("/v1/chat/completions", {"parse_context": {"tool_choice": "auto"}})]
)
@pytest.mark.parametrize(
    ("choice", "reason", "num_calls", "told"),
    [("auto", "length", 1, "length"), ("required", "stop", 0, "stop"), ("auto", "tool_calls", 1, "tool_calls")],
)
async def test_a_call_hides_no_limit_where_the_engines_own_route_shows_it(
    path: str, further: dict[str, Any], choice: str, reason: str, num_calls: int, told: str
) -> None:
    """A response is incomplete if its limit cut it, whatever was called before. On vLLM 0.33, whose render has a
    `parse_context`, a chat's reason is then `length` too, and derender tells the reason itself."""

    async def ask(_: Upstream) -> bytes:
        calls = [{"id": str(number), "function": {"name": "run"}} for number in range(num_calls)]
        made = {"index": 0, "message": {"content": None, "tool_calls": calls}, "finish_reason": reason}
        return orjson.dumps({"choices": [made]})

    tool = {"type": "function", "name": "run", "function": {"name": "run"}}
    request = {"model": "m", "input": "hi", "messages": [], "store": False, "tools": [tool], "tool_choice": choice}
    answer = orjson.dumps({"token_ids": [1, 2], "sampling_params": {}, **further})
    rendered = VllmTokens().rendered(path, request, answer)
    assert rendered is not None and rendered.needs_parser
    end = "length" if reason == "length" else "stop"
    whole, _ = await VllmTokens().derender(ask, rendered, TokenIds.of([1]), Whole([7, 9], None, end, None))
    assert (whole["finish_reason"], len(whole["message"]["tool_calls"])) == (told, num_calls)


@pytest.mark.parametrize(
    "request_", [{"thinking": {"type": "disabled"}}, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "jump"}}]
)
def test_messages_whose_answers_only_the_engine_can_parse_pass_through(request_: dict[str, Any]) -> None:
    """What `derender` would be told about them is not what the engine's own route uses."""
    assert chat_of_messages({"model": "m", "messages": [], **request_}) is None


def test_the_parser_gets_tools_and_call_counts_but_no_text() -> None:
    """Tools in the form of a chat, the tool choice, and the number of earlier calls."""
    answered = [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "1", "name": "run", "input": {}}]
    messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": answered}]
    request = {"model": "m", "max_tokens": 9, "messages": messages, "tools": [TOOL], "tool_choice": {"type": "any"}}
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
    """Even if an engine rendered it."""
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **junk}
    assert VllmTokens().rendered("/v1/messages", request, b"{}") is None


def rendered_as(**sampling: Any) -> Rendered:
    """What a chat becomes if the engine renders it to these sampling parameters."""
    answer = orjson.dumps({"token_ids": [1, 2], "sampling_params": sampling})
    rendered = VllmTokens().rendered("/v1/chat/completions", {"messages": []}, answer)
    assert rendered is not None
    return rendered


def leg_after(*made: int) -> TokenLeg:
    """A leg after these tokens."""
    return TokenLeg("leg", "one", 0, TokenIds.of([1, 2, *made]), len(made), "", 1, False)


def test_a_limit_that_the_render_leaves_out_is_the_default() -> None:
    """vLLM leaves out a limit of 16, whoever set it, but generate without a limit fills the context."""
    rendered, routes = rendered_as(), VllmTokens()
    for leg, limit in ((leg_after(), 16), (leg_after(7, 8), 14)):
        assert orjson.loads(b"".join(routes.generate(rendered, leg).body))["sampling_params"]["max_tokens"] == limit


def test_texts_of_a_seam_show_the_special_tokens_that_the_answer_shows() -> None:
    """Otherwise they would not begin with what the client was told."""
    shown = orjson.loads(VllmTokens().texts(rendered_as(skip_special_tokens=False), [[7]]).body)
    assert shown["completion_request"]["skip_special_tokens"] is False
    assert "completion_request" not in orjson.loads(VllmTokens().texts(rendered_as(), [[7]]).body)


@pytest.mark.parametrize(
    ("sampling", "counts"),
    [
        ({"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.2, "bad_words": []}, False),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"bad_words": ["a"]}, True),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}, True),
    ],
)
def test_what_depends_on_the_output_so_far_is_known(sampling: dict[str, Any], counts: bool) -> None:
    """A repetition penalty counts the prompt of a leg too, in which the output so far is."""
    assert rendered_as(**sampling).counts_output is counts


@pytest.mark.parametrize(("own", "listed"), [(-0.1, "xa"), (-0.4, "xa"), (-2.0, "xab")])
def test_a_completion_lists_the_token_beside_the_likeliest(own: float, listed: str) -> None:
    """Two were asked for. Its own route lists three if the token is not among them, generate only two in all."""
    answer = orjson.dumps([{"token_ids": [1], "sampling_params": {"logprobs": 2}}])
    routes, request = VllmTokens(), {"prompt": "hi", "logprobs": 2}
    rendered = routes.rendered("/v1/completions", request, answer)
    assert rendered is not None
    assert orjson.loads(b"".join(routes.generate(rendered, leg_after()).body))["sampling_params"]["logprobs"] == 3
    told = [{"token": name, "logprob": value} for name, value in (("x", own), ("a", -0.3), ("b", -1.0))]
    choice = {"token_ids": [9], "text": "x", "logprobs": {"content": [{**told[0], "top_logprobs": told}]}}
    data = orjson.dumps({"choices": [choice | {"finish_reason": None}]})
    [entry] = routes.reader(rendered, only_numbers=False)(data).logprobs or ()
    assert "".join(one["token"] for one in entry["top_logprobs"]) == listed
