"""Who may do what: keys of agents and clients, the admin key, and that none ever leaves the gateway."""

import io
import logging
import re
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.api.application import build_api
from gateway.turnlog import JsonFormatter
from tests.faults.asking import APIS, PATHS, body_of, check_error
from tests.faults.raw_engine import raw_engine, whole, writes
from tests.support.gateway import ADMIN, ADMIN_KEY, running_gateway

CLIENT_KEY = "sk-client-key-of-the-tests"
AGENT_KEY = "sk-agent-key-of-the-tests"
CLIENT, AGENT = ({"authorization": f"Bearer {key}"} for key in (CLIENT_KEY, AGENT_KEY))
# Of every route, who may use it at least.
WHO_MAY = {
    "anybody": (
        *("GET /healthz", "GET /readyz", "GET /health", "GET /metrics", "GET /docs", "GET /openapi.json"),
        *("GET /", "GET /dashboard", "GET /dashboard/page.css", "GET /dashboard/page.js"),
    ),
    "agents": (
        *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages"),
        *("POST /inference/v1/generate", "POST /generate", "POST /v1/embeddings", "POST /v1/messages/count_tokens"),
        *("POST /tokenize", "POST /detokenize", "POST /v1/tokenize", "POST /v1/detokenize"),
        *("GET /v1/models", "GET /v1/models/{model_id:path}"),
        "GET /docs/oauth2-redirect",  # a page of FastAPI's, which nothing needs
    ),
    "clients": (
        *("POST /v1/trajectories", "GET /v1/trajectories", "GET /v1/trajectories/{trajectory_id:path}"),
        *("DELETE /v1/trajectories/{trajectory_id:path}", "POST /v1/trajectories/{trajectory_id:path}/finish"),
        *("GET /v1/trajectories/{trajectory_id:path}/tokens", "POST /v1/trajectories/{trajectory_id:path}/reward"),
        *("POST /finish_session", "POST /programs/release", "POST /v1/rollouts/{rollout_id:path}/export"),
        *("GET /v1/rollouts/{rollout_id:path}", "DELETE /v1/rollouts/{rollout_id:path}", "GET /v1/overview"),
        *("GET /v1/engines", "GET /v1/engines/{engine_id}", "GET /v1/events", "GET /v1/weights"),
    ),
    "the admin": (
        *("POST /v1/engines", "DELETE /v1/engines/{engine_id}", "POST /v1/engines/{engine_id}/cordon"),
        *("POST /v1/engines/{engine_id}/uncordon", "POST /v1/engines/{engine_id}/drain"),
        *("POST /v1/engines/{engine_id}/evacuate", "GET /v1/demand", "POST /v1/weights"),
    ),
}
ANSWER = b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}'


@pytest.mark.parametrize("api", APIS)
async def test_client_keys_are_required_and_checked(client: httpx.AsyncClient, api: str) -> None:
    """Missing and wrong keys get 401 in the API's form; the right one is accepted in either header."""
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=100)) as engine,
        running_gateway(engine, api_keys=("another", CLIENT_KEY)) as gateway,
    ):
        url = gateway.url + PATHS[api]
        wrong = ({}, {"authorization": "Bearer nope"}, {"x-api-key": "nope"}, {"authorization": "Basic " + CLIENT_KEY})
        for headers in (*wrong, {"authorization": "Bearer"}, {"authorization": f"Bearer {CLIENT_KEY}x"}):
            check_error(api, await client.post(url, json=body_of(api), headers=headers), 401, "invalid_api_key")
        for headers in ({"authorization": f"Bearer {CLIENT_KEY}"}, {"x-api-key": CLIENT_KEY}, ADMIN):
            assert (await client.post(url, json=body_of(api), headers=headers)).status_code == 200
        for path in ("/v1/models", "/v1/trajectories", "/v1/engines", "/v1/events", "/nowhere"):
            check_error("other", await client.get(gateway.url + path), 401)
        for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
            assert (await client.get(gateway.url + path)).status_code == 200


