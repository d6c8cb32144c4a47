"""Each engine of the fleet has an address of its own, from which its id is made."""

import httpx
import pytest

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.config import ConfigError, load_settings
from tests.support.gateway import ADMIN, running_gateway


def test_a_server_spelled_in_two_ways_is_listed_twice() -> None:
    """Both would have one id, and the second could be neither shown nor removed."""
    with pytest.raises(ConfigError, match="listed twice"):
        load_settings(engines=("http://node-1:8000", "HTTP://node-1:8000/v1"))


async def test_a_server_spelled_in_another_way_is_in_the_fleet_already() -> None:
    """It is refused, and the fleet has one engine."""
    async with (
        serve_engine(SimulatedEngineSettings()) as url,
        running_gateway(url) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        again = await client.post("/v1/engines", json={"url": url.replace("http", "HTTP")}, headers=ADMIN)
        assert (again.status_code, again.json()["error"]["param"]) == (400, "url")
        assert len((await client.get("/v1/engines")).json()["data"]) == 1
