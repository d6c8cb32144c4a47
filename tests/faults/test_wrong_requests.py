"""Requests that are wrong, or only unusual: unknown routes, other methods, malformed bodies."""

import gzip
from typing import Any

import httpx
import orjson
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.faults.asking import APIS, PATHS, ask, body_of, check_error, raw
from tests.faults.raw_engine import raw_engine, whole, writes
from tests.support.engine import fixed, recorded_engine
from tests.support.gateway import running_gateway

ANSWER = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}'

MESSAGES = b'"messages":[{"role":"user","content":"hello"}],'

BAD_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "bad JSON": b'{"model": "simulated", ',
    "a list": b"[]",
    "a string": b'"hello"',
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "a lone surrogate": b'{"model": "simulated", "user": "\\ud800"}',
    "too deep": b'{"a":' * 2000 + b"1" + b"}" * 2000,
    "no number at all": b'{"model": "simulated", "n": NaN}',
    "a model that is a number": b'{"model": 5}',
    "a model that is a list": b'{"model": ["simulated"]}',
    "a stream that is a string": b'{"model": "simulated", "stream": "maybe"}',
    "a stream that is a list": b'{"model": "simulated", "stream": []}',
    "an id that is a list": b'{"model": "simulated", "session_id": []}',
    "an id with a line end": b'{"model": "simulated", "session_id": "a\\r\\nb"}',
}
BAD_FIELDS: list[dict[str, Any]] = [
    {"messages": "hello"},
    {"messages": [5]},
    {"messages": [{"role": 5, "content": {"a": 1}}]},
    {"messages": [None], "tools": "none"},
    {"prompt": {"a": 1}, "input": {"a": 1}, "messages": {"a": 1}},
    {"max_tokens": "many", "max_output_tokens": "many"},
    {"max_tokens": -1, "max_output_tokens": -1},
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(path, body, id=f"{path}-{name}")
        for name, body in BAD_BODIES.items()
        for path in (*PATHS.values(), "/v1/embeddings", "/v1/messages/count_tokens", "/tokenize")
        if path in PATHS.values() or not name.startswith(("an id", "a stream"))
    ],
)
async def test_a_malformed_body_gets_400(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    """In the form of its API, and no engine sees it."""
    async with raw_engine(writes(whole(ANSWER))) as engine, running_gateway(engine.url) as gateway:
        response = await client.post(gateway.url + path, content=body)
        check_error("messages" if path.startswith("/v1/messages") else "other", response, 400)
        assert engine.posts == []


@pytest.mark.parametrize("path", [*PATHS.values(), "/tokenize"])
async def test_a_byte_order_mark_before_the_body_is_skipped(client: httpx.AsyncClient, path: str) -> None:
    """As vLLM and SGLang do, whatever the request's length; engines get the rest."""
    async with serve_engine(SimulatedEngineSettings(speed_up=1000)) as engine, running_gateway(engine) as gateway:
        api = next((api for api in APIS if PATHS[api] == path), None)
        for text in ("hello", "hello " * 2_000):
            asked = body_of(api, text=text) if api else {"model": "simulated", "prompt": text}
            response = await client.post(gateway.url + path, content=b"\xef\xbb\xbf" + orjson.dumps(asked))
            assert response.status_code == 200, response.text


@pytest.mark.parametrize("levels", [100, 480])
@pytest.mark.parametrize("api", APIS)
async def test_nested_tool_results_are_left_to_the_engine(client: httpx.AsyncClient, api: str, levels: int) -> None:
    """However deep they are: to recognise the conversation, the gateway reads only the outermost."""
    deep = b'[{"type":"tool_result","content":' * levels + b'"x"' + b"}]" * levels
    body = b'{"model":"simulated","system":%s,"messages":[{"role":"user","content":%s}]}' % (deep, deep)
    async with raw_engine(writes(whole(b"{}", b"400 Bad Request"))) as engine, running_gateway(engine.url) as gateway:
        check_error(api, await client.post(gateway.url + PATHS[api], content=body), 400)
        assert len(engine.posts) == 1


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=[str(number) for number in range(len(BAD_FIELDS))])
@pytest.mark.parametrize("api", APIS)
async def test_fields_of_the_wrong_type_never_fail_the_gateway(
    client: httpx.AsyncClient, api: str, fields: dict[str, Any]
) -> None:
    """The gateway skips them, and returns the engine's 400 in the form of the API."""
    async with serve_engine(SimulatedEngineSettings(speed_up=1000)) as engine, running_gateway(engine) as gateway:
        response = await client.post(gateway.url + PATHS[api], json=body_of(api) | fields)
        if response.status_code != 200:
            check_error(api, response, 400)


