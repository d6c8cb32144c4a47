"""What the gateway relies on of any engine: one suite for real and simulated ones, spoken through our own adapters.

Each promise is a function; `PROMISES` lists them for the test modules that bring an engine.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import orjson

from engines.probe import Model, discover
from gateway.http.errors import engine_error
from tests.engines.contract_of_slots import (
    a_turn_that_is_left_frees_its_slot,
    an_aborted_turn_does_not_look_finished,
    the_more_urgent_runs_first,
    what_exceeds_the_slots_waits,
)
from tests.engines.site import COMPLETIONS, TIMEOUT_S, Json, Site

Promise = Callable[[Site], Awaitable[None]]
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}


async def it_says_what_it_is(engine: Site) -> None:
    """Kind, models and context without being told the kind."""
    found = await discover(engine.http, None, TIMEOUT_S)
    assert found.dialect.kind == engine.facts.kind
    assert found.models == (Model(engine.facts.model, engine.facts.max_context_tokens),)


async def it_says_how_large_it_is(engine: Site) -> None:
    """KV capacity and slots; idle, it holds nothing that cannot give way; its start never moves."""
    seen = await engine.observe()
    assert (seen.num_running, seen.num_waiting, seen.kv_used_share) == (0, 0, 0.0)
    assert seen.kv_capacity_tokens == engine.facts.kv_capacity_tokens
    assert (seen.slots or await engine.dialect.slots(engine.http, TIMEOUT_S)) == engine.facts.slots
    assert (seen.started_at is not None) == engine.facts.tells_start
    assert (await engine.observe()).started_at == seen.started_at


async def a_whole_chat_counts_its_tokens(engine: Site) -> None:
    """Usage says what the tokenizer and the token ids say."""
    counted = await engine.http.post(
        "/tokenize", orjson.dumps({"model": engine.facts.model, "messages": HELLO}), TIMEOUT_S
    )
    answer = (await engine.ask({"messages": HELLO, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True})).json
    (choice,), usage = answer["choices"], answer["usage"]
    assert answer["object"] == "chat.completion" and answer["model"] == engine.facts.model
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert usage["prompt_tokens"] == orjson.loads(counted[1])["count"]
    assert usage["completion_tokens"] == len(choice["token_ids"]) == 9
    assert usage["total_tokens"] == usage["prompt_tokens"] + 9


async def a_streamed_chat_says_what_the_whole_one_says(engine: Site) -> None:
    """The role first, the same text, the reason with or behind the last of it, and usage that only we asked for."""
    fields = {"messages": HELLO, "max_tokens": 40, "ignore_eos": True}
    whole = (await engine.ask(fields)).json
    *chunks, last = (await engine.ask(fields | {"stream": True})).chunks
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    reasons = [choice.get("finish_reason") for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0]["role"] == "assistant" and not deltas[0].get("content")
    assert _text(deltas) == whole["choices"][0]["message"]["content"]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    assert last["choices"] == [] and _counts(last["usage"]) == _counts(whole["usage"])
    assert not any(chunk.get("usage") for chunk in chunks)
    assert last.get("system_fingerprint") == whole.get("system_fingerprint")
    assert bool(whole.get("system_fingerprint")) == engine.facts.tells_fingerprint


async def a_tool_call_is_whole_and_says_why_it_ended(engine: Site) -> None:
    """Demanded or named, streamed or not: the same name, arguments that fit the schema, and the reason of its kind."""
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, reason in (("required", "tool_calls"), (named, engine.facts.named_call_reason)):
        fields = {"messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 400}
        (whole,) = (await engine.ask(fields)).json["choices"]
        (call,) = whole["message"]["tool_calls"]
        assert (whole["finish_reason"], call["function"]["name"]) == (reason, "weather")
        assert orjson.loads(call["function"]["arguments"])["unit"] in ("c", "f")
        chunks = (await engine.ask(fields | {"stream": True})).chunks
        choices = [one for chunk in chunks for one in chunk["choices"]]
        parts = [part for one in choices for part in one["delta"].get("tool_calls") or []]
        assert parts[0]["id"] and parts[0]["function"]["name"] == "weather"
        arguments = "".join(part["function"].get("arguments") or "" for part in parts)
        assert orjson.loads(arguments) == orjson.loads(call["function"]["arguments"])
        assert choices[-1]["finish_reason"] == reason


async def a_streamed_completion_says_what_the_whole_one_says(engine: Site) -> None:
    """Text and usage; a prompt of tokens counts as many as it has."""
    fields = {"prompt": "Hello", "max_tokens": 12, "ignore_eos": True}
    whole = (await engine.ask(fields, COMPLETIONS)).json
    *chunks, last = (await engine.ask(fields | {"stream": True}, COMPLETIONS)).chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == [] and _counts(last["usage"]) == _counts(whole["usage"])
    tokens = orjson.loads((await engine.http.post("/tokenize", orjson.dumps({"prompt": "Hello"}), TIMEOUT_S))[1])[
        "tokens"
    ]
    by_tokens = (await engine.ask(fields | {"prompt": tokens}, COMPLETIONS)).json
    assert by_tokens["usage"]["prompt_tokens"] == len(tokens)
    assert by_tokens["choices"][0]["text"] == whole["choices"][0]["text"]


async def a_stream_tells_its_usage_whatever_its_client_chose(engine: Site) -> None:
    """Declined by the client it comes once, for us; asked for in every chunk, it grows."""
    fields = {"messages": HELLO, "max_tokens": 20, "ignore_eos": True, "stream": True}
    for options in ({"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}, None):
        *chunks, last = (await engine.ask(fields | {"stream_options": options})).chunks
        assert last["usage"]["completion_tokens"] == 20 and not any(chunk.get("usage") for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = (await engine.ask(fields | {"stream_options": options})).chunks
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert made == sorted(made) and made[0] < made[-1] == 20


async def later_turns_reuse_the_cache(engine: Site) -> None:
    """Nothing is cached of a new conversation, and of an old one all but the end, in whole blocks."""
    messages = [{"role": "user", "content": f"{uuid.uuid4()} " * 6}]
    before = 0
    for _ in range(3):
        answer = (await engine.ask({"messages": messages, "max_tokens": 40, "ignore_eos": True})).json
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        assert cached % engine.facts.block_tokens == 0
        # The template of a model closes an answer, and an ignored end of text has no text to send back.
        assert max(before - 2 * engine.facts.block_tokens, 0) <= cached <= before
        before = usage["prompt_tokens"]
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
        before += usage["completion_tokens"]
    assert cached > 0


async def an_idle_connection_never_breaks_a_request(engine: Site) -> None:
    """Our client lets go of connections before the engine closes them; a request after that meets a new one."""
    fields = {"messages": HELLO, "max_tokens": 1}
    assert (await engine.ask(fields)).status == 200
    await asyncio.sleep(1.1 * engine.facts.keep_alive_s)  # time itself is the subject
    assert (await engine.ask(fields)).status == 200


async def its_errors_become_ours(engine: Site) -> None:
    """Wrong types, a prompt that is too long and an unknown model, told before a stream begins."""
    too_long = [{"role": "user", "content": "word " * engine.facts.max_context_tokens}]
    for stream in ({}, {"stream": True}):
        wrong = await engine.ask({"messages": "hi"} | stream)
        error = engine_error(wrong.status, wrong.body)
        assert (wrong.status, error.status) == (engine.facts.bad_type_status, 400)
        assert (error.type, error.code, error.is_clients_fault) == ("invalid_request_error", None, True)
        long = await engine.ask({"messages": too_long} | stream)
        error = engine_error(long.status, long.body)
        assert (error.status, error.code) == (400, "context_length_exceeded")
        other = await engine.ask({"model": "nope", "messages": HELLO, "max_tokens": 1} | stream)
        assert other.status == engine.facts.unknown_model_status
        if other.status != 200:
            assert engine_error(other.status, other.body).code == "model_not_found"


async def an_answer_may_not_outgrow_the_context(engine: Site) -> None:
    """A wish for more tokens than the context has is the client's mistake."""
    answer = await engine.ask({"messages": HELLO, "max_tokens": engine.facts.max_context_tokens + 1})
    error = engine_error(answer.status, answer.body)
    assert error.status == 400 and error.is_clients_fault


