"""A Redis that goes away in the middle of a start, after some of the record was read."""

import httpx
import pytest

from engines.simulated.server import serve_engine
from store import StoreAway
from tests.support.gateway import ADMIN, running_gateway
from tests.support.redis_proxy import RedisProxy, proxy_to
from tests.support.redis_server import RedisServer
from tests.weights.gateway_client import complete, engine, update

READS = pytest.mark.parametrize("name", ["sizes", "fleet", "weights", "predictor"])
"""What is read after the trajectories."""


def lose_reads_of(proxy: RedisProxy, name: str, num_reads: int) -> None:
    """The connection ends at each of the next reads of this, as at a failover."""
    asked = ":sizes\r\n" if name == "sizes" else f":states\r\n${len(name)}\r\n{name}\r\n"
    proxy.lost_words, proxy.num_questions_to_lose = asked.encode(), num_reads


@READS
async def test_a_start_waits_for_a_redis_that_goes_away_in_the_middle_of_it(
    redis_server: RedisServer, name: str
) -> None:
    """Weights, cordons and trajectories are as before."""
    async with (
        serve_engine(engine("vllm")) as url,
        serve_engine(engine("vllm")) as other,
        proxy_to(redis_server.port) as proxy,
    ):
        settings = {"store": f"redis://127.0.0.1:{proxy.port}/0", "store_namespace": f"waits-for-{name}:"}
        async with (
            running_gateway(url, other, **settings) as gateway,
            httpx.AsyncClient(base_url=gateway.url, headers=ADMIN) as client,
        ):
            assert (await update(client, "v1")).json()["status"] == "done"
            await client.post(f"/v1/engines/{url.removeprefix('http://')}/cordon")
            await complete(client, "one", "Tell me about looms.", 20)
        lose_reads_of(proxy, name, 1)
        async with (
            running_gateway(url, other, **settings) as gateway,
            httpx.AsyncClient(base_url=gateway.url) as client,
        ):
            assert proxy.num_questions_to_lose == 0, "the test's premise"
            assert (await client.get("/v1/weights")).json()["version"] == "v1"
            listed = (await client.get("/v1/engines")).json()["data"]
            assert [one["is_cordoned"] for one in listed] == [True, False]
            assert len((await client.get("/v1/trajectories/one")).json()["turns"]) == 1


@READS
async def test_a_start_is_refused_if_redis_goes_away_in_the_middle_of_it_and_stays_away(
    redis_server: RedisServer, name: str
) -> None:
    """Without the rest of the record, the gateway would forget it and then write over it."""
    async with proxy_to(redis_server.port) as proxy:
        lose_reads_of(proxy, name, 10**9)
        store = f"redis://127.0.0.1:{proxy.port}/0"
        with pytest.raises(StoreAway):
            async with running_gateway(store=store, store_namespace=f"misses-{name}:", store_start_timeout_s=0.1):
                pass