@pytest.mark.parametrize(
    "body",
    [
        b'{"metadata": {"n": 1%s}}' % (b"0" * 30),
        b'{"metadata": {"n": "\\ud800"}}',
        b'{"metadata": {"n": [NaN]}}',
        b'{"metadata": {"n": 1e400}}',
        b'{"group_id": "\\ud800"}',
        b'{"id": "a "}',
        b'{"id": ""}',
        b'{"id": "x", "unknown": 1}',
        b'{"expected_output_tokens": 1e400}',
        b'{"metadata": %s1%s}' % (b'{"a":' * 2000, b"}" * 2000),
        b'{"metadata": %s1%s}' % (b'{"a":' * 251, b"}" * 251),
        b"[" * 100_000,
        b"\xff",
        b"",
    ],
)
async def test_a_declaration_that_cannot_be_stored_gets_400(client: httpx.AsyncClient, body: bytes) -> None:
    """A value that JSON can express but a store cannot would break every later listing of trajectories."""
    async with running_gateway() as gateway:
        headers = {"content-type": "application/json"}
        response = await client.post(gateway.url + "/v1/trajectories", content=body, headers=headers)
        check_error("other", response, 400)
        assert (await client.get(gateway.url + "/v1/trajectories")).json()["data"] == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"reward": 1, "components": {"\\ud800": 1}}',
        b'{"reward": 1, "metadata": {"\\ud800": 1}}',
        b'{"reward": 1, "metadata": %s1%s}' % (b'{"a":' * 251, b"}" * 251),
        b'{"reward": 1e400}',
        b'{"reward": 1, "metadata": {"n": -Infinity}}',
    ],
)
async def test_a_reward_that_cannot_be_stored_gets_400(client: httpx.AsyncClient, body: bytes) -> None:
    """It would break every later read of its trajectory, and its later turns."""
    async with raw_engine(writes(whole(ANSWER))) as engine, running_gateway(engine.url) as gateway:
        headers = {"content-type": "application/json"}
        turn = gateway.url + "/t/mine" + PATHS["chat"]
        assert (await client.post(turn, json=body_of("chat"))).status_code == 200
        response = await client.post(gateway.url + "/v1/trajectories/mine/reward", content=body, headers=headers)
        check_error("other", response, 400)
        assert (await client.post(turn, json=body_of("chat"))).status_code == 200
        assert (await client.get(gateway.url + "/v1/trajectories")).json()["data"][0]["reward"] is None


async def test_an_unknown_model_gets_404(client: httpx.AsyncClient) -> None:
    """In the form of its API."""
    async with serve_engine(SimulatedEngineSettings()) as engine, running_gateway(engine) as gateway:
        for api in APIS:
            response = await client.post(gateway.url + PATHS[api], json=body_of(api, model="nope"))
            check_error(api, response, 404, "model_not_found")
            assert "The model 'nope' does not exist. Served: 'simulated'." in response.text
        check_error("other", await client.get(gateway.url + "/v1/models/nope"), 404, "model_not_found")
        refused = await client.post(gateway.url + "/v1/embeddings", json={"model": "nope", "input": "x"})
        check_error("other", refused, 404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "target", "message"),
    [
        ("GET", "/v1/trajectories?rolout=a", "rolout: unknown, did you mean rollout?"),
        ("GET", "/v1/trajectories?rollout=a&page=2", "page: unknown; known: rollout, state, after, limit."),
        ("POST", "/v1/engines/x/drain?timeout=5", "timeout: unknown, did you mean timeout_s?"),
        ("POST", "/v1/rollouts/a/export?stat=finished", "stat: unknown, did you mean state?"),
        ("GET", "/v1/engines?all", "all: unknown."),
        ("POST", "/v1/rollouts/a/export?state=finished&state=aborted", "state: given more than once."),
    ],
)
async def test_an_unknown_or_repeated_query_parameter_gets_400(
    client: httpx.AsyncClient, method: str, target: str, message: str
) -> None:
    """If it were ignored, a typo would list all rollouts instead of one, or drain with another timeout. Of two states,
    an export had only the last."""
    async with running_gateway(admin_key="a") as gateway:
        response = await client.request(method, gateway.url + target, headers={"authorization": "Bearer a"})
        check_error("other", response, 400)
        error = response.json()["error"]
        assert (error["message"], error["param"]) == (message, message.partition(":")[0])


