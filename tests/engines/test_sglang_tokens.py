"""SGLang at token level: the requests, how its streams are read, and how a message is parsed from tokens."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from engines.http import HttpClient
from engines.probe import discover, tells_tokens
from engines.sglang_facts import NoTokenRoutes, ServerFacts, facts_of
from engines.sglang_messages import MessageReader
from engines.sglang_tokens import SglangTokens
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from engines.simulated.text import ASSISTANT, END, Tokenizer
from engines.token_ids import TokenIds
from engines.tokens import Asking, Delta, Piece, Rendered, TokenLeg, Whole
from engines.upstream import Upstream
from tests.support.engine import fixed, recorded_engine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
TOKENIZER = Tokenizer()
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def tokens(**facts: Any) -> SglangTokens:
    known: dict[str, Any] = {"context_tokens": 1000, "is_incremental": False, "has_own_defaults": False}
    return SglangTokens(ServerFacts(**known | {"tool_parser": "hermes", "reasoning_parser": None} | facts))


def rendered(request: dict[str, Any], **facts: Any) -> Rendered | None:
    path = CHATS if "messages" in request else COMPLETIONS
    return tokens(**facts).rendered(path, request, orjson.dumps({"tokens": [5, 6, 7]}))


def leg(**more: Any) -> TokenLeg:
    known: dict[str, Any] = {
        "request_id": "r.",
        "trajectory_id": "t",
        "priority": 2,
        "prompt_ids": TokenIds.of([5, 6, 7]),
    }
    known |= {"num_made": 0, "cache_salt": "", "event_tokens": 1, "wants_logprobs": False}
    return TokenLeg(**known | more)


@pytest.fixture
async def sglang() -> AsyncIterator[str]:
    settings = SimulatedEngineSettings(dialect="sglang", speed_up=200, reasoning_parser="qwen3")
    async with serve_engine(settings) as url:
        yield url


# --- requests ------------------------------------------------------------------------------------------------


def test_a_later_leg_asks_for_the_rest_with_the_same_seed() -> None:
    """SGLang's random numbers depend on a token's position, so the seed is offset by the choice's index only, not by
    the tokens already made."""
    made = rendered({**CHAT, "seed": 7, "min_tokens": 10, "temperature": 0.5, "cache_salt": "mine"})
    assert made is not None
    call = orjson.loads(b"".join(tokens().generate(made, leg(num_made=4, index=2, cache_salt="v3")).body))
    sampling = call["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["min_new_tokens"], sampling["sampling_seed"]) == (36, 6, 9)
    assert (call["rid"], call["priority"], call["cache_salt"], call["stream"]) == ("r.", 2, "mine.v3", True)
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.5, 1.0, -1)


def test_a_chat_without_a_limit_fills_the_context() -> None:
    """A completion without a limit has 16 tokens."""
    chat, completion = (
        rendered({"messages": CHAT["messages"]}),
        tokens().rendered(COMPLETIONS, {"prompt": [5, 6, 7]}, b""),
    )
    assert chat is not None and completion is not None
    assert (chat.max_tokens, completion.max_tokens) == (996, 16)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "run"}}},
        {"tools": [{**TOOL, "function": TOOL["function"] | {"strict": True}}]},
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
        {"tools": [5]},
        {"response_format": {"type": "structural_tag"}},
        {"response_format": {"type": "json_schema", "json_schema": "nonsense"}},
        {"stop_regex": "a+"},
        {"stop": 5},
        {"max_tokens": "many"},
        {"max_tokens": 0},
        {"model": "base:adapter"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    ],
)
def test_requests_that_only_the_chat_route_can_serve_pass_through(more: dict[str, Any]) -> None:
    """Grammars that it builds itself, images, adapters, and whatever it must refuse in its own words."""
    assert rendered(CHAT | more) is None


@pytest.mark.parametrize("name", ["stop", "logit_bias", "temperature", "regex", "stop_token_ids", "extra_key"])
def test_a_field_nested_too_deeply_is_left_to_the_engine(name: str) -> None:
    """It can be parsed but not serialised, which is not the engine's fault."""
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    assert rendered(CHAT | {name: deep}) is None


def test_a_use_too_deep_to_be_converted_is_left_to_the_engine() -> None:
    """JSON may be as deep as Python's recursion limit, where the conversion ends; from 3.12 on C has one of its own."""
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": deep}
    request = {"model": "m", "max_tokens": 8, "messages": [{"role": "assistant", "content": [use]}]}
    assert tokens().render("/v1/messages", request, b"") is None


