"""Each engine of the fleet has its own address, from which its id is derived."""

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.config import ConfigError, load_settings
from tests.support.gateway import ADMIN, running_gateway


def test_a_server_listed_in_two_spellings_is_refused() -> None:
    """Both would have the same id, so the second could be neither shown nor removed."""
    with pytest.raises(ConfigError, match="listed twice"):
        load_settings(engines=("http://node-1:8000", "HTTP://node-1:8000/v1"))


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