@pytest.mark.parametrize(
    "target", ["/healthz?verbose=1", "/metrics?name=x", "/v1/models?limit=20", "/readyz?exclude=a"]
)
async def test_probes_and_model_lists_accept_any_query_parameter(client: httpx.AsyncClient, target: str) -> None:
    """Scrapers, load balancers and SDKs send their own."""
    async with running_gateway() as gateway:
        assert (await client.get(gateway.url + target)).status_code in (200, 503)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"idd": "a"}', "idd: unknown, did you mean id?"),
        (b'{"expected_output_tokens": -1}', "expected_output_tokens: must be at least 1, not -1."),
        (b'{"expected_output_tokens": true}', "expected_output_tokens: must be a number, not true."),
        (b'{"expected_output_tokens": "x"}', "expected_output_tokens: must be a whole number, not 'x'."),
        (b'{"id": ""}', "id: must not be empty, not ''."),
        (b'{"id": " a"}', "id: must be printable ASCII, without spaces at its ends, not ' a'."),
        (b'{"metadata": 5}', "metadata: must be a JSON object, not 5."),
        (b'{"metadata": {"a": NaN}}', "metadata: must hold neither NaN nor Infinity, which JSON does not have."),
        (b"[]", "The request body must be a JSON object, not []."),
        (b"", "The request has no body; it must be a JSON object."),
    ],
)
async def test_the_error_names_the_wrong_field(client: httpx.AsyncClient, body: bytes, message: str) -> None:
    """Which field, what it must be, and what it was."""
    async with running_gateway() as gateway:
        headers = {"content-type": "application/json"}
        response = await client.post(gateway.url + "/v1/trajectories", content=body, headers=headers)
        check_error("other", response, 400)
        assert response.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/t/a/v1/v1/responses", "/v1/responses"),
        ("/v1/tokenise", None),
    ],
)
async def test_the_error_suggests_the_path_if_v1_is_missing_or_doubled(
    client: httpx.AsyncClient, path: str, meant: str | None
) -> None:
    """The most common mistake in a client's base URL. Any other unknown path gets no suggestion."""
    async with running_gateway() as gateway:
        response = await client.post(gateway.url + path, json={})
        check_error("other", response, 404, "unknown_route")
        hint = f" Did you mean {meant}? Then the client's base URL has one /v1 too" if meant else ""
        assert (hint or "POST /v1/tokenise.") in response.json()["error"]["message"]


async def test_without_a_ready_engine_the_error_says_why(client: httpx.AsyncClient) -> None:
    """A fleet without engines differs from one whose engines do not answer."""
    async with running_gateway(start_timeout_s=0) as gateway:
        response = await client.post(gateway.url + PATHS["chat"], json=body_of("chat"))
        check_error("other", response, 503, "no_engine")
        assert response.json()["error"]["message"] == "No engine is ready: the fleet has none."
    async with running_gateway("http://127.0.0.1:9", start_timeout_s=0.0) as gateway:
        response = await client.post(gateway.url + PATHS["chat"], json=body_of("chat"))
        check_error("other", response, 503, "no_engine")
        assert response.json()["error"]["message"] == (
            "No engine is ready: 0 of 1 in the fleet; GET /v1/engines tells why."
        )


@pytest.mark.parametrize(
    "path",
    ["/v1", "/v2/chat/completions", "/v1/chat", "/sleep", "/wake_up", "/collective_rpc", "/v1/load_lora_adapter",
     "/pause", "/reset_prefix_cache", "/abort_requests", "/update_weights", "/flush_cache",
     "/v1/chat/completions/render", "/v1/../sleep", "/v1/%2e%2e/sleep", "//sleep",
     "/t/x/v1/../sleep", "/t/x/sleep", "/t/x/v1/nope", "/%ff", "/v1/trajectories/", "/simulate/faults",
     "/v1/chat/completions%0A", "/t/x/v1/messages%0A", "/tokenize%0A"],
)  # fmt: skip
async def test_an_unknown_route_gets_404_or_405_and_reaches_no_engine(client: httpx.AsyncClient, path: str) -> None:
    """Above all an engine's control routes."""
    async with raw_engine(writes(whole(ANSWER))) as engine, running_gateway(engine.url) as gateway:
        for method in ("POST", "GET"):
            data = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}".encode()
            answer = await raw(gateway.url, data)
            assert answer[9:12] in (b"404", b"405"), answer
            assert b'{"error":{"message":' in answer
        assert engine.posts == []


