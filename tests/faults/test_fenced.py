"""A second gateway takes the Redis namespace of the first: one of them decides for the fleet from then on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis import Redis

from engines.children import free_port
from engines.profiles import load_profile
from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from tests.faults.asking import are_waiting, ask, body_of, raw, request_bytes
from tests.support.gateway import ADMIN, eventually, running_gateway
from tests.support.redis_server import RedisServer
from tests.weights.gateway_client import engine, engines, update

DATABASE = 9
PATIENT = {"settle_timeout_s": 60.0}
"""A takeover is noticed by what is put; a busy Redis may take longer than the default to say so."""

WRITES = [
    ("POST", "/v1/chat/completions", body_of("chat")),
    ("POST", "/t/a/v1/messages", body_of("messages")),
    ("POST", "/tokenize", {"model": "simulated", "prompt": "hello"}),
    ("POST", "/v1/trajectories", {"id": "b"}),
    ("POST", "/v1/trajectories/a/finish", None),
    ("DELETE", "/v1/trajectories/a", None),
    ("POST", "/v1/trajectories/a/reward", {"reward": 0.5}),
    ("POST", "/finish_session?session_id=a", None),
    ("POST", "/programs/release", {"program_id": "a"}),
    ("DELETE", "/v1/rollouts/r", None),
    ("POST", "/v1/engines", {"url": "http://127.0.0.1:9"}),
    ("POST", "/v1/weights", {"version": "v1", "path": "/weights/v1"}),
]


@asynccontextmanager
async def gateway_at(redis: RedisServer, *urls: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway in the test's namespace."""
    async with (
        running_gateway(*urls, store=redis.url(DATABASE), **PATIENT | settings) as gateway,
        httpx.AsyncClient(base_url=gateway.url, headers=ADMIN, timeout=120) as client,
    ):
        yield client


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """A server whose database for these tests is empty."""
    with Redis(port=redis_server.port, db=DATABASE) as database:
        database.flushdb()
    return redis_server


async def is_fenced(client: httpx.AsyncClient) -> bool:
    """Whether a gateway's health says that it is."""
    health = await client.get("/healthz")
    assert (health.status_code == 503) is (health.json()["status"] == "fenced")
    return health.status_code == 503


async def test_a_fenced_gateway_refuses_writes_and_tells_load_balancers(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Two gateways that both serve would fill the fleet's KV twice, and what the first was told was lost."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=100)) as url,
        gateway_at(redis, url) as first,
    ):
        assert (await first.post("/v1/trajectories", json={"id": "a", "rollout_id": "r"})).status_code == 201
        assert not await is_fenced(first)
        assert (await first.get("/readyz")).status_code == 200
        async with gateway_at(redis, url) as second:
            await eventually(lambda: is_fenced(first))
            for method, path, body in WRITES:
                answer = await first.request(method, path, json=body)
                error = answer.json()["error"]
                code = error["details"]["error_code"] if "details" in error else error["code"]
                assert (answer.status_code, code) == (503, "fenced"), path
                assert "another gateway has taken over" in error["message"].lower()
                assert answer.headers["connection"] == "close", "a kept connection would lead back here"
                assert "retry-after" not in answer.headers
            for path in ("/readyz", "/health"):
                assert (await first.get(path)).status_code == 503
                assert (await second.get(path)).status_code == 200
            assert (await first.get("/v1/trajectories/a")).status_code == 200
            assert "heddle_store_fenced 1.0" in (await first.get("/metrics")).text
            assert "heddle_store_fenced 0.0" in (await second.get("/metrics")).text
            await eventually(lambda: "fenced" in caplog.messages)
            assert (await second.post("/v1/trajectories/a/reward", json={"reward": 0.5})).status_code == 200
            assert (await second.post("/t/a/v1/chat/completions", json=body_of("chat"))).status_code == 200
    logged = [(record.levelname, record.message) for record in caplog.records if record.message == "fenced"]
    assert logged == [("ERROR", "fenced")]
    assert "store is away" not in caplog.messages


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/trajectories/a/reward", {"reward": 0.5}),
        ("POST", "/v1/trajectories/a/finish", None),
        ("DELETE", "/v1/trajectories/a", None),
        ("POST", "/v1/trajectories", {"id": "b"}),
        ("DELETE", "/v1/rollouts/r", None),
    ],
)
async def test_the_write_that_meets_the_takeover_is_refused(
    redis: RedisServer, method: str, path: str, body: dict[str, Any] | None
) -> None:
    """It is the one by which the gateway learns of it. It was a 200, and in no record."""
    async with gateway_at(redis) as first:
        assert (await first.post("/v1/trajectories", json={"id": "a", "rollout_id": "r"})).status_code == 201
        async with gateway_at(redis) as second:
            answer = await first.request(method, path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "fenced")
            shown = (await second.get("/v1/trajectories/a")).json()
            assert (shown["state"], shown["reward"]) == ("active", None)
            assert (await second.get("/v1/trajectories/b")).status_code == 404


