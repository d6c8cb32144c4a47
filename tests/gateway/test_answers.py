"""Whole answers of engines, read into OpenAI's contract."""

from typing import Any

import orjson
import pytest

from gateway.messages.answers import Usage, content_of, read_answer, usage_of


def chat(reason: str | None = "stop", **more: Any) -> dict:
    message = {"role": "assistant", "content": "hi"}
    usage = {"prompt_tokens": 7, "total_tokens": 10, "completion_tokens": 3}
    return {
        "id": "c",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": 5}},
    } | more


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "content_filter", "function_call"])
def test_a_valid_answer_passes_byte_for_byte(reason: str) -> None:
    """Unknown fields, odd spacing and key order stay as the engine sent them."""
    body = b" " + orjson.dumps(chat(reason, service_tier=None, prompt_token_ids=[1, 2]), option=orjson.OPT_INDENT_2)
    answer = read_answer("chat", body)
    assert answer.body is body
    assert (answer.finish_reason, answer.error) == (reason, None)
    assert answer.usage == Usage(7, 3, 5)


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_abort_and_error_are_faults_despite_status_200(api: Any, reason: str) -> None:
    """vLLM ends a request with 200 and `abort` on pause, sleep, abort_requests and SIGTERM: it did not finish."""
    error = read_answer(api, orjson.dumps(chat(reason))).error
    assert error is not None
    assert error.status >= 500


def test_one_aborted_choice_makes_the_answer_a_fault() -> None:
    """With n > 1, every choice must have finished."""
    body = chat("stop")
    body["choices"].append({"index": 1, "message": {"role": "assistant", "content": ""}, "finish_reason": "abort"})
    assert read_answer("chat", orjson.dumps(body)).error is not None


@pytest.mark.parametrize("reason", ["repetition", "eos_token", ""])
def test_a_finish_reason_unknown_to_openai_becomes_stop(reason: str) -> None:
    """vLLM's `repetition` and an engine's own reasons are ends; the rest of the answer is unchanged."""
    answer = read_answer("chat", orjson.dumps(chat(reason, extra={"kept": 1})))
    assert (answer.finish_reason, answer.error) == ("stop", None)
    assert orjson.loads(answer.body) == chat("stop", extra={"kept": 1})


def test_text_that_quotes_a_finish_reason_is_not_one() -> None:
    """Quotes in text are escaped, so no text can be mistaken for an abort or for usage."""
    body = chat()
    body["choices"][0]["message"]["content"] = '"finish_reason":"abort" "usage":{"prompt_tokens":99}'
    body["choices"][0]["message"]["reasoning"] = "abort"
    answer = read_answer("chat", orjson.dumps(body))
    assert (answer.error, answer.usage) == (None, Usage(7, 3, 5))


def test_usage_is_found_beside_token_ids_and_metadata() -> None:
    """Fields after the usage, such as SGLang's metadata, do not hide it; absent usage is None."""
    body = chat(metadata={"weight_version": "v1"}, prompt_token_ids=list(range(100)))
    assert read_answer("chat", orjson.dumps(body)).usage == Usage(7, 3, 5)
    del body["usage"]["prompt_tokens_details"]
    assert read_answer("chat", orjson.dumps(body)).usage == Usage(7, 3, None)
    del body["usage"]
    assert read_answer("chat", orjson.dumps(body)).usage is None


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'"x"', b'{"choices":', b"null"])
@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
def test_an_invalid_body_with_status_200_is_the_engines_fault(api: Any, body: bytes) -> None:
    """Only a JSON object reaches a client as an answer."""
    error = read_answer(api, body).error
    assert error is not None
    assert error.status == 502


def test_an_error_body_with_status_200_is_an_error() -> None:
    """An error body is an error whatever its status line states."""
    for body in ({"error": {"message": "m", "code": 503}}, {"object": "error", "message": "m", "code": 503}):
        error = read_answer("chat", orjson.dumps(body)).error
        assert error is not None
        assert (error.status, error.message) == (503, "m")


