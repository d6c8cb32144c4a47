"""A dashboard on another origin: what a browser requires before its page may read an answer."""

from collections.abc import AsyncIterator

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.config import ConfigError, load_settings
from tests.support.gateway import running_gateway

PAGE = "https://dashboard.example"
KEY = "sk-client"
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
ROUTES = ["/v1/engines", "/v1/chat/completions", "/t/a/v1/messages", "/v1/events"]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=100)) as engine,
        running_gateway(engine, cors_origins=(PAGE,), api_keys=(KEY,)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize("path", ROUTES)
async def test_a_preflight_is_answered_without_a_key(client: httpx.AsyncClient, path: str) -> None:
    """Browsers send none with it; a page of another origin is refused."""
    headers = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    answer = await client.options(path, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    other = await client.options(path, headers={**headers, "origin": "https://other.example"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_has_cors_headers_only_for_the_configured_origin(client: httpx.AsyncClient, stream: bool) -> None:
    """Its content type and number of events stay the same. The key is still required; an error has the headers too."""
    request = {"json": {**CHAT, "stream": stream}, "headers": {"authorization": f"Bearer {KEY}"}}
    plain = await client.post("/v1/chat/completions", **request)
    request["headers"]["origin"] = PAGE
    from_page = await client.post("/v1/chat/completions", **request)
    assert (plain.status_code, from_page.status_code) == (200, 200)
    assert "access-control-allow-origin" not in plain.headers
    assert from_page.headers["access-control-allow-origin"] == PAGE
    assert "x-trajectory-id" in from_page.headers["access-control-expose-headers"]
    assert from_page.headers["content-type"] == plain.headers["content-type"]
    assert from_page.text.count("data: ") == plain.text.count("data: ")
    refused = await client.post("/v1/chat/completions", json=CHAT, headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    request["headers"]["origin"] = "https://other.example"
    assert "access-control-allow-origin" not in (await client.post("/v1/chat/completions", **request)).headers


async def test_routes_off_the_hot_path_have_cors_headers(client: httpx.AsyncClient) -> None:
    """The fleet, an unknown route, health."""
    headers = {"origin": PAGE, "authorization": f"Bearer {KEY}"}
    for path, status in (("/v1/engines", 200), ("/nowhere", 404), ("/healthz", 200)):
        answer = await client.get(path, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)


async def test_by_default_no_page_may_read(client: httpx.AsyncClient) -> None:
    """A gateway without keys on a laptop is not open to every page in its browser."""
    async with running_gateway() as gateway:
        answer = await client.get(gateway.url + "/v1/engines", headers={"origin": PAGE})
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["dashboard.example", "https://dashboard.example/", "https://a.example/path", "null"]
)
def test_an_invalid_origin_is_refused(origin: str) -> None:
    """A browser would never send it, so the page would be refused without a reason."""
    with pytest.raises(ConfigError, match="cors_origins"):
        load_settings(cors_origins=(origin,))
