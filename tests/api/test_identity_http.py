"""Which trajectory a request belongs to, as clients see it: every form over HTTP, and clients that send no id."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from tests.api.conftest import CHAT, DONE, GENERATE, HELLO, MODEL, Site, Wire, running_site, toy
from tests.api.differential import assembled, events_of
from tests.support.engine import fixed, recorded_engine
from tests.support.gateway import ADMIN, eventually

pytestmark = pytest.mark.usefixtures("token_legs")

# (name, path before /v1, headers, body fields, the id)
FORMS: list[tuple[str, str, dict[str, str], dict[str, Any], str]] = [
    ("path /t/", "/t/run-7", {}, {}, "run-7"),
    ("path /sessions/", "/sessions/run-7", {}, {}, "run-7"),
    ("path, escaped", "/t/a%2Fb%20c", {}, {}, "a/b c"),
    ("X-Trajectory-Id", "", {"X-Trajectory-Id": "run-7"}, {}, "run-7"),
    ("X-Session-ID", "", {"X-Session-ID": "run-7"}, {}, "run-7"),
    ("X-SMG-Routing-Key", "", {"X-SMG-Routing-Key": "run-7"}, {}, "run-7"),
    ("X-Dynamo-Session-ID", "", {"X-Dynamo-Session-ID": "run-7"}, {}, "run-7"),
    ("x-claude-code-session-id", "", {"x-claude-code-session-id": "run-7"}, {}, "run-7"),
    (
        "x-claude-code-session-id and agent",
        "",
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
        {},
        "s:a",
    ),
    ("session-id", "", {"session-id": "run-7"}, {}, "run-7"),
    ("session-id and thread-id", "", {"session-id": "s", "thread-id": "t"}, {}, "s:t"),
    ("X-Correlation-ID", "", {"X-Correlation-ID": "run-7"}, {}, "run-7"),
    ("metadata.trajectory_id", "", {}, {"metadata": {"trajectory_id": "run-7"}}, "run-7"),
    ("agentic_context", "", {}, {"vllm_xargs": {"agentic_context": {"program_id": "run-7"}}}, "run-7"),
    ("program_id", "", {}, {"program_id": "run-7"}, "run-7"),
    ("session_params.session_id", "", {}, {"session_params": {"session_id": "run-7"}}, "run-7"),
    ("session_params.id", "", {}, {"session_params": {"id": "run-7"}}, "run-7"),
    ("session_id", "", {}, {"session_id": "run-7"}, "run-7"),
    ("metadata.session_id", "", {}, {"metadata": {"session_id": "run-7"}}, "run-7"),
    ("user", "", {}, {"user": "run-7"}, "run-7"),
    ("metadata.user_id", "", {}, {"metadata": {"user_id": "user_x_session_run-7"}}, "run-7"),
]
APIS = ("chat/completions", "completions", "responses", "messages")


@pytest.mark.parametrize(
    ("prefix", "headers", "fields", "expected"), [form[1:] for form in FORMS], ids=[f[0] for f in FORMS]
)
async def test_every_form_names_the_trajectory_over_http(
    site: Site, prefix: str, headers: dict[str, str], fields: dict[str, Any], expected: str
) -> None:
    """Two turns in the same form are one trajectory: in the answer, in the API, and for the engine."""
    for _ in range(2):
        answer = await site.chat(f"{prefix}/v1/chat/completions", headers=headers, **fields)
        assert (answer.status_code, answer.headers["x-trajectory-id"]) == (200, expected)
    listed = (await site.client.get("/v1/trajectories")).json()["data"]
    assert [(one["id"], one["num_turns"]) for one in listed] == [(expected, 2)]
    assert {request.headers["x-session-id"] for request in site.engine.turns} == {expected}
    assert {request.path for request in site.engine.turns} <= {CHAT, GENERATE}


@pytest.mark.parametrize("api", APIS)
async def test_the_path_form_serves_every_api(site: Site, api: str) -> None:
    """A framework of which only the base_url can be set is recognised by it, whichever API it uses."""
    answer = await site.client.post(f"/t/run-7/v1/{api}", json=first_turn(api, stream=False))
    assert (answer.status_code, answer.headers["x-trajectory-id"]) == (200, "run-7")


async def test_the_path_form_reaches_the_other_routes_too(site: Site) -> None:
    """With the base_url set to the path form, an SDK's calls for models and tokens go there as well."""
    for route in ("/v1/models", f"/v1/models/{MODEL}", "/v1/engines"):
        assert (await site.client.get(f"/t/run-7{route}")).status_code == 200
    counted = await site.client.post("/sessions/run-7/v1/messages/count_tokens", json={"messages": HELLO})
    assert counted.json()["input_tokens"] > 0
    await site.chat(headers={"x-trajectory-id": "a b"})
    assert (await site.client.get("/t/run-7/v1/trajectories/a%20b")).json()["id"] == "a b"