_DETAILS: list[object] = [
    None,
    {},
    {"cached_tokens": None},
    {"cached_tokens": 5, "audio_tokens": 0},
    {"cached_tokens": -1},
    3,
]


@pytest.mark.parametrize("prompt", [7, 0, -1, 7.0, True, None, "7", 2**40])
@pytest.mark.parametrize("made", [3, 0, -1, 3.5, True, None, 2**63])
@pytest.mark.parametrize("details", _DETAILS)
def test_usage_at_the_end_is_what_a_parser_finds(prompt: object, made: object, details: object) -> None:
    """Whatever its form, whether or not members follow, and whether the answer is short or long."""
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "prompt_tokens_details": details}
    body = {"choices": [{"finish_reason": "stop"}], "usage": usage}
    for more in ({}, {"metadata": {"a": ["}"]}}, {"choices": [{"finish_reason": "stop", "text": "a" * 5_000}]}):
        assert read_answer("chat", orjson.dumps(body | more)).usage == usage_of(usage)


def test_usage_is_read_from_responses_and_anthropic_messages() -> None:
    """Both name their token counts differently; Anthropic's input count excludes cached tokens."""
    responses = {
        "id": "r", "status": "completed", "output": [],
        "tools": [{"parameters": {"usage": {"prompt_tokens": 1}}}],
        "usage": {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 3},
    }  # fmt: skip
    assert read_answer("responses", orjson.dumps(responses)).usage == Usage(7, 3, 5)
    messages = {"type": "message", "content": [], "stop_reason": "end_turn"}
    messages["usage"] = {"input_tokens": 2, "cache_read_input_tokens": 5, "output_tokens": 3}
    answer = read_answer("messages", orjson.dumps(messages))
    assert (answer.usage, answer.finish_reason) == (Usage(7, 3, 5), "end_turn")


@pytest.mark.parametrize("number", [-1, 2**53, 2**64 - 1, 1e999, 3.0, True, "3", None])
def test_an_invalid_token_count_is_ignored(number: object) -> None:
    """Counts go into sums, histories and metrics, which take neither negative numbers nor more than 64 bits."""
    wrong = {"prompt_tokens": 7, "completion_tokens": number, "prompt_tokens_details": {"cached_tokens": number}}
    assert usage_of(wrong) == Usage(7, 0, None)
    assert usage_of({"prompt_tokens": number, "completion_tokens": 3}) is None
    assert usage_of({"input_tokens": 7, "cache_read_input_tokens": number}) == Usage(7, 0, None)


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_failed_or_cancelled_response_is_a_fault(status: str) -> None:
    """`incomplete` is OpenAI's status for a length limit, which is an answer; these two are not."""
    assert read_answer("responses", orjson.dumps({"status": status, "output": []})).error is not None
    assert read_answer("responses", orjson.dumps({"status": "incomplete", "output": []})).error is None


def test_answers_of_other_routes_are_not_read() -> None:
    """Embeddings and tokenisation have no finish reason to check; they pass."""
    assert read_answer("other", b'{"tokens":[1]}').error is None


def test_the_content_is_what_a_client_sends_back() -> None:
    """The first choice's message, a completion's text, Anthropic's blocks, a response's items with its id."""
    assert content_of("chat", orjson.dumps(chat())) == {"role": "assistant", "content": "hi"}
    text = {"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]}
    assert content_of("completions", orjson.dumps(text)) == "a"
    blocks = {"content": [{"type": "text", "text": "a"}], "usage": {}}
    assert content_of("messages", orjson.dumps(blocks)) == {"role": "assistant", "content": blocks["content"]}
    assert content_of("responses", b'{"id":"r","output":[]}') == {"id": "r", "output": []}


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":{}}', b'{"choices":[{"text":1}]}'])
@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages", "other"])
def test_content_of_an_answer_without_content_is_none(api: Any, body: bytes) -> None:
    """Nothing to remember, and no crash."""
    assert content_of(api, body) is None
