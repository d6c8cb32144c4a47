"""What the gateway relies on from any engine: one suite for real and simulated engines, through our own adapters.

Each promise is a function. `PROMISES` lists them for the test modules that supply an engine.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import orjson

from engines.probe import Model, discover
from gateway.http.errors import engine_error
from tests.engines.contract_of_slots import (
    an_abandoned_turn_frees_its_slot,
    an_aborted_turn_ends_with_reason_abort,
    the_most_urgent_turn_runs_first,
    turns_beyond_the_slots_wait,
)
from tests.engines.engine_under_test import COMPLETIONS, TIMEOUT_S, EngineUnderTest, Json

Promise = Callable[[EngineUnderTest], Awaitable[None]]
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}


async def it_reports_its_kind_and_models(engine: EngineUnderTest) -> None:
    """Kind, models and context length, without being told the kind."""
    found = await discover(engine.http, None, TIMEOUT_S)
    assert found.dialect.kind == engine.facts.kind
    assert found.models == (Model(engine.facts.model, engine.facts.max_context_tokens),)


async def it_reports_its_capacity(engine: EngineUnderTest) -> None:
    """KV capacity and slots; an idle engine uses no KV, and its start time does not change."""
    observed = await engine.observe()
    assert (observed.num_running, observed.num_waiting, observed.kv_used_share) == (0, 0, 0.0)
    assert observed.kv_capacity_tokens == engine.facts.kv_capacity_tokens
    assert (observed.slots or await engine.dialect.slots(engine.http, TIMEOUT_S)) == engine.facts.slots
    assert (observed.started_at is not None) == engine.facts.tells_start
    assert (await engine.observe()).started_at == observed.started_at


async def a_whole_chat_counts_its_tokens(engine: EngineUnderTest) -> None:
    """Usage agrees with the tokenizer and with the token ids."""
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


async def a_streamed_chat_equals_the_whole_one(engine: EngineUnderTest) -> None:
    """The role comes first, the text is the same, the finish reason comes with or after the last text, and only the
    last chunk has usage, which the gateway asked for."""
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


async def a_tool_call_is_complete_and_has_its_finish_reason(engine: EngineUnderTest) -> None:
    """Required or named, streamed or not: the same name, arguments that fit the schema, and the finish reason of this
    kind of engine."""
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


async def a_streamed_completion_equals_the_whole_one(engine: EngineUnderTest) -> None:
    """Same text and usage; a prompt of token ids counts as many tokens as it has."""
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


async def a_stream_reports_usage_whatever_its_client_chose(engine: EngineUnderTest) -> None:
    """If the client declines usage, it comes once, for the gateway. If the client asks for it in every chunk, it
    grows."""
    fields = {"messages": HELLO, "max_tokens": 20, "ignore_eos": True, "stream": True}
    for options in ({"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}, None):
        *chunks, last = (await engine.ask(fields | {"stream_options": options})).chunks
        assert last["usage"]["completion_tokens"] == 20 and not any(chunk.get("usage") for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = (await engine.ask(fields | {"stream_options": options})).chunks
    if not engine.facts.tells_usage_always:
        first, *chunks = chunks
        (end,) = [chunk for chunk in chunks if any(choice["finish_reason"] for choice in chunk["choices"])]
        assert not first.get("usage") and not end.get("usage")
        chunks.remove(end)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 20


async def later_turns_reuse_the_cache(engine: EngineUnderTest) -> None:
    """A new conversation has nothing cached but what the template writes before it; a later turn has all but the end
    cached, in whole blocks."""
    messages = [{"role": "user", "content": f"{uuid.uuid4()} " * 6}]
    before = engine.facts.template_tokens
    unsure = max(2 * engine.facts.block_tokens, engine.facts.retold_tokens, before)
    for _ in range(3):
        answer = (await engine.ask({"messages": messages, "max_tokens": 40, "ignore_eos": True})).json
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        assert cached % engine.facts.block_tokens == 0
        # A model's template closes an answer, and an ignored end-of-text token has no text to send back.
        assert max(before - unsure, 0) <= cached <= before
        before = usage["prompt_tokens"]
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
        before += usage["completion_tokens"]
    assert cached > 0


async def an_idle_connection_never_breaks_a_request(engine: EngineUnderTest) -> None:
    """Our client closes idle connections before the engine does, so the next request gets a new one."""
    fields = {"messages": HELLO, "max_tokens": 1}
    assert (await engine.ask(fields)).status == 200
    await asyncio.sleep(1.1 * engine.facts.keep_alive_s)  # the promise is about time
    assert (await engine.ask(fields)).status == 200


async def its_errors_map_to_ours(engine: EngineUnderTest) -> None:
    """A wrong type, a prompt that is too long and an unknown model are reported before a stream begins."""
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


async def an_answer_longer_than_the_context_is_refused(engine: EngineUnderTest) -> None:
    """Asking for more tokens than the context has is the client's mistake."""
    answer = await engine.ask({"messages": HELLO, "max_tokens": engine.facts.max_context_tokens + 1})
    error = engine_error(answer.status, answer.body)
    assert error.status == 400 and error.is_clients_fault


async def greedy_answers_are_deterministic(engine: EngineUnderTest) -> None:
    """Alone, from the cache, or beside other requests. Moved and resumed trajectories rely on this."""
    fields = {"messages": [{"role": "user", "content": f"{uuid.uuid4()} tell"}], "max_tokens": 60, "ignore_eos": True}
    alone = (await engine.ask(fields)).json
    crowd = [
        engine.ask({"messages": HELLO, "max_tokens": 200, "ignore_eos": True}) for _ in range(engine.facts.slots - 1)
    ]
    again, *_ = await asyncio.gather(engine.ask(fields), *crowd)
    assert again.json["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]


async def an_unknown_field_is_ignored(engine: EngineUnderTest) -> None:
    """Agents send fields for the gateway, which pass through untouched."""
    assert (await engine.ask({"messages": HELLO, "max_tokens": 1, "no_such_field": {"a": 1}})).status == 200


PROMISES: tuple[Promise, ...] = (
    it_reports_its_kind_and_models,
    it_reports_its_capacity,
    turns_beyond_the_slots_wait,
    a_whole_chat_counts_its_tokens,
    a_streamed_chat_equals_the_whole_one,
    a_tool_call_is_complete_and_has_its_finish_reason,
    a_streamed_completion_equals_the_whole_one,
    a_stream_reports_usage_whatever_its_client_chose,
    later_turns_reuse_the_cache,
    the_most_urgent_turn_runs_first,
    an_abandoned_turn_frees_its_slot,
    an_aborted_turn_ends_with_reason_abort,
    an_idle_connection_never_breaks_a_request,
    its_errors_map_to_ours,
    an_answer_longer_than_the_context_is_refused,
    greedy_answers_are_deterministic,
    an_unknown_field_is_ignored,
)


def _text(deltas: list[Json]) -> str:
    return "".join(delta.get("content") or "" for delta in deltas)


def _counts(usage: Json) -> tuple[int, int, int]:
    """The numbers of a usage block that do not depend on earlier requests."""
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
