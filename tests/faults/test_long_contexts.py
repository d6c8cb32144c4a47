"""Of a long context on a trajectory that has begun, the gateway parses only what it needs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest

from gateway.server import Listening
from tests.faults.asking import check_error
from tests.faults.raw_engine import RawEngine, raw_engine, whole, writes
from tests.support.gateway import running_gateway

PATH = "/v1/chat/completions"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
ANSWER = whole(orjson.dumps({"id": "c", "object": "chat.completion", "choices": [CHOICE], "usage": USAGE}))
TEXT = b"file " * 4_000
# Neither can be parsed, and both are left for the engine to refuse where nobody here reads them.
BROKEN = [b'"\xff"', b"1e999"]


def long_body(more: bytes = b"", content: bytes = b'"x"') -> bytes:
    """A request of more than 20 KB."""
    messages = b'[{"role":"user","content":"%s"},{"role":"user","content":%s}]' % (TEXT, content)
    return b'{"messages": %s, "model": "simulated"%s}' % (messages, more)


@asynccontextmanager
async def begun_trajectory(client: httpx.AsyncClient, **settings: Any) -> AsyncIterator[tuple[Listening, RawEngine]]:
    """A gateway and its engine, after the first turn of the trajectory `one`."""
    async with raw_engine(writes(ANSWER)) as engine, running_gateway(engine.url, **settings) as gateway:
        assert (await ask(client, gateway, b'{"model":"simulated","messages":[]}')).status_code == 200
        engine.posts.clear()
        yield gateway, engine


async def ask(client: httpx.AsyncClient, gateway: Listening, body: bytes, trajectory: str = "one") -> httpx.Response:
    return await client.post(gateway.url + PATH, content=body, headers={"x-trajectory-id": trajectory})


async def test_a_long_context_reaches_the_engine_as_it_came(client: httpx.AsyncClient) -> None:
    """Byte by byte, spaces included; the turn is one of its trajectory."""
    async with begun_trajectory(client) as (gateway, engine):
        assert (await ask(client, gateway, long_body())).status_code == 200
        assert [post.partition(b"\r\n\r\n")[2] for post in engine.posts] == [long_body()]
        record = (await client.get(gateway.url + "/v1/trajectories/one")).json()
        assert record["num_turns"] == 2


async def test_fields_of_a_long_context_are_read(client: httpx.AsyncClient) -> None:
    """Those that name the trajectory, and those that the gateway adds to."""
    async with begun_trajectory(client) as (gateway, engine):
        more = b', "metadata": {"trajectory_id": "one"}, "stream": true, "stream_options": {"include_usage": false}'
        await client.post(gateway.url + PATH, content=long_body(more))
        sent = orjson.loads(engine.posts[0].partition(b"\r\n\r\n")[2])
        options = {"include_usage": True, "continuous_usage_stats": False}
        assert sent == orjson.loads(long_body(more)) | {"stream_options": options}
        assert b"x-session-id: one\r\n" in engine.posts[0]


@pytest.mark.parametrize("token_legs", ["off", "auto"])
@pytest.mark.parametrize("broken", BROKEN)
async def test_what_only_the_engine_reads_is_for_it_to_refuse(
    client: httpx.AsyncClient, broken: bytes, token_legs: str
) -> None:
    """The engine, which has no token routes, gets the body as it came."""
    async with begun_trajectory(client, token_legs=token_legs) as (gateway, engine):
        await ask(client, gateway, long_body(content=broken))
        assert engine.posts[0].endswith(long_body(content=broken))


@pytest.mark.parametrize(
    ("trajectory", "settings", "more"),
    [
        pytest.param("another", {}, b"", id="first turn"),
        pytest.param("", {}, b"", id="no id"),
        pytest.param("one", {"predictor": "tree"}, b"", id="tool outcomes"),
        pytest.param("one", {}, b', "stream": true, "stream_options": {}', id="encoded again"),
    ],
)
@pytest.mark.parametrize("broken", BROKEN)
async def test_what_is_read_and_broken_gets_400(
    client: httpx.AsyncClient, broken: bytes, trajectory: str, settings: dict[str, Any], more: bytes
) -> None:
    """And no engine sees it."""
    async with begun_trajectory(client, **settings) as (gateway, engine):
        check_error("chat", await ask(client, gateway, long_body(more, broken), trajectory), 400)
        assert engine.posts == []


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_trajectory_whose_turns_made_nothing_is_read_as_at_its_first(
    client: httpx.AsyncClient, broken: bytes
) -> None:
    """Its engine refused the first turn. The next one, with a value that cannot be parsed, was a defect."""
    async with begun_trajectory(client) as (gateway, engine):
        engine.answer = writes(whole(b'{"error":{"message":"no"}}', status=b"400 Bad Request"))
        check_error("chat", await ask(client, gateway, long_body(), "refused"), 400)
        engine.posts.clear()
        check_error("chat", await ask(client, gateway, long_body(content=broken), "refused"), 400, "invalid_json")
        assert engine.posts == []


@pytest.mark.parametrize("broken", BROKEN)
async def test_what_is_read_late_and_broken_gets_400(client: httpx.AsyncClient, broken: bytes) -> None:
    """The prompt of a trajectory that has begun is read to estimate its length. It is the client's mistake, and its
    history says so."""
    body = b'{"model":"simulated","prompt":[%s],"text":"%s"}' % (broken, TEXT)
    async with begun_trajectory(client) as (gateway, engine):
        answer = await client.post(gateway.url + "/t/one/v1/completions", content=body)
        check_error("completions", answer, 400, "invalid_json")
        record = (await client.get(gateway.url + "/v1/trajectories/one")).json()
        assert [turn["outcome"] for turn in record["turns"]] == ["finished", "failed"]
        assert record["turns"][-1]["error"] == answer.json()["error"]
        assert (await ask(client, gateway, long_body())).status_code == 200
        assert len(engine.posts) == 1


@pytest.mark.parametrize("body", [long_body()[:-1], long_body() + b"x", b"[" + long_body() + b"]"])
async def test_a_long_body_that_is_no_object_gets_400(client: httpx.AsyncClient, body: bytes) -> None:
    """On a trajectory that has begun, too."""
    async with begun_trajectory(client) as (gateway, engine):
        check_error("chat", await ask(client, gateway, body), 400, "invalid_json")
        assert engine.posts == []


async def test_a_long_body_may_be_nested_deeper_than_it_is_read(client: httpx.AsyncClient) -> None:
    """As deep as before a trajectory has begun."""
    async with begun_trajectory(client) as (gateway, engine):
        body = long_body(content=b"[" * 1_005 + b"]" * 1_005)
        assert (await ask(client, gateway, body)).status_code == 200
        assert engine.posts[0].endswith(body)