def test_sampling_parameters_with_model_defaults_must_be_explicit() -> None:
    """`/generate` does not read generation_config.json, which the chat route reads unless told otherwise."""
    named = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert rendered(CHAT, has_own_defaults=True) is None
    assert rendered(CHAT | named, has_own_defaults=True) is not None
    assert "--sampling-defaults openai" in tokens(has_own_defaults=True).limits
    assert (
        tokens(has_own_defaults=True).rendered(COMPLETIONS, {"prompt": [1]}, b"") is not None
    )  # completions have OpenAI's defaults


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"tool_parser": None}, "--tool-call-parser"),
        ({"tool_parser": "pythonic"}, "pythonic"),
        ({"reasoning_parser": "gpt-oss"}, "gpt-oss"),
    ],
)
def test_chats_of_an_unknown_parser_pass_through(facts: dict[str, Any], word: str) -> None:
    """Its format may not begin calls with one marker. The note names the parser or the flag."""
    assert rendered(CHAT | {"tools": [TOOL]}, **facts) is None and word in tokens(**facts).limits
    assert (rendered(CHAT, **facts) is None) == ("reasoning_parser" in facts)


def test_a_streamed_chat_is_rendered_without_its_stream() -> None:
    """SGLang answers `/v1/tokenize` with 501 if the body says `stream`: no streamed chat was served at token level."""
    body = orjson.dumps(CHAT)
    for given in (CHAT, CHAT | {"stream": True}):
        upstream = tokens().render(CHATS, given, orjson.dumps(given))
        assert upstream is not None and upstream.body == body


def test_messages_and_responses_are_rendered_as_chats() -> None:
    """A malformed request is not rendered: the engine's own route refuses it."""
    routes = tokens()
    message = {"model": "m", "max_tokens": 9, "system": "Be short.", "messages": CHAT["messages"], "prompt": [1, 2]}
    response = {"model": "m", "input": "hello", "instructions": "Be short.", "max_output_tokens": 9}
    answer = orjson.dumps({"tokens": [5, 6, 7]})
    for path, request, limit in (("/v1/messages", message, 9), ("/v1/responses", response, 7)):
        upstream = routes.render(path, request, b"")
        assert upstream is not None and upstream.path == "/v1/tokenize"
        messages = orjson.loads(upstream.body)["messages"]
        assert [one["role"] for one in messages] == ["system", "user"]
        made = routes.rendered(path, request, answer)
        assert made is not None and made.max_tokens == limit
        malformed = request | {"tools": [5]}
        assert routes.render(path, malformed, b"") is None and routes.rendered(path, malformed, b"") is None
        assert routes.rendered(path, request, b"") is None


@pytest.mark.parametrize(
    ("facts", "api", "word"),
    [
        ({"has_own_defaults": True}, "messages", "--sampling-defaults"),
        ({"reasoning_parser": "qwen3"}, "responses", "thought"),
        ({"has_preferred": True}, "responses", "--preferred-sampling-params"),
        ({"reasoning_parser": "gpt-oss"}, "messages", "gpt-oss"),
        ({"reasoning_parser": "gpt-oss"}, "responses", "gpt-oss"),
    ],
)
def test_an_api_that_passes_through_has_a_reason(facts: dict[str, Any], api: str, word: str) -> None:
    """From what the server reports about itself."""
    assert tokens().passed == {} and word in tokens(**facts).passed[api]


# --- what a server offers ------------------------------------------------------------------------------------


async def test_an_engine_without_token_routes_has_a_reason() -> None:
    """Each missing fact is named."""
    settings = SimulatedEngineSettings(dialect="sglang")
    async with recorded_engine(settings) as engine:
        http = HttpClient(engine.url)
        assert (await facts_of(http, 5)).tool_parser == "hermes"
        for path, answer, word in [
            ("/server_info", fixed(200, b'{"skip_tokenizer_init": true}'), "--skip-tokenizer-init"),
            ("/server_info", fixed(200, b"[]"), "does not say"),
            ("/model_info", fixed(404, b"{}"), "/model_info"),
            ("/v1/tokenize", fixed(404, b"{}"), "/v1/tokenize"),
        ]:
            engine.scripts = {path: answer}
            with pytest.raises(NoTokenRoutes, match=word):
                await facts_of(http, 5)
            dialect = (await discover(http, "sglang", 5)).dialect
            assert await tells_tokens(dialect, http, 5)
            assert dialect.tokens is None and word in dialect.tokens_note
        http.close()