async def test_a_wrong_method_gets_405_with_the_allowed_ones(client: httpx.AsyncClient) -> None:
    """In the form of its API."""
    async with running_gateway() as gateway:
        for path in [*PATHS.values(), "/v1/embeddings", "/tokenize"]:
            for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
                response = await client.request(method, gateway.url + path)
                check_error("messages" if path == "/v1/messages" else "other", response, 405, "method_not_allowed")
                assert response.headers["allow"] == "POST"
        response = await client.put(gateway.url + "/v1/models")
        check_error("other", response, 405, "method_not_allowed")
        assert response.headers["allow"] == "GET, HEAD"
        response = await client.put(gateway.url + "/v1/trajectories")
        check_error("other", response, 405, "method_not_allowed")
        assert response.headers["allow"] == "GET, HEAD, POST"
        response = await client.head(gateway.url + "/v1/events")
        assert (response.status_code, response.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/v1/models", "/t/a/v1/engines", "/nope"])
async def test_head_is_answered_like_get_without_a_body(client: httpx.AsyncClient, path: str) -> None:
    """Load balancers use it. The next bytes on the connection are the next answer."""
    async with running_gateway() as gateway:
        get = await client.get(gateway.url + path)
        head = await client.head(gateway.url + path)
        assert (head.status_code, head.headers["content-type"]) == (get.status_code, get.headers["content-type"])
        assert int(head.headers["content-length"]) > 0 and not head.content
        request = f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n"
        answers = await raw(gateway.url, request.encode())
        assert answers.endswith(b'\r\n\r\n{"object":"list","data":[]}') and answers.count(b"\r\n\r\n") == 2


@pytest.mark.parametrize("path", [*PATHS.values(), "/v1/embeddings"])
async def test_a_trailing_slash_is_not_redirected(client: httpx.AsyncClient, path: str) -> None:
    """It is an unknown route: a redirect would lose the identity in the path, and name a host that clients behind a
    proxy cannot reach."""
    async with running_gateway() as gateway:
        check_error("other", await client.post(f"{gateway.url}/t/a{path}/", json={}), 404, "unknown_route")


@pytest.mark.parametrize("path", [*PATHS.values(), "/v1/embeddings", "/v1/trajectories"])
async def test_a_compressed_body_gets_415(client: httpx.AsyncClient, path: str) -> None:
    """The error names the encoding, instead of an invalid UTF-8 byte."""
    async with raw_engine(writes(whole(ANSWER))) as engine, running_gateway(engine.url) as gateway:
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        response = await client.post(gateway.url + path, content=gzip.compress(b"{}"), headers=headers)
        check_error("messages" if path == PATHS["messages"] else "other", response, 415, "unsupported_encoding")
        assert "gzip" in response.text


@pytest.mark.parametrize("body", [b"{", b'{"id": "\xff"}'], ids=["no JSON", "no UTF-8"])
@pytest.mark.parametrize("path", [*PATHS.values(), "/v1/embeddings", "/v1/trajectories"])
async def test_a_body_that_is_not_json_gets_the_same_code_everywhere(
    client: httpx.AsyncClient, path: str, body: bytes
) -> None:
    """Also on routes of FastAPI."""
    async with running_gateway() as gateway:
        response = await client.post(gateway.url + path, content=body, headers={"content-type": "application/json"})
        check_error("messages" if path == PATHS["messages"] else "other", response, 400, "invalid_json")
        assert "is not valid JSON: " in response.json()["error"]["message"]


@pytest.mark.parametrize("token_legs", ["off", "auto"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_an_engine_refuses_is_not_a_failure(
    client: httpx.AsyncClient, stream: bool, token_legs: str
) -> None:
    """Agents run until their context is full: that is no sign of engines that fail, and fires no alert."""
    async with (
        serve_engine(SimulatedEngineSettings(max_model_len=200)) as engine,
        running_gateway(engine, token_legs=token_legs) as gateway,
    ):
        reply = await ask(client, gateway.url, "chat", body_of("chat", stream, text="word " * 400))
        assert (reply.status, reply.error("chat")["code"]) == (400, "context_length_exceeded")
        shown = (await client.get(f"{gateway.url}/v1/trajectories/{reply.headers['x-trajectory-id']}")).json()
        turns = [(turn["outcome"], turn["error"]["code"], turn["legs"]) for turn in shown["turns"]]
        assert turns == [("refused", "context_length_exceeded", 1)]
        counts = (await client.get(gateway.url + "/metrics")).text
        assert 'heddle_turns_total{api="chat",outcome="refused"} 1' in counts
        assert 'heddle_turns_total{api="chat",outcome="failed"} 0' in counts


async def test_a_request_too_deep_to_rewrite_gets_400(client: httpx.AsyncClient) -> None:
    """JSON can be parsed to a greater depth than it can be written, and stream options set by the client force a
    rewrite of the body."""
    body = b'{"model":"simulated","stream":true,"stream_options":{},"messages":[],"x":%s%s}' % (b"[" * 400, b"]" * 400)
    async with raw_engine(writes(whole(ANSWER))) as engine, running_gateway(engine.url) as gateway:
        response = await client.post(gateway.url + PATHS["chat"], content=body)
        check_error("chat", response, 400)
        assert "nested" in response.text and engine.posts == []


def deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


TOOLS = b'[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}]'
# Requests that can be read, but not written in the form that token routes take.
NOT_WRITABLE: dict[str, tuple[str, str, bytes]] = {
    "a deep chat": ("sglang", "chat", b'"stream":true,"x":%s' % deep(300)),
    "deep calls": ("sglang", "responses", b'"input":[{"type":"function_call","call_id":%s,"name":"f"}]' % deep(300)),
    "a huge number": ("sglang", "completions", b'"prompt":"hello","logprobs":%d' % 2**64),
    "a huge seed": ("sglang", "completions", b'"prompt":"hello","n":2,"seed":%d' % (2**64 - 1)),
    "a deep chat with tools": ("vllm", "chat", b'"tools":%s,"max_tokens":8,"x":%s' % (TOOLS, deep(300))),
}


@pytest.mark.parametrize("name", NOT_WRITABLE)
async def test_a_request_that_token_routes_cannot_be_sent_is_not_their_engines_fault(
    client: httpx.AsyncClient, name: str
) -> None:
    """It is served by the engine's own route, or refused, after one leg. However many such requests come, the engine
    stays in use."""
    kind, api, fields = NOT_WRITABLE[name]
    body = b'{"model":"simulated",%s%s}' % (b"" if b'"messages"' in fields or api != "chat" else MESSAGES, fields)
    settings = SimulatedEngineSettings(dialect=kind, speed_up=200)  # type: ignore[arg-type]
    async with serve_engine(settings) as url, running_gateway(url, token_legs="auto", retry_pause_s=0.01) as gateway:
        for number in range(3):
            response = await client.post(gateway.url + f"/t/{number}" + PATHS[api], content=body)
            assert response.status_code < 500, response.text
            turns = (await client.get(f"{gateway.url}/v1/trajectories/{number}")).json()["turns"]
            assert [turn["legs"] for turn in turns] == [1]
        [shown] = (await client.get(gateway.url + "/v1/engines")).json()["data"]
        assert (shown["state"], shown["last_fault"]) == ("ready", None)


@pytest.mark.parametrize(("path", "token_legs"), [("/generate", "off"), ("/v1/chat/completions", "auto")])
async def test_a_request_that_sglang_aborts_as_wrong_gets_400(
    client: httpx.AsyncClient, path: str, token_legs: str
) -> None:
    """A regex that does not compile is found once the stream has begun. Nothing is asked again."""
    wrong = {"message": "Failed to compile the regex (", "status_code": 400, "err_type": "BadRequestError"}
    meta = {"id": "r", "finish_reason": {"type": "abort"} | wrong, "prompt_tokens": 3, "completion_tokens": 0}
    event = {"text": "", "output_ids": [], "meta_info": meta, "index": 0}
    body = body_of("chat", stream=True, regex="(") if token_legs == "auto" else {"text": "hello", "stream": True}
    async with (
        recorded_engine(SimulatedEngineSettings(dialect="sglang", speed_up=200)) as engine,
        running_gateway(engine.url, token_legs=token_legs) as gateway,
    ):
        events = b"data: %s\n\ndata: [DONE]\n\n" % orjson.dumps(event)
        engine.scripts["/generate"] = fixed(200, events, b"text/event-stream")
        response = await client.post(f"{gateway.url}/t/a{path}", json=body)
        check_error("chat", response, 400)
        assert response.json()["error"]["message"] == wrong["message"]
        assert [asked.path for asked in engine.turns if asked.path in ("/generate", path)] == ["/generate"]