@pytest.mark.parametrize("other", ["", "sk-of-another-service"])
async def test_one_right_key_suffices_among_several(client: httpx.AsyncClient, other: str) -> None:
    """A client may send both headers, with nothing or another service's key in one; only the first header counted."""
    async with running_gateway(api_keys=(CLIENT_KEY,)) as gateway:
        for key, path in ((CLIENT_KEY, "/v1/trajectories"), (ADMIN_KEY, "/v1/engines/none/cordon")):
            right = [("authorization", f"Bearer {key}"), ("x-api-key", key)]
            wrong = [("x-api-key", other), ("authorization", f"Bearer {other}".strip())]
            for headers in (pair[::step] for pair in zip(right, wrong, strict=True) for step in (1, -1)):
                reply = await client.request("POST" if "none" in path else "GET", gateway.url + path, headers=headers)
                assert reply.status_code == (404 if "none" in path else 200), headers


async def test_turns_refused_for_their_keys_are_counted(client: httpx.AsyncClient) -> None:
    """A key that was changed on one side only shows up in a metric."""
    async with running_gateway(api_keys=["right"]) as gateway:
        for api in APIS:
            wrong = {"authorization": "Bearer wrong"}
            refused = await client.post(gateway.url + PATHS[api], json=body_of(api), headers=wrong)
            assert refused.status_code == 401
        await client.get(gateway.url + "/v1/models", headers={"authorization": "Bearer wrong"})
        page = (await client.get(gateway.url + "/metrics")).text
    assert f'heddle_refused_requests_total{{status="401"}} {len(APIS)}.0' in page


async def test_only_the_admin_key_may_change_the_fleet(client: httpx.AsyncClient) -> None:
    """A client key may read it. Without an admin key, nobody may change it."""
    changes = [
        ("POST", "/v1/engines"),
        ("DELETE", "/v1/engines/{id}"),
        ("POST", "/v1/engines/{id}/cordon"),
        ("POST", "/v1/engines/{id}/uncordon"),
        ("POST", "/v1/engines/{id}/drain"),
    ]
    key = {"authorization": f"Bearer {CLIENT_KEY}"}
    async with serve_engine(SimulatedEngineSettings()) as engine:
        for admin_key, statuses in ((ADMIN_KEY, {"none": 401, "client": 403}), (None, {"none": 401, "client": 403})):
            async with running_gateway(engine, api_keys=(CLIENT_KEY,), admin_key=admin_key) as gateway:
                engine_id = engine.removeprefix("http://")
                for method, path in changes:
                    url = gateway.url + path.format(id=engine_id)
                    body = {"url": "http://127.0.0.1:1"} if path == "/v1/engines" else None
                    for who, headers in (("none", {}), ("client", key)):
                        response = await client.request(method, url, json=body, headers=headers)
                        check_error("other", response, statuses[who])
                listed = (await client.get(gateway.url + "/v1/engines", headers=key)).json()["data"]
                assert [(one["id"], one["is_cordoned"]) for one in listed] == [(engine_id, False)]
                if admin_key is None:
                    check_error("other", await client.post(gateway.url + "/v1/engines", headers=ADMIN), 401)
        async with running_gateway(engine) as gateway:
            for method, path in changes[2:]:
                url = gateway.url + path.format(id=engine_id)
                assert (await client.request(method, url, headers=ADMIN)).status_code == 200


async def test_every_route_says_who_may_use_it(client: httpx.AsyncClient) -> None:
    """No key: 401 beyond what is open. An agent's key: 403 beyond turns and models, whichever way a route is served,
    and which key it needs. A route that is not in the table fails here."""
    routes = [(method, route.path) for route in build_api().routes for method in route.methods if method != "HEAD"]
    assert sorted(map(" ".join, routes)) == sorted(route for group in WHO_MAY.values() for route in group)
    senders = {"anybody": {}, "agents": AGENT, "clients": CLIENT, "the admin": ADMIN}
    ranks = list(WHO_MAY)
    async with running_gateway(api_keys=(CLIENT_KEY,), agent_keys=("another", AGENT_KEY)) as gateway:
        for least, group in WHO_MAY.items():
            for method, path in (route.split() for route in group):
                url = gateway.url + re.sub(r"{.*?}", "x", path)
                for who, headers in senders.items():
                    async with client.stream(method, url, headers=headers) as answer:
                        if ranks.index(who) >= ranks.index(least):
                            assert answer.status_code not in (401, 403), (who, method, path)
                            continue
                        await answer.aread()
                    api = "messages" if path.startswith("/v1/messages") else "other"
                    check_error(api, answer, 401 if who == "anybody" else 403)
                    needs = {"clients": "a client key (api_keys) or the admin key", "the admin": "the admin key"}
                    assert who == "anybody" or f"This needs {needs[least]}" in answer.text