async def test_the_first_form_in_the_order_wins(site: Site) -> None:
    """Path over header over body, in the order of precedence."""
    fields = {"headers": {"x-session-id": "header"}, "session_id": "body"}
    assert (await site.chat("/t/path/v1/chat/completions", **fields)).headers["x-trajectory-id"] == "path"
    assert (await site.chat(**fields)).headers["x-trajectory-id"] == "header"
    assert (await site.chat(session_id="body")).headers["x-trajectory-id"] == "body"


async def test_group_and_rollout_are_known_from_headers_and_metadata(site: Site) -> None:
    """A trajectory shows the group and the rollout that its first turn named."""
    await site.chat(headers={"x-trajectory-id": "a", "x-group-id": "g1", "x-rollout-id": "r1"})
    await site.chat(metadata={"trajectory_id": "b", "group_id": "g2", "rollout_id": "r2"})
    shown = [await site.trajectory(name) for name in ("a", "b")]
    assert [(one["group_id"], one["rollout_id"]) for one in shown] == [("g1", "r1"), ("g2", "r2")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
async def test_a_conversation_without_an_id_is_recognised(site: Site, api: str, stream: bool) -> None:
    """A client that sends back the answers stays on its trajectory for all its turns."""
    body = first_turn(api, stream)
    ids = []
    for _ in range(3):
        answer = await site.client.post(f"/v1/{api}", json=body)
        assert answer.status_code == 200, answer.text
        ids.append(answer.headers["x-trajectory-id"])
        body = next_turn(api, body, answer)
    assert len(set(ids)) == 1
    assert (await site.trajectory(ids[0]))["num_turns"] == 3


async def test_a_request_that_is_refused_does_not_take_its_conversation_along() -> None:
    """With a predictor that reads all of a request: a number too large for JSON, behind a conversation that is
    recognised first, is a 400. What the client asks instead continues the trajectory."""
    async with running_site(policy="cmlfq") as site:
        body = {**first_turn("chat/completions", False), "messages": [{"role": "user", "content": "long " * 2_000}]}
        first = await site.client.post("/v1/chat/completions", json=body)
        refused, instead = (next_turn("chat/completions", body, first, text) for text in ("this", "that"))
        broken = orjson.dumps(refused)[:-1] + b',"top_p":1e999}'
        assert (await site.client.post("/v1/chat/completions", content=broken)).status_code == 400
        second = await site.client.post("/v1/chat/completions", json=instead)
        assert second.headers["x-trajectory-id"] == first.headers["x-trajectory-id"]


@pytest.mark.parametrize("api", APIS)
async def test_siblings_without_ids_are_trajectories_of_one_group(site: Site, api: str) -> None:
    """The same first prompt four times is four trajectories of one group, and their second turns continue them."""
    firsts = [await site.client.post(f"/v1/{api}", json=first_turn(api, False)) for _ in range(4)]
    ids = [answer.headers["x-trajectory-id"] for answer in firsts]
    assert len(set(ids)) == 4
    groups = {(await site.trajectory(name))["group_id"] for name in ids}
    assert len(groups) == 1
    seconds = [
        await site.client.post(
            f"/v1/{api}", json=next_turn(api, first_turn(api, False), answer, text=f"go on {number}")
        )
        for number, answer in enumerate(firsts)
    ]
    assert {answer.headers["x-trajectory-id"] for answer in seconds} <= set(ids)


@pytest.mark.parametrize("how", ["aborted", "finished", "rollout", "group", "model"])
async def test_a_turn_without_an_id_continues_the_sibling_that_it_fits(wire: Wire, how: str) -> None:
    """Greedy siblings get equal answers. The next turn is not of the one that was aborted (a 409) or finished, nor of
    the one in another rollout or group, or of another model, as long as one that fits waits."""
    async with recorded_engine(toy(model="other")) as other, running_site() as site:
        added = await site.client.post("/v1/engines", headers=ADMIN, json={"url": other.url})
        assert added.status_code < 300, added.text

        async def knows_both() -> bool:
            return len((await site.client.get("/v1/models")).json()["data"]) == 2

        await eventually(knows_both)
        for engine in (site.engine, other):
            engine.scripts[wire.path] = fixed(200, wire.chunk("ls", "stop") + DONE, b"text/event-stream")
        theirs: dict[str, Any] = {"rollout": {"x-rollout-id": "1"}, "group": {"x-group-id": "1"}}.get(how, {})
        ours = dict.fromkeys(theirs, "2")
        first = await site.chat(headers=theirs, stream=True, model="other" if how == "model" else MODEL)
        second = await site.chat(headers=ours, stream=True)
        name = first.headers["x-trajectory-id"]
        match how:
            case "aborted":
                await site.client.delete(f"/v1/trajectories/{name}")
            case "finished":
                await site.client.post(f"/v1/trajectories/{name}/finish")
        messages = [*HELLO, {"role": "assistant", "content": "ls"}, {"role": "user", "content": "a.txt"}]
        next_ = await site.chat(headers=ours, stream=True, messages=messages)
        assert (next_.status_code, next_.headers["x-trajectory-id"]) == (200, second.headers["x-trajectory-id"])


async def test_equal_requests_that_name_only_a_user_are_not_joined(site: Site) -> None:
    """Concurrent requests that share no more than a `user` are answered separately."""
    answers = await asyncio.gather(site.chat(user="someone"), site.chat(user="someone"))
    assert len({answer.json()["id"] for answer in answers}) == 2


ERRORS: list[tuple[str, int, dict[str, Any]]] = [
    ("unknown model", 404, {"json": {"model": "nope", "messages": HELLO}}),
    ("not JSON", 400, {"content": b"{"}),
    ("refused by the engine", 400, {"json": {"model": MODEL, "messages": "Hello"}}),
    ("too large", 413, {"content": b"x" * 5000}),
]


@pytest.mark.parametrize(("status", "request_"), [error[1:] for error in ERRORS], ids=[error[0] for error in ERRORS])
async def test_an_error_carries_the_ids_too(status: int, request_: dict[str, Any]) -> None:
    """A client that named its trajectory finds it in every answer, with a request id to ask about."""
    async with running_site(max_body_bytes=4096) as site:
        answer = await site.client.post("/t/run-7/v1/chat/completions", **request_)
        assert (answer.status_code, answer.headers["x-trajectory-id"]) == (status, "run-7")
        assert len(answer.headers["x-request-id"]) == 32


async def test_an_error_carries_the_id_from_the_body() -> None:
    """Even if the body's model is unknown."""
    async with running_site() as site:
        answer = await site.chat(model="nope", session_id="run-7")
        assert (answer.status_code, answer.headers["x-trajectory-id"]) == (404, "run-7")


@pytest.mark.parametrize("bad", ["x" * 257, "ä", [1], {}])
async def test_an_invalid_id_is_a_400(site: Site, bad: Any) -> None:
    """In OpenAI's form, and no engine is asked."""
    answer = await site.chat(session_id=bad)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "bad_identity"
    assert not site.engine.turns


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
async def test_an_invalid_id_in_the_path_is_a_400_of_its_route(site: Site, route: str) -> None:
    """In the form of the route's SDK, and counted as a refused turn if the route is one of turns."""
    answer = await site.client.post(f"/t/%C3%A4/{route.removeprefix('/')}", json={"model": MODEL, "messages": []})
    assert answer.status_code == 400
    error = answer.json()["error"]
    if route.startswith("/v1/messages"):
        assert (answer.json()["type"], error["details"]["error_code"]) == ("error", "bad_identity")
    else:
        assert error["code"] == "bad_identity"
    page = (await site.client.get("/metrics")).text
    assert ('heddle_refused_requests_total{status="400"} 1.0' in page) == (route != "/v1/messages/count_tokens")


EVERYWHERE = [
    *(("GET", path) for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/models", "/v1/engines")),
    *(("GET", path) for path in ("/v1/trajectories", "/v1/trajectories/nope", "/v1/models/nope", "/nope")),
    ("GET", "/v1/chat/completions"),
    ("PUT", "/v1/models"),
    ("DELETE", "/tokenize"),
    ("DELETE", "/v1/rollouts/nope"),
    ("POST", "/tokenize"),
    ("POST", "/v1/engines/nope/cordon"),
    ("POST", "/t/%ff/v1/chat/completions"),
]


@pytest.mark.parametrize(("method", "path"), EVERYWHERE)
async def test_every_answer_has_a_request_id(site: Site, method: str, path: str) -> None:
    """On any route, for valid and invalid requests."""
    answers = [await site.client.request(method, path) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 2
    assert all(len(one) == 32 for one in ids)


# --- what a client of each API sends ---------------------------------------------------------------------------------


def first_turn(api: str, stream: bool) -> dict[str, Any]:
    match api:
        case "completions":
            return {"model": MODEL, "prompt": "Say: hello.", "max_tokens": 5, "stream": stream}
        case "responses":
            return {"model": MODEL, "input": HELLO, "max_output_tokens": 5, "stream": stream}
        case _:
            return {"model": MODEL, "messages": HELLO, "max_tokens": 5, "stream": stream}


def next_turn(api: str, body: dict[str, Any], answer: httpx.Response, text: str = "go on") -> dict[str, Any]:
    """The request that an ordinary client builds from its last one and the answer."""
    question = {"role": "user", "content": text}
    if body["stream"]:
        events = events_of(answer.text)
        whole = assembled(events)
        match api:
            case "completions":
                return {**body, "prompt": body["prompt"] + whole["choices"][0]["text"] + " " + text}
            case "responses":
                output = next(data for name, data in events if name == "response.output_item.done")["item"]
                return {**body, "input": [*body["input"], output, question]}
            case "messages":
                text_block = {"type": "text", "text": whole["content_block_delta   0"]["delta"]["text"]}
                assistant = {"role": "assistant", "content": [text_block]}
            case _:
                assistant = {"role": "assistant", "content": whole["choices"][0]["delta"]["content"]}
        return {**body, "messages": [*body["messages"], assistant, question]}
    given = answer.json()
    match api:
        case "completions":
            return {**body, "prompt": body["prompt"] + given["choices"][0]["text"] + " " + text}
        case "responses":
            return {**body, "input": [*body["input"], *given["output"], question]}
        case "messages":
            assistant = {"role": "assistant", "content": given["content"]}
        case _:
            assistant = given["choices"][0]["message"]
    return {**body, "messages": [*body["messages"], assistant, question]}
