"""Who may do what: client keys, the admin key, and that neither ever leaves the gateway."""

import io
import logging
from typing import Any

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.turnlog import JsonFormatter
from tests.faults.asking import APIS, PATHS, body_of, check_error
from tests.faults.raw_engine import raw_engine, whole, writes
from tests.support.gateway import ADMIN, ADMIN_KEY, running_gateway

CLIENT_KEY = "sk-client-key-of-the-tests"
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
                keys: dict[str, Any] = {"api_keys": (CLIENT_KEY,), "retry_pause_s": 0}
                async with running_gateway(*engines, **keys) as gateway:
                    for headers in (
                        {"authorization": f"Bearer {CLIENT_KEY}"},
                        {"x-api-key": CLIENT_KEY, "cookie": "sk-cookie"},
                        {"authorization": "Bearer sk-wrong-key"},
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
                    for secret in (CLIENT_KEY, ADMIN_KEY, "sk-cookie", "sk-wrong-key"):
                        assert secret.encode() not in post
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    log = lines.getvalue()
    assert '"message":"turn"' in log
    for secret in (CLIENT_KEY, ADMIN_KEY, engine_key, "sk-cookie", "sk-wrong-key"):
        assert secret not in log
