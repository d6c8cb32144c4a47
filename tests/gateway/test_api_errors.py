"""Errors in any engine's form, rewritten in OpenAI's and Anthropic's."""

from collections.abc import Iterator

import httpx2
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http.errors import MAX_MESSAGE_LENGTH, Api, api_error, engine_error, error_body, error_event

VLLM = {"error": {"message": "Too long.", "type": "BadRequestError", "param": "messages", "code": 400}}
SGLANG = {"object": "error", "message": "Too long.", "type": "BadRequest", "param": "messages", "code": 400}


@pytest.mark.parametrize("body", [VLLM, SGLANG], ids=["vLLM", "SGLang"])
def test_nested_and_flat_errors_get_one_form(body: dict) -> None:
    """vLLM nests its errors and SGLang's OpenAI routes do not; clients always get the nested form."""
    error = engine_error(400, orjson.dumps(body))
    assert orjson.loads(error_body("chat", error)) == {
        "error": {"message": "Too long.", "type": "invalid_request_error", "param": "messages", "code": None}
    }


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (503, b'{"error":"Model is scaling"}', "Model is scaling"),
        (404, b'{"detail":"Not Found"}', "Not Found"),
        (500, b'"just a string"', "just a string"),
        (500, b"Internal Server Error", "Internal Server Error"),
        (502, b"<html><body>nginx 10.0.0.7</body></html>", "The engine failed with status 502 and no explanation."),
        (500, b"", "The engine failed with status 500 and no explanation."),
        (500, b"[1,2]", "The engine failed with status 500 and no explanation."),
        (500, b"null", "The engine failed with status 500 and no explanation."),
        (500, b'{"error":{"message":null}}', "The engine failed with status 500 and no explanation."),
        (500, b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_any_other_body_becomes_an_error(status: int, body: bytes, message: str) -> None:
    """Strings, FastAPI's detail, plain text, HTML or an empty body: always OpenAI's form, never HTML."""
    error = engine_error(status, body)
    assert (error.status, error.message) == (status, message)
    assert set(orjson.loads(error_body("chat", error))["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", [b'{"detail":"Not Found"}', b'{"error":{"message":"Not Found","code":404}}'])
def test_an_engine_without_the_route_answers_as_the_gateway_would(body: bytes) -> None:
    """FastAPI's words for it: bare, and in the form that vLLM gives to all errors."""
    assert engine_error(404, body).code == "unknown_route"
    assert engine_error(404, b'{"detail":"The response was not found"}').code is None


def test_a_validation_error_is_a_400_that_names_the_field() -> None:
    """FastAPI answers 422 with a list; OpenAI's status for an invalid body is 400."""
    body = {"detail": [{"loc": ["body", "messages", 0], "msg": "Field required", "type": "missing"}]}
    error = engine_error(422, orjson.dumps(body))
    assert (error.status, error.message, error.param) == (400, "messages.0: Field required", "messages.0")
    assert error.type == "invalid_request_error"


@pytest.mark.parametrize("status", [401, 403])
def test_an_engine_that_refuses_the_gateways_key_is_a_502(status: int) -> None:
    """vLLM's 401 is `{"error":"Unauthorized"}`. The refused key is the gateway's, so the client gets a 502."""
    error = engine_error(status, b'{"error":"Unauthorized"}')
    assert (error.status, error.type, error.is_clients_fault) == (502, "server_error", False)


def test_the_code_of_an_error_event_is_its_status() -> None:
    """vLLM answers a stream with 200 before its engine accepts it; the event's code is the status that it meant."""
    event = {"error": {"message": "paused", "type": "ServiceUnavailableError", "param": None, "code": 503}}
    assert engine_error(200, event).status == 503
    assert engine_error(200, {"error": {"message": "?"}}).status == 502


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("invalid_request_error", 400),
        ("not_found_error", 404),
        ("request_too_large", 413),
        ("rate_limit_error", 429),
        ("overloaded_error", 503),
        ("authentication_error", 502),
        ("permission_error", 502),
        ("api_error", 502),
        (["odd"], 502),
    ],
)
def test_anthropics_type_is_the_status_of_an_error_event_without_a_code(kind: object, status: int) -> None:
    """vLLM and SGLang report errors in a stream of messages that way; the gateway's own key is the fleet's matter."""
    assert engine_error(200, {"type": "error", "error": {"type": kind, "message": "?"}}).status == status
    assert engine_error(200, {"error": {"type": kind, "message": "?", "code": 500}}).status == 500


def test_the_code_is_a_string_or_null() -> None:
    """OpenAI's `code` is a word or null, but vLLM and SGLang give a number; agents check for two of the words."""
    message = "This model's maximum context length is 4096 tokens."
    codes = [
        engine_error(400, {"error": {"message": message, "code": 400}}).code,
        engine_error(404, {"error": {"message": "The model `x` does not exist.", "code": 404}}).code,
        engine_error(500, {"error": {"message": "x", "code": 500}}).code,
        engine_error(500, {"error": {"message": "x", "code": "cuda_error"}}).code,
        engine_error(500, {"error": {"message": "x", "code": ["?"]}}).code,
        engine_error(500, {"error": {"message": "x", "code": "500"}}).code,
        engine_error(413, {"error": {"message": message, "code": 413}}).code,
    ]
    words = ["context_length_exceeded", "model_not_found", None, "cuda_error", None, None, "context_length_exceeded"]
    assert codes == words


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "Input length (5000) exceeds model's maximum context length (4096).",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "The decoder prompt (length 4096) plus the number of requested output tokens (at least 1) is longer than the "
        "maximum model length of 4096.",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    ],
)
def test_a_context_that_is_too_long_has_its_code_in_all_words_of_engines(message: str) -> None:
    """Parts of vLLM have words of their own for it. Agents compact their history when they see the code."""
    assert engine_error(400, {"error": {"message": message, "code": 400}}).code == "context_length_exceeded"


