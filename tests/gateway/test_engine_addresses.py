"""Each engine of the fleet has its own address, from which its id is derived."""

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.config import ConfigError, load_settings
from tests.support.engine import fixed, recorded_engine
from tests.support.gateway import ADMIN, eventually, running_gateway


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://node-1:8000", "HTTP://node-1:8000/v1/"),
        ("http://node-1:8000", "http://Node-1:8000"),
        ("http://[FD00::80]", "http://[fd00::80]:80/"),
        ("https://node-1:443/a", "https://node-1/a"),
    ],
)
def test_a_server_listed_in_two_spellings_is_refused(one: str, other: str) -> None:
    """Both would be sent turns as if each had all of its slots and KV."""
    with pytest.raises(ConfigError, match="listed twice"):
        load_settings(engines=(one, other))


def test_servers_at_one_host_are_told_apart() -> None:
    """By port and path; a path may differ in case only."""
    urls = ("http://node-1", "http://node-1:8080", "http://node-1:443", "http://node-1/a", "http://node-1/A")
    assert len(load_settings(engines=urls).engines) == 5


async def test_adding_a_server_in_another_spelling_is_refused() -> None:
    """The fleet keeps its one engine."""
    async with (
        serve_engine(SimulatedEngineSettings()) as url,
        running_gateway(url) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        again = await client.post("/v1/engines", json={"url": url.replace("http", "HTTP")}, headers=ADMIN)
        assert (again.status_code, again.json()["error"]["param"]) == (400, "url")
        assert len((await client.get("/v1/engines")).json()["data"]) == 1


async def test_a_server_that_does_not_tell_its_kind_is_to_be_named_one() -> None:
    """As the fleet can: `vllm+http://...`."""
    async with recorded_engine(SimulatedEngineSettings()) as recorded:
        recorded.scripts["/v1/models"] = fixed(200, b'{"data":[{"id":"m","owned_by":"acme"}]}')
        async with running_gateway(recorded.url, start_timeout_s=0) as gateway, httpx.AsyncClient() as client:

            async def fault() -> str | None:
                (one,) = (await client.get(gateway.url + "/v1/engines")).json()["data"]
                return one["last_fault"]  # type: ignore[no-any-return]

            await eventually(fault)
            assert await fault() == "neither vLLM nor SGLang (models owned by ['acme']); name its kind"