async def test_parsers_are_found_where_an_older_server_tells_them() -> None:
    """0.5.17 shows them only with its other arguments. Its answers were passed on with calls and thoughts as text."""
    settings = SimulatedEngineSettings(dialect="sglang", reasoning_parser="qwen3")
    async with recorded_engine(settings) as engine:
        http = HttpClient(engine.url)
        engine.scripts = {"/model_info": fixed(200, b'{"model_path": "m", "weight_version": "default"}')}
        facts = await facts_of(http, 5)
        assert (facts.tool_parser, facts.reasoning_parser) == ("hermes", "qwen3")
        http.close()


# --- streams -------------------------------------------------------------------------------------------------


async def pieces_of(url: str, upstream: Upstream, routes: SglangTokens, made: Rendered) -> list[Piece]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(upstream.path, content=b"".join(upstream.body))
    read = routes.reader(made, only_numbers=False)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [read(line.encode()) for line in lines]


async def test_cumulative_and_incremental_streams_read_the_same() -> None:
    """With one or many tokens per event: the same ids, text, log-probabilities and versions, each once."""
    streams = []
    for is_incremental in (False, True):
        settings = SimulatedEngineSettings(dialect="sglang", speed_up=50, incremental_streaming_output=is_incremental)
        async with serve_engine(settings) as url:
            http = HttpClient(url)
            routes = SglangTokens(await facts_of(http, 5))
            http.close()
            made = routes.rendered(
                COMPLETIONS, {"prompt": [300, 301], "max_tokens": 200, "ignore_eos": True, "logprobs": 2}, b""
            )
            assert made is not None
            for event_tokens in (1, 32):
                upstream = routes.generate(made, leg(prompt_ids=TokenIds.of([300, 301]), event_tokens=event_tokens))
                streams.append((await pieces_of(url, upstream, routes, made), event_tokens))
    results = [
        (
            [id for piece in pieces for id in piece.ids],
            "".join(piece.text for piece in pieces),
            [entry for piece in pieces for entry in piece.logprobs or ()],
            pieces[-1].finish_reason,
            pieces[-1].versions,
        )
        for pieces, _ in streams
    ]
    assert all(one == results[0] for one in results) and len(results[0][0]) == len(results[0][2]) == 200
    assert results[0][3:] == ("length", (("default", 0, 200),))
    assert all(len(entry["top_logprobs"]) == 2 for entry in results[0][2])
    assert all(len(pieces) == (200 if event_tokens == 1 else 8) for pieces, event_tokens in streams)


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_tokens_that_an_abort_repeats_are_not_taken_twice(is_incremental: bool) -> None:
    """An incremental stream ends with its last token once more, and with all of its text."""
    settings = SimulatedEngineSettings(dialect="sglang", speed_up=1.0, incremental_streaming_output=is_incremental)
    async with serve_engine(settings) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        routes = tokens(is_incremental=is_incremental)
        made = routes.rendered(COMPLETIONS, {"prompt": [300], "max_tokens": 500, "ignore_eos": True}, b"")
        assert made is not None
        reading = asyncio.create_task(
            pieces_of(url, routes.generate(made, leg(prompt_ids=TokenIds.of([300]))), routes, made)
        )
        async with asyncio.timeout(60):
            while "sglang:generation_tokens_total{" not in (page := (await client.get("/metrics")).text) or all(
                float(line.split()[-1]) < 5 for line in page.splitlines() if "generation_tokens_total{" in line
            ):
                pass
        await client.post("/abort_request", json={"rid": "r."})
        pieces = await reading
        whole = (
            await client.post(
                "/generate", json={"input_ids": [300], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
            )
        ).json()
    ids = [id for piece in pieces for id in piece.ids]
    assert pieces[-1] == Piece([], finish_reason="abort") and 5 <= len(ids) < 500
    assert ids == whole["output_ids"][: len(ids)]
    assert whole["text"].startswith("".join(piece.text for piece in pieces))


def test_a_partial_character_has_no_bytes() -> None:
    """The engine's text for such a token is a replacement character."""
    routes = tokens()
    made = rendered(CHAT | {"logprobs": True})
    assert made is not None
    meta = {"finish_reason": None, "output_token_logprobs": [[-0.5, 9, "\ufffd"], [-0.1, 8, "é"]]}
    piece = routes.reader(made, False)(orjson.dumps({"text": "é", "output_ids": [9, 8], "meta_info": meta}))
    assert [entry["bytes"] for entry in piece.logprobs or ()] == [None, [0xC3, 0xA9]]


async def test_texts_leave_out_an_incomplete_character(sglang: str) -> None:
    """A text is what the output adds to the prompt."""
    routes = tokens()
    made = rendered(CHAT)
    assert made is not None
    ids = TOKENIZER.encode("so 🧵🧵")
    async with httpx.AsyncClient(base_url=sglang, timeout=60) as client:
        upstream = routes.texts(made, [ids[:n] for n in range(1, len(ids) + 1)])
        texts = routes.read_texts((await client.post(upstream.path, content=upstream.body)).content)
    assert texts[-1] == "so 🧵🧵" and texts[0] == "so" and set(texts) <= {"so", "so ", "so 🧵", "so 🧵🧵"}


# --- messages ------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
MESSAGES = {
    "text": ("Hello <tool there.\n", "", "Hello <tool there.\n", 0),
    "a call": (CALL, "", "", 1),
    "text and a call": ("Let me see.\n\n" + CALL, "", "Let me see.", 1),
    "reasoning": ("<think>hm <b> m</think>Hello.", "hm <b> m", "Hello.", 0),
    "reasoning and a call": ("<think>\nhm\n</think>\n\n" + CALL, "\nhm\n", "", 1),
}


def ask_with(client: httpx.AsyncClient) -> Asking:
    async def ask(upstream: Upstream) -> bytes:
        return (await client.post(upstream.path, content=upstream.body)).raise_for_status().content

    return ask


@pytest.mark.parametrize("is_opened", [False, True], ids=["", "opened"])
@pytest.mark.parametrize("name", MESSAGES)
async def test_a_message_is_the_same_whole_and_in_any_pieces(sglang: str, name: str, is_opened: bool) -> None:
    """No part of a marker becomes text, and a template that ends with <think> has begun the reasoning."""
    written, reasoning, content, num_calls = MESSAGES[name]
    tail = TokenIds.of([ASSISTANT, *TOKENIZER.encode("<think>\n")] if is_opened else [ASSISTANT])
    if is_opened and not reasoning:
        return
    written = written.removeprefix("<think>") if is_opened else written
    ids = [id for character in written for id in TOKENIZER.encode(character)] + [END]
    reader, dice = MessageReader("hermes", "qwen3"), random.Random(name)
    request = CHAT | {"tools": [TOOL]}
    async with httpx.AsyncClient(base_url=sglang, timeout=60) as client:
        ask = ask_with(client)
        message = (await reader.whole(ask, request, tail, Whole(ids, None, "stop", None)))["message"]
        whole_content = content or (None if num_calls else "")  # no content beside calls is null, as on its chat route
        assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, whole_content)
        assert [call["function"] for call in message.get("tool_calls", ())] == [
            {"name": "run", "arguments": "{}"}
        ] * num_calls
        for _ in range(4):
            streamed: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
            state, at, choice = None, 0, {}
            while at < len(ids):
                end = at + dice.randrange(1, 20)
                reason = "stop" if end >= len(ids) else None
                choice, state = await reader.delta(ask, request, tail, Delta(ids[at:end], reason, None, state))
                for field, value in choice["delta"].items():
                    streamed[field] = streamed.get(field, "") + value if field != "tool_calls" else value
                at = end
            assert (streamed["reasoning_content"], streamed["content"].strip()) == (reasoning, content.strip())
            assert len(streamed["tool_calls"]) == num_calls
            assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")


async def test_a_truncated_call_is_not_text_in_a_stream(sglang: str) -> None:
    """The engine's own stream omits it too; a whole answer has it as content."""
    ids = TOKENIZER.encode("Wait. " + CALL[:30])
    reader, request = MessageReader("hermes", None), CHAT | {"tools": [TOOL]}
    async with httpx.AsyncClient(base_url=sglang, timeout=60) as client:
        choice, _ = await reader.delta(ask_with(client), request, [ASSISTANT], Delta(ids, "length", None, None))
        whole = await reader.whole(ask_with(client), request, [ASSISTANT], Whole(ids, None, "length", None))
    assert choice["delta"]["content"] == "Wait." and choice["finish_reason"] == "length"
    assert whole["message"]["content"] == "Wait. " + CALL[:30]