async def test_agent_keys_ask_for_turns_and_leave_no_route_open(client: httpx.AsyncClient) -> None:
    """In each API, within their own limit. Without client keys, what is beyond turns needs the admin key; a client's
    key beside an agent's counts."""
    settings: dict[str, Any] = {"agent_keys": ("another", AGENT_KEY)}
    async with serve_engine(SimulatedEngineSettings(speed_up=100)) as engine:
        async with running_gateway(engine, **settings) as gateway:
            for api in APIS:
                url = f"{gateway.url}/t/{api}{PATHS[api]}"
                check_error(api, await client.post(url, json=body_of(api)), 401, "invalid_api_key")
                for headers in (AGENT, {"x-api-key": "another"}, ADMIN):
                    assert (await client.post(url, json=body_of(api), headers=headers)).status_code == 200
                own = gateway.url + f"/v1/trajectories/{api}"
                check_error("other", await client.get(own), 401)
                check_error("other", await client.get(own, headers=AGENT), 403, "forbidden")
                check_error("other", await client.post(f"{own}/reward", json={"reward": 1}, headers=AGENT), 403)
                assert (await client.get(own, headers=ADMIN)).json()["reward"] is None
            check_error("other", await client.get(gateway.url + "/chat/completions", headers=AGENT), 404)
        async with running_gateway(engine, api_keys=(CLIENT_KEY,), **settings) as gateway:
            both = [AGENT | {"x-api-key": CLIENT_KEY}, CLIENT | {"x-api-key": AGENT_KEY}]
            for headers in both:
                assert (await client.get(gateway.url + "/v1/trajectories", headers=headers)).status_code == 200


async def test_keys_are_neither_logged_nor_sent_to_engines(client: httpx.AsyncClient) -> None:
    """Neither those of clients, good or bad, nor the admin's, nor the engine's own, even at level DEBUG. Only an
    engine's own key goes to that engine."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    engine_key = "sk-engine-key-of-the-tests"
    echo = whole(b'{"error":{"message":"Bearer %s is no key","code":401}}' % engine_key.encode(), b"401 Unauthorized")
    try:
        for answer in (writes(whole(ANSWER)), writes(echo), writes(b"nonsense")):
            async with raw_engine(answer) as engine:
                engines = ({"url": engine.url, "api_key": engine_key},)
                keys: dict[str, Any] = {"api_keys": (CLIENT_KEY,), "agent_keys": (AGENT_KEY,), "retry_pause_s": 0}
                async with running_gateway(*engines, **keys) as gateway:
                    for headers in (
                        {"authorization": f"Bearer {CLIENT_KEY}"},
                        {"x-api-key": CLIENT_KEY, "cookie": "sk-cookie"},
                        {"authorization": "Bearer sk-wrong-key"},
                        AGENT,
                        ADMIN,
                    ):
                        url = gateway.url + PATHS["chat"]
                        response = await client.post(url, json=body_of("chat"), headers=headers)
                        assert engine_key not in response.text
                        await client.post(gateway.url + "/v1/embeddings", json={"input": "x"}, headers=headers)
                        await client.get(gateway.url + "/v1/engines", headers=headers)
                assert engine.posts
                for post in engine.posts:
                    assert b"authorization: Bearer " + engine_key.encode() in post
                    for secret in (CLIENT_KEY, AGENT_KEY, ADMIN_KEY, "sk-cookie", "sk-wrong-key"):
                        assert secret.encode() not in post
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    log = lines.getvalue()
    assert '"message":"turn"' in log
    for secret in (CLIENT_KEY, AGENT_KEY, ADMIN_KEY, engine_key, "sk-cookie", "sk-wrong-key"):
        assert secret not in log