async def test_turns_that_run_end_and_turns_that_wait_are_refused(redis: RedisServer) -> None:
    """An engine has the work already; what waits is for the gateway that owns the fleet now. Refused turns stayed in
    the queue and got the slots of those that ended, so that turns seemed to run for ever."""
    one_slot = replace(load_profile("qwen3-14b-h100-tp1"), slots=1)
    async with (
        serve_engine(SimulatedEngineSettings(profile=one_slot)) as url,
        gateway_at(redis, url) as first,
    ):
        base = str(first.base_url).rstrip("/")
        runs = asyncio.create_task(ask(first, base, "chat", body_of("chat", tokens=1_000, text="one")))

        async def is_running() -> bool:
            return "heddle_running_turns 1.0" in (await first.get("/metrics")).text

        await eventually(is_running)
        waits = [
            asyncio.create_task(ask(first, base, "chat", body_of("chat", stream, text=f"two {stream}")))
            for stream in (False, True)
        ]
        await eventually(lambda: are_waiting(first, base, 2))
        async with gateway_at(redis):
            assert (await first.post("/v1/trajectories", json={})).status_code == 503
            for answer in await asyncio.gather(*waits):
                assert answer.status == 503 and answer.error("chat")["code"] == "fenced"
            assert await are_waiting(first, base, 0)
            assert not runs.done(), "the test's premise"
            assert (await runs).is_finished("chat")
            assert "heddle_running_turns 0.0" in (await first.get("/metrics")).text
            assert await is_fenced(first)


async def test_a_long_request_is_read_before_it_is_refused(redis: RedisServer) -> None:
    """Its connection is closed then; while part of the request was unread, that reset it, and the answer was lost."""
    async with gateway_at(redis) as first, gateway_at(redis):
        await eventually(lambda: is_fenced(first))
        base = str(first.base_url).rstrip("/")
        asked = request_bytes("chat", body_of("chat", text="word " * 1_000_000), {})
        answer = await raw(base, asked, timeout_s=60)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"fenced"' in answer


async def test_a_fenced_gateway_gives_no_engine_its_old_weights(redis: RedisServer) -> None:
    """An engine that comes back gets those of the gateway that owns the fleet."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with gateway_at(redis, url) as first:
        async with serve_engine(engine("vllm"), port):
            await eventually(lambda: is_ready(first))
            assert (await update(first, "v1")).json()["status"] == "done"
            async with gateway_at(redis, url) as second:
                await eventually(lambda: is_fenced(first))
                assert (await update(second, "v2")).json()["status"] == "done"
        await eventually(lambda: is_lost(first))
        async with serve_engine(engine("vllm"), port), httpx.AsyncClient(base_url=url) as direct:
            await eventually(lambda: is_told(first, "another gateway has taken over"))
            assert "v1" not in (await direct.get("/metrics")).text
            async with gateway_at(redis, url) as third:
                await eventually(lambda: is_ready(third))
                assert (await engines(third))[0]["weight_version"] == "v2"


async def is_ready(client: httpx.AsyncClient) -> bool:
    return bool((await engines(client))[0]["state"] == "ready")


async def is_lost(client: httpx.AsyncClient) -> bool:
    return bool((await engines(client))[0]["state"] == "lost")


async def is_told(client: httpx.AsyncClient, why: str) -> bool:
    return why in str((await engines(client))[0]["last_fault"])