@pytest.mark.parametrize(
    "secret",
    [
        "http://engine-3.internal:8000/v1", "10.1.2.3:8000", "10.1.2.3", "engine-3:8000", "localhost:30000",
        "[fe80::1]:8000", "Authorization: Bearer abc.DEF-123", '"authorization": "abc123"', "Bearer abc123",
        "sk-proj-abcdef123",
    ],
)  # fmt: skip
def test_addresses_and_credentials_are_not_passed_on(secret: str) -> None:
    """An engine's message may quote its own address or a header; the client sees neither."""
    message = engine_error(500, {"error": {"message": f"Cannot reach {secret} now"}}).message
    assert message.startswith("Cannot reach ")
    assert message.endswith(" now")
    for part in ("8000", "30000", "10.1", "engine-3", "fe80", "abc", "DEF"):
        assert part not in message


def test_ordinary_words_and_numbers_are_kept() -> None:
    """Only addresses and credentials are removed from a message."""
    message = "Line 3:14, ratio 1:2, time 12:30:05, version 0.33.0: top_p must be in (0, 1], got 1.5."
    assert engine_error(400, {"error": {"message": message}}).message == message


def test_a_long_message_is_truncated() -> None:
    """An engine that echoes a whole prompt does not fill logs and clients with it."""
    assert len(engine_error(400, {"error": {"message": "x" * 10**6}}).message) == MAX_MESSAGE_LENGTH
    assert len(engine_error(500, b"y" * 10**6).message) == MAX_MESSAGE_LENGTH


@example(500, {"detail": [{"loc": True}]})
@given(
    st.integers(0, 999),
    st.recursive(
        st.none() | st.booleans() | st.integers(0, 1000) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["error", "detail", "message", "code", "param", "loc", "msg"]), inner)
        ),
        max_leaves=8,
    ),
)
def test_any_body_becomes_a_valid_error(status: int, body: object) -> None:
    """Whatever an engine sends gives an error status, a message, and OpenAI's four fields with the right types."""
    error = engine_error(status, orjson.dumps(body))
    assert 400 <= error.status <= 599
    assert error.message
    assert all(value is None or isinstance(value, str) for value in error.openai().values())


@pytest.mark.parametrize(
    ("status", "openai_type", "anthropic_type"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "invalid_request_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
        (504, "server_error", "timeout_error"),
    ],
)
def test_each_api_has_its_own_error_types(status: int, openai_type: str, anthropic_type: str) -> None:
    """The type follows from the status, and Anthropic's routes answer in Anthropic's form."""
    error = api_error(status, "m")
    assert orjson.loads(error_body("chat", error))["error"]["type"] == openai_type
    body = orjson.loads(error_body("messages", error, "req-1"))
    assert body == {"type": "error", "error": {"type": anthropic_type, "message": "m"}, "request_id": "req-1"}


def test_only_400_404_and_413_are_the_clients_fault() -> None:
    """Overload, conflicts and every 5xx are retried, because another engine may do better."""
    clients_faults = [
        status for status in (400, 404, 408, 409, 413, 429, 500, 502, 503) if api_error(status, "").is_clients_fault
    ]
    assert clients_faults == [400, 404, 413]


def http_client_for(content: bytes) -> httpx2.Client:
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    return httpx2.Client(
        transport=httpx2.MockTransport(lambda request: httpx2.Response(200, headers=headers, content=content))
    )


CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
)
CREATED = b'event: response.in_progress\ndata: {"type":"response.in_progress","sequence_number":0,"response":{}}\n\n'
STARTED = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":"a"}}\n\n'
)


def read_stream(api: Api, content: bytes) -> Iterator[object]:
    """The events that the vendor's own SDK reads from a stream."""
    if api == "messages":
        import anthropic

        client = anthropic.Anthropic(api_key="k", base_url="http://gateway", http_client=http_client_for(content))
        user = [{"role": "user", "content": "hi"}]
        yield from client.messages.create(model="m", max_tokens=5, messages=user, stream=True)
        return
    import openai

    openai_client = openai.OpenAI(api_key="k", base_url="http://gateway/v1", http_client=http_client_for(content))
    match api:
        case "chat":
            yield from openai_client.chat.completions.create(model="m", messages=[], stream=True)
        case "completions":
            yield from openai_client.completions.create(model="m", prompt="p", stream=True)
        case "responses":
            yield from openai_client.responses.create(model="m", input="p", stream=True)


@pytest.mark.parametrize(
    ("api", "first"), [("chat", CHUNK), ("completions", CHUNK), ("responses", CREATED), ("messages", STARTED)]
)
def test_a_broken_stream_raises_in_the_sdk(api: Api, first: bytes) -> None:
    """The SDKs take a stream that just ends for a complete one; the error event makes each of them raise."""
    import anthropic
    import openai

    event = error_event(api, api_error(502, "The engine died."), "req-1", sequence_number=1)
    seen = []
    with pytest.raises((openai.APIError, anthropic.APIError), match="The engine died") as raised:
        seen.extend(read_stream(api, first + event))
    assert len(seen) == 1
    assert "The engine died." in str(raised.value)


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
def test_the_message_of_a_broken_stream_states_its_status(api: Api) -> None:
    """Agents that see only an SDK's message retry if it states a server error."""
    import anthropic
    import openai

    event = error_event(api, api_error(502, "The engine died."))
    with pytest.raises((openai.APIError, anthropic.APIError), match="502 The engine died"):
        list(read_stream(api, event))