async def greedy_answers_are_the_same_each_time(engine: Site) -> None:
    """Alone, from the cache, or in a crowd: what moved and resumed trajectories stand on."""
    fields = {"messages": [{"role": "user", "content": f"{uuid.uuid4()} tell"}], "max_tokens": 60, "ignore_eos": True}
    alone = (await engine.ask(fields)).json
    crowd = [
        engine.ask({"messages": HELLO, "max_tokens": 200, "ignore_eos": True}) for _ in range(engine.facts.slots - 1)
    ]
    again, *_ = await asyncio.gather(engine.ask(fields), *crowd)
    assert again.json["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]


async def a_field_it_does_not_know_does_no_harm(engine: Site) -> None:
    """Agents send fields for the gateway, which pass through untouched."""
    assert (await engine.ask({"messages": HELLO, "max_tokens": 1, "no_such_field": {"a": 1}})).status == 200


PROMISES: tuple[Promise, ...] = (
    it_says_what_it_is,
    it_says_how_large_it_is,
    what_exceeds_the_slots_waits,
    a_whole_chat_counts_its_tokens,
    a_streamed_chat_says_what_the_whole_one_says,
    a_tool_call_is_whole_and_says_why_it_ended,
    a_streamed_completion_says_what_the_whole_one_says,
    a_stream_tells_its_usage_whatever_its_client_chose,
    later_turns_reuse_the_cache,
    the_more_urgent_runs_first,
    a_turn_that_is_left_frees_its_slot,
    an_aborted_turn_does_not_look_finished,
    an_idle_connection_never_breaks_a_request,
    its_errors_become_ours,
    an_answer_may_not_outgrow_the_context,
    greedy_answers_are_the_same_each_time,
    a_field_it_does_not_know_does_no_harm,
)


def _text(deltas: list[Json]) -> str:
    return "".join(delta.get("content") or "" for delta in deltas)


def _counts(usage: Json) -> tuple[int, int, int]:
    """The numbers of a usage block that do not depend on what was asked before."""
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
